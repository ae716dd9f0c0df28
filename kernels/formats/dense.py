"""Weights in floating point as they are: what f32, bf16 and f16 share. A band lies in memory as

    k = 0                                       k = 1
    | w[0,0] .. w[15,0] | w[16,0] .. w[31,0] | w[0,1] .. w[15,1] | w[16,1] .. w[31,1] | ...

w[n, k] with n counted from the band's first output.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import ask_ahead
from tfm.kernels.formats.bands import (
    COPY_STRIDE,
    SUM_COLUMNS,
    TILE_ROWS,
    UNPACKED_STRIDE,
    VECTOR_BYTES,
    element_bytes,
    place,
)
from tfm.kernels.jit import jit
from tfm.kernels.records import BAND_PANELS, BF16, F32, LANES
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    add_rows,
    add_tile,
    f32x16,
    fma_tile,
    fma_unpack_tile,
    peek_bf16,
    peek_f16,
    peek_f32,
    peek_i64,
    peek_u16,
    peek_u32,
    poke_f32,
    poke_u16,
    poke_u32,
    store_f32,
    store_rows,
    tile_of,
)


def row_kernel(load: Any, element_bytes: int, streams: int) -> Any:
    """The micro-kernel for one row of activations and a band, or two.

    It asks for what it reads soon; kernels/formats/affine.py says why. `streams` is as bands.py has it.
    """
    zeros, fma = tile_of(f32x16, 1, BAND_PANELS), fma_tile(load)
    step = LANES * element_bytes

    @jit
    def row(matrix, p, x, apart):
        acc, other, panel = zeros(), zeros(), place(matrix, p, 0)
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part, other_part = zeros(), zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                at = panel + k * (BAND_PANELS * step)
                ask_ahead(at, BAND_PANELS * step)
                if streams == 2:
                    ask_ahead(at + apart, BAND_PANELS * step)
                part = fma(part, at, step, x + 4 * k, 0)
                if streams == 2:
                    other_part = fma(other_part, at + apart, step, x + 4 * k, 0)
            acc, other = add_tile(acc, part), add_tile(other, other_part)
        return acc, other

    return row


def block_starter(load: Any, element_bytes: int) -> Any:
    """The start_block of a type."""
    zeros, fma = tile_of(f32x16, TILE_ROWS, PANELS_AT_ONCE), fma_unpack_tile(load)
    step = LANES * element_bytes

    @jit
    def start_block(matrix, p, begin, columns, rows, unpacked, x, sums):
        """The first tile unpacks, hidden behind its multiplications; a single tile has to ask for what comes next."""
        panel = place(matrix, p, begin)
        if rows <= TILE_ROWS:
            for k in range(columns):
                for i in range(PANELS_AT_ONCE):
                    store_f32(unpacked + i * VECTOR_BYTES, load(panel + (k * BAND_PANELS + i) * step))
                unpacked += UNPACKED_STRIDE
            return 0
        for first in range(0, columns, SUM_COLUMNS):
            part = zeros()
            for k in range(first, min(first + SUM_COLUMNS, columns)):
                target = unpacked + k * UNPACKED_STRIDE
                part = fma(part, panel + k * (BAND_PANELS * step), step, x + 4 * k, COPY_STRIDE, target)
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)
        return TILE_ROWS

    return start_block


@jit
def pack(matrix, p, rows, source, row_stride, column_stride, scales, biases):
    """Pack panel p; `rows` is the address of all outputs' source rows, int64, -1 for zeros; strides are in bytes."""
    rows += 8 * LANES * p
    size = element_bytes(matrix)
    for k in range(matrix.columns):
        target = place(matrix, p, k)
        for r in range(LANES):
            row = peek_i64(rows + 8 * r)
            at = source + row * row_stride + k * column_stride
            if size == 4:
                poke_u32(target + 4 * r, peek_u32(at) if row >= 0 else np.uint32(0))
            else:
                poke_u16(target + 2 * r, peek_u16(at) if row >= 0 else np.uint16(0))


@jit
def embed(matrix, row, out):
    """Write row `row` of the matrix to out (float32, columns long)."""
    panel, lane = divmod(row, LANES)
    for k in range(matrix.columns):
        at = place(matrix, panel, k) + lane * element_bytes(matrix)
        if matrix.format == F32:
            value = peek_f32(at)
        elif matrix.format == BF16:
            value = peek_bf16(at)
        else:
            value = peek_f16(at)
        poke_f32(out + 4 * k, value)


def unpack(packed: Any, rows: int, columns: int, value: np.dtype[Any]) -> Any:
    """[rows, columns] values of the bytes of packed bands; NumPy, for tests."""
    bands = packed.view(value).reshape(-1, columns, BAND_PANELS * LANES)
    return bands.transpose(0, 2, 1).reshape(-1, columns)[:rows]
