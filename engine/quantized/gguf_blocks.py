"""GGUF's block formats as MLX affine arrays, without loss. A row is a run of blocks of 32 weights each.

    Q4_1   d f16 | m f16 | 16 bytes      w = d q + m           scales d, biases m
    Q4_0   d f16 | 16 bytes              w = d (q - 8)         scales d, biases -8 d
    Q8_0   d f16 | 32 bytes              w = d q, q signed     scales d, biases -128 d, q + 128 unsigned

A 4-bit block holds weight i in the low half of byte i and weight i + 16 in its high half; MLX packs neighbours: weight
2i in the low half of byte i, weight 2i + 1 in the high half. Multiplying by 8 or 128 only raises the exponent, so the
biases are exact in float16 unless they overflow; then scales and biases are both kept as float32.

Shapes: N rows, K columns, G = K / 32 blocks a row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GROUP_SIZE = 32


@dataclass(frozen=True)
class BlockType:
    """Where a block's codes start, how wide they are, and its zero point (None: the block stores a minimum)."""

    bits: int
    block_bytes: int
    codes_at: int
    zero_point: int | None


BLOCK_TYPES = {
    "Q4_0": BlockType(bits=4, block_bytes=18, codes_at=2, zero_point=8),
    "Q4_1": BlockType(bits=4, block_bytes=20, codes_at=4, zero_point=None),
    "Q8_0": BlockType(bits=8, block_bytes=34, codes_at=2, zero_point=128),
}


@dataclass(frozen=True)
class Blocks:
    """A matrix as it lies in a GGUF file: data is uint8 [N, G * block_bytes]."""

    type: BlockType
    data: npt.NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def groups(self) -> int:
        return int(self.data.shape[1]) // self.type.block_bytes

    def _fields(self, first_byte: int, end_byte: int) -> npt.NDArray[np.uint8]:
        blocks = self.data.reshape(self.rows, self.groups, self.type.block_bytes)
        return np.ascontiguousarray(blocks[:, :, first_byte:end_byte])

    def _half(self, first_byte: int) -> npt.NDArray[np.float16]:
        return self._fields(first_byte, first_byte + 2).view("<f2").reshape(self.rows, self.groups)

    def is_finite(self) -> bool:
        """Whether every scale (and stored minimum) is a number."""
        return all(bool(np.isfinite(self._half(byte)).all()) for byte in range(0, self.type.codes_at, 2))

    def fits_float16(self) -> bool:
        """Whether the biases can be kept as float16."""
        zero_point = self.type.zero_point
        largest = np.abs(self._half(0)).max(initial=0).astype(np.float32)
        return zero_point is None or bool(largest * zero_point <= np.finfo(np.float16).max)

    def weight(self) -> npt.NDArray[np.uint32]:
        """The codes, packed as MLX packs them: uint32 [N, K * bits / 32], first weight in the lowest bits."""
        codes = self._fields(self.type.codes_at, self.type.block_bytes)
        if self.type.bits == 8:
            packed = codes ^ 0x80
        else:
            low, high = codes & 0x0F, codes >> 4
            order = np.concatenate([low, high], axis=2)
            packed = order[:, :, 0::2] | (order[:, :, 1::2] << 4)
        return np.ascontiguousarray(packed).reshape(self.rows, -1).view("<u4")

    def scales(self, dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
        """[N, G]"""
        return self._half(0).astype(dtype)

    def biases(self, dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
        """[N, G]"""
        if self.type.zero_point is None:
            return self._half(2).astype(dtype)
        return (self._half(0).astype(np.float32) * -self.type.zero_point).astype(dtype)
