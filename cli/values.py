"""Types of values that options take. What is wrong is told in the words that a TfmError has."""

import os
import re
from typing import Any

import click

LARGEST_SIZE = 2.0**63
SHOWN_CHARACTERS = 60
UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T"))}
UNITS |= {f"{unit}iB": factor for unit, factor in UNITS.items() if unit}
UNITS |= {f"{unit}B": 1000**power for power, unit in enumerate(("", "K", "M", "G", "T"))}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:iB|B)?)", re.IGNORECASE)


def wrong_value(
    param: click.Parameter | None, ctx: click.Context | None, found: str | int, allowed: str
) -> click.UsageError:
    """The error for a value of an option, in the words that a TfmError has."""
    name = max(param.opts, key=len) if param else "value"
    if isinstance(found, str):
        found = repr(found if len(found) <= SHOWN_CHARACTERS else f"{found[:SHOWN_CHARACTERS]}...")
    return click.UsageError(f"{name}: found {found}; allowed: {allowed}.", ctx)


class WholeType(click.ParamType):  # type: ignore[type-arg]
    """A whole number, none below `least`."""

    name = "n"

    def __init__(self, least: int | None = None) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        bound = "" if self.least is None else f" from {self.least}"
        try:
            number = int(value)
        except ValueError:
            raise wrong_value(param, ctx, value, f"a whole number{bound}") from None
        if self.least is not None and number < self.least:
            raise wrong_value(param, ctx, number, f"a whole number{bound}")
        return number


class NumberType(click.ParamType):  # type: ignore[type-arg]
    """Any number; what makes sense is known where it is used."""

    name = "x"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return float(value)
        except ValueError:
            raise wrong_value(param, ctx, value, "a number, such as 0.8") from None


class TextType(click.ParamType):  # type: ignore[type-arg]
    """Text from the command line: its bytes are UTF-8, whatever the locale says."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from tfm.cli.text import decode

        return decode(os.fsencode(value), param.human_readable_name.strip("[]") if param else "text")


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """Bytes: 512M and 1.5G are powers of 1024, as are MiB; MB are powers of 1000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = SIZE.fullmatch(value.strip())
        factors = {unit.upper(): factor for unit, factor in UNITS.items()}
        size = float(match[1]) * factors[match[2].upper()] if match else 0.0
        if not 1 <= size < LARGEST_SIZE:
            raise wrong_value(param, ctx, value, "a size above 0 that a memory may have, such as 512M or 1.5G")
        return int(size)


class BiasType(click.ParamType):  # type: ignore[type-arg]
    """ID=X: what is added to a token's logit."""

    name = "id=x"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        name, _, bias = value.partition("=")
        try:
            found = int(name), float(bias)
        except ValueError:
            found = -1, 0.0
        if found[0] < 0:
            raise wrong_value(param, ctx, value, "a token id and a number, such as 42=-5")
        return found


TEXT = TextType()
NUMBER = NumberType()
