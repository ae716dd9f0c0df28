"""A conversation with a model: its messages, and one sequence that goes on from turn to turn.

Every answer is the one that the whole conversation, put through the chat template anew, would get. What of its ids is
in the sequence already is not run again: however a template writes earlier turns (without white space at their ends,
without thoughts, with other tokens than the model chose), the common prefix stays and the rest is run.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tfm.engine.chat import read_chat_template
from tfm.engine.errors import TfmError
from tfm.engine.fields import read_json, shown
from tfm.engine.files import is_there
from tfm.engine.progress import Progress, silent
from tfm.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tfm.engine import cache
    from tfm.engine.constraint import Constraint, Constraints, Grammar
    from tfm.engine.generate import Token
    from tfm.engine.model import Model
    from tfm.engine.tokenizer import Message

CHUNK = 64  # tokens of a prompt between two calls of progress, so that who stops an answer need not wait long
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class AnswerSettings:
    """How a conversation is answered; see `generate`."""

    max_tokens: int = 1024
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    speculate: int = 0
    grammar: "Grammar | None" = None


class Conversation:
    """Turns of a user's message and the model's answer, and what the model is told before them (system).

    A turn is there when its answer has ended, or was broken off after some text had come: then that text is the
    answer. When none had come, or after an error, the conversation is as it was before the turn. So messages always
    alternate, which many templates ask for. Close it (or use `with`) to give its memory back.
    """

    def __init__(self, model: "Model", system: str | None = None, sequence: "cache.Sequence | None" = None) -> None:
        """sequence, empty, is where the conversation is run: for who wants to keep it.

        Raises TfmError when the model has no chat template, or one that takes no system message.
        """
        if not model.tokenizer.has_chat_template:
            raise _no_template(model.folder)
        self.model = model
        self.sequence = model.sequence() if sequence is None else sequence
        self._system: str | None = None
        self._turns: list[Message] = []
        self.new_tokens = 0  # of the last prompt, those that were not in the sequence
        self.constraint: Constraint | None = None  # on the last answer
        self.replace([] if system is None else [_message("system", system)])

    @property
    def system(self) -> str | None:
        """What the model is told before the first message."""
        return self._system

    @property
    def messages(self) -> "list[Message]":
        """All of the conversation, as the chat template gets it."""
        return [*([] if self._system is None else [_message("system", self._system)]), *self._turns]

    @property
    def turns(self) -> int:
        """How many messages of the user have been answered."""
        return len(self._turns) // 2

    def replace(self, messages: "Sequence[Message]") -> None:
        """Take messages for the conversation: a system message or none, then user and assistant in turn.

        Raises TfmError, and changes nothing, for messages in another order and for those that the template refuses.
        """
        has_system = bool(messages) and messages[0].get("role") == "system"
        turns = list(messages[has_system:])
        for i, message in enumerate(turns):
            if message.get("role") != ROLES[i % 2]:
                where = f"messages[{i + has_system}].role"
                raise TfmError(where, shown(message.get("role")), f"{ROLES[i % 2]}: user and assistant take turns")
        if len(turns) % 2:
            raise TfmError(f"messages[{len(messages) - 1}]", "a message without an answer", "an answer to each")
        self.model.tokenizer.chat_ids([*messages, _message("user", "a question")])
        self._system, self._turns = (messages[0]["content"] if has_system else None), turns

    def reset(self) -> None:
        """Forget all turns; system stays."""
        self._turns = []

    def set_system(self, text: str | None) -> None:
        """Tell the model something else before the first message, or nothing (None). Raises as `replace`."""
        self.replace([*([] if text is None else [_message("system", text)]), *self._turns])

    def drop(self, count: int = 1) -> None:
        """Forget the oldest turns. Raises TfmError for more than there are."""
        if not 1 <= count <= self.turns:
            raise TfmError("turns to forget", count, f"1 to {self.turns}" if self.turns else "none: there are none")
        self._turns = self._turns[2 * count :]

    def count(self, text: str, dropped: int = 0) -> int:
        """Tokens of the prompt when text is the next message, and so many of the oldest turns are forgotten."""
        kept = self.messages[: len(self.messages) - len(self._turns)] + self._turns[2 * dropped :]
        return len(self.model.tokenizer.chat_ids([*kept, _message("user", text)]))

    def ids(self, text: str) -> list[int]:
        """The prompt when text is the next message."""
        return self.model.tokenizer.chat_ids([*self.messages, _message("user", text)])

    def check_grammar(self, grammar: "Grammar") -> None:
        """Raises TfmError for a grammar that no answer can keep to, before a message is sent."""
        self._constraints.start(grammar, ())

    @cached_property
    def _constraints(self) -> "Constraints":
        """One for all turns: to read a large vocabulary takes a second and more."""
        from tfm.engine.constraint import Constraints

        return Constraints(self.model.tokenizer, self.model.config.vocab_size)

    def answer(
        self, text: str, settings: AnswerSettings | None = None, progress: Progress = silent
    ) -> "Generator[Token, None, None]":
        """The model's answer to text, token by token; the turn is there when it ends.

        Closing the iterator, or a KeyboardInterrupt (which progress may raise), breaks the answer off. Raises TfmError
        before the first token when the conversation with text does not fit the context.
        """
        return self._start(self._turns, text, settings or AnswerSettings(), progress)

    def regenerate(
        self, settings: AnswerSettings | None = None, progress: Progress = silent
    ) -> "Generator[Token, None, None]":
        """Another answer to the last message; the one before stays until this one ends or is broken off after text."""
        if not self._turns:
            raise TfmError("conversation", "no answer yet", do="send a message first")
        return self._start(self._turns[:-2], self._turns[-2]["content"], settings or AnswerSettings(), progress)

    def _start(
        self, before: "list[Message]", text: str, settings: AnswerSettings, progress: Progress
    ) -> "Generator[Token, None, None]":
        turns = [*before, _message("user", text)]
        system = self.messages[: len(self.messages) - len(self._turns)]
        ids = self.model.tokenizer.chat_ids([*system, *turns])
        if len(ids) > self.model.ctx:
            raise self.model.too_long(len(ids))
        wanted = None if settings.grammar is None else self._constraints.start(settings.grammar, ids)
        self.constraint = wanted
        self.new_tokens = len(ids) - self.sequence.keep(ids)
        tokens = self.model.generate(
            ids, settings.max_tokens, settings.sampling, settings.stop, chunk=CHUNK, progress=progress,
            sequence=self.sequence, constraint=wanted, speculate=settings.speculate,
        )  # fmt: skip
        return self._follow(tokens, turns)

    def _follow(self, tokens: "Iterator[Token]", turns: "list[Message]") -> "Generator[Token, None, None]":
        """tokens; at their end the turns are the conversation's."""
        parts: list[str] = []
        try:
            for token in tokens:
                parts.append(token.text)
                yield token
        except (GeneratorExit, KeyboardInterrupt):
            if "".join(parts).strip():
                self._turns = [*turns, _message("assistant", "".join(parts))]
            raise
        self._turns = [*turns, _message("assistant", "".join(parts))]

    def close(self) -> None:
        """Give the memory of keys and values back; the messages stay."""
        self.sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_template(folder: Path) -> None:
    """Raises TfmError when the checkpoint in folder has no chat template; quick, since nothing else is read."""
    config: dict[str, object] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        config |= read_json(folder / name) if is_there(folder / name) else {}
    if read_chat_template(folder, config, {}) is None:
        raise _no_template(folder)


def _no_template(folder: Path) -> TfmError:
    remedy = "talk with a model that was made for chat, or continue plain text with tfm generate --raw"
    return TfmError(f"{folder}: chat template", "none", do=remedy)


def _message(role: str, content: str) -> "Message":
    return {"role": role, "content": content}
