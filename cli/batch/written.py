"""Rows that tfm batch has written, told from everything else by how they begin."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from tfm.cli.output import encoded
from tfm.engine.errors import TfmError

BEGIN = re.compile(
    rb'\{"id": (?:null|-?[0-9][0-9.e+-]*|"(?:[^"\\]|\\.)*+"), "line": ([1-9][0-9]{0,17}), "key": "([0-9a-f]{16})", '
    rb'"(text|error)": "'
)
FIRST_BYTES = b'{"id": '
SHOWN_BYTES = 60
OTHER = "give another -o, or remove this file"
WITHOUT_CR = "take out each CR, with tr -d '\\r', or give another -o"


def row_text(id_: object, line: int, key: str, content: dict[str, Any]) -> str:
    """A row as it is written, without LF. content begins with text or error.

    A byte of a name that is no UTF-8, as the model's may have, is U+FFFD in it, wherever it goes to.
    """
    text = json.dumps({"id": id_, "line": line, "key": key, **content}, ensure_ascii=False)
    return encoded(text, "replace").decode()


def row_begin(id_: object, line: int, key: str) -> bytes:
    """What the bytes of this row begin with."""
    return f"{row_text(id_, line, key, {})[:-1]}, ".encode()


@dataclass(frozen=True)
class Written:
    """A row of a file: its place there, the line of the input that it answers, its key and, if it has one, its error.

    size_bytes is with its LF. The last row may be cut off, and have nothing but `begin`, its bytes.
    """

    place: int
    line: int
    key: str
    error: str | None
    size_bytes: int
    begin: bytes | None = None

    @property
    def is_whole(self) -> bool:
        return self.begin is None


def read_written(name: str, file: IO[bytes]) -> Iterator[Written]:
    """The rows of file from its beginning. Raises TfmError for a line that tfm batch has not written."""
    file.seek(0)
    for place, data in enumerate(_lines(file), 1):
        is_cut = not data.endswith(b"\n")
        if is_cut and (data.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(data)):
            yield Written(place, 0, "", None, len(data), data)
            return
        match = None if is_cut else BEGIN.match(data)
        if match and data.endswith(b"\r\n"):  # an editor's work; what is appended would end in another way
            raise TfmError(f"{name}: line {place}", "a CR before its LF", "rows as tfm batch wrote them", WITHOUT_CR)
        try:
            error = json.loads(data).get("error") if match else None
        except ValueError:
            match = None
        if match is None:
            raise TfmError(f"{name}: line {place}", shown_bytes(data), "rows that tfm batch wrote", OTHER)
        yield Written(place, int(match[1]), match[2].decode(), error, len(data))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """As a file gives them itself, but quickly also where it has no buffer."""
    rest: list[bytes] = []
    while piece := file.read(1 << 16):
        first, *more = piece.split(b"\n")
        rest.append(first)
        if more:
            yield b"".join(rest) + b"\n"
            yield from (line + b"\n" for line in more[:-1])
            rest = [more[-1]]
    if any(rest):
        yield b"".join(rest)


def shown_bytes(data: bytes) -> str:
    """The begin of a line for a message."""
    text = data.rstrip(b"\r\n").decode(errors="replace")
    return text if len(text) <= SHOWN_BYTES else f"{text[:SHOWN_BYTES]}..."
