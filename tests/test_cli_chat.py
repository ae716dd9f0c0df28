"""tfm chat at a terminal, key by key."""

import json
import os
import pty
import re
import select
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_process import TFM, TIMEOUT_S, environment

from tfm.kernels.cache_folder import cache_folder

ANSWER = "Hi é🙂!"
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07")
READY = "\x1b[?2004h"  # the line editor is at work: from now on a paste has marks around it
ENTER, NEW_LINE, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\n", "\x1b\r", "\x1b[A", "\x03", "\x04"
LETTERS = b"abcdefghij"


class Terminal:
    """tfm at a terminal. What it showed is a text without escape sequences; `see` waits, and goes on from there."""

    def __init__(self, command: list[str | Path], env: dict[str, str | None]) -> None:
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.execve(command[0], [str(word) for word in command], environment(env))
        self._data, self._at = b"", 0
        self._prompt = "> " if env.get("TERM") == "dumb" else "{prompt}"

    @property
    def shown(self) -> str:
        return ESCAPES.sub("", self._data.decode(errors="replace").replace(READY, "{prompt}"))

    def see_prompt(self) -> None:
        self.see(self._prompt)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def see(self, text: str) -> str:
        """Wait until text is shown behind what was seen before; gives all up to its end."""
        end = time.monotonic() + TIMEOUT_S
        while (place := self.shown.find(text, self._at)) < 0:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown[self._at :]!r}"
            if not self._read():
                raise AssertionError(f"ended without {text!r}: {self.shown[self._at :]!r}")
        begin, self._at = self._at, place + len(text)
        return self.shown[begin : self._at]

    def say(self, text: str) -> None:
        """Type a line at the next prompt."""
        self.see_prompt()
        self.type(text + ENTER)

    def interrupt(self) -> None:
        os.kill(self._process, signal.SIGINT)

    def end(self) -> int:
        """Wait for the end; the exit status."""
        while self._read():
            pass
        os.close(self._terminal)
        status, self._process = os.waitpid(self._process, 0)[1], 0
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], TIMEOUT_S)
        assert ready, f"nothing more came after {self.shown[self._at :]!r}"
        try:
            piece = os.read(self._terminal, 1 << 16)
        except OSError:  # how Linux says that the other end is closed
            return False
        self._data += piece
        return bool(piece)

    def kill(self) -> None:
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the history of a test is kept."""
    return tmp_path / "data"


def history_of(home: Path) -> Path:
    return home / "tfm" / "chat-history"


@contextmanager
def chat(model: Path, *options: str, home: Path, term: str = "xterm", **env: str | None) -> Iterator[Terminal]:
    changes = {"TERM": term, "XDG_DATA_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": None, **env}
    terminal = Terminal([TFM, "chat", "-m", model, *options], changes)
    try:
        yield terminal
    finally:
        terminal.kill()


def test_terminal_is_as_it_was(chatty_parrot: Path, home: Path) -> None:
    """What the shell's user typed after the chat was not shown."""
    script = f"stty -a; {TFM} chat -q -m {chatty_parrot}; stty -a"
    terminal = Terminal(["/bin/sh", "-c", script], {"TERM": "xterm", "XDG_DATA_HOME": str(home)})
    try:
        terminal.say("hello")
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
        before, after = re.findall(r"speed .*?-?extproc", terminal.shown, re.DOTALL)
        assert before == after
    finally:
        terminal.kill()


# ------------------------------------------------------------------------------------------- at a terminal


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_conversation(chatty_parrot: Path, home: Path, term: str) -> None:
    """Ask, read, ask again, leave."""
    with chat(chatty_parrot, home=home, term=term) as terminal:
        terminal.see("/help tells what there is, Ctrl-D leaves\r\n")
        terminal.say("hello")
        terminal.see(f"{ANSWER}\r\n")
        terminal.say("")
        terminal.say("   ")
        terminal.say("again")
        terminal.see(f"{ANSWER}\r\n")
        terminal.see_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert "Traceback" not in terminal.shown
        assert terminal.shown.count(ANSWER) == 2  # nothing was sent for empty lines


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(endless_chat: Path, home: Path, tmp_path: Path, term: str) -> None:
    """Ctrl-C ended the process a second later, or the next message met a template that refuses two in a row."""
    with chat(endless_chat, "-n", "900000", home=home, term=term) as terminal:
        for text in ("one", "two"):
            terminal.say(text)
            terminal.see("abcdefghijabcdefghij")
            terminal.type(CTRL_C)
            terminal.see("stopped; what was said so far stays in the conversation")
        terminal.say("/regenerate")
        terminal.see("abcdefghijabcdefghij")
        terminal.type(CTRL_C)
        terminal.see("stopped")
        time.sleep(1.5)  # after GRACE_S the process was ended from the side
        terminal.say("/save " + str(tmp_path / "saved.json"))
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    messages = json.loads((tmp_path / "saved.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in messages[::2]] == ["one", "two"]
    for message in messages[1::2]:
        content = message["content"]
        assert content == (LETTERS.decode() * (len(content) // 10 + 1))[: len(content)]


def test_what_is_typed_during_an_answer(endless_chat: Path, home: Path, tmp_path: Path) -> None:
    """It was shown in the middle of the answer; Enter became a line break, so that nothing was sent afterwards."""
    file = tmp_path / "saved.json"
    with chat(endless_chat, "-n", "1000", home=home) as terminal:
        terminal.say("one")
        terminal.see("abcdefghij")
        terminal.type("two" + NEW_LINE + "more" + ENTER + f"/save {file}" + ENTER + CTRL_D)
        assert terminal.end() == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages] == [
        text for question in ("one", "two\nmore") for text in (question, LETTERS.decode() * 100)
    ]
    assert LETTERS.decode() * 100 in terminal.shown


def test_ctrl_c_while_the_prompt_is_read(endless_chat: Path, home: Path) -> None:
    """A long message could not be stopped before the first token of its answer was there."""
    with chat(endless_chat, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("\x1b[200~" + "x" * 200_000 + "\x1b[201~")
        terminal.type(ENTER)
        terminal.see("reading the prompt")
        terminal.interrupt()
        terminal.interrupt()
        terminal.see("stopped before anything was said; the conversation is as it was")
        terminal.see_prompt()
        bars = terminal.shown.count("reading the prompt")
        time.sleep(0.5)  # the bar is gone: it would be drawn over the prompt
        terminal.type("/help")
        terminal.see("/help")
        assert terminal.shown.count("reading the prompt") == bars
        terminal.type(ENTER)
        terminal.say("/drop")
        terminal.see("there are none")
        terminal.say("/bye")
        assert terminal.end() == 0


@pytest.mark.parametrize("how", ["key", "signal"])
def test_ctrl_c_at_the_prompt(chatty_parrot: Path, home: Path, how: str) -> None:
    """It ended the chat, or left the text standing; at an empty prompt nothing said how to leave."""
    with chat(chatty_parrot, home=home) as terminal:

        def interrupt() -> None:
            terminal.type(CTRL_C) if how == "key" else terminal.interrupt()

        terminal.see_prompt()
        interrupt()
        terminal.see("Ctrl-D or /bye leaves")
        terminal.see_prompt()
        terminal.type("forget this")
        terminal.see("forget this")
        interrupt()
        terminal.say("hello")
        terminal.see(f"{ANSWER}\r\n")
        assert terminal.shown.count("Ctrl-D or /bye leaves") == 1
        terminal.say("/bye")
        assert terminal.end() == 0


def test_ctrl_c_before_the_first_prompt(endless_chat: Path, home: Path) -> None:
    """While the model is loaded Ctrl-C ends the process, as everywhere."""
    with chat(endless_chat, home=home) as terminal:
        time.sleep(0.15)
        terminal.interrupt()
        assert terminal.end() in (130, -signal.SIGINT)


def test_messages_of_several_lines(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A pasted text was sent line by line, each answered for itself."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("one" + NEW_LINE + "two" + ALT_ENTER + "three" + ENTER)
        terminal.see(ANSWER)
        terminal.see_prompt()
        terminal.type("\x1b[200~four\r\nfive\rsix\n\x1b[201~" + ENTER)
        terminal.see(ANSWER)
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.see_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    messages = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in messages] == ["one\ntwo\nthree", ANSWER, "four\nfive\nsix\n", ANSWER]


def test_history_across_runs(chatty_parrot: Path, home: Path) -> None:
    """Arrow up found nothing in a new run, or lines of a message as texts of their own; others could read the file."""
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("first" + NEW_LINE + "é🙂" + ENTER)
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
    assert stat.S_IMODE(history_of(home).stat().st_mode) == 0o600
    history_of(home).chmod(0o644)
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type(UP + UP)
        terminal.see("first")
        terminal.see("é🙂")
        terminal.type(ENTER)
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0
    assert stat.S_IMODE(history_of(home).stat().st_mode) == 0o600
    assert history_of(home).read_text().count("+first\n+é🙂\n") == 2


@pytest.mark.parametrize("what", ["a file in the way", "a pipe", "no home"])
def test_history_that_cannot_be_kept(chatty_parrot: Path, tmp_path: Path, what: str) -> None:
    """A home that is missing or read-only ended the chat before it began, or a pipe in its place made it wait."""
    home: Path = tmp_path / "data"
    env: dict[str, str | None] = {}
    if what == "a file in the way":
        home.write_text("")
    elif what == "a pipe":
        history_of(home).parent.mkdir(parents=True)
        os.mkfifo(history_of(home))
    else:
        home, env = Path(), {"XDG_DATA_HOME": None, "HOME": "/dev/null/nowhere", "TFM_CACHE": str(cache_folder())}
    with chat(chatty_parrot, home=home, **env) as terminal:
        terminal.see("history: not kept")
        terminal.say("hello")
        terminal.see(ANSWER)
        terminal.see_prompt()
        terminal.type(UP)
        terminal.see("hello")
        terminal.type(CTRL_C)
        terminal.say("/bye")
        assert terminal.end() == 0
        assert terminal.shown.count("history: not kept") == 1


def test_two_chats_share_the_history(chatty_parrot: Path, home: Path) -> None:
    """The last one to leave wrote its own history over the other's."""
    with chat(chatty_parrot, home=home) as one, chat(chatty_parrot, home=home) as other:
        for text in ("x", "y"):
            for terminal, name in ((one, "one"), (other, "other")):
                terminal.say(f"{name} {text}")
                terminal.see(ANSWER)
        for terminal in (one, other):
            terminal.say("/bye")
            assert terminal.end() == 0
    lines = history_of(home).read_text().splitlines()
    assert [line for line in lines if line.startswith(("+one", "+other"))] == [
        "+one x",
        "+other x",
        "+one y",
        "+other y",
    ]


# ---------------------------------------------------------------------------------------------- commands


def test_words_behind_a_slash(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A mistyped command was sent to the model as a message."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say("/rest")
        terminal.see("command /rest: found no such command; did you mean /reset? //rest makes it a message")
        terminal.say("/sys")
        terminal.see("did you mean /system?")
        terminal.say("/etc/passwd is a file")
        terminal.see(
            "command /etc/passwd: found no such command; /help tells what there is; //etc/passwd makes it a message"
        )
        terminal.say("/reset all")
        terminal.see("command /reset: found 'all'; allowed: nothing behind it")
        terminal.say("/save")
        terminal.see("command /save: found nothing behind it; allowed: /save FILE")
        terminal.say("/drop x")
        terminal.see("command /drop: found 'x'; allowed: a number of turns")
        terminal.say("/regenerate")
        terminal.see("no answer yet")
        terminal.say("//etc is a folder")
        terminal.see(f"{ANSWER}\r\n")
        terminal.say("/help")
        terminal.see("/regenerate     another answer to the last message")
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert [message["content"] for message in json.loads(file.read_text())["messages"]] == ["/etc is a folder", ANSWER]


def test_completion_of_commands(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """Tab completes the names of commands, with the space before an argument, and of files where one is taken."""
    (tmp_path / "a conversation.json").write_text('{"messages": []}')
    with chat(chatty_parrot, home=home) as terminal:
        terminal.see_prompt()
        terminal.type("/sys\tBe kind." + ENTER)
        terminal.say("/system")
        terminal.see("Be kind.\r\n")
        terminal.see_prompt()
        terminal.type(f"/lo\t{tmp_path}/a c\t" + ENTER)
        terminal.see("loaded: 0 turns")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_system_drop_and_reset(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.json"

    def saved(terminal: Terminal) -> list[tuple[str, str]]:
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        return [(message["role"], message["content"]) for message in json.loads(file.read_text())["messages"]]

    with chat(chatty_parrot, "-s", "First.", home=home) as terminal:
        for text in ("one", "two", "three"):
            terminal.say(text)
            terminal.see(ANSWER)
        terminal.say("/system Second.")
        terminal.say("/drop 2")
        terminal.see("forgotten: 2; turns that are left: 1")
        assert saved(terminal) == [("system", "Second."), ("user", "three"), ("assistant", ANSWER)]
        terminal.say("/drop 2")
        terminal.see("turns to forget: found 2; allowed: 1 to 1")
        terminal.say("/reset")
        assert saved(terminal) == [("system", "Second.")]
        terminal.say('/system ""')
        assert saved(terminal) == []
        terminal.say("/system")
        terminal.see("(nothing)")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_regenerate(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """The seed was the same again, and so was the answer; or the new answer became a turn of its own."""
    file = tmp_path / "saved.json"
    with chat(chatty_parrot, "--temperature", "0.5", "--seed", "7", home=home) as terminal:
        terminal.say("one")
        terminal.see(ANSWER)
        terminal.say("/regenerate")
        terminal.see(ANSWER)
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
        assert "the same again" not in terminal.shown
    saved = json.loads(file.read_text())
    assert (len(saved["messages"]), saved["settings"]["seed"], saved["settings"]["temperature"]) == (2, 8, 0.5)
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say("one")
        terminal.see(ANSWER)
        terminal.say("/regenerate")
        terminal.see("at temperature 0 the answer is the same again")
        terminal.see(ANSWER)
        terminal.say("/bye")
        assert terminal.end() == 0


def test_save_and_load(chatty_parrot: Path, endless_chat: Path, home: Path, tmp_path: Path) -> None:
    """A conversation goes on in another process, with its settings, and with a note where the model is another one."""
    file = tmp_path / "my chat.json"
    with chat(chatty_parrot, "-n", "3", "--stop", "x", "-s", "Be kind.", home=home) as terminal:
        terminal.say("hello")
        terminal.see("the answer ends here: it has 3 tokens, and -n allows no more")
        for _ in range(2):  # the second time over the first
            terminal.say(f"/save {file}")
            terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads(file.read_text())
    assert list(saved) == ["format", "model", "settings", "messages"]
    assert saved["model"] == str(chatty_parrot)
    assert os.listdir(tmp_path / "data") == ["tfm"]
    assert sorted(os.listdir(tmp_path)) == ["data", "my chat.json"]  # and no temporary file
    with chat(endless_chat, home=home) as terminal:
        terminal.say(f"/load {file}")
        terminal.see("loaded: 1 turns")
        terminal.see(f"it was made with the model {chatty_parrot}, and goes on with {endless_chat}")
        terminal.see("settings of the file: max_tokens 3, stop ('x',)")
        terminal.say("go on")
        terminal.see("abc\r\n")
        terminal.say(f"/save {file}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    contents = [message["content"] for message in json.loads(file.read_text())["messages"]]
    assert contents == ["Be kind.", "hello", "Hi ", "go on", "abc"]


def test_quotes_around_a_name(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """The quotes became a part of the file's name."""
    with chat(chatty_parrot, home=home) as terminal:
        terminal.say(f"/save {tmp_path}/Ada's talk.json")
        terminal.see("saved: ")
        for quote in "'", '"':
            terminal.say(f"/save {quote}{tmp_path}/my talk.json{quote}")
            terminal.see("saved: ")
            terminal.say(f"/load {quote}{tmp_path}/my talk.json{quote}")
            terminal.see("loaded: 0 turns")
        terminal.say('/save "my talk.json')
        terminal.see("close the quote")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert sorted(os.listdir(tmp_path)) == ["Ada's talk.json", "data", "my talk.json"]


def test_the_command_line_wins_over_a_file(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """/load changed what the person had asked for on the command line."""
    file = tmp_path / "saved.json"
    settings = {"max_tokens": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.5, "seed": 9}
    file.write_text(json.dumps({"messages": [], "settings": settings}))
    with chat(chatty_parrot, "-n", "1024", "--temperature", "0", home=home) as terminal:
        terminal.say(f"/load {file}")
        terminal.see("settings of the file: top_p 0.5, stop ('x',)")
        terminal.see("not taken from the file, since the command line says otherwise: temperature, max_tokens")
        terminal.say(f"/save {tmp_path}/new.json")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads((tmp_path / "new.json").read_text())["settings"]
    assert settings | {"max_tokens": 1024, "temperature": 0} == {name: saved[name] for name in settings}


def test_save_keeps_what_is_there(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A file that is no conversation was overwritten, a link replaced, or an error left a piece of a file."""
    notes, target, link = tmp_path / "notes.txt", tmp_path / "target.json", tmp_path / "link.json"
    notes.write_text("precious")
    (tmp_path / "other.json").write_text('{"messages": []}')
    link.symlink_to(target)
    with chat(chatty_parrot, home=home) as terminal:
        for name, found in (
            ("notes.txt", "not overwritten"), ("other.json", "not overwritten"), (".", "not overwritten"),
            ("missing/x.json", "No such file or directory"), ("/dev/null", "not overwritten"),
        ):  # fmt: skip
            terminal.say(f"/save {tmp_path / name}")
            terminal.see(found)
        terminal.say(f"/save {link}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    assert notes.read_text() == "precious"
    assert (tmp_path / "other.json").read_text() == '{"messages": []}'
    assert link.is_symlink()
    assert json.loads(target.read_text())["messages"] == []
    assert sorted(os.listdir(tmp_path)) == ["data", "link.json", "notes.txt", "other.json", "target.json"]


BAD_FILES = {
    "nothing": (None, "nothing there; name a file that /save wrote"),
    "not JSON": ("{", "column 2; name a file that /save wrote"),
    "a list": ("[]", "a JSON object"),
    "no messages": ("{}", "field messages: found nothing"),
    "format": ('{"format": "x", "messages": []}', 'field format: found "x"'),
    "message": ('{"messages": ["x"]}', 'field messages[0]: found "x"'),
    "role": ('{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}', "messages[1].role"),
    "content": ('{"messages": [{"role": "user", "content": 5}]}', "field messages[0].content: found 5"),
    "more": ('{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "field messages[0].name"),
    "order": ('{"messages": [{"role": "assistant", "content": "a"}]}', 'messages[0].role: found "assistant"'),
    "setting": ('{"messages": [], "settings": {"temperature": -1}}', "field settings.temperature: found -1"),
    "type": ('{"messages": [], "settings": {"top_p": "x"}}', "field settings.top_p: found x"),
    "unknown": ('{"messages": [], "settings": {"warmth": 1}}', "allowed: temperature, top_k, "),
    "names": ('{"messages": [], "settings": {"warmth": 1}}', "logit_bias, seed, max_tokens, stop"),
    "bias": ('{"messages": [], "settings": {"logit_bias": {"9999": 1}}}', "settings.logit_bias: found token id 9999"),
    "underscore": (
        '{"messages": [], "settings": {"logit_bias": {"1_0": 1}}}',
        'field settings.logit_bias: found {"1_0"',
    ),
    "flag": (
        '{"messages": [], "settings": {"logit_bias": {"1": true}}}',
        'field settings.logit_bias: found {"1": true',
    ),
    "tokens": ('{"messages": [], "settings": {"max_tokens": 0}}', "field settings.max_tokens: found 0"),
    "stop": ('{"messages": [], "settings": {"stop": [""]}}', "field settings.stop"),
    "half a character": ('{"messages": [], "settings": {"stop": ["\\ud800"]}}', "texts that UTF-8 can hold"),
    "too large": ('{"messages": [], "settings": {"temperature": 1' + "0" * 400 + "}}", "field settings.temperature"),
    "steers": ('{"messages": [], "settings": {"\\u001b[31m": 1}}', "field settings.\\x1b[31m"),
}


def test_load_of_bad_files(chatty_parrot: Path, home: Path, tmp_path: Path) -> None:
    """A damaged file ended the chat, or left half of it in the conversation; the error did not name the field."""
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    with chat(chatty_parrot, home=home, COLUMNS="500") as terminal:
        terminal.say("hello")
        terminal.see(ANSWER)
        for content, found in BAD_FILES.values():
            if content is not None:
                bad.write_text(content)
            terminal.say(f"/load {bad}")
            terminal.see(found)
        terminal.say(f"/save {good}")
        terminal.see("saved: ")
        terminal.say("/bye")
        assert terminal.end() == 0
    saved = json.loads(good.read_text())
    assert [message["content"] for message in saved["messages"]] == ["hello", ANSWER]
    assert (saved["settings"]["temperature"], saved["settings"]["max_tokens"]) == (0, 1024)


# ----------------------------------------------------------------------------------------- context is full


def test_context_full_at_a_terminal(small_chat: Path, home: Path) -> None:
    """Old turns were dropped without a word, or the conversation could not go on."""
    with chat(small_chat, home=home) as terminal:
        for text in ("x" * 20, "y"):
            terminal.say(text)
            terminal.see(ANSWER)
        terminal.say("z" * 20)
        terminal.see("conversation with this message: found ")
        line = terminal.see("/reset all of them")
        assert " tokens; allowed: at most 128, the context; /drop 1 forgets the oldest 1 of 2 turns (" in line
        terminal.say("/drop 1")
        terminal.say("z" * 20)
        terminal.see(ANSWER)
        terminal.say("w" * 200)
        terminal.see(
            "message: found 226 tokens, even without the earlier turns; allowed: at most 128, the context; shorten it"
        )
        terminal.say("/bye")
        assert terminal.end() == 0


def test_answer_that_meets_the_end_of_the_context(small_chat: Path, home: Path) -> None:
    """It ended in mid-sentence, and nothing said why."""
    with chat(small_chat, home=home) as terminal:
        terminal.say("x" * (128 - len("<user></user>\n<assistant>\n") - 2))
        terminal.see("Hi \r\n")
        terminal.see("the answer ends here: the context of 128 tokens is full")
        terminal.say("/bye")
        assert terminal.end() == 0


def test_terminal_into_a_pipe(chatty_parrot: Path, home: Path) -> None:
    """With stdout in a pipe the line editor wrote its escape sequences into the result."""
    script = f"{TFM} chat -m {chatty_parrot} | cat"
    terminal = Terminal(["/bin/sh", "-c", script], {"XDG_DATA_HOME": str(home)})
    try:
        terminal.see("each line is a message")
        terminal.type("hello\n")
        terminal.see(f"{ANSWER}\r\n")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
        assert not history_of(home).exists()
    finally:
        terminal.kill()


def test_constraint_at_a_terminal(chatty_parrot: Path, home: Path) -> None:
    """An answer that broke off before its constraint allows ended the chat, or went by as complete."""
    with chat(chatty_parrot, "--regex", "[A-Za-z]{4}[0-9]", "-n", "3", home=home) as terminal:
        for text in ("x", "y"):
            terminal.say(text)
            terminal.see("--regex: the answer is not complete")
        terminal.say("/bye")
        assert terminal.end() == 0
