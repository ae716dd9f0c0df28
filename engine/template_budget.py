"""How long a chat template may run, and how much it may make.

Characters are counted beforehand where an operation makes much out of little.
"""

import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView

from jinja2.exceptions import SecurityError

ITEM_CHARACTERS = 8  # what an item of a list counts beside its content
PIECE_CHARACTERS = 20  # and what a piece counts that is cut out of a text: Python's smallest text takes 50 bytes
FLOAT_CHARACTERS = 24
COMPARISONS = 1 << 30  # in one operation whose steps are the product of two lengths: a second at worst
LARGEST_BITS = 4096


class Budget:
    """How many characters may still be made, and until when."""

    def __init__(self, characters: int, seconds: float) -> None:
        self._left, self._seconds = characters, seconds
        self._begun = time.thread_time()
        self.end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the processor's time is used up: on a busy machine that lasts longer than by the clock.

        The clock, which is cheaper, is looked at first.
        """
        now = time.monotonic()
        if now > self.end:
            self.end = now + self._seconds - (time.thread_time() - self._begun)
        return now > self.end

    def look_at_clock(self) -> None:
        if self.is_over:
            raise SecurityError(f"still running after {self._seconds:g} s")

    def afford(self, characters: float) -> None:
        self.look_at_clock()
        if characters > self._left:
            raise SecurityError("it makes more text than a conversation needs")

    def spend(self, characters: int) -> None:
        self.afford(characters)
        self._left -= characters

    def made(self, value: object) -> None:
        """Count a value that an operation has made: what it takes itself, while its items may be shared.

        Its whole content must be affordable, so that no later operation on it takes long.
        """
        if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
            raise SecurityError("a number too large")
        self.weigh(value)
        self.spend(own_size(value))

    def weigh(self, value: object) -> int:
        weight = weigh(value, self._left)
        self.afford(weight)
        return weight

    def cut(self, text: str, pieces: int) -> None:
        self.afford(len(text) + PIECE_CHARACTERS * pieces)

    def compare(self, text: str, other: str) -> None:
        if len(text) * len(other) > COMPARISONS:
            raise SecurityError(f"it looks for {len(other)} characters in {len(text)}, which would take too long")


def weigh(value: object, most: int) -> int:
    """The characters in a value, those of items many times over counted as often; stops soon after most."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    items: Iterable[object]
    if isinstance(value, Mapping):
        items = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | set | frozenset | KeysView | ItemsView | ValuesView):
        items = value
    else:
        return FLOAT_CHARACTERS if isinstance(value, float) else 1
    weight = 0
    for item in items:
        weight += ITEM_CHARACTERS + weigh(item, most - weight)
        if weight > most:
            break
    return weight


def own_size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM_CHARACTERS * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 1
