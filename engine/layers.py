"""The layer table: what the forward pass reads of a model, an image of its weights made ready to run.

Shapes: P positions, H head size.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.config import LayerConfig, ModelConfig, RopeConfig
from tfm.engine.records import IMAGE, LAYER
from tfm.kernels.records import KV_BLOCK, LANES, head_bytes

Record = np.ndarray[Any, np.dtype[Any]]
Memory = npt.NDArray[np.uint8]
ADDRESSES = ("data", "bias", "weight", "layers", "position_embeddings")
"""The fields of an image's records that are addresses."""


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


class LayerTable:
    """The records of a model whose weights lie in `image`: `head` (IMAGE, an array of one) and `layers` (LAYER).

    The image is only read, and may be mapped from a file that other processes map too.
    """

    def __init__(self, config: ModelConfig, image: Memory, ctx: int, kv_type: int) -> None:
        self.image = image
        base = image.ctypes.data
        self.head = _rebased(image[: IMAGE.itemsize].view(IMAGE), base)
        begin, count = int(self.head["layers"][0]) - base, int(self.head["num_layers"][0])
        self.layers = _rebased(image[begin : begin + count * LAYER.itemsize].view(LAYER), base)
        self.head["layers"] = self.layers.ctypes.data
        ropes = {layer.rope: RopeTable(layer.rope, ctx) for layer in config.layers if layer.rope is not None}
        self.ropes = list(ropes.values())
        offset = 0
        for row, layer in zip(self.layers, config.layers, strict=True):
            row["cache_offset"] = offset
            offset += _layer_cache_bytes(layer, kv_type)
            if layer.rope is not None:
                row["rope"] = _rope_record(ropes[layer.rope])


def _rebased(records: Record, base: int) -> Record:
    """A copy of records of an image, with addresses of this process, where the image lies at `base`."""
    copy = records.copy()
    for field in _addresses(copy):
        field[...] = np.where(field != 0, field + base, 0)
    return copy


def _addresses(records: Record) -> Iterator[npt.NDArray[np.int64]]:
    """The fields that hold addresses, those of records inside included."""
    for name in records.dtype.names or ():
        if name in ADDRESSES:
            yield records[name]
        elif records.dtype[name].names:
            yield from _addresses(records[name])


def _rope_record(table: RopeTable) -> tuple[Any, ...]:
    return len(table.rope.inv_freq), table.rope.interleaved, table.cos.ctypes.data, table.sin.ctypes.data


def cache_block_bytes(config: ModelConfig, kv_type: int) -> int:
    """Bytes of 64 positions of keys and values, all layers."""
    return sum(_layer_cache_bytes(layer, kv_type) for layer in config.layers)


def _layer_cache_bytes(layer: LayerConfig, kv_type: int) -> int:
    return 2 * layer.num_key_value_heads * head_bytes(kv_type, padded(layer.head_dim))
