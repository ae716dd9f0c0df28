"""Products with weights in floating point: what all formats share that lie in bands.

A panel holds 16 outputs, a vector one column of it. Two panels are a band, interleaved along K, as dense.py and
bf12.py show; the last band is filled up with zeros.

y[n] = sum over k of w[n, k] x[k], in float32. 64 columns are summed from nothing, one fused multiply-add for each k in
order, and such sums are added in order: one chain of 1536 additions would be 2.5 times less exact than NumPy, this is
as exact.

One row of activations takes a band at once and reads it from first to last: one chain of additions would wait for its
own result, and from four panels one after the other a thread read 24 GB/s of bf16, 31 where they lay side by side. Two
suffice, and threads that share a matrix out part it between bands; with bands of four the one in the middle was read by
both, and a step took 7 % longer (with AVX2 and bf12, where registers were too few for four, 28 %).

Many rows are multiplied in pieces that fit the caches: at the beginning of a block of rows 192 columns of a panel (or
of two) are unpacked to float32, and they stay in the nearest cache while tile after tile is multiplied with them; those
columns of the rows stay in the second. Two panels share the broadcast of an activation.

A format gives
    band_row(matrix, p, x, apart)
                               the sums of one row of activations with the band that begins with panel p, and with the
                               one that lies `apart` bytes after it: tiles of two panels. Where `streams` is 1 the
                               second is nothing
    band_rows(matrix, p, x, apart)
                               the same with two streams
    start_block(matrix, p, begin, columns, rows, unpacked, x, sums)
                               unpacks so many columns of PANELS_AT_ONCE panels from p on; it may multiply the first
                               rows meanwhile, and returns how many it has multiplied
"""

from typing import Any

from tfm.kernels.formats import bias_of, finish, finish_panel
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import (
    BAND_PANELS,
    BF12,
    BLOCK_COLUMNS,
    BLOCK_PANELS,
    BLOCK_ROWS,
    F32,
    LANES,
    UNIT_BYTES,
    UNIT_COLUMNS,
    band_head_bytes,
)
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    STREAMS,
    TARGET,
    TILE,
    add_rows,
    f32x16,
    fma_tile,
    load_f32,
    peek_f32,
    poke_f32,
    prefetch,
    splat,
    store_f32,
    store_rows,
    tile_of,
    vector_of,
)

TILE_ROWS = 12 if TARGET.has_avx512 else TILE  # of 32 registers 24 hold sums, 2 weights and 1 an activation
SUM_COLUMNS = 64  # columns that are summed by themselves
# Columns that a tile of 6 rows takes between two jumps: on a Zen 3 a prompt in bf16 took 9 % less time so, with two 5 %
# less, with eight as much as with one. A tile of 12 rows has enough to do between them.
UNROLLED = 1 if TARGET.has_avx512 else 4
VECTOR_BYTES = 4 * LANES
UNPACKED_STRIDE = PANELS_AT_ONCE * VECTOR_BYTES  # of a column of the panels that are multiplied at once
UNPACKED_BYTES = BLOCK_COLUMNS * UNPACKED_STRIDE
# An odd number of cache lines: rows of 2048 columns lie in the same few places of the caches, and drive each other out.
COPY_STRIDE = 4 * BLOCK_COLUMNS + 64
assert BLOCK_COLUMNS % SUM_COLUMNS == BLOCK_PANELS % PANELS_AT_ONCE == BAND_PANELS % PANELS_AT_ONCE == 0
first_panel, second_panel = vector_of(0), vector_of(1)
head_bytes = jit(band_head_bytes)


@inline
def band_of(matrix, p):
    """The address of the band of panel p."""
    return matrix.data + p // BAND_PANELS * (BAND_PANELS * matrix.panel_bytes)


@inline
def next_band(p):
    """The first panel of the band after that of panel p."""
    return p - p % BAND_PANELS + BAND_PANELS


@inline
def element_bytes(matrix):
    return 4 if matrix.format == F32 else 2


@jit
def place(matrix, p, k):
    """The address of column k of panel p; in bf12 that of the unit which has it."""
    if matrix.format == BF12:
        return band_of(matrix, p) + head_bytes(matrix.strays) + k // UNIT_COLUMNS * UNIT_BYTES
    return band_of(matrix, p) + (k * BAND_PANELS + p % BAND_PANELS) * LANES * element_bytes(matrix)


def tile_kernel(rows: int) -> Any:
    """The micro-kernel for `rows` rows of activations and unpacked panels: adds to their sums, rows of UNPACKED_STRIDE.

    With every 64 columns it asks for so many steps of what comes next, of step_bytes each; when it asked with every
    column, the product was 3 to 8 % slower.
    """
    zeros, fma = tile_of(f32x16, rows, PANELS_AT_ONCE), fma_tile(load_f32)

    @jit
    def tile(w, x, columns, sums, ahead, ahead_steps, step_bytes):
        for begin in range(0, columns, SUM_COLUMNS):
            for _ in range(ahead_steps):
                for line in range(0, step_bytes, 64):
                    prefetch(ahead + line)
                ahead += step_bytes
            part = zeros()
            k, stop = begin, min(begin + SUM_COLUMNS, columns)
            while k + UNROLLED <= stop:
                for i in range(k, k + UNROLLED):
                    part = fma(part, w + i * UNPACKED_STRIDE, VECTOR_BYTES, x + 4 * i, COPY_STRIDE)
                k += UNROLLED
            while k < stop:
                part = fma(part, w + k * UNPACKED_STRIDE, VECTOR_BYTES, x + 4 * k, COPY_STRIDE)
                k += 1
            store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)

    return tile


many, four, two, one = (tile_kernel(rows) for rows in (TILE_ROWS, 4, 2, 1))


@jit
def tiles(w, x, t, rows, columns, sums, ahead, steps, step_bytes):
    """The tiles of a block's rows from t on. Together they ask for `steps` steps with every 64 columns."""
    rest = (rows - t) % TILE_ROWS
    count = (rows - t) // TILE_ROWS + rest // 4 + rest % 4 // 2 + rest % 2
    ahead_steps = -(-steps // count)
    while t < rows:
        at, target = x + t * COPY_STRIDE, sums + t * UNPACKED_STRIDE
        if t + TILE_ROWS <= rows:
            many(w, at, columns, target, ahead, ahead_steps, step_bytes)
            t += TILE_ROWS
        elif t + 4 <= rows:
            four(w, at, columns, target, ahead, ahead_steps, step_bytes)
            t += 4
        elif t + 2 <= rows:
            two(w, at, columns, target, ahead, ahead_steps, step_bytes)
            t += 2
        else:
            one(w, at, columns, target, ahead, ahead_steps, step_bytes)
            t += 1
        ahead += -(-columns // SUM_COLUMNS) * ahead_steps * step_bytes


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
        finish_panel(load_f32(sums + t * UNPACKED_STRIDE), bias, out + t * out_stride, add)


def driver(band_row: Any, band_rows: Any, start_block: Any) -> Any:
    """y = x W^T for rows begin .. end - 1 and panels first .. last - 1; see kernels/matmul.py."""

    @jit
    def block(matrix, x, x_stride, rows, first, last, out, out_stride, add, scratch):
        """At most BLOCK_ROWS rows and BLOCK_PANELS panels. Both of a pair are multiplied; those wanted are stored."""
        # What comes next is asked for by bands, where a panel is multiplied at once each of the two asks for its part.
        step_bytes, steps = BAND_PANELS * LANES * element_bytes(matrix), SUM_COLUMNS
        if matrix.format == BF12:
            step_bytes, steps = UNIT_BYTES, SUM_COLUMNS // UNIT_COLUMNS
        turns = BAND_PANELS // PANELS_AT_ONCE
        copied = scratch + UNPACKED_BYTES
        sums = copied + rows * COPY_STRIDE
        sums_bytes = rows * UNPACKED_STRIDE
        begin_panel = first - first % PANELS_AT_ONCE
        for i in range(0, -(-(last - begin_panel) // PANELS_AT_ONCE) * sums_bytes, VECTOR_BYTES):
            store_f32(sums + i, splat(0.0))
        for begin in range(0, matrix.columns, BLOCK_COLUMNS):
            columns = min(BLOCK_COLUMNS, matrix.columns - begin)
            copy_columns(x + 4 * begin, x_stride, rows, columns, copied)
            for p in range(begin_panel, last, PANELS_AT_ONCE):
                following, begun = next_band(p), p % BAND_PANELS // PANELS_AT_ONCE * (columns // turns)
                ahead = place(matrix, following, begin + begun)
                if following >= last:
                    ahead = place(matrix, first - first % BAND_PANELS, begin + columns + begun)
                target = sums + (p - begin_panel) // PANELS_AT_ONCE * sums_bytes
                done = start_block(matrix, p, begin, columns, rows, scratch, copied, target)
                tiles(scratch, copied, done, rows, columns, target, ahead, steps // turns, step_bytes)
        for p in range(first, last):
            pair, i = divmod(p - begin_panel, PANELS_AT_ONCE)
            at = sums + pair * sums_bytes + i * VECTOR_BYTES
            finish_rows(at, rows, bias_of(matrix, p), out + VECTOR_BYTES * p, out_stride, add)

    @jit
    def drive_row(matrix, x, first, last, out, add):
        """One row: band after band, or two at once; a thread's share may begin or end within one."""
        p = first
        if STREAMS == 2 and p % BAND_PANELS == 0:
            half = (last - first) // (2 * BAND_PANELS) * BAND_PANELS
            for p in range(first, first + half, BAND_PANELS):
                acc, other = band_rows(matrix, p, x, half * matrix.panel_bytes)
                finish(acc, bias_of(matrix, p), out + VECTOR_BYTES * p, 0, add)
                finish(other, bias_of(matrix, p + half), out + VECTOR_BYTES * (p + half), 0, add)
            p = first + 2 * half
        while p < last:
            bias, target = bias_of(matrix, p), out + VECTOR_BYTES * p
            (acc, _), following = band_row(matrix, p - p % BAND_PANELS, x, 0), next_band(p)
            if p % BAND_PANELS == 0 and following <= last:
                finish(acc, bias, target, 0, add)
            else:
                following = p + 1
                finish_panel(second_panel(acc) if p % BAND_PANELS else first_panel(acc), bias, target, add)
            p = following

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add, scratch):
        if end - begin == 1:
            drive_row(matrix, acts.values + begin * acts.stride, first, last, out + begin * stride, add)
            return
        for t in range(begin, end, BLOCK_ROWS):
            x, rows = acts.values + t * acts.stride, min(BLOCK_ROWS, end - t)
            p = first
            while p < last:
                stop = min(last, p - p % PANELS_AT_ONCE + BLOCK_PANELS)
                block(matrix, x, acts.stride, rows, p, stop, out + t * stride, stride, add, scratch)
                p = stop

    return drive
