"""bfloat16 in 12 bits, without loss: how a matrix of bfloat16 is packed where its exponents allow it.

A bfloat16 is a sign, eight bits of exponent and seven of mantissa. Weights use few exponents: of 64 outputs' weights,
all but some in ten thousand have one of eight upper halves, signs apart, when the lower half keeps the exponent's last
bit. So a weight is its lower half, eight bits, and four for the sign and the place of the upper half in a table. What
has another exponent is a stray: it stands in a list, and takes its place when the weights are unpacked. A product has
the bits that it has with bf16, from three quarters of the memory.

The weights of a band, four panels of 16 outputs, lie in units of two columns (kernels/simd/narrow.py), of which an odd
last one is filled up with weights that nothing reads:

    | table: 8 upper halves, the same with a sign | strays, by column | to a cache line | unit | unit | ...

A stray is an int64: its unit's first column << 32 | which of the unit's 128 values << 16 | its bits. The one that ends
the list has a column that no matrix has.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats.bands import (
    COPY_STRIDE,
    HALF_PANELS,
    SUM_COLUMNS,
    TILE_ROWS,
    UNPACKED_STRIDE,
    VECTOR_BYTES,
    band_of,
    place,
)
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import (
    ABSENT,
    AHEAD_BYTES,
    BAND_PANELS,
    BF12,
    BLOCK_COLUMNS,
    LANES,
    STRAY_BYTES,
    TABLE_BYTES,
    TABLED,
    UNIT_BYTES,
    UPPERS,
    band_head_bytes,
)
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    TARGET,
    add_rows,
    add_tile,
    f32x16,
    fma_even,
    fma_odd,
    fma_tile,
    fma_unit,
    load_f32,
    load_table,
    load_unit,
    peek_i64,
    peek_u8,
    peek_u16,
    poke_i8,
    poke_i64,
    poke_u32,
    prefetch,
    set_value,
    store_f32,
    store_rows,
    tile_of,
    vector_of,
)

CODE = BF12
QUANTIZED = False
NO_COLUMN = 1 << 30
BAND_ROWS = BAND_PANELS * LANES
assert SUM_COLUMNS % 2 == BLOCK_COLUMNS % 2 == 0

load_first, load_second = load_unit([0]), load_unit([1])
first_even, first_odd, second_even, second_odd = map(vector_of, range(4))
UNPACKS_IN_TILE = TARGET.has_avx512  # while the first tile multiplies, see `start_block`
tile_zeros, tile_fma = tile_of(f32x16, TILE_ROWS, PANELS_AT_ONCE), fma_tile(load_f32)


@inline
def column_of(stray):
    """Of a stray's address: the first column of its unit."""
    return peek_i64(stray) >> 32


@inline
def with_strays(weights, stray, column, half):
    """A unit, or half of one, with its strays, of which `stray` is the first; and the first that is not its own."""
    while column_of(stray) == column:
        entry = peek_i64(stray)
        weights = set_value(weights, (entry >> 16 & 0xFFFF) - 64 * half, entry & 0xFFFF)
        stray += STRAY_BYTES
    return weights, stray


def row_kernel(*halves: int) -> Any:
    """The micro-kernel for one row of activations and a band, or one half of it.

    It asks for what it reads soon, for every other line of it (a unit has three); kernels/formats/affine.py says why.
    """
    zeros, load, fma = tile_of(f32x16, 1, HALF_PANELS * len(halves)), load_unit(halves), fma_unit(halves)
    first_half = halves[0]

    @jit
    def row(matrix, p, x):
        band = band_of(matrix, p)
        table, stray, at = load_table(band), band + TABLE_BYTES, place(matrix, p, 0)
        acc = zeros()
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part, k, stop = zeros(), begin, min(begin + SUM_COLUMNS, matrix.columns)
            while k < stop:
                until = min(stop - stop % 2, column_of(stray))
                for _ in range(k, until, 2):
                    for line in range(0, UNIT_BYTES, 128):
                        prefetch((at + line + AHEAD_BYTES) & -128)
                    part = fma(part, at, table, x)
                    at, x = at + UNIT_BYTES, x + 8
                k = max(k, until)
                if k < stop:  # a unit with strays, or one column
                    weights, stray = with_strays(load(at, table), stray, k, first_half)
                    part = fma_even(part, weights, x)
                    if k + 1 < stop:
                        part = fma_odd(part, weights, x)
                    k, at, x = k + 2, at + UNIT_BYTES, x + 8
            acc = add_tile(acc, part)
        return acc

    return row


band_row, first_half_row, second_half_row = row_kernel(0, 1), row_kernel(0), row_kernel(1)


@jit
def half_row(matrix, p, x):
    return second_half_row(matrix, p, x) if p % BAND_PANELS else first_half_row(matrix, p, x)


@inline
def unpack_unit(at, table, stray, k, p, target):
    """Two columns of PANELS_AT_ONCE panels from p on as float32; gives the next stray."""
    half = p % BAND_PANELS // HALF_PANELS
    weights = load_second(at, table) if half else load_first(at, table)
    if column_of(stray) == k:
        weights, stray = with_strays(weights, stray, k, half)
    if PANELS_AT_ONCE == 2:
        store_f32(target + VECTOR_BYTES, second_even(weights))
        store_f32(target + VECTOR_BYTES + UNPACKED_STRIDE, second_odd(weights))
    elif p % 2:
        store_f32(target, second_even(weights))
        store_f32(target + UNPACKED_STRIDE, second_odd(weights))
        return stray
    store_f32(target, first_even(weights))
    store_f32(target + UNPACKED_STRIDE, first_odd(weights))
    return stray


@jit
def start_block(matrix, p, begin, columns, rows, unpacked, x, sums):
    """The first tile of a block unpacks, hidden behind its multiplications; a single tile asks for what comes.

    Where registers are few, sums would go to memory and back: 16 rows took 19 % longer so with AVX2.
    """
    band = band_of(matrix, p)
    table, stray, at = load_table(band), band + TABLE_BYTES, place(matrix, p, begin)
    while column_of(stray) < begin:
        stray += STRAY_BYTES
    if rows <= TILE_ROWS or not UNPACKS_IN_TILE:
        for k in range(0, columns, 2):
            stray = unpack_unit(at, table, stray, begin + k, p, unpacked + k * UNPACKED_STRIDE)
            at += UNIT_BYTES
        return 0
    for first in range(0, columns, SUM_COLUMNS):
        part = tile_zeros()
        for k in range(first, min(first + SUM_COLUMNS, columns), 2):
            target = unpacked + k * UNPACKED_STRIDE
            stray = unpack_unit(at, table, stray, begin + k, p, target)
            part = tile_fma(part, target, VECTOR_BYTES, x + 4 * k, COPY_STRIDE)
            if k + 1 < columns:
                odd = target + UNPACKED_STRIDE
                part = tile_fma(part, odd, VECTOR_BYTES, x + 4 * k + 4, COPY_STRIDE)
            at += UNIT_BYTES
        store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)
    return TILE_ROWS


# ------------------------------------------------------------------------------------------------------------- packing


@jit
def bits_of(rows, r, k, source, row_stride, column_stride):
    """The bits of a weight of output r of a band, whose source rows stand at `rows`, -1 for zeros."""
    source_row = peek_i64(rows + 8 * r)
    return np.int64(peek_u16(source + source_row * row_stride + k * column_stride)) if source_row >= 0 else np.int64(0)


@jit
def count_band(columns, rows, source, row_stride, column_stride, counts):
    """Add to counts, int64 [UPPERS], how often the weights of a band have each upper half."""
    for r in range(BAND_ROWS):
        for k in range(columns):
            upper = bits_of(rows, r, k, source, row_stride, column_stride) >> 8 & 127
            poke_i64(counts + 8 * upper, peek_i64(counts + 8 * upper) + 1)


@jit
def pack(matrix, p, rows, source, row_stride, column_stride, places, unused):
    """Pack a band where p is its first panel; places is the address of packing.Exponents.places."""
    if p % BAND_PANELS != 0:
        return
    band, rows, places = band_of(matrix, p), rows + 8 * LANES * p, places + p // BAND_PANELS * UPPERS
    for upper in range(UPPERS):
        if peek_u8(places + upper) != ABSENT:
            poke_i8(band + peek_u8(places + upper), upper)
            poke_i8(band + TABLED + peek_u8(places + upper), upper + 128)
    stray, end = band + TABLE_BYTES, band + TABLE_BYTES + STRAY_BYTES * matrix.strays
    for k in range(0, matrix.columns, 2):
        at = place(matrix, p, k)
        for half in range(2):
            for i in range(64):
                panel, n, odd = HALF_PANELS * half + i // 8 % 2, i // 16 * 4 + i // 2 % 4, i % 2
                is_there, bits = k + odd < matrix.columns, np.int64(0)
                if is_there:
                    bits = bits_of(rows, LANES * panel + n, k + odd, source, row_stride, column_stride)
                nibble = np.int64(peek_u8(places + (bits >> 8 & 127)))
                if nibble == ABSENT:
                    # There is room for all, unless somebody changes the file meanwhile; then it is not kept.
                    if is_there and stray < end:
                        poke_i64(stray, k << 32 | (LANES * (2 * panel + odd) + n) << 16 | bits)
                        stray += STRAY_BYTES
                    nibble = 0
                nibble += bits >> 15 << 3
                poke_i8(at + 64 * half + i, bits & 255)
                if half:
                    nibble = np.int64(peek_u8(at + 128 + i)) + (nibble << 4)
                poke_i8(at + 128 + i, nibble)
    while stray < place(matrix, p, 0):  # all that is left before the units
        poke_i64(stray, NO_COLUMN << 32)
        stray += STRAY_BYTES


@jit
def embed(matrix, row, out):
    """One row as float32."""
    p, n = divmod(row, LANES)
    band, at, half = band_of(matrix, p), place(matrix, p, 0), p % BAND_PANELS // HALF_PANELS
    for k in range(matrix.columns):
        i = n // 4 * 16 + p % HALF_PANELS * 8 + n % 4 * 2 + k % 2
        upper = np.int64(peek_u8(band + (np.int64(peek_u8(at + 128 + i)) >> 4 * half & 15)))
        poke_u32(out + 4 * k, upper << 24 | np.int64(peek_u8(at + 64 * half + i)) << 16)
        at += k % 2 * UNIT_BYTES
    stray = band + TABLE_BYTES
    while column_of(stray) != NO_COLUMN:
        vector, lane = divmod(peek_i64(stray) >> 16 & 0xFFFF, LANES)
        if lane == n and vector // 2 == p % BAND_PANELS:
            poke_u32(out + 4 * (column_of(stray) + vector % 2), (peek_i64(stray) & 0xFFFF) << 16)
        stray += STRAY_BYTES


def unpack(packed: Any, rows: int, columns: int, strays: int) -> Any:
    """uint16 [rows, columns] of the bytes of packed bands; NumPy, for tests."""
    head, count = band_head_bytes(strays), -(-columns // 2)
    bands = packed.reshape(-1, head + count * UNIT_BYTES)
    units = bands[:, head:].reshape(len(bands), count, UNIT_BYTES)
    places = np.concatenate([units[..., 128:] & 15, units[..., 128:] >> 4], axis=-1)
    upper = np.take_along_axis(bands[:, None, :TABLE_BYTES], places, axis=-1).astype(np.uint16)
    # unit, half, quarter of a panel, panel of a half, lane of a quarter, column
    bits = (upper << 8 | units[..., :128]).reshape(*units.shape[:2], 2, 4, 2, 4, 2)
    weights = bits.transpose(0, 2, 4, 3, 5, 1, 6).reshape(len(bands), BAND_PANELS, LANES, 2 * count)
    for band, listed in enumerate(bands[:, TABLE_BYTES : TABLE_BYTES + STRAY_BYTES * (strays + 1)]):
        for stray in np.ascontiguousarray(listed).view(np.int64):
            if stray >> 32 == NO_COLUMN:
                break
            (vector, lane), column = divmod(stray >> 16 & 0xFFFF, LANES), stray >> 32
            weights[band, vector // 2, lane, column + vector % 2] = stray & 0xFFFF
    return weights.reshape(-1, 2 * count)[:rows, :columns]
