"""Fields of a JSON file, read by name and checked: an error names the file, the field, what stood there, what may."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard, TypeVar

from tfm.engine.errors import TfmError
from tfm.engine.files import CHECK, read_text_bytes

T = TypeVar("T")

LARGEST_SIZE = 2**31 - 1
SHOWN_CHARACTERS = 60
NESTED = "lists or objects in each other without end"


def read_json(path: Path, do: str | None = None) -> dict[str, object]:
    """The object in a JSON file. Raises TfmError when the file is not there, not JSON, or not an object.

    do is the remedy for a file that is not one of a model.
    """
    mend = do or "download the file again or mend it"
    try:
        text = read_text_bytes(path, do or CHECK).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"a byte that is not UTF-8 at {error.start}"
        raise TfmError(f"file {path}: not JSON", found, do=mend) from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{reason(error)} in line {error.lineno}, column {error.colno}"
        raise TfmError(f"file {path}: not JSON", place, do=mend) from error
    except (ValueError, RecursionError) as error:
        raise TfmError(f"file {path}: not JSON that can be read", reason(error)) from error
    if not isinstance(found, dict):
        raise TfmError(f"file {path}", shown(found), "a JSON object", do)
    return found


def reason(error: ValueError | RecursionError) -> str:
    """Why a JSON text cannot be read: Python's words, but for those that end in mid-sentence or speak of Python."""
    if isinstance(error, RecursionError):
        return NESTED
    if isinstance(error, json.JSONDecodeError):
        return error.msg.removesuffix(" at")  # what follows is a place
    if "set_int_max_str_digits" in str(error):
        return f"a whole number of more than {sys.get_int_max_str_digits()} digits"
    return str(error)


def shortened(text: str, most: int) -> str:
    """text, without its middle when it is longer than that."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def shown(value: object) -> str:
    """A JSON value as it stands in the file, cut short when it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        text = f"{type(value).__name__} in {type(value).__name__} without end"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class Fields:
    """A JSON object. null counts as absent; a field without a default must be there.

    names says what the file calls a word that the reader asks for, where that differs; within is the name of the group.
    """

    def __init__(
        self, where: str, values: Mapping[str, object], names: Mapping[str, str] | None = None, within: str = ""
    ) -> None:
        self.where = where
        self._values = {word: value for word, value in values.items() if value is not None}
        self._names = names or {}
        self._within = within

    def __contains__(self, word: str) -> bool:
        return word in self._values

    def words(self) -> tuple[str, ...]:
        """All words that have a value."""
        return tuple(self._values)

    def value(self, word: str) -> object:
        """Whatever stands there; None when nothing does."""
        return self._values.get(word)

    def name(self, word: str) -> str:
        """What the file calls word; `outer.inner` inside a group."""
        return self._within + self._names.get(word, word)

    def fault(self, word: str, allowed: object, do: str | None = None) -> TfmError:
        """The error that says what stands at word and what may."""
        found = shown(self._values[word]) if word in self._values else "nothing"
        return TfmError(f"{self.where}: field {self.name(word)}", found, allowed, do)

    def integer(self, word: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE) -> int:
        """A whole number from least to most."""
        value = self._values.get(word, default)
        if not is_integer(value) or not least <= value <= most:
            raise self.fault(word, f"a whole number from {least} to {most}")
        return value

    def number(self, word: str, default: float | None = None, least: float = 0.0) -> float:
        """A finite number, not below least."""
        value = self._values.get(word, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= sys.float_info.max:
            return float(value)
        raise self.fault(word, f"a number from {least:g}")

    def flag(self, word: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._values.get(word, default)
        if not isinstance(value, bool):
            raise self.fault(word, "true, false")
        return value

    def choice(self, word: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """What choices says of the text that stands there."""
        value = self._values.get(word, default)
        if not isinstance(value, str) or value not in choices:
            raise self.fault(word, ", ".join(choices))
        return choices[value]

    def group(self, word: str) -> "Fields":
        """The object that stands there; without fields when nothing does."""
        value = self._values.get(word, {})
        if not isinstance(value, dict):
            raise self.fault(word, "a JSON object")
        return Fields(self.where, value, within=f"{self.name(word)}.")


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a JSON value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)
