"""A JSON schema's own faults: what means nothing, and what llguidance would not keep to and not tell of.

By the standard, a keyword that is not known is ignored, also one that is only misspelt: a mistake that nobody would see
in the answer. What the standard has and llguidance does not is refused by llguidance itself.
"""

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import unquote

from tfm.engine.fields import is_integer, shortened, shown

WITH_A_SCHEMA = {
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
WITH_SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
WITH_NAMED_SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
TEXTS = {"$ref", "format", "pattern"}
LISTS = {"allOf", "anyOf", "enum", "oneOf", "prefixItems"}
COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
BOUNDS = {"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"}
NUMBERS = {*BOUNDS, "multipleOf"}
OTHERS = {
    "$anchor", "$comment", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveAnchor", "$recursiveRef", "$ref",
    "$schema", "$vocabulary", "const", "contentEncoding", "contentMediaType", "default", "dependencies",
    "dependentRequired", "deprecated", "description", "enum", "example", "examples", "format", "id", "maxContains",
    "minContains", "pattern", "readOnly", "required", "title", "type", "uniqueItems", "writeOnly",
    "discriminator",  # of OpenAPI, for readers of the schema: it is beside an anyOf or oneOf and changes nothing
}  # fmt: skip
KEYWORDS = WITH_A_SCHEMA | WITH_SCHEMAS | WITH_NAMED_SCHEMAS | COUNTS | NUMBERS | OTHERS

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
MOST = 2**53 - 1
MOST_DIGITS, MOST_PLACES = 15, 22
EXACT = f"-{MOST} to {MOST}, with {MOST_DIGITS} digits and {MOST_PLACES} places at most: others would be changed"
MEETING = {"$ref", "allOf", "anyOf", "oneOf"}
MOST_PRODUCT = 2**32 - 1
SHOWN_PLACE = 80
SPACE = r"[ \t\n\r]*"
WHITE = r"(?: |\\[tnr]|[\t\n\r])"
LAYOUT = {  # the options of x-guidance whose value is a text, with what leaves the answer JSON
    "item_separator": re.compile(f"{SPACE},{SPACE}"),
    "key_separator": re.compile(f"{SPACE}:{SPACE}"),
    "whitespace_pattern": re.compile(rf"(?:(?:{WHITE}|\[{WHITE}+\])(?:[*+?]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})?)*"),
}
LAYOUT_ALLOWED = {
    "item_separator": "a comma and white space",
    "key_separator": "a colon and white space",
    "whitespace_pattern": r"a regex of white space alone, such as [ \n]{0,8}",
}
SWITCHES = ("whitespace_flexible", "coerce_one_of")


class Fault(NamedTuple):
    """What is wrong, where, and what may be there."""

    found: str
    allowed: str | None = None


def check_schema(schema: object) -> Fault | None:
    """The first fault; None when there is none. What stands in x-... may be anything, unless a $ref leads there."""
    waiting: list[tuple[str, object]] = [("#", schema)]
    seen: set[int] = set()
    multiples: set[Decimal] = set()
    do_meet = False  # whether one number may have to be a multiple of two
    while waiting:
        place, found = waiting.pop()
        if not isinstance(found, dict) or id(found) in seen:
            continue
        seen.add(id(found))
        for word, value in found.items():
            at = f"{place}/{word}"
            if (fault := _fault(found, word, value, at, found is schema)) is not None:
                return fault
            waiting += _schemas_in(at, word, value)
            if word == "$ref" and value.startswith("#/"):
                waiting.append((value, _target(schema, value)))
        if "multipleOf" in found:
            multiples.add(Decimal(repr(found["multipleOf"])))
        do_meet = do_meet or not MEETING.isdisjoint(found)
    if do_meet and _product(multiples) > MOST_PRODUCT:
        return Fault("values of multipleOf that are too large for a number that must be a multiple of several of them")
    return None


def _fault(schema: dict[str, Any], word: str, value: object, at: str, is_top: bool) -> Fault | None:
    """What is wrong with one word of a schema."""
    place = _short(at)
    if word == "x-guidance":
        return _layout_fault(value) if is_top else Fault(f"{place}, which has no effect there", "it at the top alone")
    if word.startswith("x-"):
        return None
    if word not in KEYWORDS:
        return Fault(f"the keyword {_short(word)!r}{_in(at, word)}, which JSON Schema does not have")
    if word == "type" and (wrong := _unknown_type(value)) is not None:
        return Fault(f"the type {_short(wrong)!r}{_in(at, word)}, which is none of {', '.join(TYPES)}")
    if word in ("exclusiveMaximum", "exclusiveMinimum") and isinstance(value, bool):  # of draft 4
        bound = "maximum" if word == "exclusiveMaximum" else "minimum"
        return Fault(f"{place}: true without {bound}", "a number") if value and bound not in schema else None
    allowed = _allowed(word, value)
    if allowed is not None:
        return Fault(f"{place}: {shown(value)}", allowed)
    number = next((number for number in _numbers(word, value) if not _is_exact(number)), None)
    if number is not None:
        return Fault(f"{place}: {shown(number)}", EXACT)
    if word == "multipleOf" and isinstance(value, int | float) and value <= 0:
        return Fault(f"{place}: {shown(value)}", "a number above 0")
    if word == "minProperties" and isinstance(value, int):
        return _count_fault(schema, value, place)
    if word == "additionalItems" and not isinstance(schema.get("items"), list):
        return Fault(f"{place} without a list as items", "items for those after prefixItems")
    if word == "prefixItems" and isinstance(schema.get("items"), list):
        return Fault(f"{place} beside a list as items", "one of the two")
    return None


def _allowed(word: str, value: object) -> str | None:
    """What may be there instead of a value of another type: llguidance ignores some of them."""
    if word in NUMBERS and not (is_integer(value) or isinstance(value, float)):
        return "a number"
    if word in COUNTS and not (is_integer(value) and 0 <= value <= MOST):
        return f"a whole number from 0 to {MOST}"
    if word in TEXTS and not isinstance(value, str):
        return "a text"
    if word in LISTS and not isinstance(value, list):
        return "a list"
    if word == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return "a list of names"
    if word in WITH_NAMED_SCHEMAS and not isinstance(value, dict):
        return "an object of schemas"
    is_list_of_items = word == "items" and isinstance(value, list)
    if word in WITH_A_SCHEMA and not isinstance(value, dict | bool) and not is_list_of_items:
        return "a JSON schema"
    return None


def _count_fault(schema: dict[str, Any], least: int, place: str) -> Fault | None:
    """Names that the schema leaves open may come twice, and llguidance counts them twice: they count as one here."""
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    required = schema.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    sure = max(1, len(names))
    if is_closed or least <= sure:
        return None
    found = f"{place}: {least}, where names that are left open may come twice"
    return Fault(found, f"at most {sure}, by what is required")


def _layout_fault(layout: object) -> Fault | None:
    if not isinstance(layout, dict):
        return Fault(f"x-guidance: {shown(layout)}", "an object")
    if layout.get("lenient"):
        return Fault("x-guidance.lenient, which would ignore what is not supported")
    for name, value in layout.items():
        if name in LAYOUT:
            is_right = isinstance(value, str) and LAYOUT[name].fullmatch(value) is not None
        elif name in (*SWITCHES, "lenient"):
            is_right = isinstance(value, bool)
        else:
            return Fault(f"x-guidance.{_short(name)}", ", ".join((*LAYOUT, *SWITCHES)))
        if not is_right:
            return Fault(f"x-guidance.{name}: {shown(value)}", LAYOUT_ALLOWED.get(name, "true, false"))
    return None


def _numbers(word: str, value: object) -> Iterator[int | float]:
    """All numbers that an answer is held against."""
    if word not in NUMBERS and word not in ("const", "enum"):
        return
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
        elif is_integer(found) or isinstance(found, float):
            yield found


def _is_exact(number: int | float) -> bool:
    """Whether llguidance takes it for what it is.

    It reads all numbers as float64, by one division or multiplication with a power of ten, and some then as int64.
    """
    if not -MOST <= number <= MOST:  # infinities too
        return False
    if isinstance(number, int):
        return True
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    assert isinstance(exponent, int)
    return len("".join(map(str, digits)).strip("0")) <= MOST_DIGITS and -exponent <= MOST_PLACES


def _product(multiples: set[Decimal]) -> int:
    """Of all, as whole numbers of their last place: llguidance has 32 bits for the least common multiple."""
    places = max((-int(number.as_tuple().exponent) for number in multiples), default=0)
    return math.prod(int(number.scaleb(max(places, 0))) for number in multiples)


def _schemas_in(at: str, word: str, value: object) -> list[tuple[str, object]]:
    if word in WITH_SCHEMAS and isinstance(value, list):
        return [(f"{at}/{i}", schema) for i, schema in enumerate(value)]
    if word in WITH_NAMED_SCHEMAS and isinstance(value, dict):
        return [(f"{at}/{name}", schema) for name, schema in value.items()]
    return [(at, value)] if word in WITH_A_SCHEMA else []


def _target(schema: object, pointer: str) -> object:
    """What stands at a JSON pointer (RFC 6901) with # before it; None where nothing does."""
    for part in unquote(pointer[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(name)
        elif isinstance(schema, list) and name.isascii() and name.isdecimal() and len(name) < MOST_DIGITS:
            schema = schema[int(name)] if int(name) < len(schema) else None
        else:
            return None
    return schema


def _in(at: str, word: str) -> str:
    """Where the schema is that has this word; nothing for the whole."""
    place = at.removesuffix(f"/{word}")
    return "" if place == "#" else f" in {_short(place)}"


def _unknown_type(value: object) -> str | None:
    """The first name that is no type; what is no name at all is told by llguidance."""
    names = value if isinstance(value, list) else [value]
    return next((name for name in names if isinstance(name, str) and name not in TYPES), None)


def _short(text: str) -> str:
    return shortened(text, SHOWN_PLACE)
