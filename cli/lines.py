"""Lines of a file or of stdin as they come. They end at LF only, and nothing else is taken from them."""

import os
import select
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import click

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.output import Notes

BOM = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 16
LONGEST_BYTES = 1 << 26
SILENT_S = 2.0


@dataclass(frozen=True)
class Line:
    """A line without its LF, counted from 1. data is None for one of more than LONGEST_BYTES."""

    number: int
    data: bytes | None
    size_bytes: int


class Lines:
    """The lines of FILE, or of stdin for None and "-". Use it in `with`. Raises TfmError for what cannot be read.

    A byte order mark at the start is dropped. Memory is bounded: of a line that is too long, only its size is kept.
    """

    def __init__(self, file: str | None, notes: "Notes") -> None:
        self._name = "stdin" if file in (None, "-") else f"file {file}"
        self._notes = notes
        if (file is None and os.isatty(0)) or (file in (None, "-") and sys.stdin is None):
            raise click.UsageError("No text: give FILE, or lines on stdin.")
        self._descriptor = os.dup(0) if file in (None, "-") else self._open(file)
        status = os.fstat(self._descriptor)
        self.size_bytes = status.st_size if stat.S_ISREG(status.st_mode) else None
        self._has_read = False

    def _open(self, file: str) -> int:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            found = error.strerror if isinstance(error, OSError) else error
            raise TfmError(f"{self._name}: cannot be read", found, do="check its name and your rights") from error
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise TfmError(self._name, "a folder", "a file or a pipe")
        return descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def __iter__(self) -> Iterator[Line | None]:
        """The lines in order, and None where the next is not there yet. The last one may have no LF."""
        begun = _Begun()
        while True:
            if not self._is_ready(0):
                yield None
                self._wait()
            piece = self._read()
            if not piece:
                break
            self._has_read = True
            *ends, rest = piece.split(b"\n")
            for end in ends:
                begun.add(end)
                yield begun.line()
            begun.add(rest)
        if begun.size_bytes:
            yield begun.line()

    def _is_ready(self, seconds: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def _wait(self) -> None:
        """Until a piece or the end is there; says so when nothing has come yet."""
        if not self._has_read and not self._is_ready(SILENT_S):
            self._notes.note(f"waiting for lines on {self._name}")
        self._is_ready(None)

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, PIECE_BYTES)
        except BlockingIOError:  # a pipe that does not wait, and that another process has emptied
            self._is_ready(None)
            return self._read()
        except OSError as error:
            raise TfmError(f"{self._name}: cannot be read", error.strerror) from error


class _Begun:
    """The line that is not whole yet."""

    def __init__(self) -> None:
        self._number = 1
        self._parts: list[bytes] = []
        self.size_bytes = 0

    def add(self, data: bytes) -> None:
        self.size_bytes += len(data)
        if self.size_bytes > LONGEST_BYTES:
            self._parts = []
        else:
            self._parts.append(data)

    def line(self) -> Line:
        """The line as it is now; the next one begins."""
        data = None if self.size_bytes > LONGEST_BYTES else b"".join(self._parts)
        if data and self._number == 1:
            data = data.removeprefix(BOM)
        line = Line(self._number, data, self.size_bytes)
        self._number, self._parts, self.size_bytes = self._number + 1, [], 0
        return line
