"""Prompt-lookup speculation: tokens of the text itself, proposed as the next ones.

Texts repeat themselves: a name, a quotation, a line of code. Where the last tokens stood before, what followed them
then is proposed, and one forward pass tells the logits after each proposed token. A proposal is kept as far as it is
what would have been chosen anyway, so the text is the same, in fewer passes (Saxena 2023, "Prompt lookup decoding").
"""

from collections.abc import Iterable

LENGTHS = (3, 2)  # of the n-grams that are looked up, the longest first; a single token proposes too much that is wrong


class PromptLookup:
    """The n-grams of a text and where they ended last, so that a step costs the same however long the text is."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        for id_ in ids:
            self.push(id_)

    def push(self, id_: int) -> None:
        """The text's next token."""
        end = len(self._ids)  # the n-grams that ended here have a token behind them from now on
        for length in LENGTHS:
            if end >= length:
                self._ends[tuple(self._ids[end - length :])] = end
        self._ids.append(id_)

    def propose(self, most: int) -> list[int]:
        """What stood behind the last tokens when they stood there before: at most `most` tokens."""
        if most <= 0:
            return []
        for length in LENGTHS:
            end = self._ends.get(tuple(self._ids[-length:]))
            if end is not None:
                return self._ids[end : end + most]
        return []
