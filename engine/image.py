"""Weights as the kernels read them, in one piece of memory that can be kept in a file and mapped.

    | IMAGE | layer table | norms, biases, positions, and the matrices in panels, each on a cache line ... |

An address in an image counts from the image's first byte, and is 0 where the thing is not there; `layers.LayerTable`
makes addresses of this process of them. What depends on how a model is run (rope tables, places in the cache) is not in
the image.

Shapes: D hidden, N query heads, K key heads, H head size.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.config import LayerConfig, ModelConfig
from tfm.engine.layers import Memory, Record, padded
from tfm.engine.matrix import Matrix
from tfm.engine.progress import Progress, silent
from tfm.engine.records import IMAGE, LAYER
from tfm.engine.weights import LayerWeights, Vector, Weights
from tfm.kernels.packing import (
    ALIGN,
    PART_ROWS,
    Exponents,
    count_uppers,
    describe,
    pack_tasks,
    packed_bytes,
    part_of,
    read_bytes,
)
from tfm.kernels.records import HIDDEN_ACTS, NORMS

READ_AT_ONCE = 1 << 22  # bytes of a matrix: what is read is still in the processor's cache when it is packed
# The most strays of a matrix in bf12, as a share of its weights. One takes 4 ns: with one in 1,000 a thread reads 3 to
# 7 % slower than with none, with three a third slower, no faster than 16 bits a weight.
MOST_STRAYS = 1e-3


@dataclass
class _Slot:
    """A matrix and the record that describes it; rows is its order when packed, exponents what bf12 needs."""

    matrix: Matrix
    record: Record
    rows: npt.NDArray[np.int64]
    exponents: Exponents | None

    def in_bf12(self, strays: int = 0) -> Record:
        """The record of the matrix in bf12, with room for so many strays in each band."""
        return describe("bf12", len(self.rows), self.matrix.columns, strays=strays)


class Plan:
    """Where everything of a model's image goes. size is what the image takes; `write` makes it.

    exponents has those of the matrices that are packed in bf12, by their index among all; see `narrowed`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, exponents: Mapping[int, Exponents] | None = None) -> None:
        self._config, self._weights, self._exponents = config, weights, exponents or {}
        self._slots: list[_Slot] = []
        self._vectors: list[tuple[int, npt.NDArray[np.float32]]] = []
        self.size = IMAGE.itemsize
        self._image, self._layers = np.zeros(1, IMAGE), np.zeros(config.num_hidden_layers, LAYER)
        head = self._image[0]
        head["num_layers"], head["layers"] = len(self._layers), self._take(self._layers.nbytes)
        for row, layer, tensors in zip(self._layers, config.layers, weights.layers, strict=True):
            self._fill_layer(row, layer, tensors)
        head["embed_tokens"] = embed_tokens = self._matrix(weights.embed_tokens)
        if weights.lm_head is None:
            # A tied unembedding reads the same panels; only its bias may differ.
            head["lm_head"] = embed_tokens
            head["lm_head"]["bias"] = self._vector(weights.lm_head_bias)
        else:
            head["lm_head"] = self._matrix(weights.lm_head, weights.lm_head_bias)
        head["norm"] = self._norm(config.final_norm, weights.norm, weights.norm_bias, config.final_norm_eps)
        head["position_embeddings"] = self._vector(weights.position_embeddings)
        unread = 0 if weights.lm_head is None else read_bytes(embed_tokens.reshape(1))
        read = sum(read_bytes(slot.record) for slot in self._slots)
        head["size"], head["decode_bytes"] = self.size, read - unread

    @property
    def least_size(self) -> int:
        """What the image takes if all matrices in bf16 are packed in bf12, without strays."""
        slots = [slot for slot in self._slots if slot.matrix.format == "bf16"]
        return self.size - sum(packed_bytes(slot.record) - packed_bytes(slot.in_bf12()) for slot in slots)

    def narrowed(self, threads: int, progress: Progress | None = None) -> "Plan":
        """The plan with matrices in bf12 whose exponents allow it; all in bf16 are read for it on `threads` threads."""
        chosen = [(index, slot) for index, slot in enumerate(self._slots) if slot.matrix.format == "bf16"]
        chosen.sort(key=lambda item: -item[1].matrix.nbytes)  # as in `write`
        total, done, found = sum(slot.matrix.nbytes for _, slot in chosen), 0, {}
        with ThreadPoolExecutor(threads) as pool:
            counted = pool.map(_exponents, [slot for _, slot in chosen])
            for (index, slot), exponents in zip(chosen, counted, strict=True):
                is_few = exponents.total <= MOST_STRAYS * len(slot.rows) * slot.matrix.columns
                # Every band has room for as many as the one that has the most.
                if is_few and packed_bytes(slot.in_bf12(exponents.most)) < packed_bytes(slot.record):
                    found[index] = exponents
                done += slot.matrix.nbytes
                (progress or silent)("reading weights", done, total)
        return Plan(self._config, self._weights, found) if found else self

    def write(self, memory: Memory, threads: int, progress: Progress | None = None) -> None:
        """Pack all weights into memory, which is `size` bytes on a cache line, on `threads` threads."""
        _bytes_at(memory, 0, self._image)
        _bytes_at(memory, int(self._image["layers"][0]), self._layers)
        for begin, vector in self._vectors:
            _bytes_at(memory, begin, vector)
        # The largest first, so that no thread is left with one at the end.
        slots = sorted(self._slots, key=lambda slot: -packed_bytes(slot.record))
        total, done = sum(packed_bytes(slot.record) for slot in slots), 0
        with ThreadPoolExecutor(threads) as pool:
            for size in pool.map(partial(_pack, memory), slots):
                done += size
                (progress or silent)("loading weights", done, total)

    def _take(self, size: int) -> int:
        """The place of `size` bytes."""
        begin = -(-self.size // ALIGN) * ALIGN
        self.size = begin + size
        return begin

    def _vector(self, values: Vector | None, rows: npt.NDArray[np.int64] | None = None) -> int:
        """The place of a float32 copy whose last dimension is padded with zeros, in the order `rows`; 0 for None."""
        if values is None:
            return 0
        if rows is not None:
            values = np.where(rows >= 0, values[rows], np.float32(0))
        copy = np.zeros((*values.shape[:-1], padded(values.shape[-1])), np.float32)
        copy[..., : values.shape[-1]] = values
        begin = self._take(copy.nbytes)
        self._vectors.append((begin, copy))
        return begin

    def _norm(self, kind: str, weight: Vector | None, bias: Vector | None, eps: float) -> tuple[int, int, int, float]:
        return NORMS[kind], self._vector(weight), self._vector(bias), eps

    def _matrix(self, matrix: Matrix, bias: Vector | None = None, rows: npt.NDArray[np.int64] | None = None) -> Any:
        """The record of a matrix that will be packed in the order `rows`, an element of an array of one."""
        order = np.arange(matrix.rows) if rows is None else rows
        exponents = self._exponents.get(len(self._slots))
        if exponents is None:
            record = describe(matrix.format, len(order), matrix.columns, matrix.group_size, matrix.scale_type)
        else:
            record = describe("bf12", len(order), matrix.columns, strays=exponents.most)
        record["bias"], record["data"] = self._vector(bias, rows), self._take(packed_bytes(record))
        self._slots.append(_Slot(matrix, record, order, exponents))
        return record[0]

    def _fill_layer(self, row: Any, layer: LayerConfig, tensors: LayerWeights) -> None:
        n, k, h = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
        row["heads"] = (
            n, k, h, padded(h), layer.sliding_window, layer.attention_scale, layer.attn_logit_softcapping
        )  # fmt: skip
        row["attn_norm"] = self._norm(layer.norm, tensors.attn_norm, tensors.attn_norm_bias, layer.norm_eps)
        row["mlp_norm"] = self._norm(layer.norm, tensors.mlp_norm, tensors.mlp_norm_bias, layer.norm_eps)
        row["hidden_act"], row["gated"] = HIDDEN_ACTS[layer.hidden_act], tensors.gate_proj is not None
        q_rows, kv_rows = head_rows(n, h), head_rows(k, h)
        row["q_proj"] = self._matrix(tensors.q_proj, tensors.q_bias, q_rows)
        row["k_proj"] = self._matrix(tensors.k_proj, tensors.k_bias, kv_rows)
        row["v_proj"] = self._matrix(tensors.v_proj, tensors.v_bias, kv_rows)
        row["o_proj"] = self._matrix(tensors.o_proj, tensors.o_bias)
        for name in ("gate", "up", "down"):
            matrix = getattr(tensors, f"{name}_proj")
            if matrix is not None:
                row[f"{name}_proj"] = self._matrix(matrix, getattr(tensors, f"{name}_bias"))


def head_rows(heads: int, head_dim: int) -> npt.NDArray[np.int64] | None:
    """Source rows of heads that are padded to whole vectors, -1 for padding; None where they need none."""
    size = padded(head_dim)
    if size == head_dim:
        return None
    rows = np.full((heads, size), -1, np.int64)
    rows[:, :head_dim] = np.arange(heads * head_dim).reshape(heads, head_dim)
    return rows.ravel()


def _bytes_at(memory: Memory, begin: int, values: npt.NDArray[Any]) -> None:
    memory[begin : begin + values.nbytes] = values.reshape(-1).view(np.uint8)


def _parts(slot: _Slot) -> Iterator[tuple[int, Matrix, npt.NDArray[np.int64]]]:
    """A matrix read part by part, in the order in which it is packed: the first packed row, some of the matrix's rows,
    and which of them each packed row is.
    """  # fmt: skip
    matrix, order = slot.matrix, slot.rows
    at_once = max(1, READ_AT_ONCE * matrix.rows // (matrix.nbytes * PART_ROWS)) * PART_ROWS
    at_once = len(order) if matrix.is_stored_transposed else at_once
    for first in range(0, len(order), at_once):
        rows = order[first : first + at_once]
        used = rows[rows >= 0]
        begin, end = (int(used.min()), int(used.max()) + 1) if len(used) else (0, 0)
        yield first, matrix.part(slice(begin, end)), np.where(rows >= 0, rows - begin, -1)


def _exponents(slot: _Slot) -> Exponents:
    counts = [count_uppers(np.asarray(part.weight), rows) for _, part, rows in _parts(slot)]
    return Exponents.of(np.concatenate(counts))


def _pack(memory: Memory, slot: _Slot) -> int:
    """Pack a matrix into the image, as it is read; the bytes it takes.

    memory is held and not only its address: a thread that was just started as Ctrl-C came is not waited for.
    """
    whole = slot.record.copy()
    whole["data"] += memory.ctypes.data
    for first, part, rows in _parts(slot):
        weight, scales, biases = part.arrays(slice(None))
        if slot.exponents is not None:
            scales = slot.exponents.places[first // PART_ROWS :]
        for task in pack_tasks(part_of(whole, first, len(rows)), weight, scales, biases, rows):
            task()
    return packed_bytes(slot.record)
