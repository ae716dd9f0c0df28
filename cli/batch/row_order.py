"""Answers in the order of their rows: those that are finished before their turn wait in a file."""

import fcntl
import os
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from tfm.cli import interrupt
from tfm.cli.batch.written import read_written
from tfm.engine.errors import TfmError

SMALL_BYTES = 1 << 20  # so much that nobody needs may stand in the file of waiting rows


class Waiting:
    """Rows that wait for their turn, by line. Memory holds only where they stand in the file.

    With a path the file outlives a killed process: the next run takes over the rows that it finds there. An empty one
    is taken over as well, and is gone at the end: a process killed at its start leaves such a file, and nothing in it
    can be lost. Without a path the file has no name, and is made when the rows are too many for memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._places: dict[int, tuple[int, int]] = {}  # line -> where it begins, how many bytes
        self._kept: dict[int, tuple[str, str | None]] = {}  # line -> key and error, of rows that an earlier run left
        self._end = self._live_bytes = 0
        self._file = _open(path)
        try:
            if path is not None:
                self._take_over()
        except BaseException:
            if path is not None and not os.fstat(self._file.fileno()).st_size:  # made just now; else it is somebody's
                path.unlink(missing_ok=True)
            self._file.close()
            raise

    def _take_over(self) -> None:
        for row in read_written(self._name, self._file):
            if row.is_whole:
                self._places[row.line] = (self._end, row.size_bytes)
                self._kept[row.line] = row.key, row.error
                self._end += row.size_bytes
                self._live_bytes += row.size_bytes
        self._file.truncate(self._end)

    @property
    def _name(self) -> str:
        return f"file {self._path}" if self._path else "temporary file"

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, line: int) -> bool:
        return line in self._places

    def take_kept(self, line: int, key: str) -> tuple[bool, str | None]:
        """Whether an earlier run left the answer of this row, and the error in it. Another answer is forgotten."""
        found, error = self._kept.pop(line, ("", None))
        if found == key:
            return True, error
        if found:
            self.drop(line)
        return False, None

    def forget(self, is_there: Callable[[int], bool]) -> None:
        """Drop the rows of these lines: a process was killed after it had written them, before it dropped them."""
        for line in [line for line in self._places if is_there(line)]:
            del self._kept[line]
            self.drop(line)

    def put(self, line: int, row: str) -> None:
        """Raises TfmError where the file cannot be written; it is then as it was."""
        self._check()
        data = f"{row}\n".encode()
        with interrupt.held():  # what is in the file is known, or a stop counts a row less than the next run finds
            try:
                self._write(self._file, self._end, data)
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self._end)
                do = "make room on the disk"
                raise TfmError(f"{self._name}: cannot be written", error.strerror, do=do) from error
            self._places[line] = (self._end, len(data))
            self._end += len(data)
            self._live_bytes += len(data)

    def read(self, line: int) -> str:
        """The row of a line, without LF. Raises TfmError where another program changed the file."""
        self._check()
        place, size = self._places[line]
        self._file.seek(place)
        data = self._file.read(size)
        return data[:-1].decode()

    def _check(self) -> None:
        if self._path is None:
            return
        size = os.fstat(self._file.fileno()).st_size
        if size != self._end:
            found = f"{size} bytes, changed by another program while answers waited in it"
            do = "remove it, and run the same command again"
            raise TfmError(self._name, found, f"the {self._end} that were written", do)

    def drop(self, line: int) -> None:
        """Forget a row, which is somewhere else by now. What nobody needs is taken out of the file now and then."""
        _, size = self._places.pop(line)
        self._live_bytes -= size
        if not self._places:
            self._file.truncate(0)
            self._end = 0
        elif self._end - self._live_bytes > max(SMALL_BYTES, self._live_bytes):
            self._rewrite()

    def _rewrite(self) -> None:
        """A new file with the rows that still wait takes the place of the old one."""
        beside = self._path and Path(f"{self._path}.new")
        file = _open(beside)
        if beside is not None:
            deque(read_written(f"file {beside}", file), maxlen=0)  # one that a killed process left, and nothing else
        places, end = {}, 0
        try:
            file.truncate(0)
            for line in self._places:
                data = f"{self.read(line)}\n".encode()
                self._write(file, end, data)
                places[line] = end, len(data)
                end += len(data)
            if beside is not None and self._path is not None:
                os.replace(beside, self._path)
        except OSError as error:
            file.close()
            if beside is not None:
                beside.unlink(missing_ok=True)
            raise TfmError(f"{self._name}: cannot be written", error.strerror, do="make room on the disk") from error
        self._file.close()
        self._file, self._places, self._end = file, places, end

    def _write(self, file: IO[bytes], place: int, data: bytes) -> None:
        file.seek(place)
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        file.flush()

    def abandon(self, is_needed: bool = True) -> None:
        """Take the file away, unless rows wait in it that the next run will need."""
        if self._path is not None and not (is_needed and self._places):
            self._path.unlink(missing_ok=True)

    def close(self, is_needed: bool = True) -> None:
        """The same, and nothing can be done with it any more."""
        self.abandon(is_needed)
        with suppress(OSError):  # what had no room on the disk was told of, and would be tried again here
            self._file.close()


def _open(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.SpooledTemporaryFile(SMALL_BYTES)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        found = "a link" if path.is_symlink() else error.strerror
        raise TfmError(f"file {path}: cannot be written", found, do="take it away, or give another -o") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TfmError(f"file {path}", "no regular file", "one that tfm batch made", "take it away, or give another -o")
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        lock(descriptor, path)
    except TfmError:
        file.close()
        raise
    return file


def lock(descriptor: int, path: Any) -> None:
    """Have a file alone until it is closed or the process ends. Raises TfmError where another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        found, do = "another tfm batch that writes it", "wait for its end, or give another -o"
        raise TfmError(f"file {path}", found, do=do) from None
    except OSError as error:  # a file system that has no locks
        raise TfmError(f"file {path}: cannot be locked", error.strerror, do="give a file on another disk") from error


class Turns:
    """Hands rows to `write`, in the order in which they were begun; or, if that is not wanted, as they finish.

    Inside `whole` a row is written and known to be: interrupt.held for a file, nothing for a pipe, which may be full.
    """

    def __init__(
        self, write: Callable[[str], None], waiting: Waiting, in_order: bool,
        whole: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:  # fmt: skip
        self._write, self._waiting, self._in_order, self._whole = write, waiting, in_order, whole
        self._order: deque[int] = deque()
        self._lock = threading.RLock()  # `release` may be called by the thread that ends the process
        self._is_writing = False  # still, after Ctrl-C in the middle of a row: then nothing may follow it

    def begin(self, line: int) -> None:
        """A row is next in the order. It may be among those that wait already."""
        with self._lock:
            self._order.append(line)
            self._advance()

    def finish(self, line: int, row: str) -> None:
        """The answer of a row that was begun."""
        with self._lock:
            if self._in_order and self._order[0] != line:
                self._waiting.put(line, row)
                return
            self._hand(line, row)
            self._advance()

    def release(self) -> None:
        """Hand over all that waits, although rows before it are missing: nothing else will come."""
        with self._lock:
            for line in [line for line in self._order if line in self._waiting and not self._is_writing]:
                self._hand_over(line)

    def _advance(self) -> None:
        if not self._in_order:
            if self._order and self._order[-1] in self._waiting:
                self._hand_over(self._order[-1])
            return
        while self._order and self._order[0] in self._waiting:
            self._hand_over(self._order[0])

    def _hand_over(self, line: int) -> None:
        self._hand(line, self._waiting.read(line))

    def _hand(self, line: int, row: str) -> None:
        with self._whole():
            self._is_writing = True
            self._write(row)
            with interrupt.held():  # a row that is written waits no more, or `release` would write it again
                if line in self._waiting:
                    self._waiting.drop(line)
                self._order.remove(line)
                self._is_writing = False
