"""Weight formats, one a file: its layout, its packing and unpacking, and its micro-kernel.

A format module has
    CODE                              its number in kernels/records.py
    QUANTIZED                         whether it reads int8 activations (else float32)
    tile_kernel(rows)                 the micro-kernel for so many rows of activations and one panel of 16 outputs
    pair_kernel(rows)                 one for two panels, or None
    row_kernel                        one for a single row and several panels, or None
    pack(matrix, panel, rows, ...)    writes one panel from the arrays of a checkpoint
    embed(matrix, row, out)           one row, as float32
"""

from collections.abc import Mapping
from typing import Any

from tfm.kernels.jit import inline, jit
from tfm.kernels.simd import add_rows, add_vector, load_f32, store_rows


@inline
def finish(acc, bias, out, out_stride, add):
    """The end of a micro-kernel: bias (0: none) to every row of the tile, what stands in out where `add`; store."""
    if bias != 0:
        acc = add_vector(acc, load_f32(bias))
    if add:
        acc = add_rows(acc, out, out_stride)
    store_rows(acc, out, out_stride)


def by_format(functions: Mapping[int, Any]) -> Any:
    """A compiled function: calls that of `functions` whose key is the format of its first argument, a matrix record."""
    (code, function), *others = functions.items()
    if not others:
        return function
    otherwise = by_format(dict(others))

    @jit
    def pick(matrix, *arguments):
        if matrix.format == code:
            function(matrix, *arguments)
        else:
            otherwise(matrix, *arguments)

    return pick
