"""A loaded model: rows of (token, sequence, position) in, logits out. T rows of a step, V vocabulary."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from tfm.engine.cache import BlockPool, Sequence
from tfm.engine.config import ModelConfig
from tfm.engine.errors import TfmError
from tfm.engine.layers import LayerTable, Memory, cache_block_bytes, padded
from tfm.engine.progress import Progress, silent
from tfm.engine.records import CHANGING, STEP
from tfm.engine.team import Team, activation_bytes, activation_rows
from tfm.kernels.packing import aligned_empty, data_address
from tfm.kernels.records import (
    KV_BLOCK,
    KV_TYPES,
    LANES,
    MULTIPLY_SCRATCH_BYTES,
    SEGMENT_BLOCKS,
    SPAN,
    attention_scratch_bytes,
    state_bytes,
)

if TYPE_CHECKING:
    from tfm.engine.constraint import Constraint
    from tfm.engine.generate import Token
    from tfm.engine.sampling_params import SamplingParams
    from tfm.engine.tokenizer import Tokenizer

MAX_ROWS = 512  # rows of one forward pass; a longer prompt takes several, with the same result
# So few rows share a long sequence by its segments, since they have too few heads to keep all threads busy.
SPLIT_ROWS = 8
# Steps of few rows, each of which reads all weights, after which mapped weights are copied. That takes 20 to 200 ms for
# 100 MB, and gains a tenth of each later step of 2 ms.
STEPS_TO_STAY = 256
Work = Items[tuple[Sequence, Items[int]]]
Piece = tuple[Sequence, list[int], int]  # tokens of one pass, and of how many at their end the logits are wanted
Wanted = Literal["last", "all", "none"]
NUMBERS = int, np.integer


class Model:
    """A model ready to run. Steps of several Python threads take turns; `close` ends its helper threads."""

    tokenizer: "Tokenizer"  # read beside the weights; see engine/loading.py

    def __init__(
        self, name: str, folder: Path, config: ModelConfig, image: Memory,
        threads: int, kv_type: str, ctx: int, max_cache_bytes: int | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self.name, self.folder, self.config = name, folder, config
        self.threads, self.kv_type, self.ctx = threads, kv_type, ctx
        Team.prepare(progress)
        kind = KV_TYPES[kv_type]
        self.table = LayerTable(config, image, ctx, kind)
        block_bytes = cache_block_bytes(config, kind)
        limit = None if max_cache_bytes is None else max(1, max_cache_bytes // block_bytes)
        self.pool = BlockPool(block_bytes, limit)
        self._buffers = Buffers(config, ctx)
        self._small_steps = 0
        # A step, and behind it what its last fields point to: all that changes is written at once.
        numbers = np.zeros(STEP.itemsize // 8 + MAX_ROWS * (2 + len(SPAN.names or ())), np.int64)
        self._step = numbers[: STEP.itemsize // 8].view(STEP)
        self._changing = numbers[STEP.itemsize // 8 - len(CHANGING) :]
        self._lists_address = numbers.ctypes.data + STEP.itemsize
        self._fill_step(kind)
        self._team = Team(
            threads, self._step.ctypes.data, self._buffers.columns,
            max(MULTIPLY_SCRATCH_BYTES, *(attention_scratch_bytes(padded(layer.head_dim)) for layer in config.layers)),
        )  # fmt: skip

    def _fill_step(self, kv_type: int) -> None:
        """What stays the same from step to step."""
        step, head = self._step[0], self.table.head[0]
        step["hidden_size"], step["kv_type"] = self.config.hidden_size, kv_type
        for name in ("num_layers", "layers", "embed_tokens", "lm_head", "position_embeddings", "norm"):
            step[name] = head[name]
        self._buffers.fill(step)
        self._logits_width = int(head["lm_head"]["panels"]) * LANES
        step["logits_stride"] = 4 * self._logits_width

    def take_weights(self) -> None:
        """Read the weights from memory of its own from now on, if that is faster.

        A model does it by itself when a run is no short one; who measures does it before.
        """
        from tfm.engine.packed import own_copy

        with self._team.lock:
            image = own_copy(self.table.image)
            if image is not None:
                kind = KV_TYPES[self.kv_type]
                self.table = LayerTable(self.config, image, self.ctx, kind)
                self._fill_step(kind)

    def sequence(self) -> Sequence:
        """A new text, empty; of at most ctx positions."""
        return Sequence(self.pool, self.ctx)

    def step(self, work: Work, logits: Wanted | Items[Wanted] = "last") -> npt.NDArray[np.float32]:
        """Append tokens to sequences: prefill, decoding and any mix of them.

        work lists (sequence, new token ids). Gives float32 [rows, V], in the order of work: of the last new token of
        each sequence ("last"), of every new token ("all") or of none; logits may say it for each item of work. A row's
        logits depend on its own sequence only, bit for bit. Raises TfmError where a sequence would outgrow the context
        or memory ends; tokens before that have been appended.
        """
        each = [logits] * len(work) if isinstance(logits, str) else logits
        pieces: list[Piece] = []
        lengths: dict[Sequence, int] = {}
        rows = count = 0
        for (sequence, ids), how in zip(work, each, strict=True):
            tokens = self.checked(ids)
            lengths[sequence] = length = lengths.get(sequence, sequence.length) + len(tokens)
            if length > self.ctx:
                raise self.too_long(length)
            wanted = {"last": min(1, len(tokens)), "all": len(tokens), "none": 0}[how]
            if tokens:
                pieces.append((sequence, tokens, wanted))
            rows += len(tokens)
            count += wanted
        out = np.empty((count, self._logits_width), np.float32)
        address = data_address(out)
        for part in [pieces] if 0 < rows <= MAX_ROWS else _parts(pieces):
            address += out.strides[0] * self._team.step(self._run, part, address)
        return out if self._logits_width == self.config.vocab_size else out[:, : self.config.vocab_size]

    def checked(self, ids: "Items[int] | npt.NDArray[np.integer[Any]]") -> list[int]:
        """ids as Python's own numbers; TfmError for what is no token id of this model."""
        if isinstance(ids, str):
            raise _no_ids(ids)
        numbers = []
        for id_ in ids:
            if type(id_) is not int and not isinstance(id_, NUMBERS):
                raise _no_ids(ids)
            if not 0 <= id_ < self.config.vocab_size:
                raise TfmError("token ids", int(id_), f"0 to {self.config.vocab_size - 1}")
            numbers.append(int(id_))
        return numbers

    def _run(self, part: "list[Piece]", logits: int) -> int:
        """One forward pass; the number of rows of logits that it wrote to the address.

        The weights drive all of Python out of the caches, so that each thing it does here takes a microsecond or two.
        """
        tokens: list[int] = []
        spans: list[int] = []
        picked: list[int] = []
        longest = 0
        ends: dict[Sequence, int] = {}
        for sequence, ids, wanted in part:
            begin = ends.get(sequence, sequence.length)
            end = ends[sequence] = begin + len(ids)
            sequence.reserve(end)
            spans += len(tokens), len(ids), begin, sequence.table_address
            tokens += ids
            picked += range(len(tokens) - wanted, len(tokens))
            longest = max(longest, end)
        for rope in self.table.ropes:
            rope.fill(longest)
        rows, segments = len(tokens), _segments(longest)
        is_split = rows <= SPLIT_ROWS and segments > 1
        tokens_at = self._lists_address
        spans_at = tokens_at + 8 * rows
        picked_at = spans_at + 8 * len(spans)
        # In the order of CHANGING, and the lists behind it.
        numbers = [rows, len(part), len(picked), segments if is_split else 0, logits, tokens_at, spans_at, picked_at]
        numbers += tokens + spans + picked
        self._changing[: len(numbers)] = numbers
        self._team.run(rows)
        self._small_steps += rows <= SPLIT_ROWS
        if self._small_steps == STEPS_TO_STAY:
            self.take_weights()
        for sequence, ids, _ in part:
            sequence.ids += ids
        return len(picked)

    def logits(self, ids: Items[int], chunk: int | None = None) -> npt.NDArray[np.float32]:
        """float32 [T, V]: the logits after each of ids.

        chunk splits the prompt into passes of so many tokens, with the same result. Raises TfmError for one below 1.
        """
        if chunk is not None and chunk < 1:
            raise TfmError("chunk", chunk, "a whole number from 1")
        if len(ids) > self.ctx:
            raise self.too_long(len(ids))
        out = np.empty((len(ids), self.config.vocab_size), np.float32)
        size = chunk or MAX_ROWS
        with self.sequence() as sequence:
            for begin in range(0, len(ids), size):
                out[begin : begin + size] = self.step([(sequence, ids[begin : begin + size])], "all")
        return out

    def generate(
        self, ids: Items[int], max_tokens: int = 1024, sampling: "SamplingParams | None" = None,
        stop: Items[str] = (), logprobs: int = 0, chunk: int = MAX_ROWS, progress: Progress = silent,
        sequence: Sequence | None = None, constraint: "Constraint | None" = None, speculate: int = 0,
    ) -> "Iterator[Token]":  # fmt: skip
        """The continuation of ids, token by token; see Request and generate in engine/generate.py."""
        from tfm.engine.generate import Request, generate

        request = Request(ids, max_tokens, sampling, stop, logprobs, constraint)
        return generate(self, request, chunk, progress, sequence, speculate)

    def too_long(self, tokens: int) -> TfmError:
        """The error of a text of so many tokens, which do not fit the context."""
        own = self.config.max_position_embeddings
        more = f", or raise --ctx and --max-ram (the model's own context is {own})" if self.ctx < own else ""
        return TfmError("prompt", f"{tokens} tokens", f"at most {self.ctx}, the context", f"shorten it{more}")

    @cached_property
    def weights_digest(self) -> str:
        """Of the checkpoint's content, as it is when this is asked for first: do it soon after loading."""
        from tfm.engine.identity import weights_digest

        return weights_digest(self.folder)

    def memory(self) -> dict[str, int]:
        """Bytes of all weights, of those that every token reads, of 1,000 tokens' keys and values, of scratch space."""
        return {
            "weights_bytes": len(self.table.image),
            "decode_bytes": int(self.table.head["decode_bytes"][0]),
            "kv_bytes_per_1000_tokens": self.pool.block_bytes * 1000 // KV_BLOCK,
            "scratch_bytes": Buffers.size(self.config, self.ctx),
        }

    @property
    def steps_alone(self) -> int:
        """Forward passes that one thread did alone, because the processors were busy with something else."""
        return self._team.steps_alone

    def close(self) -> None:
        """End the helper threads. A later step starts new ones."""
        self._team.close()

    def __repr__(self) -> str:
        how = f"{self.threads} threads, {self.kv_type} keys and values, {self.ctx} positions"
        return f"<Model {self.name}: {self.config.model_type}, {how}>"


def _no_ids(found: object) -> TfmError:
    do = "text is made into ids by model.tokenizer.encode"
    return TfmError("token ids", repr(found)[:60], "whole numbers", do)


def _parts(pieces: "list[Piece]") -> "list[list[Piece]]":
    """The pieces in passes of at most MAX_ROWS rows, cut where one does not fit."""
    parts: list[list[Piece]] = []
    room = 0
    for sequence, ids, wanted in pieces:
        done = 0
        while done < len(ids):
            if room == 0:
                parts.append([])
                room = MAX_ROWS
            taken = ids[done : done + room]
            done += len(taken)
            room -= len(taken)
            after = len(ids) - done
            parts[-1].append((sequence, taken, min(len(taken), max(0, wanted - after))))
    return parts


class Buffers:
    """What the threads of a step write, for at most MAX_ROWS rows.

    Memory is touched, and so taken, only as far as a step needs it.
    """

    def __init__(self, config: ModelConfig, ctx: int) -> None:
        self._widths = _Widths.of(config)
        self.columns = self._widths.columns
        self._floats = [aligned_empty(MAX_ROWS * stride) for stride in self._widths.strides]
        self._floats[0][:] = 0  # the padding of x stays zero
        self.activations, self._activations_memory = activation_rows(MAX_ROWS, self.columns)
        self.claims = np.zeros(len(config.layers), np.int64)
        self._partials = aligned_empty(_segments(ctx) * self._widths.partial_bytes)

    @staticmethod
    def size(config: ModelConfig, ctx: int) -> int:
        """Bytes of all buffers when every row is used."""
        widths = _Widths.of(config)
        activations = MAX_ROWS * activation_bytes(widths.columns)
        return MAX_ROWS * sum(widths.strides) + activations + _segments(ctx) * widths.partial_bytes

    def fill(self, step: Any) -> None:
        step["claims"], step["partials"], step["partial_bytes"] = (
            self.claims.ctypes.data, self._partials.ctypes.data, self._widths.partial_bytes,
        )  # fmt: skip
        step["x"], step["heads_out"], step["attended"], step["gate"], step["up"] = (x.ctypes.data for x in self._floats)
        step["x_stride"], step["heads_stride"], step["attended_stride"], step["mlp_stride"], _ = self._widths.strides
        step["activations"] = self.activations.ctypes.data


@dataclass(frozen=True)
class _Widths:
    """The widest rows of a model: strides in bytes, the columns that a matmul reads, bytes of a segment's states."""

    strides: tuple[int, ...]  # x, heads_out, attended, gate, up
    columns: int
    partial_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        layers = config.layers
        heads = max((n.num_attention_heads + 2 * n.num_key_value_heads) * padded(n.head_dim) for n in layers)
        attended = max(n.num_attention_heads * n.head_dim for n in layers)
        mlp = max(n.intermediate_size for n in layers)
        states = max(n.num_attention_heads * state_bytes(padded(n.head_dim)) for n in layers)
        strides = tuple(4 * padded(width) for width in (config.hidden_size, heads, attended, mlp, mlp))
        return cls(strides, max(config.hidden_size, attended, mlp), SPLIT_ROWS * states)


def _segments(positions: int) -> int:
    return -(-positions // (KV_BLOCK * SEGMENT_BLOCKS))
