"""A chat on a terminal: what is typed is a message or one of the /commands."""

import shlex
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tfm.cli.chat import file as chat_file
from tfm.cli.chat.prompt import Prompt, keys_kept
from tfm.cli.chat.turns import Turns
from tfm.cli.interrupt import Stopped, Wish, noted
from tfm.cli.output import say
from tfm.engine.errors import TfmError
from tfm.engine.sampling_params import LARGEST_SEED

if TYPE_CHECKING:
    from tfm.cli.answer import Answer
    from tfm.engine.conversation import AnswerSettings

LEAVING = ("/bye", "/exit", "/quit")
NOTHING = ('""', "''")
KEYS = """\
Enter sends; Alt-Enter or Ctrl-J begins a new line; arrows bring earlier texts back.
Ctrl-C stops an answer, or clears the line; Ctrl-D leaves.
//text sends a text that begins with a slash."""


@dataclass(frozen=True)
class Action:
    """A command: the argument that it takes ([IN BRACKETS]: or none), what it does in a few words, and how."""

    argument: str
    help: str
    do: Callable[[str], None]


class Session:
    """Reads and answers until the person leaves."""

    def __init__(self, turns: Turns, kept: Collection[str]) -> None:
        """kept are the settings that the command line gave: a file does not change them."""
        self._kept = kept
        turns.has_commands = True
        self._turns, self._conversation = turns, turns.conversation
        self._show, self._note = turns.output.write_line, turns.notes.note
        self._wish = Wish()
        self._was_stopped = False
        self._actions = {
            "/system": Action("[TEXT]", 'tell the model TEXT before all, quotes included ("": nothing)', self._system),
            "/reset": Action("", "forget all turns", self._reset),
            "/drop": Action("[N]", "forget the oldest turn, or N of them", self._drop),
            "/regenerate": Action("", "another answer to the last message", self._regenerate),
            "/save": Action("FILE", "keep the conversation in a file", self._save),
            "/load": Action("FILE", "go on with a conversation that was saved", self._load),
            "/help": Action("", "this text", self._help),
            "/bye": Action("", "leave", lambda argument: None),
        }

    def run(self) -> None:
        """Until Ctrl-D or /bye. Errors of a turn or a command are told, and end nothing."""
        names = tuple(f"{name} " if action.argument else name for name, action in self._actions.items())
        prompt = Prompt(names, ("/save", "/load"), self._turns.notes)
        model = self._conversation.model
        self._note(f"{model.name}, {model.ctx} tokens of context; /help tells what there is, Ctrl-D leaves")
        with keys_kept(self._turns.output), noted() as self._wish:
            while True:
                try:
                    text = prompt.ask(self._wish, self._turns.output)
                except EOFError:
                    return
                except Stopped:
                    raise
                except KeyboardInterrupt:
                    if prompt.is_empty:
                        self._note("Ctrl-D or /bye leaves")
                    continue
                if text.strip() in LEAVING:
                    return
                self._wish.begin()
                try:
                    self._take(text)
                except TfmError as error:
                    self._turns.output.end_line()
                    say(f"tfm: {error}")

    def _is_to_stop(self) -> bool:
        return self._wish.to_stop

    def _take(self, text: str) -> None:
        """A command or a message; nothing where there is only white space."""
        if text.startswith("/") and not text.startswith("//"):
            word, *rest = text.split(maxsplit=1)
            argument = rest[0].strip() if rest else ""
            action = self._action(word)
            if argument and not action.argument:
                raise TfmError(f"command {word}", repr(argument), "nothing behind it")
            if not argument and action.argument.isalpha():
                raise TfmError(f"command {word}", "nothing behind it", f"{word} {action.argument}")
            action.do(argument)
        elif text.strip():
            self._end(self._turns.ask(text.removeprefix("/") if text.startswith("//") else text, self._is_to_stop))

    def _action(self, word: str) -> Action:
        if word in self._actions:
            return self._actions[word]
        near = [name for name in self._actions if name.startswith(word)] or get_close_matches(word, self._actions)
        meant = f"did you mean {' or '.join(near)}?" if near else "/help tells what there is;"
        raise TfmError(f"command {word}", "no such command", do=f"{meant} /{word} makes it a message")

    def _end(self, answer: "Answer") -> None:
        """What follows an answer: the end of its line, and what there is to say about it."""
        self._turns.output.end_line()
        self._was_stopped = answer.finish_reason is None
        if self._was_stopped:
            if answer.text.strip():
                self._note("stopped; what was said so far stays in the conversation")
            else:
                self._note("stopped before anything was said; the conversation is as it was")
        self._turns.remark(answer)
        if not self._was_stopped:
            self._turns.check_end(answer)

    # ---- commands ----

    def _system(self, text: str) -> None:
        if not text:
            self._show(self._conversation.system if self._conversation.system is not None else "(nothing)")
            return
        is_nothing = text in NOTHING
        self._conversation.set_system(None if is_nothing else text)
        if is_nothing:
            self._note("the model is told nothing before the messages")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._note("all turns are forgotten")

    def _drop(self, count: str) -> None:
        if not (count or "1").isdecimal() or len(count) > 9:
            raise TfmError("command /drop", repr(count), "a number of turns")
        self._conversation.drop(int(count or 1))
        self._note(f"forgotten: {count or 1}; turns that are left: {self._conversation.turns}")

    def _regenerate(self, _: str) -> None:
        settings = self._turns.settings
        if not self._conversation.turns:
            raise TfmError("command /regenerate", "no answer yet", do="send a message first")
        if settings.sampling.temperature > 0:
            seed = ((settings.sampling.seed or 0) + 1) & LARGEST_SEED
            self._turns.settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
        elif not self._was_stopped:
            self._note("at temperature 0 the answer is the same again")
        self._end(self._turns.ask_again(self._is_to_stop))

    def _save(self, file: str) -> None:
        path = chat_file.save(_unquoted(file), self._conversation, self._turns.settings)
        self._note(f"saved: {path}")

    def _load(self, file: str) -> None:
        before, model = self._turns.settings, self._conversation.model
        loaded = chat_file.load(_unquoted(file), self._conversation, before, self._kept)
        self._turns.settings, self._was_stopped = loaded.settings, False
        self._note(f"loaded: {self._conversation.turns} turns, {self._conversation.count('')} tokens of {model.ctx}")
        if loaded.model is not None and loaded.model != model.name:
            self._note(f"it was made with the model {loaded.model}, and goes on with {model.name}")
        changes = _differences(before, loaded.settings)
        if changes:
            self._note(f"settings of the file: {', '.join(changes)}")
        if loaded.overruled:
            self._note(f"not taken from the file, since the command line says otherwise: {', '.join(loaded.overruled)}")

    def _help(self, _: str) -> None:
        names = {f"{name} {action.argument}".strip(): action.help for name, action in self._actions.items()}
        width = max(map(len, names))
        self._show("\n".join([*(f"{name:{width}}  {text}" for name, text in names.items()), KEYS]))


def _unquoted(file: str) -> str:
    """The name of a file, without quotes around it. Raises TfmError for a quote that does not end."""
    if file[0] not in "'\"":
        return file
    try:
        parts = shlex.split(file)
    except ValueError:
        raise TfmError("file", file, do="close the quote") from None
    return parts[0] if len(parts) == 1 else file


def _differences(before: "AnswerSettings", after: "AnswerSettings") -> list[str]:
    """The settings that have changed, with their new values."""
    old, new = ({**asdict(settings.sampling), **asdict(settings)} for settings in (before, after))
    idle = {"sampling", "seed"} if after.sampling.temperature == 0 else {"sampling"}
    return [f"{name} {new[name]}" for name in new if name not in idle and new[name] != old[name]]
