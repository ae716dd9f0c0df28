"""A row of JSON lines as an object: what is refused in any of them, and what a wrong field's name may mean."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from tfm.engine.errors import TfmError
from tfm.engine.fields import reason, shown

SPACE = b" \t\r\n"  # what JSON calls white space


def read_object(data: bytes, example: str, do: str | None = None) -> dict[str, Any]:
    """A JSON object in UTF-8, without what JSON has not (NaN), and nothing in it twice. Raises TfmError for others.

    do is the remedy for lines that are not even the begin of an object, such as those of a text.
    """
    allowed = f"a JSON object, such as {example}"
    do = None if data.startswith(b"{") else do
    try:
        values = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise TfmError("row: not UTF-8", f"0x{data[error.start]:02x} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise TfmError("row: not JSON", f"{reason(error)} at character {error.pos + 1}", allowed, do) from None
    except (ValueError, RecursionError) as error:
        raise TfmError("row: not JSON that can be read", reason(error)) from None
    if not isinstance(values, dict):
        raise TfmError("row", shown(values), allowed, do)
    return values


def is_whole(data: bytes) -> bool:
    """Whether this is a JSON object, with faults perhaps, and so not the begin of one: that is never JSON."""
    try:
        return isinstance(json.loads(data.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise TfmError(f"row: field {ascii(twice)[1:-1]}", "it twice", "it once")
    return values


def _constant(name: str) -> None:
    raise TfmError("row: not JSON", name, "numbers that JSON has")


def meant(name: str, fields: Iterable[str], likeness: float = 0.6) -> str | None:
    """A question that proposes what a name may stand for; None where nothing is like it (1: the same)."""
    word = name.replace("-", "_").lower()
    known = list(fields)
    found = [word] if word in known else get_close_matches(word, known, cutoff=likeness)
    return f"did you mean {' or '.join(found)}?" if found else None
