"""Weights in floating point: what f32, bf16 and f16 share.

A panel holds 16 outputs, a vector one column of it. Four panels are a band, interleaved along K:

    k = 0                                          k = 1
    | w[0,0] .. w[15,0] | .. | w[48,0] .. w[63,0] | w[0,1] .. w[15,1] | ...

w[n, k] with n counted from the band's first output; the last band is filled up with zeros.

y[n] = sum over k of w[n, k] x[k], in float32. 64 columns are summed from nothing, one fused multiply-add for each k in
order, and such sums are added in order: one chain of 1536 additions would be 2.5 times less exact than NumPy, this is
as exact.

One row of activations takes a band at once, because one chain of additions would wait for its own result, and reads it
from first to last: a thread read 31 GB/s of bf16 so, and 24 from four panels that lay one after the other. Many
rows are multiplied in pieces that fit the caches: the first tile of a block of rows unpacks 192 columns of a panel (or
of two) to float32 as it goes, and they stay in the nearest cache while tile after tile is multiplied with them; those
columns of the rows stay in the second. Two panels share the broadcast of an activation.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import finish
from tfm.kernels.jit import jit
from tfm.kernels.records import AHEAD_BYTES, BAND_PANELS, BLOCK_COLUMNS, BLOCK_PANELS, BLOCK_ROWS, LANES
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

TILE_ROWS = 12 if TARGET.has_avx512 else TILE  # of 32 registers 24 hold sums, 2 weights and 1 an activation
SUM_COLUMNS = 64  # columns that are summed by themselves
VECTOR_BYTES = 4 * LANES
UNPACKED_STRIDE = PANELS_AT_ONCE * VECTOR_BYTES  # of a column of the panels that are multiplied at once
UNPACKED_BYTES = BLOCK_COLUMNS * UNPACKED_STRIDE
# An odd number of cache lines: rows of 2048 columns lie in the same few places of the caches, and drive each other out.
COPY_STRIDE = 4 * BLOCK_COLUMNS + 64
assert BLOCK_COLUMNS % SUM_COLUMNS == BLOCK_PANELS % PANELS_AT_ONCE == 0


def row_kernel(load: Any, element_bytes: int, panels: int) -> Any:
    """The micro-kernel for one row of activations and so many panels of a band.

    It asks for what it reads soon, for every other line of it; kernels/formats/affine.py says why.
    """
    zeros, fma = tile_of(f32x16, 1, panels), fma_tile(load)
    step = LANES * element_bytes

    @jit
    def row(matrix, panel, acts, t, bias, out, out_stride, add):
        acc = zeros()
        x = acts.values + t * acts.stride
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, matrix.columns)):
                at = panel + k * (BAND_PANELS * step)
                for line in range(0, panels * step, 128):
                    prefetch(at + line + AHEAD_BYTES)
                part = fma(part, at, step, x + 4 * k, 0)
            acc = add_tile(acc, part)
        finish(acc, bias, out, out_stride, add)

    return row


def tile_kernel(rows: int) -> Any:
    """The micro-kernel for `rows` rows of activations and unpacked panels: adds to their sums, rows of UNPACKED_STRIDE.

    With every 64 columns it asks for `ahead_columns` columns of the two panels that come next, of `step` bytes each;
    when it asked with every column, the product was 3 to 8 % slower.
    """
    zeros, fma = tile_of(f32x16, rows, PANELS_AT_ONCE), fma_tile(load_f32)

    @jit
    def tile(w, x, columns, sums, ahead, ahead_columns, step):
        for begin in range(0, columns, SUM_COLUMNS):
            for _ in range(ahead_columns):
                for line in range(0, 2 * step, 64):
                    prefetch(ahead + line)
                ahead += BAND_PANELS * step
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, columns)):
                part = fma(part, w + k * UNPACKED_STRIDE, VECTOR_BYTES, x + 4 * k, COPY_STRIDE)
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)

    return tile


many, four, two, one = (tile_kernel(rows) for rows in (TILE_ROWS, 4, 2, 1))


@jit
def tiles(w, x, t, rows, columns, sums, ahead, step):
    """The tiles of a block's rows from t on. Together they ask for as many columns as they multiply."""
    rest = (rows - t) % TILE_ROWS
    count = (rows - t) // TILE_ROWS + rest // 4 + rest % 4 // 2 + rest % 2
    ahead_columns = -(-SUM_COLUMNS * PANELS_AT_ONCE // 2 // count)
    while t < rows:
        at, target = x + t * COPY_STRIDE, sums + t * UNPACKED_STRIDE
        if t + TILE_ROWS <= rows:
            many(w, at, columns, target, ahead, ahead_columns, step)
            t += TILE_ROWS
        elif t + 4 <= rows:
            four(w, at, columns, target, ahead, ahead_columns, step)
            t += 4
        elif t + 2 <= rows:
            two(w, at, columns, target, ahead, ahead_columns, step)
            t += 2
        else:
            one(w, at, columns, target, ahead, ahead_columns, step)
            t += 1
        ahead += -(-columns // SUM_COLUMNS) * ahead_columns * BAND_PANELS * step


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


def placer(element_bytes: int) -> Any:
    """The address of column k of panel p."""

    @jit
    def place(matrix, p, k):
        band, i = divmod(p, BAND_PANELS)
        return matrix.data + band * BAND_PANELS * matrix.panel_bytes + (k * BAND_PANELS + i) * LANES * element_bytes

    return place


def driver(load: Any, element_bytes: int) -> Any:
    """y = x W^T for rows begin .. end - 1 and panels first .. last - 1; see kernels/matmul.py."""
    assert BAND_PANELS == 4, "a row takes four, two or one of a band's panels at once"
    row_of_four, row_of_two, row_of_one = (row_kernel(load, element_bytes, panels) for panels in (4, 2, 1))
    step = LANES * element_bytes
    place = placer(element_bytes)
    zeros, fma = tile_of(f32x16, TILE_ROWS, PANELS_AT_ONCE), fma_unpack_tile(load)

    @jit
    def unpack_and_multiply(panel, second, columns, unpacked, x, sums):
        """The first tile of a block unpacks, hidden behind its multiplications."""
        for begin in range(0, columns, SUM_COLUMNS):
            part = zeros()
            for k in range(begin, min(begin + SUM_COLUMNS, columns)):
                target = unpacked + k * UNPACKED_STRIDE
                part = fma(part, panel + k * (BAND_PANELS * step), second, x + 4 * k, COPY_STRIDE, target)
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)

    @jit
    def unpack(panel, second, columns, target):
        for k in range(columns):
            for i in range(PANELS_AT_ONCE):
                store_f32(target + i * VECTOR_BYTES, load(panel + i * second + k * (BAND_PANELS * step)))
            target += UNPACKED_STRIDE

    @jit
    def block(matrix, x, x_stride, rows, first, last, out, out_stride, add, scratch):
        """At most BLOCK_ROWS rows and BLOCK_PANELS panels."""
        copied = scratch + UNPACKED_BYTES
        sums = copied + rows * COPY_STRIDE
        sums_bytes = rows * UNPACKED_STRIDE
        for i in range(0, -(-(last - first) // PANELS_AT_ONCE) * sums_bytes, VECTOR_BYTES):
            store_f32(sums + i, splat(0.0))
        for begin in range(0, matrix.columns, BLOCK_COLUMNS):
            columns = min(BLOCK_COLUMNS, matrix.columns - begin)
            copy_columns(x + 4 * begin, x_stride, rows, columns, copied)
            for p in range(first, last, PANELS_AT_ONCE):
                panel = place(matrix, p, begin)
                # Two panels side by side fill whole cache lines: one at once asks for half of them.
                following, begun = p - p % 2 + 2, p % 2 * (columns // 2)
                ahead = place(matrix, following, begin + begun)
                if following >= last:
                    ahead = place(matrix, first - first % 2, begin + columns + begun)
                # Without a second panel the first is multiplied twice.
                second = place(matrix, p + 1, begin) - panel if p + 1 < last else 0
                target = sums + (p - first) // PANELS_AT_ONCE * sums_bytes
                done = 0
                if rows > TILE_ROWS:  # a single tile has to ask for the next panels itself
                    unpack_and_multiply(panel, second, columns, scratch, copied, target)
                    done = TILE_ROWS
                else:
                    unpack(panel, second, columns, scratch)
                tiles(scratch, copied, done, rows, columns, target, ahead, step)
        for p in range(first, last):
            pair, i = divmod(p - first, PANELS_AT_ONCE)
            bias = matrix.bias + VECTOR_BYTES * p if matrix.bias != 0 else 0
            at = sums + pair * sums_bytes + i * VECTOR_BYTES
            finish_rows(at, rows, bias, out + VECTOR_BYTES * p, out_stride, add)

    @jit
    def drive_row(matrix, acts, t, first, last, out, add):
        """Band after band, of which a thread's share may begin or end within one."""
        p = first
        while p < last:
            bias = matrix.bias + VECTOR_BYTES * p if matrix.bias != 0 else 0
            panel, target = place(matrix, p, 0), out + VECTOR_BYTES * p
            count = min(last, (p // BAND_PANELS + 1) * BAND_PANELS) - p
            if count == 4:
                row_of_four(matrix, panel, acts, t, bias, target, 0, add)
                p += 4
            elif count >= 2:
                row_of_two(matrix, panel, acts, t, bias, target, 0, add)
                p += 2
            else:
                row_of_one(matrix, panel, acts, t, bias, target, 0, add)
                p += 1

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add, scratch):
        if end - begin == 1:
            drive_row(matrix, acts, begin, first, last, out + begin * stride, add)
            return
        for t in range(begin, end, BLOCK_ROWS):
            x, rows = acts.values + t * acts.stride, min(BLOCK_ROWS, end - t)
            for p in range(first, last, BLOCK_PANELS):
                stop = min(last, p + BLOCK_PANELS)
                block(matrix, x, acts.stride, rows, p, stop, out + t * stride, stride, add, scratch)

    return drive


def packer(element_bytes: int) -> Any:
    """A packer of panel p; `rows` is the address of all outputs' source rows, int64, -1 for zeros; strides: bytes."""
    peek, poke, zero = (peek_u32, poke_u32, np.uint32(0)) if element_bytes == 4 else (peek_u16, poke_u16, np.uint16(0))
    place = placer(element_bytes)

    @jit
    def pack(matrix, p, rows, source, row_stride, column_stride, scales, biases):
        rows += 8 * LANES * p
        target = place(matrix, p, 0)
        for k in range(matrix.columns):
            for r in range(LANES):
                row = peek_i64(rows + 8 * r)
                value = peek(source + row * row_stride + k * column_stride) if row >= 0 else zero
                poke(target + (k * BAND_PANELS * LANES + r) * element_bytes, value)

    return pack


def embedder(peek: Any, element_bytes: int) -> Any:
    """A function that writes row `row` of the matrix to out (float32, columns long)."""

    place = placer(element_bytes)

    @jit
    def embed(matrix, row, out):
        panel, lane = divmod(row, LANES)
        for k in range(matrix.columns):
            poke_f32(out + 4 * k, peek(place(matrix, panel, k) + lane * element_bytes))

    return embed


def unpack(packed: Any, rows: int, columns: int, value: np.dtype[Any]) -> Any:
    """[rows, columns] values of the bytes of packed bands; NumPy, for tests."""
    bands = packed.view(value).reshape(-1, columns, BAND_PANELS * LANES)
    return bands.transpose(0, 2, 1).reshape(-1, columns)[:rows]
