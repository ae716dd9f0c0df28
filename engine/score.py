"""How likely a model finds texts that are given: the log-probability of each token after those before it.

Texts go through the model one behind the other, as many rows a step as memory allows. A row's logits depend on its own
text only, so the figures of a text do not depend on its neighbours, nor on where it was cut. They are those that
generating the same tokens reports, bit for bit. Shapes: T rows of a step, V vocabulary.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tfm.engine.errors import TfmError
from tfm.engine.sampling import Logits, not_finite
from tfm.engine.scored_text import Text
from tfm.kernels.logits import log_sum_exp
from tfm.kernels.records import KV_BLOCK

if TYPE_CHECKING:
    from tfm.engine.cache import Sequence
    from tfm.engine.model import Model, Wanted

LOGITS_BYTES = 64_000_000  # of one step
MOST_ROWS = 512
MOST_TEXTS = 32  # at once: each takes a block of keys and values at least


@dataclass(frozen=True)
class ScoredToken:
    """A token and its log-probability; rank is its place among all tokens by their logits, 1 for the likeliest.

    Among equal logits the lower id comes first. Both are None for a token with nothing before it.
    """

    id: int
    logprob: float | None
    rank: int | None


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text's counted tokens; tokens are all of it, with what cannot be counted."""

    logprobs: Items[float]
    size_bytes: int
    tokens: tuple[ScoredToken, ...] = ()

    @property
    def logprob(self) -> float | None:
        """The sum, rounded once (math.fsum); None where nothing was counted."""
        return math.fsum(self.logprobs) if self.logprobs else None

    @property
    def perplexity(self) -> float | None:
        """exp(-mean log-probability); infinite beyond what a float holds."""
        return None if self.logprob is None else _exp(-self.logprob / len(self.logprobs))

    @property
    def standard_error(self) -> float | None:
        """Of the perplexity, by the delta method: perplexity x standard error of the mean log-probability.

        That takes tokens as independent of each other. None for fewer than two.
        """
        count = len(self.logprobs)
        if self.perplexity is None or self.logprob is None or count < 2:
            return None
        mean = self.logprob / count
        variance = math.fsum((logprob - mean) ** 2 for logprob in self.logprobs) / (count - 1)
        return self.perplexity * math.sqrt(variance / count)

    @property
    def bits_per_byte(self) -> float | None:
        """-log2 of the text's probability, for each byte of it in UTF-8."""
        if self.logprob is None or not self.size_bytes:
            return None
        return -self.logprob / math.log(2) / self.size_bytes


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


Given = Text | TfmError | None


def score(model: "Model", texts: Iterable[Given]) -> Iterator[Score | TfmError]:
    """A Score for each text, in order, as soon as it is there.

    texts is read only as far as the next step needs. A None in it says that the next text is not there yet: what has
    been read is then scored at once. A TfmError stands for a text that could not be read, and comes back in its place,
    as one does for a text that cannot be scored: longer than the context and one more token, ids that do not exist,
    logits that are not finite.
    """
    queue = _Queue(model)
    try:
        for text in texts:
            if text is not None:
                queue.append(text)
            yield from queue.finished()
            while queue.is_full or (text is None and queue.has_work):
                queue.step()
                yield from queue.finished()
        while queue.has_work:
            queue.step()
            yield from queue.finished()
    finally:
        queue.close()


class _Queue:
    """Texts on their way through the model, in order; the first is the next to be finished."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._runs: deque[_Run] = deque()
        self._rows = max(1, min(MOST_ROWS, LOGITS_BYTES // (4 * model.config.vocab_size)))
        self._blocks = model.pool.limit or math.inf

    def append(self, text: Text | TfmError) -> None:
        fault = text if isinstance(text, TfmError) else self._fault(text)
        self._runs.append(_Run(self._model, Text(()) if isinstance(text, TfmError) else text, fault))

    def _fault(self, text: Text) -> TfmError | None:
        """What keeps a text from being scored. Its last token is not run: it may stand behind a full context."""
        most, vocab_size = self._model.ctx + 1, self._model.config.vocab_size
        if len(text.ids) > most:
            allowed = f"at most {most}: the context, and one that is only scored"
            return TfmError("text", f"{len(text.ids)} tokens", allowed, "shorten it, or use --perplexity or more --ctx")
        wrong = next((id_ for id_ in text.ids if not 0 <= id_ < vocab_size), None)
        return None if wrong is None else TfmError("token ids", wrong, f"0 to {vocab_size - 1}")

    @property
    def has_work(self) -> bool:
        return any(run.rows for run in self._runs)

    @property
    def is_full(self) -> bool:
        """Whether there is enough for a step that is worth it, or more than may be in memory."""
        if not self.has_work:
            return False
        rows, blocks = sum(run.rows for run in self._runs), sum(run.blocks for run in self._runs)
        return rows >= self._rows or blocks > self._blocks or len(self._runs) >= MOST_TEXTS

    def step(self) -> None:
        """Run rows of the first texts."""
        work: list[tuple[Sequence, Items[int]]] = []
        wanted: list[Wanted] = []
        targets: list[tuple[_Run, int]] = []
        room, blocks = self._rows, 0
        for run in filter(lambda run: run.rows, self._runs):
            blocks += run.blocks
            if room == 0 or (work and blocks > self._blocks):
                break
            for begin, end, how in run.pieces(room):
                work.append((run.sequence, run.text.ids[begin:end]))
                wanted.append(how)
                room -= end - begin
                if how == "all":
                    targets += [(run, i) for i in range(begin + 1, end + 1)]
        logits_TV = self._model.step(work, wanted)
        for (run, i), logits_V in zip(targets, logits_TV, strict=True):
            run.take(i, logits_V)

    def finished(self) -> Iterator[Score | TfmError]:
        """The results that are there, of the first texts; they leave the queue."""
        while self._runs and not self._runs[0].rows:
            run = self._runs.popleft()
            run.sequence.close()
            yield run.result()

    def close(self) -> None:
        for run in self._runs:
            run.sequence.close()


class _Run:
    """One text, and what is known of it."""

    def __init__(self, model: "Model", text: Text, error: TfmError | None) -> None:
        self.text, self._error = text, error
        self.sequence = model.sequence()
        self._first = max(1, text.begin)  # the first that has a log-probability
        self._tokens = [ScoredToken(id_, None, None) for id_ in text.ids[text.begin : self._first]]

    @property
    def rows(self) -> int:
        """How many are left to run."""
        count = len(self.text.ids)
        return 0 if self._error or count <= self._first else count - 1 - self.sequence.length

    @property
    def blocks(self) -> int:
        """Blocks of keys and values that the text has or will have."""
        return -(-(len(self.text.ids) - 1) // KV_BLOCK) if self.rows else 0

    def pieces(self, most: int) -> "list[tuple[int, int, Wanted]]":
        """The next rows as (begin, end, logits): those before the last one of the prompt need no logits."""
        begin = self.sequence.length
        end = begin + min(most, self.rows)
        middle = min(max(begin, self._first - 1), end)
        pieces: list[tuple[int, int, Wanted]] = [(begin, middle, "none"), (middle, end, "all")]
        return [piece for piece in pieces if piece[0] < piece[1]]

    def take(self, index: int, logits_V: Logits) -> None:
        """The logits for the token at index."""
        if self._error is not None:
            return
        total = log_sum_exp(logits_V)
        if math.isnan(total):
            self._error = not_finite(logits_V, index)
            return
        id_ = self.text.ids[index]
        logit = logits_V[id_]
        rank = 1 + np.count_nonzero(logits_V > logit) + np.count_nonzero(logits_V[:id_] == logit)
        self._tokens.append(ScoredToken(id_, float(logit) - total, int(rank)))

    def result(self) -> Score | TfmError:
        logprobs = tuple(token.logprob for token in self._tokens if token.logprob is not None)
        return self._error or Score(logprobs, self.text.size_bytes, tuple(self._tokens))
