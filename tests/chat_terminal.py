"""tfm chat at a terminal, for tests: keys are typed, and what is shown is waited for."""

import os
import pty
import re
import select
import signal
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli_process import TFM, TIMEOUT_S, environment

ANSWER = "Hi é🙂!"
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|\x1b[=>]|\x1b\][^\x07]*\x07")
READY = "\x1b[?2004h"  # the line editor is at work: from now on a paste has marks around it
ENTER, NEW_LINE, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\n", "\x1b\r", "\x1b[A", "\x03", "\x04"


class Terminal:
    """tfm at a terminal. What it showed is a text without escape sequences; `see` waits, and goes on from there."""

    def __init__(self, command: list[str | Path], env: dict[str, str | None]) -> None:
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            os.execve(command[0], [str(word) for word in command], environment(env))
        self.settings_before = self.settings
        self._data, self._at = b"", 0
        self._prompt = "> " if env.get("TERM") == "dumb" else "{prompt}"

    @property
    def settings(self) -> list[object]:
        """How the terminal treats what is typed, as termios has it."""
        return termios.tcgetattr(self._terminal)

    @property
    def marks_pastes(self) -> bool:
        """Whether a paste would come with marks around it, which a shell does not expect."""
        return self._data.rfind(READY.encode()) > self._data.rfind(READY.replace("h", "l").encode())

    @property
    def data(self) -> bytes:
        """All that the terminal got, escape sequences too."""
        return self._data

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

    def interrupt(self, number: int = signal.SIGINT) -> None:
        os.kill(self._process, number)

    def interrupt_at_once(self, *numbers: int) -> None:
        """Several signals, all of which are there before Python looks for one."""
        os.kill(self._process, signal.SIGSTOP)
        os.waitpid(self._process, os.WUNTRACED)
        for number in (*numbers, signal.SIGCONT):
            os.kill(self._process, number)

    def hang_up(self) -> int:
        """Close the terminal's window, and wait for the end; the exit status."""
        os.close(self._terminal)
        return self._wait()

    def end(self) -> int:
        """Wait for the end; the exit status. The terminal is left as it was given back."""
        while self._read():
            pass
        self.settings_after = self.settings
        os.close(self._terminal)
        return self._wait()

    def _wait(self) -> int:
        end = time.monotonic() + TIMEOUT_S
        while not (ended := os.waitpid(self._process, os.WNOHANG))[0]:
            assert time.monotonic() < end, "it goes on without its terminal"
            time.sleep(0.01)
        self._process = 0
        return os.waitstatus_to_exitcode(ended[1])

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


def history_of(home: Path) -> Path:
    return home / "tfm" / "chat-history"


@contextmanager
def chat(
    model: Path, *options: str, home: Path, term: str = "xterm", tfm: tuple[str | Path, ...] = (TFM,),
    **env: str | None,
) -> Iterator[Terminal]:  # fmt: skip
    changes = {"TERM": term, "XDG_DATA_HOME": str(home), "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": None, **env}
    terminal = Terminal([*tfm, "chat", "-m", model, *options], changes)
    try:
        yield terminal
    finally:
        terminal.kill()
