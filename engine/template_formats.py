"""The operations of chat templates that follow a pattern, bounded by construction: %, str.format, tojson, strftime."""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedFormatter

from tfm.engine.template_budget import Budget

if TYPE_CHECKING:
    from tfm.engine.template import Environment

WIDEST = 999
NUMBER_CHARACTERS = 350  # the longest float as %f
ESCAPED = {"r": 10, "a": 10}  # conversions that may write \U0010ffff for a character
JSON_ESCAPED = 6  # \u001f
LONGEST_INDENT, LONGEST_SEPARATOR, LONGEST_TIME = 100, 10, 1000
PARENTHESIS = re.compile(r"[()]")
DIRECTIVE = re.compile(r"[-+ #0]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?")  # matched once at a place: linear
WIDE = re.compile(r"\d{4}")
WIDE_TIME = re.compile(r"%[-_0^#+]*\d")


def percent(budget: Budget, pattern: str, values: object) -> str:
    """pattern % values."""
    weight = budget.weigh(values) + NUMBER_CHARACTERS
    length = len(pattern)
    for widths, conversion in _directives(pattern):
        if any(width == "*" or len(width) > len(str(WIDEST)) for width in widths):
            raise SecurityError(f"a format with a width beyond {WIDEST} or by *")
        length += sum(int(width) for width in widths if width) + ESCAPED.get(conversion, 1) * weight
    budget.afford(length)
    return str.__mod__(pattern, values)


def _directives(pattern: str) -> Iterator[tuple[list[str], str]]:
    """Width and precision, and the conversion, of each directive; read as Python reads them, in one pass."""
    at = pattern.find("%") + 1
    while at:
        if pattern[at : at + 1] == "(":
            depth = 0
            for match in PARENTHESIS.finditer(pattern, at):
                depth += 1 if match[0] == "(" else -1
                if depth == 0:
                    at = match.end()
                    break
            else:
                return  # Python says that the key has no end
        directive = DIRECTIVE.match(pattern, at)
        assert directive is not None
        at = directive.end()
        yield [width or "" for width in directive.groups()], pattern[at : at + 1]
        at = pattern.find("%", at + 1) + 1


class Formatter(SandboxedFormatter):
    """str.format without Python's internals, each field looked at when its format is known."""

    def __init__(self, environment: "Environment") -> None:
        super().__init__(environment)
        self._budget = environment.budget

    def format_field(self, value: Any, format_spec: str) -> str:
        if WIDE.search(format_spec):
            raise SecurityError(f"a format with a width beyond {WIDEST}")
        self._budget.weigh(value)
        text: str = super().format_field(value, format_spec)
        self._budget.spend(len(text))
        return text


def to_json(
    budget: Budget, value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON as transformers writes it in templates: letters as they are, nothing escaped for HTML."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > LONGEST_INDENT:
        raise SecurityError(f"an indent beyond {LONGEST_INDENT}")
    if separators is not None and max(map(len, separators)) > LONGEST_SEPARATOR:
        raise SecurityError(f"a separator of more than {LONGEST_SEPARATOR} characters")
    budget.afford(JSON_ESCAPED * budget.weigh(value))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    pieces, length = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        length += len(piece)
        budget.afford(length)
    return "".join(pieces)


def strftime_now(format: str) -> str:
    if len(format) > LONGEST_TIME or WIDE_TIME.search(format):
        raise SecurityError(f"a time format with a width or of more than {LONGEST_TIME} characters")
    return datetime.now().strftime(format)
