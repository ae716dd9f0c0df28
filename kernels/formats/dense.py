"""Weights in floating point: what f32, bf16 and f16 share.

A panel holds 16 outputs, interleaved along K, so that a vector is one column of the panel:

    k = 0                   k = 1
    | w[0,0] .. w[15,0] |  | w[0,1] .. w[15,1] |  ...        w[n, k], n counted from the panel's first output

y[n] = sum over k of w[n, k] x[k], in float32. 64 columns are summed from nothing, one fused multiply-add for each k in
order, and such sums are added in order: one chain of 1536 additions would be 2.5 times less exact than NumPy, this is
as exact.

One row of activations takes four panels at once, because one chain of additions would wait for its own result. Many
rows are multiplied in pieces that fit the caches: the first tile of a block of rows unpacks 192 columns of a panel (or
of two) to float32 as it goes, and they stay in the nearest cache while tile after tile is multiplied with them; those
columns of the rows stay in the second. Two panels share the broadcast of an activation.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import finish
from tfm.kernels.jit import jit
from tfm.kernels.records import AHEAD_BYTES, BLOCK_COLUMNS, BLOCK_PANELS, BLOCK_ROWS, LANES
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    TARGET,
    TILE,
    add_rows,
    add_tile,
    f32x16,
    fma_tile,
    fma_unpack_tile,
    load_f32,
    peek_f32,
    peek_i64,
    peek_u16,
    peek_u32,
    poke_f32,
    poke_u16,
    poke_u32,
    prefetch,
    splat,
    store_f32,
    store_rows,
    tile_of,
)

ROW_PANELS = 4  # that a single row takes at once
TILE_ROWS = 12 if TARGET.has_avx512 else TILE  # of 32 registers 24 hold sums, 2 weights and 1 an activation
SUM_COLUMNS = 64  # columns that are summed by themselves
VECTOR_BYTES = 4 * LANES
UNPACKED_STRIDE = PANELS_AT_ONCE * VECTOR_BYTES  # of a column of the panels that are multiplied at once
UNPACKED_BYTES = BLOCK_COLUMNS * UNPACKED_STRIDE
# An odd number of cache lines: rows of 2048 columns lie in the same few places of the caches, and drive each other out.
COPY_STRIDE = 4 * BLOCK_COLUMNS + 64
assert BLOCK_COLUMNS % SUM_COLUMNS == BLOCK_PANELS % PANELS_AT_ONCE == 0


def row_kernel(load: Any, element_bytes: int) -> Any:
    """The micro-kernel for one row of activations and four panels.

    It asks for what it reads soon: from memory, bf16 then comes at 30 GB/s, where it came at 25.
    """
    zeros, fma = tile_of(f32x16, 1, ROW_PANELS), fma_tile(load)
    step = LANES * element_bytes

    @jit
    def row(matrix, panel, acts, t, bias, out, out_stride, add):
        acc = zeros()
        x = acts.values + t * acts.stride
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                for i in range(ROW_PANELS):
                    prefetch(panel + i * matrix.panel_bytes + k * step + AHEAD_BYTES)
                part = fma(part, panel + k * step, matrix.panel_bytes, x + 4 * k, 0)
            acc = add_tile(acc, part)
        finish(acc, bias, out, out_stride, add)

    return row


def tile_kernel(rows: int) -> Any:
    """The micro-kernel for `rows` rows of activations and unpacked panels: adds to their sums, rows of UNPACKED_STRIDE.

    With every 64 columns it asks for `ahead_bytes` of each of the panels that come next, which lie `ahead_stride`
    apart; when it did with every column, the product was 3 to 8 % slower.
    """
    zeros, fma = tile_of(f32x16, rows, PANELS_AT_ONCE), fma_tile(load_f32)

    @jit
    def tile(w, x, columns, sums, ahead, ahead_stride, ahead_bytes):
        for begin in range(0, columns, SUM_COLUMNS):
            for line in range(0, ahead_bytes, 64):
                for i in range(PANELS_AT_ONCE):
                    prefetch(ahead + i * ahead_stride + line)
            ahead += ahead_bytes
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, columns)):
                part = fma(part, w + k * UNPACKED_STRIDE, VECTOR_BYTES, x + 4 * k, COPY_STRIDE)
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)

    return tile


many, four, two, one = (tile_kernel(rows) for rows in (TILE_ROWS, 4, 2, 1))


@jit
def tiles(w, x, t, rows, columns, sums, ahead, ahead_stride, step):
    """The tiles of a block's rows from t on. Together they ask for so many columns of the next panels, of `step` bytes.
    """
    rest = (rows - t) % TILE_ROWS
    count = (rows - t) // TILE_ROWS + rest // 4 + rest % 4 // 2 + rest % 2
    ahead_bytes = -(-step // count) * SUM_COLUMNS
    while t < rows:
        at, target = x + t * COPY_STRIDE, sums + t * UNPACKED_STRIDE
        if t + TILE_ROWS <= rows:
            many(w, at, columns, target, ahead, ahead_stride, ahead_bytes)
            t += TILE_ROWS
        elif t + 4 <= rows:
            four(w, at, columns, target, ahead, ahead_stride, ahead_bytes)
            t += 4
        elif t + 2 <= rows:
            two(w, at, columns, target, ahead, ahead_stride, ahead_bytes)
            t += 2
        else:
            one(w, at, columns, target, ahead, ahead_stride, ahead_bytes)
            t += 1
        ahead += -(-columns // SUM_COLUMNS) * ahead_bytes


@jit
def copy_columns(x, x_stride, rows, columns, target):
    """So many columns of a block's rows, to rows of COPY_STRIDE."""
    whole = columns // LANES * LANES
    for _ in range(rows):
        for k in range(0, whole, LANES):
            store_f32(target + 4 * k, load_f32(x + 4 * k))
        for k in range(whole, columns):
            poke_f32(target + 4 * k, peek_f32(x + 4 * k))
        x, target = x + x_stride, target + COPY_STRIDE


@jit
def finish_rows(sums, rows, bias, out, out_stride, add):
    """What `finish` does, for one panel of a block's sums."""
    for t in range(rows):
        y = load_f32(sums + t * UNPACKED_STRIDE)
        if bias != 0:
            y = load_f32(bias) + y
        if add:
            y = load_f32(out + t * out_stride) + y
        store_f32(out + t * out_stride, y)


def driver(load: Any, element_bytes: int) -> Any:
    """y = x W^T for rows begin .. end - 1 and panels first .. last - 1; see kernels/matmul.py."""
    row = row_kernel(load, element_bytes)
    step = LANES * element_bytes
    zeros, fma = tile_of(f32x16, TILE_ROWS, PANELS_AT_ONCE), fma_unpack_tile(load)

    @jit
    def unpack_and_multiply(panel, panel_bytes, columns, unpacked, x, sums):
        """The first tile of a block unpacks, hidden behind its multiplications."""
        for begin in range(0, columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, columns)):
                target = unpacked + k * UNPACKED_STRIDE
                part = fma(part, panel + k * step, panel_bytes, x + 4 * k, COPY_STRIDE, target)
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)

    @jit
    def unpack(panel, panel_bytes, columns, target):
        for k in range(columns):
            for i in range(PANELS_AT_ONCE):
                store_f32(target + i * VECTOR_BYTES, load(panel + i * panel_bytes + k * step))
            target += UNPACKED_STRIDE

    @jit
    def block(matrix, x, x_stride, rows, first, last, out, out_stride, add, scratch):
        """At most BLOCK_ROWS rows and BLOCK_PANELS panels."""
        copied, panel_bytes = scratch + UNPACKED_BYTES, matrix.panel_bytes
        sums = copied + rows * COPY_STRIDE
        sums_bytes = rows * UNPACKED_STRIDE
        for i in range(0, -(-(last - first) // PANELS_AT_ONCE) * sums_bytes, VECTOR_BYTES):
            store_f32(sums + i, splat(0.0))
        for begin in range(0, matrix.columns, BLOCK_COLUMNS):
            columns = min(BLOCK_COLUMNS, matrix.columns - begin)
            copy_columns(x + 4 * begin, x_stride, rows, columns, copied)
            for p in range(first, last, PANELS_AT_ONCE):
                panel = matrix.data + p * panel_bytes + begin * step
                ahead = panel + PANELS_AT_ONCE * panel_bytes
                if p + PANELS_AT_ONCE >= last:
                    ahead = matrix.data + first * panel_bytes + (begin + columns) * step
                second = panel_bytes if p + 1 < last else 0  # without a second panel the first is multiplied twice
                target = sums + (p - first) // PANELS_AT_ONCE * sums_bytes
                done = 0
                if rows > TILE_ROWS:  # a single tile has to ask for the next panels itself
                    unpack_and_multiply(panel, second, columns, scratch, copied, target)
                    done = TILE_ROWS
                else:
                    unpack(panel, second, columns, scratch)
                tiles(scratch, copied, done, rows, columns, target, ahead, panel_bytes, step)
        for p in range(first, last):
            place = (p - first) // PANELS_AT_ONCE * sums_bytes + (p - first) % PANELS_AT_ONCE * VECTOR_BYTES
            bias = matrix.bias + VECTOR_BYTES * p if matrix.bias != 0 else 0
            finish_rows(sums + place, rows, bias, out + VECTOR_BYTES * p, out_stride, add)

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add, scratch):
        p = first
        while end - begin == 1 and p + ROW_PANELS <= last:
            bias = matrix.bias + VECTOR_BYTES * p if matrix.bias != 0 else 0
            panel, target = matrix.data + p * matrix.panel_bytes, out + begin * stride + VECTOR_BYTES * p
            row(matrix, panel, acts, begin, bias, target, stride, add)
            p += ROW_PANELS
        for t in range(begin, end, BLOCK_ROWS):
            x, rows = acts.values + t * acts.stride, min(BLOCK_ROWS, end - t)
            for q in range(p, last, BLOCK_PANELS):
                stop = min(last, q + BLOCK_PANELS)
                block(matrix, x, acts.stride, rows, q, stop, out + t * stride, stride, add, scratch)

    return drive


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
