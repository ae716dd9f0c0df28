"""Rows as they come in: lines of a file or of stdin that end at LF only, in bounded memory."""

import os
import select
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.output import Notes

BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"  # what JSON calls white space
PIECE_BYTES = 1 << 16
LONGEST_ROW_BYTES = 1 << 28
SILENT_S = 2.0
NO_ROWS = "No rows: give FILE, or JSON lines on stdin."


class RowSource:
    """The rows of FILE, or of stdin for None and "-". Use it in `with`. Raises TfmError for what cannot be read."""

    def __init__(self, file: str | None, notes: "Notes") -> None:
        self.name = "stdin" if file in (None, "-") else f"file {file}"
        self._notes = notes
        if file is None or file == "-":
            if sys.stdin is None or os.isatty(0):
                raise click.UsageError(NO_ROWS)
            self._descriptor = os.dup(0)
        else:
            try:
                self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:  # ValueError: a NUL in the name
                found = error.strerror if isinstance(error, OSError) else error
                raise TfmError(f"{self.name}: cannot be read", found, do="check its name and your rights") from error
        self.status = os.fstat(self._descriptor)
        if stat.S_ISDIR(self.status.st_mode):
            os.close(self._descriptor)
            raise TfmError(self.name, "a folder", "a file or a pipe")
        self._is_file = stat.S_ISREG(self.status.st_mode)
        self._start = os.lseek(self._descriptor, 0, os.SEEK_CUR) if self._is_file else 0
        self._clear()

    def _clear(self) -> None:
        self._line = 0  # number of the line that `next` gave last
        self._lines: deque[bytes] = deque()  # whole ones that have been read
        self._pieces: list[bytes] = []  # of the line that is not whole
        self._is_at_end = False
        self._is_unread = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(line, its bytes without white space around them), in order. Lines without anything else are passed over."""
        return self

    def __next__(self) -> tuple[int, bytes]:
        while True:
            while not self._lines:
                if self._is_at_end:
                    raise StopIteration
                self._read()
            self._line += 1
            row = self._lines.popleft()
            row = (row.removeprefix(BOM) if self._line == 1 else row).strip(SPACE)
            if row:
                return self._line, row

    @property
    def line(self) -> int:
        """The number of the line that was given last, from 1."""
        return self._line

    def comes_within(self, seconds: float) -> bool:
        """Whether `next` would not wait longer than about so long; False while a pipe is open and silent."""
        while not self._lines and not self._is_at_end:
            if not self._is_file and not select.select([self._descriptor], [], [], seconds)[0]:
                return False
            self._read()
        return True

    def make_repeatable(self) -> None:
        """From now on `rewind` works; what a pipe has is read to its end, into a file that goes with the process."""
        if self._is_file:
            return
        assert not self._line
        with tempfile.TemporaryFile() as copy:
            while piece := self._piece():
                copy.write(piece)
            copy.flush()
            os.dup2(copy.fileno(), self._descriptor, inheritable=False)
        self._is_file = True
        self.rewind()

    def rewind(self) -> None:
        """Begin again with the first row; of a file, or after `make_repeatable`."""
        os.lseek(self._descriptor, self._start, os.SEEK_SET)
        self._clear()

    def count_lines(self) -> int | None:
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
            rest = b"".join(self._pieces)
            self._lines.extend([rest] if rest else [])
            return
        first, *more = piece.split(b"\n")
        self._pieces.append(first)
        if len(self._pieces) * PIECE_BYTES > LONGEST_ROW_BYTES and sum(map(len, self._pieces)) > LONGEST_ROW_BYTES:
            where = f"{self.name}: line {self._line + len(self._lines) + 1}"
            raise TfmError(where, f"more than {LONGEST_ROW_BYTES} bytes", "a row of JSON in each line")
        if more:
            self._lines.append(b"".join(self._pieces))
            self._lines.extend(more[:-1])
            self._pieces = [more[-1]]

    def _piece(self) -> bytes:
        """What is there, at least a byte; nothing at the end."""
        is_first, self._is_unread = self._is_unread, False
        if is_first and not self._is_file and not select.select([self._descriptor], [], [], SILENT_S)[0]:
            self._notes.note(f"waiting for rows on {self.name}")
        try:
            while True:
                try:
                    return os.read(self._descriptor, PIECE_BYTES)
                except BlockingIOError:  # stdin may be an inherited pipe that does not wait
                    select.select([self._descriptor], [], [])
        except OSError as error:
            raise TfmError(f"{self.name}: cannot be read", error.strerror) from error
