"""Prompt-lookup speculation: tokens of the text itself, proposed as the next ones.

Texts repeat themselves: a name, a quotation, a line of code. Where the last tokens stood before, what followed them
then is proposed, and one forward pass tells the logits after each proposed token. A proposal is kept as far as it is
what would have been chosen anyway, so the text is the same, in fewer passes (Saxena 2023, "Prompt lookup decoding").
"""

from collections.abc import Iterable

LENGTHS = (3, 2)  # of the n-grams that are looked up, the longest first; a single token proposes too much that is wrong
FIRST = 2


class PromptLookup:
    """The n-grams of a text and where they ended last, so that a step costs the same however long the text is.

    most is how many tokens are proposed at once: two at first, twice as many after a proposal that came true as a
    whole, half as many after one of which nothing did.
    """

    def __init__(self, ids: Iterable[int], most: int) -> None:
        self._most, self._size = most, min(FIRST, most)
        self._proposed: list[int] = []
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        for id_ in ids:
            self._add(id_)

    def push(self, ids: Iterable[int]) -> None:
        """The text's next tokens, which tell what became of the last proposal."""
        new = list(ids)
        if self._proposed:
            if new[: len(self._proposed)] == self._proposed:
                self._size = min(2 * self._size, self._most)
            elif new[:1] != self._proposed[:1]:
                self._size = max(1, self._size // 2)
            self._proposed = []
        for id_ in new:
            self._add(id_)

    def _add(self, id_: int) -> None:
        end = len(self._ids)  # the n-grams that ended here have a token behind them from now on
        for length in LENGTHS:
            if end >= length:
                self._ends[tuple(self._ids[end - length :])] = end
        self._ids.append(id_)

    def propose(self, room: int) -> list[int]:
        """What stood behind the last tokens when they stood there before: at most `room` tokens."""
        ends = (self._ends.get(tuple(self._ids[-length:])) for length in LENGTHS)
        end = next((end for end in ends if end is not None), None)
        if end is not None and room > 0:
            self._proposed = self._ids[end : end + min(room, self._size)]
        return self._proposed
