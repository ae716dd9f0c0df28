"""y = x W^T + bias for weights in panels: the driver that all formats share. M rows, N outputs, K columns.

A call computes some panels for some rows. Rows are taken in blocks that stay in the L2 cache, a panel is read once for
a block, and a micro-kernel takes up to TILE rows at once. Which tile a row falls into does not change its sums.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import bf16, by_format, dense, f16, f32, q4, q8
from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import Op
from tfm.kernels.quantize import quantize
from tfm.kernels.records import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    GROUP,
    LANES,
    MATRIX,
    Q4,
    Q8,
    SCALE_TYPES,
    panel_bytes,
    panels_of,
)
from tfm.kernels.simd import TILE, record_at

FORMATS = (q4, q8, f32, bf16, f16)
ROW_BLOCK = 48  # rows; times 1536 columns of int8 it is 144 KB

matrix_at = record_at(MATRIX)
activations_at = record_at(ACTIVATIONS)


def reference(x_MK: Any, w_NK: Any, bias_N: Any = None) -> Any:
    y_MN = x_MK @ w_NK.T
    return y_MN if bias_N is None else y_MN + bias_N


def driver(module: ModuleType) -> Any:
    """The loops over row blocks, panels and tiles for one weight format."""
    full, four, two, one = (module.tile_kernel(rows) for rows in (TILE, 4, 2, 1))
    row = module.row_kernel or one
    panels_at_once = dense.PANELS_AT_ONCE if module.row_kernel else 1

    @jit
    def panel_of_rows(matrix, panel, acts, t, end, bias, out, stride, add):
        """One panel for rows t .. end - 1."""
        while t + TILE <= end:
            full(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += TILE
        if t + 4 <= end:
            four(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += 4
        if t + 2 <= end:
            two(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += 2
        if t < end:
            one(matrix, panel, acts, t, bias, out + t * stride, stride, add)

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add):
        p = first
        if end - begin == 1:
            while p + panels_at_once <= last:
                bias = matrix.bias + 64 * p if matrix.bias != 0 else 0
                panel, target = matrix.data + p * matrix.panel_bytes, out + begin * stride + 64 * p
                row(matrix, panel, acts, begin, bias, target, stride, add)
                p += panels_at_once
        for block in range(begin, end, ROW_BLOCK):
            for q in range(p, last):
                bias = matrix.bias + 64 * q if matrix.bias != 0 else 0
                panel = matrix.data + q * matrix.panel_bytes
                panel_of_rows(matrix, panel, acts, block, min(end, block + ROW_BLOCK), bias, out + 64 * q, stride, add)

    return drive


# multiply(matrix, acts, begin, end, first, last, out, stride, add): rows begin..end-1 and panels first..last-1 of
# out[t, n] = (out[t, n] if add) + x[t] . w[n] + bias[n]; out is float32, `stride` bytes from row to row, padded to
# whole panels.
multiply = by_format({module.CODE: driver(module) for module in FORMATS})
pack_panel = by_format({module.CODE: module.pack for module in FORMATS})


@jit
def multiply_all(matrix, acts, rows, out):
    matrix = matrix_at(matrix)
    multiply(matrix, activations_at(acts), 0, rows, 0, matrix.panels, out, 64 * matrix.panels, False)


@jit
def pack_panels(matrix, first, last, rows, source, row_stride, column_stride, scales, biases):
    for p in range(first, last):
        pack_panel(matrix_at(matrix), p, rows, source, row_stride, column_stride, scales, biases)


_multiply_all = Entry("tfm.kernels.matmul:multiply_all", "iiii")
