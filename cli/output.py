"""What a person and a pipe get to see: the result on stdout and nothing else, everything about it on stderr."""

import errno
import os
import re
import select
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

SHOW_CURSOR = b"\x1b[?25h"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LONG_S = 0.5  # work that takes longer than this is told of


def encoded(text: str, errors: str) -> bytes:
    """text in UTF-8. Half surrogates, which a locale that knows no UTF-8 makes of a name, become its bytes again.

    errors says what is written for those that are no UTF-8 after all.
    """
    with suppress(UnicodeEncodeError):
        return text.encode()
    with suppress(UnicodeEncodeError):
        text = text.encode(errors="surrogateescape").decode(errors=errors)
    return text.encode(errors=errors)


def harmless(text: str) -> str:
    """text with control characters as escapes: a file's name, or what stands in a file, is not to steer a terminal."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def say(line: str) -> None:
    """A line on stderr. If nobody can read it, then nobody can."""
    line = harmless(line)
    try:
        write_all(2, encoded(f"{line}\n", "backslashreplace"))
    except OSError:
        return


def write_all(descriptor: int, data: bytes) -> None:
    """Also where the other end does not want to be waited for (O_NONBLOCK, which a pipe may inherit)."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class StdoutError(TfmError):
    """stdout cannot be written, whatever the result is made of."""


class Output:
    """The result, in UTF-8 whatever the locale says. Each piece is on its way when `write` returns."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._owed: Callable[[], str] | None = None
        self._at_stop: list[Callable[[], None]] = []
        self._at_line_start = True
        self._has_ended_line = False
        self._lock = threading.Lock()

    @property
    def is_terminal(self) -> bool:
        return sys.stdout is not None and os.isatty(1)

    def write(self, text: str) -> None:
        """Raises BrokenPipeError when nobody reads any more, StdoutError when the text cannot be written."""
        if not text:
            return
        if sys.stdout is None:
            raise StdoutError("stdout", "closed", "a file, a pipe or a terminal to write the result to")
        try:
            write_all(1, encoded(text, "replace"))
        except BrokenPipeError:
            raise
        except OSError as error:
            do = "make room for the result" if error.errno == errno.ENOSPC else None
            raise StdoutError("stdout: cannot be written", error.strerror, do=do) from error
        self._at_line_start = text.endswith("\n")

    def write_line(self, text: str) -> None:
        self.write(f"{text}\n")

    def hold(self, text: str) -> None:
        """Keep text for `release`; when the process is stopped it is written all the same."""
        with self._lock:
            self._held.append(text)

    def release(self) -> None:
        """Write what is held, once."""
        with self._lock:
            held, self._held = self._held, []
        self.write("".join(held))

    @contextmanager
    def owing(self, make: Callable[[], str]) -> Iterator[None]:
        """Write the line that make gives at the end of the work inside; also, of what there is then, at Ctrl-C."""
        self._owed = make
        try:
            yield
        except KeyboardInterrupt:
            self._pay_at_stop()
            raise
        except BaseException:
            self._owed = None
            raise
        self._pay()

    @contextmanager
    def stopping(self, act: Callable[[], None]) -> Iterator[None]:
        """What else is to be done when the process is stopped during the work inside; another thread may do it."""
        self._at_stop.append(act)
        try:
            yield
        finally:
            self._at_stop.remove(act)

    def _pay(self) -> bool:
        """Whether there was a line to write."""
        with self._lock:
            owed, self._owed = self._owed, None
        if owed is not None:
            self.write_line(owed())
        return owed is not None

    def _pay_at_stop(self) -> None:
        """On a terminal the line goes behind ^C and ends there: no other line end is needed."""
        if self._pay():
            self._has_ended_line = self.is_terminal

    def end_line(self) -> None:
        """On a terminal, begin a new line for what comes next; a pipe or file gets the result and not a byte more."""
        if self.is_terminal and not self._at_line_start:
            self.write("\n")

    def begin_stderr_line(self) -> None:
        """Where stdout and stderr are one file, pipe or terminal: what is said next does not go on a line of stdout."""
        if not self._at_line_start and _is_one_place():
            say("")
            self._at_line_start = True

    def last_words(self) -> None:
        """Before the process is stopped: nothing that was made is lost, and the terminal is as it was."""
        for act in (self.release, self._pay_at_stop, *reversed(self._at_stop)):
            with suppress(OSError, TfmError):
                act()
        if sys.stderr is not None and os.isatty(2):
            with suppress(OSError):  # a terminal that was closed
                write_all(2, (b"" if self._has_ended_line else b"\n") + SHOW_CURSOR)


def _is_one_place() -> bool:
    try:
        return os.path.samestat(os.fstat(1), os.fstat(2)) or (os.isatty(1) and os.isatty(2))
    except OSError:
        return False


class Notes:
    """What is said on stderr while a command works: notes, warnings, and how far it is; nothing when quiet.

    Use it in `with`: then Python's warnings become notes, and no progress bar is left behind.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.is_terminal = sys.stderr is not None and os.isatty(2)
        self._stage: _Stage | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def note(self, text: str) -> None:
        if self.quiet:
            return
        if self._stage is None or not self._stage.print_above(f"tfm: {text}"):
            say(f"tfm: {text}")

    def progress(self, label: str, done: int, total: int | None, detail: str = "") -> None:
        """The engine's Progress. Work is told of when it has taken LONG_S: by a bar on a terminal, else by one line.

        detail stands behind the label, and may change.
        """
        if self.quiet:
            return
        with self._lock:
            if self._stage is not None and (self._stage.label != label or done == total):
                self._stage.end()
                self._stage = None
            if done == total:
                return
            if self._stage is None:
                self._stage = _Stage(label, self.is_terminal, self._told)
            self._stage.update(done, total, detail)

    def asked_for(self, label: str, done: int, total: int | None, detail: str = "") -> None:
        """The Progress of work that is the command itself: a bar on a terminal; a pipe is told nothing of it."""
        if self.is_terminal:
            self.progress(label, done, total, detail)

    def __enter__(self) -> Self:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.showwarning = lambda message, *where, **more: self.note(str(message))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stage is not None:
            self._stage.end()
            self._stage = None
        self._warnings.__exit__(kind, error, trace)


class _Stage:
    """One piece of work: a timer at first, then a bar or a line. told are the labels that had their line before."""

    def __init__(self, label: str, is_terminal: bool, told: set[str]) -> None:
        self.label, self._is_terminal, self._told = label, is_terminal, told
        self._done, self._total = 0, None  # type: tuple[int, int | None]
        self._shown_label = label
        self._ended = False
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._lock = threading.RLock()
        self._timer = threading.Timer(LONG_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def update(self, done: int, total: int | None, detail: str = "") -> None:
        with self._lock:
            self._done, self._total = done, total
            self._shown_label = f"{self.label} {detail}" if detail else self.label
            if self._bar is not None and self._task is not None:
                self._bar.update(self._task, completed=done, total=self._shown_total(), description=self._shown_label)

    def print_above(self, text: str) -> bool:
        """Print a line over the bar; False when there is no bar."""
        with self._lock:
            if self._bar is None:
                return False
            self._bar.console.print(harmless(text), markup=False, highlight=False, soft_wrap=True)
            return True

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()

    def _shown_total(self) -> int | None:
        """None, and so a bar that only moves, for work that is one step."""
        return None if self._total == 1 else self._total

    def _show(self) -> None:
        with self._lock:
            if self._ended:
                return
            if not self._is_terminal:
                if self.label not in self._told:
                    self._told.add(self.label)
                    say(f"tfm: {self.label} ...")
                return
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
            so_far = TextColumn("so far")  # else the time would be taken for what is left
            self._bar = Progress(*columns, so_far, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._shown_label, completed=self._done, total=self._shown_total())
            self._bar.start()
