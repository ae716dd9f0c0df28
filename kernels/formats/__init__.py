"""Weight formats, one a file: its layout, its packing and unpacking, and its micro-kernel.

A format module has
    CODE                              its number in kernels/records.py
    multiply(matrix, acts, ...)       y = x W^T for some rows of activations and some panels of 16 outputs
    pack(matrix, panel, rows, ...)    writes one panel from the arrays of a checkpoint
    embed(matrix, row, out)           one row, as float32
"""

from collections.abc import Mapping
from typing import Any

from tfm.kernels.jit import inline, jit
from tfm.kernels.records import BF16, F16, F32, Q4, Q8
from tfm.kernels.simd import add_rows, store_rows


@inline
def finish(acc, bias, out, out_stride, add):
    """The end of a micro-kernel: bias (0: none) to every row of the tile, what stands in out where `add`; store."""
    if bias != 0:
        acc = add_rows(acc, bias, 0)
    if add:
        acc = add_rows(acc, out, out_stride)
    store_rows(acc, out, out_stride)


def by_format(functions: Mapping[int, Any]) -> Any:
    """A compiled function: calls that of `functions` whose key is the format of its first argument, a matrix record."""
    f32, bf16, f16, q8, q4 = (functions[code] for code in (F32, BF16, F16, Q8, Q4))

    @jit
    def call(matrix, *arguments):
        if matrix.format == Q4:
            q4(matrix, *arguments)
        elif matrix.format == Q8:
            q8(matrix, *arguments)
        elif matrix.format == BF16:
            bf16(matrix, *arguments)
        elif matrix.format == F16:
            f16(matrix, *arguments)
        else:
            f32(matrix, *arguments)

    return call
