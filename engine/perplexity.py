"""The perplexity of a text of any length, through a window that slides over it. A window is a text of its own."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress, silent
from tfm.engine.score import Score, score
from tfm.engine.scored_text import Text

if TYPE_CHECKING:
    from tfm.engine.model import Model


@dataclass(frozen=True)
class Window:
    """A window of ctx tokens that moves on by stride; each begins with `before`, what stands before a text."""

    before: Items[int]
    ctx: int
    stride: int

    @classmethod
    def of(cls, before: Items[int], most: int, ctx: int | None = None, stride: int | None = None) -> Self:
        """ctx None is most, the model's context; stride None is half of ctx. Raises TfmError for what does not fit."""
        ctx = most if ctx is None else ctx
        least = max(2, len(before) + 1)
        if not least <= ctx <= most:
            raise TfmError("--ctx: the window", f"{ctx} tokens", f"{least} to {most}")
        # without BOS the first token of a window has nothing before it: another window has to count it
        widest = ctx - len(before) if before else ctx - 1
        stride = min(ctx // 2, widest) if stride is None else stride
        if not 1 <= stride <= widest:
            raise TfmError("--stride", stride, f"1 to {widest}, for a window of {ctx} tokens")
        return cls(before, ctx, stride)

    @property
    def room(self) -> int:
        """How many tokens of the text are in a window."""
        return self.ctx - len(self.before)

    def count(self, tokens: int) -> int:
        """How many windows a text of so many tokens takes."""
        return 1 + max(0, -(-(tokens - self.room) // self.stride))

    def over(self, ids: Items[int]) -> Iterator[Text]:
        """The windows of a text; each scores what none before it had."""
        for i in range(self.count(len(ids))):
            start = i * self.stride
            counted = start + self.room - self.stride if i else 0
            yield Text([*self.before, *ids[start : start + self.room]], len(self.before) + counted - start)


def perplexity(model: "Model", text: Text, window: Window, progress: Progress = silent) -> Score:
    """The score of a text, each token counted once, behind as many as its window has before it.

    Those are at least ctx - stride, where the text has them (BOS included). Raises TfmError for what `score` refuses.
    """
    ids = text.ids[text.begin :]
    logprobs: list[float] = []
    for done, part in enumerate(score(model, window.over(ids)), 1):
        if isinstance(part, TfmError):
            raise part
        logprobs += part.logprobs
        progress("scoring", done, window.count(len(ids)))
    return Score(logprobs, text.size_bytes)
