"""Weight formats, one a file: its layout, its packing and unpacking, and its micro-kernel.

A format module has
    CODE                              its number in kernels/records.py
    multiply(matrix, acts, ...)       y = x W^T for some rows of activations and some panels of 16 outputs; a format in
                                      floating point has what bands.py needs to make it
    pack(matrix, panel, rows, ...)    writes one panel (bf12: the band that begins with it) from a checkpoint's arrays
    embed(matrix, row, out)           one row, as float32
"""

from collections.abc import Mapping
from typing import Any

from tfm.kernels.jit import inline, jit
from tfm.kernels.records import BF12, BF16, F16, F32, LANES, Q4, Q8, panels_together
from tfm.kernels.simd import AHEAD_BYTES, ASKED_BYTES, add_rows, load_f32, prefetch, store_f32, store_rows

together = jit(panels_together)


@inline
def finish(acc, bias, out, out_stride, add):
    """The end of a micro-kernel: bias (0: none) to every row of the tile, what stands in out where `add`; store."""
    if bias != 0:
        acc = add_rows(acc, bias, 0)
    if add:
        acc = add_rows(acc, out, out_stride)
    store_rows(acc, out, out_stride)


@inline
def finish_panel(y, bias, out, add):
    """The same for the vector of one row and panel."""
    if bias != 0:
        y = load_f32(bias) + y
    if add:
        y = load_f32(out) + y
    store_f32(out, y)


@inline
def bias_of(matrix, panel):
    """The address of a panel's bias; 0: none."""
    return matrix.bias + 4 * LANES * panel if matrix.bias != 0 else 0


@inline
def ask_ahead(at, size):
    """Ask for what comes AHEAD_BYTES after the `size` bytes that are read now."""
    for line in range(0, size, ASKED_BYTES):
        prefetch((at + line + AHEAD_BYTES) & -ASKED_BYTES)


@inline
def begin_of(matrix, panel):
    """Where a product that begins with `panel` begins to read the matrix."""
    return matrix.data + (panel - panel % together(matrix.format)) * matrix.panel_bytes


def by_format(functions: Mapping[int, Any]) -> Any:
    """A compiled function: calls that of `functions` whose key is the format of its first argument, a matrix record."""
    q8, q4, in_floats = functions[Q8], functions[Q4], by_float(functions)

    @jit
    def call(matrix, *arguments):
        if matrix.format == Q4:
            return q4(matrix, *arguments)
        if matrix.format == Q8:
            return q8(matrix, *arguments)
        return in_floats(matrix, *arguments)

    return call


def by_float(functions: Mapping[int, Any]) -> Any:
    """The same for the formats in floating point."""
    f32, bf16, f16, bf12 = (functions[code] for code in (F32, BF16, F16, BF12))

    @jit
    def call(matrix, *arguments):
        if matrix.format == BF16:
            return bf16(matrix, *arguments)
        if matrix.format == F16:
            return f16(matrix, *arguments)
        if matrix.format == BF12:
            return bf12(matrix, *arguments)
        return f32(matrix, *arguments)

    return call
