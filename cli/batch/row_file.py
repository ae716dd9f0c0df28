"""OUT, the file of answers: appended to row by row, by one run at a time, and gone on with by the next.

A row is in the file, or it is not: one that is cut off (a killed process, a full disk) is taken out before the next is
written. Nothing else is ever taken out.
"""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tfm.cli import interrupt
from tfm.cli.batch.resume import Done, Expected, match, match_in_order
from tfm.cli.batch.row_order import Waiting, lock
from tfm.cli.batch.written import read_written
from tfm.cli.lines import Lines
from tfm.cli.output import Output, write_all
from tfm.engine.errors import TfmError

SAME_AGAIN = "make room, then run the same command again: it goes on from here"
OTHER_FILE = "write to another one"


class RowFile:
    """A regular file to write answers to; use it in `with`. Raises TfmError where another run has it.

    A file that was made for this run and got no row is taken away, if the run fails or is stopped.
    """

    whole = staticmethod(interrupt.held)  # around `append`: a stop waits until the row is written and counted

    def __init__(self, name: str) -> None:
        self.name = name
        self._path = Path(os.path.realpath(name))
        self._is_new = not self._path.exists()
        with ExitStack() as undo:
            self._descriptor = self._open()
            undo.callback(os.close, self._descriptor)
            self.status = os.fstat(self._descriptor)
            undo.callback(self._take_away)
            self._end = self.status.st_size
            self._count = 0 if self._end == 0 else None  # rows of the file, when `resume` knows
            self.waiting = Waiting(Path(f"{self._path}.waiting"))
            undo.pop_all()

    def _open(self) -> int:
        while True:
            try:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            except OSError as error:
                do = "check its folder and your rights there"
                raise TfmError(f"file {self.name}: cannot be written", error.strerror, do=do) from error
            try:
                lock(descriptor, self.name)
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    return descriptor
            except FileNotFoundError:
                pass
            except TfmError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # another run took it away between open and lock

    @property
    def has_rows(self) -> bool:
        return self._end > 0

    @property
    def kept(self) -> int | None:
        """Rows that the next run will find, also those that wait; None before `resume` has looked."""
        return None if self._count is None else self._count + len(self.waiting)

    def resume(self, expected: Callable[[], Iterator[Expected]], in_order: bool) -> Done:
        """What is there already. Raises TfmError, and changes nothing, where the file holds anything but answers of
        these rows; in_order they must be the first ones in order."""
        if not self._end:
            return Done()
        name = f"file {self.name}"
        with open(self._path, "rb") as file:
            done = (match_in_order if in_order else match)(name, read_written(name, file), expected)
        if done.cut is not None:
            self._end -= done.cut.size_bytes
            os.ftruncate(self._descriptor, self._end)
        self.waiting.forget(lambda line: line in done)
        self._count = done.count
        return done

    def append(self, row: str) -> None:
        """Write a row, whole. Raises TfmError where that fails; the file is then as it was."""
        self._check()
        data = memoryview(f"{row}\n".encode())
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as error:
            with suppress(OSError):
                if written and os.fstat(self._descriptor).st_size == self._end + written:
                    os.ftruncate(self._descriptor, self._end)
            raise TfmError(f"file {self.name}: cannot be written", error.strerror, do=SAME_AGAIN) from error
        self._end += written
        if self._count is not None:
            self._count += 1

    @property
    def _has_its_name(self) -> bool:
        with suppress(OSError):
            return os.path.samestat(self.status, os.stat(self._path))
        return False

    def _check(self) -> None:
        """Raises TfmError where the file was removed or renamed, so that nobody would find what is written to it, or
        where another program wrote to it or cut it; what that left is not touched."""
        if not self._has_its_name:
            found = "another file, or none: it was removed or renamed while answers were written to it"
            raise TfmError(f"file {self.name}", found, do="run the same command again")
        size = os.fstat(self._descriptor).st_size
        if size != self._end:
            found = f"{size} bytes, changed by another program while answers were written to it"
            do = "put right what it did, and run the same command again; or give another -o"
            raise TfmError(f"file {self.name}", found, f"the {self._end} that were written", do)

    def abandon(self) -> None:
        """Take away what was made for this run and holds no row. For another thread, before it ends the process."""
        self.waiting.abandon()
        self._take_away()

    def _take_away(self) -> None:
        """Remove the file, if this run made it and nothing is in it, nor ever was."""
        if self._is_new and not self._end and not os.fstat(self._descriptor).st_size and self._has_its_name:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_done = False
        try:
            if error is None:
                self._check()
                os.fsync(self._descriptor)
                is_done = True
            else:
                self._take_away()
        finally:
            self.waiting.close(is_needed=not is_done)
            os.close(self._descriptor)


class RowStream:
    """stdout, a pipe, a terminal: rows that are there cannot be gone on with. Use it in `with`."""

    whole = staticmethod(nullcontext)  # nobody may read: a stop must not wait for that

    def __init__(self, append: Callable[[str], None], descriptor: int | None = None) -> None:
        self.append = append
        self.waiting = Waiting(None)
        self._descriptor = descriptor

    def abandon(self) -> None:
        """Nothing was made."""

    @classmethod
    def open(cls, name: str) -> Self:
        """What is no regular file, by its name. Waits for the reader of a named pipe."""
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TfmError(f"file {name}: cannot be written", error.strerror) from error

        def append(row: str) -> None:
            try:
                write_all(descriptor, f"{row}\n".encode())
            except BrokenPipeError:
                raise
            except OSError as error:
                raise TfmError(f"file {name}: cannot be written", error.strerror) from error

        return cls(append, descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waiting.close(is_needed=False)
        if self._descriptor is not None:
            os.close(self._descriptor)


def open_rows(name: str | None, output: Output, source: Lines, stack: ExitStack) -> RowFile | RowStream:
    """Where answers go: the file or stream of this name, or stdout for None and "-"; entered into stack.

    A file is opened and entered in one step: a stop between the two would leave an empty one behind.
    """
    there = None
    if name not in (None, "-"):
        with suppress(OSError, ValueError):  # what is wrong is told where it is opened
            there = os.stat(name)
    same = there is not None and sys.stdout is not None and os.path.samestat(there, os.fstat(1))
    is_stdout = same or name in (None, "-")
    target = os.fstat(1) if is_stdout else there
    if target is not None and stat.S_ISREG(target.st_mode) and os.path.samestat(target, source.status):
        raise TfmError("stdout" if is_stdout else f"file {name}", "the file that rows are read from", do=OTHER_FILE)
    if name is None or is_stdout:
        return stack.enter_context(RowStream(output.write_line))
    if there is not None and not stat.S_ISREG(there.st_mode) and not stat.S_ISDIR(there.st_mode):
        return stack.enter_context(RowStream.open(name))
    beside = os.path.realpath(name) + ".waiting"
    if os.path.exists(beside) and os.path.samestat(os.stat(beside), source.status):
        raise TfmError(f"file {name}", "an OUT whose waiting rows would lie where rows are read from", do=OTHER_FILE)
    with interrupt.held():
        return stack.enter_context(RowFile(name))
