"""Many requests at once: continuous batching.

A step of the model takes rows of any sequences (design D7). Each step here holds one row of every request that is being
answered, and beside them as much of the waiting prompts as there is room for. A request that is done makes room for the
next one at once. What a request gets does not depend on its neighbours, bit for bit, so neither does its answer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tfm.engine.cache import Sequence, common_prefix
from tfm.engine.errors import TfmError
from tfm.engine.generate import Continuation, Request, Token
from tfm.engine.machine import available_memory
from tfm.engine.model import MAX_ROWS, Model, Wanted
from tfm.engine.prefixes import Key, PrefixCache, block_keys
from tfm.engine.speculation import PromptLookup
from tfm.kernels.records import KV_BLOCK

SLOTS = 32
MEMORY_SHARE = 0.8  # of what is free, for keys and values, where --max-ram does not say


@dataclass(frozen=True)
class Finished:
    """An answer that is complete, or why there is none. index counts the requests from 0."""

    index: int
    prompt_tokens: int
    tokens: list[Token]
    error: TfmError | None = None


@dataclass
class _Row:
    """A request that is being answered. reserved is how many blocks its sequence may come to have."""

    index: int
    text: Continuation
    sequence: Sequence
    keys: list[Key]
    reserved: int
    lookup: PromptLookup | None
    tokens: list[Token] = field(default_factory=list)
    has_begun: bool = False
    proposed: list[int] = field(default_factory=list)

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be run."""
        return not self.tokens

    @property
    def is_done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None

    def new_ids(self, room: int) -> list[int]:
        """What its sequence is to have next, at most `room` tokens."""
        prompt, answer = self.text.prompt, self.text.answer
        if self.is_reading:
            return prompt[self.sequence.length : self.sequence.length + room]
        if self.lookup is not None:
            self.proposed = self.lookup.propose(min(room - 1, self.text.most - len(answer) - 1))
        return [answer[-1], *self.proposed]

    def take(self, logits_TV: npt.NDArray[np.float32]) -> None:
        """The tokens that the logits after the prompt, or after the last token and the proposed ones, make certain."""
        before = len(self.tokens)
        for logits_V, guess in zip(logits_TV, [*self.proposed, None], strict=True):
            token = self.text.take(logits_V)
            self.tokens.append(token)
            if token.finish_reason is not None or token.id != guess:
                break
        if self.lookup is not None:
            self.lookup.push(self.text.answer[before:])
        self.proposed = []
        self.sequence.truncate(len(self.text.prompt) + len(self.text.answer) - 1)


OVER = Finished(-1, 0, [])  # behind the last request


class Batch:
    """Answers requests on at most `slots` sequences at once.

    share_prefixes computes beginnings that prompts have in common once; speculate is the most tokens to propose for a
    row of a step. Neither changes an answer. generated and read count tokens: of the answers so far, and of the prompts
    that were run through the model.
    """

    def __init__(self, model: Model, slots: int = SLOTS, share_prefixes: bool = True, speculate: int = 0) -> None:
        if not 1 <= slots <= MAX_ROWS:
            raise TfmError("slots", slots, f"a whole number from 1 to {MAX_ROWS}")
        self._model, self._slots, self._speculate = model, slots, speculate
        self.prefixes = PrefixCache(model.pool) if share_prefixes else None
        self._rows: list[_Row] = []
        self._capacity = _capacity(model)
        self._common: list[int] | None = None  # what all prompts so far begin with
        self.generated = self.read = 0

    def run(self, requests: Iterable[Request | None], tick: Callable[[], None] = lambda: None) -> Iterator[Finished]:
        """The answers as they finish. A request is taken when there is a slot and memory for it.

        None among the requests says that there is none for now: the next one is asked for after the next step. It must
        not come while nothing is being answered. tick is called after each step of the model.
        """
        waiting = self._prepared(requests)
        following: _Row | Finished | None = None
        is_over = False
        try:
            while not is_over or self._rows:
                while not is_over:
                    if following is None:
                        following = next(waiting, OVER)
                    if following is OVER:
                        is_over, following = True, None
                    elif isinstance(following, Finished):
                        yield following
                        following = None
                    elif following is not None and self._has_room(following):
                        self._rows.append(following)
                        following = None
                    else:
                        break
                if self._rows:
                    yield from self._step()
                    tick()
        finally:
            while self._rows:
                self._rows.pop().sequence.close()

    def start_from(self, beginning: Sequence) -> None:
        """Have the full blocks of a sequence for prompts that begin so."""
        if self.prefixes is not None:
            self.prefixes.add(block_keys([*beginning.ids, -1]), beginning.blocks)

    def common_beginning(self) -> Sequence:
        """A sequence of what all prompts so far began with, in full blocks; to be closed by the caller."""
        beginning = self._model.sequence()
        if self.prefixes is not None and self._common is not None:
            blocks = self.prefixes.find(block_keys([*self._common, -1]))
            beginning.adopt(blocks, self._common[: len(blocks) * KV_BLOCK])
        return beginning

    def close(self) -> None:
        """Give the memory of shared beginnings back."""
        if self.prefixes is not None:
            self.prefixes.close()

    def _prepared(self, requests: Iterable[Request | None]) -> Iterator[_Row | Finished | None]:
        index = -1
        for request in requests:
            if request is None:
                yield None
                continue
            index += 1
            try:
                text = Continuation(self._model, request)
            except TfmError as error:
                yield Finished(index, len(request.ids), [], error)
                continue
            if text.most == 0:
                yield Finished(index, len(text.prompt), [])
                continue
            same = len(text.prompt) if self._common is None else common_prefix(self._common, text.prompt)
            self._common = text.prompt[:same]
            reserved = -(-(len(text.prompt) + text.most) // KV_BLOCK)
            keys = [] if self.prefixes is None else block_keys(text.prompt)
            lookup = PromptLookup(text.prompt, self._speculate) if self._speculate else None
            yield _Row(index, text, self._model.sequence(), keys, reserved, lookup)

    def _has_room(self, row: _Row) -> bool:
        """Whether the row may begin: even if all rows become as long as they may, memory holds them."""
        if not self._rows:
            room = self._capacity - row.reserved
        else:
            room = self._capacity - row.reserved - sum(other.reserved for other in self._rows)
            if room < 0 or len(self._rows) == self._slots:
                return False
        if self.prefixes is not None:
            self.prefixes.shrink(max(0, room))
        return True

    def _step(self) -> Iterator[Finished]:
        """One step of the model, and the rows that end with it."""
        plan = self._plan()
        wanted: list[Wanted] = []
        for row, ids in plan:
            is_last = row.sequence.length + len(ids) >= len(row.text.prompt)
            wanted.append("none" if not is_last else "last" if row.is_reading else "all")
        logits = self._model.step([(row.sequence, ids) for row, ids in plan], wanted)
        first = 0
        for (row, ids), how in zip(plan, wanted, strict=True):
            if row.is_reading:
                self.read += len(ids)
                if self.prefixes is not None:
                    self.prefixes.add(row.keys[: row.sequence.length // KV_BLOCK], row.sequence.blocks)
            if how == "none":
                continue
            count = len(ids) if how == "all" else 1
            error = self._take(row, logits[first : first + count])
            first += count
            if error is not None or row.is_done:
                row.sequence.close()
                self._rows.remove(row)
                yield Finished(row.index, len(row.text.prompt), row.tokens, error)

    def _take(self, row: _Row, logits_TV: npt.NDArray[np.float32]) -> TfmError | None:
        before = len(row.tokens)
        try:
            row.take(logits_TV)
        except TfmError as error:
            return error
        self.generated += len(row.tokens) - before
        return None

    def _plan(self) -> list[tuple[_Row, list[int]]]:
        """What the next step runs: a token of each row that is being answered, then prompts in their order."""
        plan = []
        answering = [row for row in self._rows if not row.is_reading]
        room = MAX_ROWS - len(answering)
        for row in answering:
            ids = row.new_ids(room + 1)
            room -= len(ids) - 1
            plan.append((row, ids))
        reading: list[_Row] = []
        for row in self._rows:
            if room and row.is_reading and self._may_read(row, reading):
                ids = row.new_ids(room)
                room -= len(ids)
                reading.append(row)
                plan.append((row, ids))
        return plan

    def _may_read(self, row: _Row, reading: list[_Row]) -> bool:
        """Begin a prompt with the blocks that are there; not while another row computes blocks that it could have."""
        if row.has_begun or self.prefixes is None:
            return True
        there = self.prefixes.find(row.keys)
        if any(common_prefix(row.keys, other.keys) > len(there) for other in reading):
            return False
        row.sequence.adopt(there, row.text.prompt[: len(there) * KV_BLOCK])
        row.has_begun = True
        return True


def _capacity(model: Model) -> int:
    """How many blocks there may be."""
    if model.pool.limit is not None:
        return model.pool.limit
    free = available_memory()
    return 1 << 40 if free is None else int(MEMORY_SHARE * free) // model.pool.block_bytes
