"""A weight matrix as it lies in a checkpoint: what a linear layer or an embedding is made of.

Shapes: N rows (outputs), K columns (inputs), G = K / group_size groups of columns that share a scale and a bias.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Format = Literal["f32", "f16", "bf16", "q4", "q8"]
ScaleType = Literal["f32", "f16", "bf16"]

QUANTIZED_BITS = {"q4": 4, "q8": 8}


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K]; its arrays are views of mapped files and are never written.

    weight of a float format is [N, K] in float32, float16 or uint16 (the bits of bfloat16) with any strides. Of q4 and
    q8 it is uint32 [N, K * bits / 32], the first column in the lowest bits, with contiguous rows; then
    w = q * scale + bias, where scales and biases are [N, G] in float32, float16 or uint16 (bfloat16).
    """

    name: str
    format: Format
    rows: int
    columns: int
    weight: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None
    biases: npt.NDArray[Any] | None = None
    scale_type: ScaleType | None = None
    group_size: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (self.weight, self.scales, self.biases) if array is not None)

    def part(self, rows: slice | list[int]) -> "Matrix":
        """Some of its rows, as a matrix of their own."""
        picked = (None if array is None else array[rows] for array in (self.weight, self.scales, self.biases))
        weight, scales, biases = picked
        assert weight is not None
        return replace(self, rows=len(weight), weight=weight, scales=scales, biases=biases)

    def dequantize(self, dtype: type[np.floating[Any]] = np.float32) -> npt.NDArray[Any]:
        """All weights [N, K] as float32, or float64; of q4 and q8, product and sum are each rounded to it."""
        if self.format not in QUANTIZED_BITS:
            return to_float32(self.weight).astype(dtype, copy=False)
        assert self.scales is not None
        assert self.biases is not None
        codes_NK = self.weight.view(np.uint8)
        if QUANTIZED_BITS[self.format] == 4:
            codes_NK = np.stack([codes_NK & 0x0F, codes_NK >> 4], axis=-1)
        codes_NGg = codes_NK.reshape(self.rows, -1, self.group_size)
        scales_NG, biases_NG = (to_float32(table).astype(dtype, copy=False) for table in (self.scales, self.biases))
        values = codes_NGg * scales_NG[:, :, None] + biases_NG[:, :, None]
        return values.reshape(self.rows, self.columns)


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A new contiguous float32 array of the same values; uint16 holds the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.array(values, np.float32, order="C")
