"""Weights in floating point: what f32, bf16 and f16 share.

A panel holds 16 outputs, interleaved along K, so that a vector is one column of the panel:

    k = 0                   k = 1
    | w[0,0] .. w[15,0] |  | w[0,1] .. w[15,1] |  ...        w[n, k], n counted from the panel's first output

y[n] = sum over k of w[n, k] x[k], in float32. 64 columns are summed from nothing, one fused multiply-add for each k in
order, and such sums are added in order: one chain of 1536 additions would be 2.5 times less exact than NumPy, this is
as exact. Rows of activations share the load of a column, and two panels the broadcast of an activation; a single row
takes four panels at once, because one chain of additions would wait for its own result.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import finish
from tfm.kernels.jit import jit
from tfm.kernels.records import LANES
from tfm.kernels.simd import (
    add_rows,
    add_tile,
    f32x16,
    fma_panels,
    fma_rows,
    peek_i64,
    peek_u16,
    peek_u32,
    poke_f32,
    poke_u16,
    poke_u32,
    prefetch,
    store_rows,
    tile_of,
)

PANELS_AT_ONCE = 4
SUM_COLUMNS = 64  # columns that are summed by themselves


def tile_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """The micro-kernel for `rows` rows of activations and one panel."""
    zeros = tile_of(f32x16, rows)
    step = LANES * element_bytes
    ahead = rows > 1  # as in affine.py: a step of 16 rows of a bf16 model took 15 ms, and 23 without

    @jit
    def tile(matrix, panel, acts, t, bias, out, out_stride, add):
        acc = zeros()
        x = acts.values + t * acts.stride
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                if ahead:
                    prefetch(panel + matrix.panel_bytes + k * step)
                part = fma_rows(part, load(panel + k * step), x + 4 * k, acts.stride)
            acc = add_tile(acc, part)
        finish(acc, bias, out, out_stride, add)

    return tile


def pair_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """The same sums for two panels side by side, for a CPU with registers for two tiles.

    They share the broadcast of an activation: 10 loads for 16 multiply-adds instead of 9 for 8. On a Zen 5 that is 122
    G multiply-adds/s instead of 104, of 132 that its multipliers can do; with 1536 columns, where panels come from the
    L2 cache, 123 instead of 78.
    """
    zeros = tile_of(f32x16, rows)
    step = LANES * element_bytes

    @jit
    def pair(matrix, panel, acts, t, bias, out, out_stride, add):
        a, b = zeros(), zeros()
        x, second = acts.values + t * acts.stride, panel + matrix.panel_bytes
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part_a, part_b = zeros(), zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                prefetch(panel + 2 * matrix.panel_bytes + k * step)
                prefetch(second + 2 * matrix.panel_bytes + k * step)
                part_a = fma_rows(part_a, load(panel + k * step), x + 4 * k, acts.stride)
                part_b = fma_rows(part_b, load(second + k * step), x + 4 * k, acts.stride)
            a, b = add_tile(a, part_a), add_tile(b, part_b)
        finish(a, bias, out, out_stride, add)
        finish(b, bias + 4 * LANES if bias != 0 else 0, out + 4 * LANES, out_stride, add)

    return pair


def row_kernel(load: Any, element_bytes: int) -> Any:
    """The micro-kernel for one row of activations and four panels; the same sums as `tile_kernel`, side by side."""
    zeros = tile_of(f32x16, PANELS_AT_ONCE)
    fma = fma_panels(load)
    step = LANES * element_bytes

    @jit
    def row(matrix, panel, acts, t, bias, out, out_stride, add):
        acc = zeros()
        x = acts.values + t * acts.stride
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                part = fma(part, panel + k * step, matrix.panel_bytes, x + 4 * k)
            acc = add_tile(acc, part)
        if bias != 0:
            acc = add_rows(acc, bias, 4 * LANES)
        if add:
            acc = add_rows(acc, out, 4 * LANES)
        store_rows(acc, out, 4 * LANES)

    return row


def packer(element_bytes: int) -> Any:
    """A packer of panel p; `rows` is the address of all outputs' source rows, int64, -1 for zeros; strides: bytes."""
    peek, poke, zero = (peek_u32, poke_u32, np.uint32(0)) if element_bytes == 4 else (peek_u16, poke_u16, np.uint16(0))

    @jit
    def pack(matrix, p, rows, source, row_stride, column_stride, scales, biases):
        panel, rows = matrix.data + p * matrix.panel_bytes, rows + 8 * LANES * p
        for r in range(LANES):
            row = peek_i64(rows + 8 * r)
            for k in range(matrix.columns):
                value = peek(source + row * row_stride + k * column_stride) if row >= 0 else zero
                poke(panel + (k * LANES + r) * element_bytes, value)

    return pack


def embedder(peek: Any, element_bytes: int) -> Any:
    """A function that writes row `row` of the matrix to out (float32, columns long)."""

    @jit
    def embed(matrix, row, out):
        panel, lane = matrix.data + row // LANES * matrix.panel_bytes, row % LANES
        for k in range(matrix.columns):
            poke_f32(out + 4 * k, peek(panel + (k * LANES + lane) * element_bytes))

    return embed


def unpack(packed: Any, rows: int, columns: int, value: np.dtype[Any]) -> Any:
    """[rows, columns] values of the bytes of packed panels; NumPy, for tests."""
    panels = packed.view(value).reshape(-1, columns, LANES)
    return panels.transpose(0, 2, 1).reshape(-1, columns)[:rows]
