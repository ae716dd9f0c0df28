"""Lines of a file or of stdin as they come. They end at LF only, and nothing else is taken from them."""

import os
import select
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import click

from tfm.cli.output import write_all
from tfm.cli.text import SILENT_S, patience
from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.output import Notes

BOM = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 16
LONGEST_BYTES = 1 << 26


@dataclass(frozen=True)
class Line:
    """A line without its LF, counted from 1. data is None for one that is too long.

    is_ended: there was an LF. The last line may have none; its writer may be in the middle of it.
    """

    number: int
    data: bytes | None
    size_bytes: int
    is_ended: bool = True


class Lines:
    """The lines of FILE, or of stdin for None and "-". Use it in `with`. Raises TfmError for what cannot be read.

    A byte order mark at the start is dropped. Memory is bounded: of a line of more than longest_bytes, only its size is
    kept; or with must_fit, it is an error as soon as it is too long, also if it never ends. noun is what messages call
    the lines.
    """

    def __init__(
        self, file: str | None, notes: "Notes", noun: str = "lines", longest_bytes: int = LONGEST_BYTES,
        must_fit: bool = False,
    ) -> None:  # fmt: skip
        self.name = "stdin" if file in (None, "-") else f"file {file}"
        self._notes, self._noun, self._longest_bytes, self._must_fit = notes, noun, longest_bytes, must_fit
        self._is_told = False  # that it is waited for
        if (file is None and os.isatty(0)) or (file in (None, "-") and sys.stdin is None):
            raise click.UsageError(f"No {noun}: give FILE, or {noun} on stdin.")
        self._descriptor = os.dup(0) if file is None or file == "-" else self._open(file)
        self.status = os.fstat(self._descriptor)
        self._is_file = stat.S_ISREG(self.status.st_mode)
        self.size_bytes = self.status.st_size if self._is_file else None
        self._start = os.lseek(self._descriptor, 0, os.SEEK_CUR) if self._is_file else 0
        self._clear()

    def _open(self, file: str) -> int:
        try:
            with patience(self._tell):  # a named pipe into which nobody writes
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            found = error.strerror if isinstance(error, OSError) else error
            raise TfmError(f"{self.name}: cannot be read", found, do="check its name and your rights") from error
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise TfmError(self.name, "a folder", "a file or a pipe")
        return descriptor

    def _clear(self) -> None:
        self.number = 0  # of the line that `next` gave last
        self.is_ended = True  # that line
        self._whole: deque[Line] = deque()  # lines that have been read
        self._begun = _Begun(self._longest_bytes)
        self._is_at_end = False
        self._is_unread = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def __iter__(self) -> Iterator[Line]:
        return self

    def __next__(self) -> Line:
        """The next line, which is waited for. The last one may have no LF."""
        while not self._whole:
            if self._is_at_end:
                raise StopIteration
            self._read()
        line = self._whole.popleft()
        self.number, self.is_ended = line.number, line.is_ended
        return line

    def comes_within(self, seconds: float) -> bool:
        """Whether `next` would not wait longer than about so long; False while a pipe is open and silent."""
        while not self._whole and not self._is_at_end:
            if not self._is_file and not self._is_ready(seconds):
                return False
            self._read()
        return True

    def make_repeatable(self) -> None:
        """From now on `rewind` works; what a pipe has is read to its end, into a file that goes with the process."""
        if self._is_file:
            return
        assert not self.number
        try:
            with tempfile.TemporaryFile(buffering=0) as copy:
                while piece := self._piece():
                    write_all(copy.fileno(), piece)
                os.dup2(copy.fileno(), self._descriptor, inheritable=False)
        except OSError as error:
            where = f"folder {tempfile.tempdir or 'of temporary files'}: a copy of {self.name} cannot be written"
            raise TfmError(where, error.strerror, do="make room there, or name another in $TMPDIR") from error
        self._is_file = True
        self.rewind()

    def rewind(self) -> None:
        """Begin again with the first line; of a file, or after `make_repeatable`."""
        os.lseek(self._descriptor, self._start, os.SEEK_SET)
        self._clear()

    def count(self) -> int | None:
        """How many lines there are, blank ones too; None for what can be read only once."""
        if not self._is_file:
            return None
        count, last, place = 0, b"\n", self._start
        while piece := os.pread(self._descriptor, 1 << 20, place):
            count, last, place = count + piece.count(b"\n"), piece[-1:], place + len(piece)
        return count + (last != b"\n")

    def _read(self) -> None:
        """One piece more. At the end, what stands behind the last LF is a line too."""
        piece = self._piece()
        if not piece:
            self._is_at_end = True
            self._whole.extend([self._begun.line(is_ended=False)] if self._begun.size_bytes else [])
            return
        *ends, rest = piece.split(b"\n")
        for end in ends:
            self._add(end)
            self._whole.append(self._begun.line())
        self._add(rest)

    def _add(self, data: bytes) -> None:
        self._begun.add(data)
        if self._must_fit and self._begun.size_bytes > self._longest_bytes:
            found, allowed = f"more than {self._longest_bytes} bytes", f"at most {self._longest_bytes}"
            raise TfmError(f"{self.name}: line {self._begun.number}", found, allowed)

    def _piece(self) -> bytes:
        """What is there, at least a byte; nothing at the end."""
        is_first, self._is_unread = self._is_unread, False
        if is_first and not self._is_file and not self._is_ready(SILENT_S):
            self._tell()
        try:
            while True:
                try:
                    return os.read(self._descriptor, PIECE_BYTES)
                except BlockingIOError:  # stdin may be an inherited pipe that does not wait
                    self._is_ready(None)
        except OSError as error:
            raise TfmError(f"{self.name}: cannot be read", error.strerror) from error

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._notes.note(f"waiting for {self._noun} on {self.name}")

    def _is_ready(self, seconds: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], seconds)[0])


class _Begun:
    """The line that is not whole yet."""

    def __init__(self, longest_bytes: int) -> None:
        self._longest_bytes = longest_bytes
        self.number = 1
        self._parts: list[bytes] = []
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self.size_bytes += len(data)
        if self.size_bytes > self._longest_bytes:
            self._parts = []
        else:
            self._parts.append(data)

    def line(self, is_ended: bool = True) -> Line:
        """The line as it is now; the next one begins."""
        data = None if self.size_bytes > self._longest_bytes else b"".join(self._parts)
        if data and self.number == 1:
            data = data.removeprefix(BOM)
        line = Line(self.number, data, self.size_bytes, is_ended)
        self.number, self._parts, self.size_bytes = self.number + 1, [], 0
        return line
