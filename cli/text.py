"""Text from the argument, files and stdin, byte for byte."""

import os
import re
import select
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    from tfm.cli.output import Notes

BOM = "\ufeff"
BLANK_LINE = "\n\n"
PIECE_BYTES = 1 << 16
SILENT_S = 2.0
MOST_DIGITS = 18  # all fit into 64 bits
SHOWN_CHARACTERS = 60
ID_SEPARATORS = re.compile(r"[\s,\[\]]+")


def gather(text: str | None, files: Sequence[str], with_stdin: bool, notes: "Notes") -> str | None:
    """text, then the files, then stdin if it is no terminal; with a blank line between those that are not empty.

    None when nothing was given: no text, no file, and nothing on stdin.
    """
    parts = [] if text is None else [text]
    parts += [decode(_read_file(file, notes), f"file {file}").removeprefix(BOM) for file in files]
    piped = decode(_read_stdin(notes), "stdin").removeprefix(BOM) if with_stdin else ""
    parts += [piped] if piped else []
    return BLANK_LINE.join(filter(None, parts)) if parts else None


def decode(data: bytes, source: str) -> str:
    """data as UTF-8. Raises TfmError that tells the offset of the first byte that is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"0x{data[error.start]:02x} at byte {error.start}"
        raise TfmError(f"{source}: not UTF-8", found, do="convert it, for example with iconv -t UTF-8") from None


@contextmanager
def patience(tell: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """tell is called when the work inside waits for SILENT_S; unless that which this yields is called before."""
    timer = threading.Timer(SILENT_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def read_file(file: str, notes: "Notes", most: int | None = None) -> bytes:
    """All of a file or pipe, or a byte more than most. Says so when it is waited for. Raises OSError, ValueError."""
    pieces: list[bytes] = []
    size = 0
    with patience(lambda: notes.note(f"waiting for text on file {file}")) as is_there, open(file, "rb", 0) as stream:
        while (most is None or size <= most) and (piece := stream.read(PIECE_BYTES)):
            is_there()
            pieces.append(piece)
            size += len(piece)
    return b"".join(pieces)


def _read_file(file: str, notes: "Notes") -> bytes:
    try:
        return read_file(file, notes)
    except IsADirectoryError as error:
        raise TfmError(f"file {file}", "a folder", "a file or a pipe", "give -f for each file in it") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        found = error.strerror if isinstance(error, OSError) else error
        raise TfmError(f"file {file}: cannot be read", found, do="check its name and your rights") from error


def _read_stdin(notes: "Notes") -> bytes:
    """All of stdin; nothing when it is closed or a terminal. Says so when it is waited for."""
    if sys.stdin is None or os.isatty(0):
        return b""
    pieces: list[bytes] = []
    try:
        with patience(lambda: notes.note("waiting for text on stdin (--no-stdin leaves it alone)")) as is_there:
            while piece := _read_piece():
                is_there()
                pieces.append(piece)
    except OSError as error:
        raise TfmError("stdin: cannot be read", error.strerror) from error
    return b"".join(pieces)


def _read_piece() -> bytes:
    """What is there, at least a byte; nothing at the end."""
    while True:
        try:
            return os.read(0, PIECE_BYTES)
        except BlockingIOError:  # stdin may be an inherited pipe that does not wait
            select.select([0], [], [])


def parse_ids(text: str) -> list[int]:
    """Token ids, with spaces, commas or line breaks between; a JSON list is as good."""
    words = ID_SEPARATORS.split(text)
    wrong = next((word for word in words if word and not (word.isdecimal() and len(word) <= MOST_DIGITS)), None)
    if wrong is not None:
        found = repr(wrong if len(wrong) <= SHOWN_CHARACTERS else f"{wrong[:SHOWN_CHARACTERS]}...")
        allowed = f"whole numbers of at most {MOST_DIGITS} digits, with spaces or commas between"
        raise TfmError("token ids", found, allowed)
    return [int(word) for word in words if word]
