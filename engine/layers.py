"""The layer table: weights packed into one piece of memory, and the records that the forward pass reads of them.

Shapes: D hidden, F feed-forward, V vocabulary, P positions, N query heads, K key heads, H head size.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.config import LayerConfig, ModelConfig, RopeConfig
from tfm.engine.matrix import Matrix
from tfm.engine.progress import Progress
from tfm.engine.records import LAYER
from tfm.engine.weights import LayerWeights, Vector, Weights
from tfm.kernels.packing import ALIGN, aligned_empty, describe, pack_tasks, packed_bytes
from tfm.kernels.records import HIDDEN_ACTS, KV_BLOCK, LANES, NORMS, head_bytes

Record = np.ndarray[Any, np.dtype[Any]]


def padded(size: int) -> int:
    """size rounded up to whole vectors of 16 lanes."""
    return -(-size // LANES) * LANES


class RopeTable:
    """Cosines and sines of all positions up to ctx, float32 [positions, half], filled in as they are needed.

    They are computed in float64, 64 positions at a time, so that a position's bits do not depend on which text asked
    first.
    """

    def __init__(self, rope: RopeConfig, ctx: int) -> None:
        self.rope, self._filled = rope, 0
        self._inv_freq = np.array(rope.inv_freq, np.float64)
        shape = (-(-ctx // KV_BLOCK) * KV_BLOCK, len(rope.inv_freq))
        self.cos, self.sin = np.empty(shape, np.float32), np.empty(shape, np.float32)

    def fill(self, positions: int) -> None:
        """Make sure that positions 0 .. positions - 1 are there."""
        while self._filled < positions:
            block = slice(self._filled, self._filled + KV_BLOCK)
            angles = np.arange(block.start, block.stop)[:, None] * self._inv_freq
            self.cos[block] = np.cos(angles) * self.rope.attention_factor
            self.sin[block] = np.sin(angles) * self.rope.attention_factor
            self._filled = block.stop


@dataclass
class LayerTable:
    """All that the forward pass reads: a record a layer, and those of embedding and unembedding.

    `memory` is what they point into; decode_bytes are the matrices that every new token reads.
    """

    layers: Record
    embed_tokens: Record
    lm_head: Record
    norm_weight: int
    norm_bias: int
    position_embeddings: int
    ropes: list[RopeTable]
    weights_bytes: int
    decode_bytes: int
    memory: list[npt.NDArray[Any]] = field(repr=False)


def cache_block_bytes(config: ModelConfig, kv_type: int) -> int:
    """Bytes of 64 positions of keys and values, all layers."""
    return sum(_layer_cache_bytes(layer, kv_type) for layer in config.layers)


def _layer_cache_bytes(layer: LayerConfig, kv_type: int) -> int:
    return 2 * layer.num_key_value_heads * head_bytes(kv_type, padded(layer.head_dim))


def packed_size(weights: Weights) -> int:
    """Bytes of all matrices when packed (norms and biases, which are small, not counted)."""
    matrices = [weights.embed_tokens, weights.lm_head]
    for layer in weights.layers:
        matrices += [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]
        matrices += [layer.gate_proj, layer.up_proj, layer.down_proj]
    return sum(
        packed_bytes(describe(m.format, m.rows, m.columns, m.group_size, m.scale_type))
        for m in matrices
        if m is not None
    )


@dataclass
class _Slot:
    """A matrix and the record that will describe it; rows is its order when packed (None: as it is)."""

    matrix: Matrix
    record: Record
    rows: npt.NDArray[np.int64] | None

    def tasks(self) -> Iterator[Callable[[], None]]:
        matrix = self.matrix
        return pack_tasks(self.record, matrix.weight, matrix.scales, matrix.biases, self.rows)


class _Builder:
    """Gathers what is to be packed, so that the memory can be taken in one piece."""

    def __init__(self) -> None:
        self.slots: list[_Slot] = []
        self.vectors: list[npt.NDArray[np.float32]] = []

    def vector(self, values: npt.NDArray[np.float32] | None, rows: npt.NDArray[np.int64] | None = None) -> int:
        """The address of a float32 copy whose last dimension is padded with zeros, in the order `rows`; 0 for None."""
        if values is None:
            return 0
        if rows is not None:
            values = np.where(rows >= 0, values[rows], np.float32(0))
        copy = np.zeros((*values.shape[:-1], padded(values.shape[-1])), np.float32)
        copy[..., : values.shape[-1]] = values
        self.vectors.append(copy)
        return copy.ctypes.data

    def matrix(self, matrix: Matrix, bias: Vector | None = None, rows: npt.NDArray[np.int64] | None = None) -> Record:
        """The record of a matrix that will be packed."""
        count = matrix.rows if rows is None else len(rows)
        record = describe(matrix.format, count, matrix.columns, matrix.group_size, matrix.scale_type)
        record["bias"] = self.vector(bias, rows)
        self.slots.append(_Slot(matrix, record, rows))
        return record

    def place(self) -> tuple[npt.NDArray[np.uint8], int]:
        """Take the memory, and let each record point to its part."""
        sizes = [-(-packed_bytes(slot.record) // ALIGN) * ALIGN for slot in self.slots]
        memory = aligned_empty(sum(sizes))
        address = memory.ctypes.data
        for slot, size in zip(self.slots, sizes, strict=True):
            slot.record["data"] = address
            address += size
        return memory, sum(sizes)


def head_rows(heads: int, head_dim: int) -> npt.NDArray[np.int64] | None:
    """Source rows of heads that are padded to whole vectors, -1 for padding; None where they need none."""
    size = padded(head_dim)
    if size == head_dim:
        return None
    rows = np.full((heads, size), -1, np.int64)
    rows[:, :head_dim] = np.arange(heads * head_dim).reshape(heads, head_dim)
    return rows.ravel()


def build(
    config: ModelConfig, weights: Weights, ctx: int, kv_type: int, threads: int, progress: Progress | None = None
) -> LayerTable:
    """Pack all weights, on `threads` threads."""
    builder, ropes = _Builder(), {}
    for layer in config.layers:
        if layer.rope is not None and layer.rope not in ropes:
            ropes[layer.rope] = RopeTable(layer.rope, ctx)
    table = np.zeros(config.num_hidden_layers, LAYER)
    filled = []
    offset = 0
    for i, (layer, tensors) in enumerate(zip(config.layers, weights.layers, strict=True)):
        table[i]["cache_offset"] = offset
        offset += _layer_cache_bytes(layer, kv_type)
        filled.append(_fill_layer(table[i], layer, tensors, builder, ropes))
    embed_tokens = builder.matrix(weights.embed_tokens)
    if weights.lm_head is None:
        # A tied unembedding reads the same panels; only its bias may differ.
        lm_head = embed_tokens.copy()
        lm_head["bias"] = builder.vector(weights.lm_head_bias)
    else:
        lm_head = builder.matrix(weights.lm_head, weights.lm_head_bias)
    memory, size = builder.place()
    if weights.lm_head is None:
        lm_head["data"] = embed_tokens["data"]
    for row, records in zip(table, filled, strict=True):
        for name, record in records.items():
            row[name] = record[0]
    _pack(builder.slots, threads, progress)
    return LayerTable(
        layers=table,
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        norm_weight=builder.vector(weights.norm),
        norm_bias=builder.vector(weights.norm_bias),
        position_embeddings=builder.vector(weights.position_embeddings),
        ropes=list(ropes.values()),
        weights_bytes=size + sum(vector.nbytes for vector in builder.vectors),
        decode_bytes=size - (0 if weights.lm_head is None else packed_bytes(embed_tokens)),
        memory=[memory, *builder.vectors],
    )


def _fill_layer(
    row: Any, layer: LayerConfig, tensors: LayerWeights, builder: _Builder, ropes: dict[RopeConfig, RopeTable]
) -> dict[str, Record]:
    """Fill a row of the table; its matrices are described, and come when they have been placed."""
    n, k, h = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    row["heads"] = (
        n, k, h, padded(h), layer.sliding_window, layer.attention_scale, layer.attn_logit_softcapping
    )  # fmt: skip
    kind = NORMS[layer.norm]
    row["attn_norm"] = (kind, builder.vector(tensors.attn_norm), builder.vector(tensors.attn_norm_bias), layer.norm_eps)
    row["mlp_norm"] = (kind, builder.vector(tensors.mlp_norm), builder.vector(tensors.mlp_norm_bias), layer.norm_eps)
    if layer.rope is not None:
        rope = ropes[layer.rope]
        half = len(layer.rope.inv_freq)
        row["rope"] = (half, layer.rope.interleaved, rope.cos.ctypes.data, rope.sin.ctypes.data)
    row["hidden_act"], row["gated"] = HIDDEN_ACTS[layer.hidden_act], tensors.gate_proj is not None
    q_rows, kv_rows = head_rows(n, h), head_rows(k, h)
    records = {
        "q_proj": builder.matrix(tensors.q_proj, tensors.q_bias, q_rows),
        "k_proj": builder.matrix(tensors.k_proj, tensors.k_bias, kv_rows),
        "v_proj": builder.matrix(tensors.v_proj, tensors.v_bias, kv_rows),
        "o_proj": builder.matrix(tensors.o_proj, tensors.o_bias),
    }
    for name in ("gate", "up", "down"):
        matrix = getattr(tensors, f"{name}_proj")
        if matrix is not None:
            records[f"{name}_proj"] = builder.matrix(matrix, getattr(tensors, f"{name}_bias"))
    return records


def _pack(slots: list[_Slot], threads: int, progress: Progress | None) -> None:
    total, done = sum(packed_bytes(slot.record) for slot in slots), 0

    def run(slot: _Slot) -> int:
        for task in slot.tasks():
            task()
        return packed_bytes(slot.record)

    with ThreadPoolExecutor(threads) as pool:
        # The largest first, so that no thread is left with one at the end.
        for size in pool.map(run, sorted(slots, key=lambda slot: -packed_bytes(slot.record))):
            done += size
            if progress:
                progress("loading weights", done, total)
