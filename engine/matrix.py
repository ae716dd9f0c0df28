"""A weight matrix as it lies in a checkpoint: what a linear layer or an embedding is made of.

Shapes: N rows (outputs), K columns (inputs), G = K / group_size groups of columns that share a scale and a bias.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Format = Literal["f32", "f16", "bf16", "q4", "q8"]
ScaleType = Literal["f32", "f16", "bf16"]

QUANTIZED_BITS = {"q4": 4, "q8": 8}


class Rows(Protocol):
    """The rows of an array, which is in memory, or in a file: then rows[begin:end] is where they are read."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, rows: slice | list[int], /) -> npt.NDArray[Any]: ...


@dataclass(frozen=True)
class Matrix:
    """A matrix [N, K]; its arrays are never written, and those in files are read part by part.

    weight of a float format is [N, K] in float32, float16 or uint16 (the bits of bfloat16) with any strides. Of q4 and
    q8 it is uint32 [N, K * bits / 32], the first column in the lowest bits, with contiguous rows; then
    w = q * scale + bias, where scales and biases are [N, G] in float32, float16 or uint16 (bfloat16). Of a matrix that
    is stored transposed, to read some rows takes as long as to read all.
    """

    name: str
    format: Format
    rows: int
    columns: int
    weight: Rows
    scales: Rows | None = None
    biases: Rows | None = None
    scale_type: ScaleType | None = None
    group_size: int = 0
    is_stored_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(array.nbytes for array in (self.weight, self.scales, self.biases) if array is not None)

    def arrays(
        self, rows: slice | list[int]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
        """weight, scales and biases of some rows, in memory. Raises TfmError where a file has become shorter."""
        scales, biases = (None if array is None else array[rows] for array in (self.scales, self.biases))
        return self.weight[rows], scales, biases

    def part(self, rows: slice | list[int]) -> "Matrix":
        """Some of its rows in memory, as a matrix of their own."""
        weight, scales, biases = self.arrays(rows)
        return replace(self, rows=len(weight), weight=weight, scales=scales, biases=biases)

    def dequantize(self, dtype: type[np.floating[Any]] = np.float32) -> npt.NDArray[Any]:
        """All weights [N, K] as float32, or float64; of q4 and q8, product and sum are each rounded to it."""
        weight, scales, biases = self.arrays(slice(None))
        if self.format not in QUANTIZED_BITS:
            return to_float32(weight).astype(dtype, copy=False)
        assert scales is not None
        assert biases is not None
        codes_NK = weight.view(np.uint8)
        if QUANTIZED_BITS[self.format] == 4:
            codes_NK = np.stack([codes_NK & 0x0F, codes_NK >> 4], axis=-1)
        codes_NGg = codes_NK.reshape(self.rows, -1, self.group_size)
        scales_NG, biases_NG = (to_float32(table).astype(dtype, copy=False) for table in (scales, biases))
        values = codes_NGg * scales_NG[:, :, None] + biases_NG[:, :, None]
        return values.reshape(self.rows, self.columns)


def to_float32(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A new contiguous float32 array of the same values; uint16 holds the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.array(values, np.float32, order="C")
