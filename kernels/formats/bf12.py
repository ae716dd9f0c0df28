"""bfloat16 in 12 bits, without loss: how a matrix of bfloat16 is packed where its exponents allow it.

A bfloat16 is a sign, eight bits of exponent and seven of mantissa. Weights use few exponents: of 32 outputs' weights,
all but some in ten thousand have one of eight upper halves, signs apart, when the lower half keeps the exponent's last
bit. So a weight is its lower half, eight bits, and four for the sign and the place of the upper half in a table. What
has another exponent is a stray: it stands in a list, and takes its place when the weights are unpacked. A product has
the bits that it has with bf16, from three quarters of the memory.

The weights of a band, two panels of 16 outputs, lie in units of four columns (kernels/simd/narrow.py), of which the
last one is filled up with weights that nothing reads:

    | table: 8 upper halves, the same with a sign | strays, by column | to a cache line | unit | unit | ...

A stray is an int64: its unit's first column << 32 | which of the unit's 128 values << 16 | its bits. The one that ends
the list has a column that no matrix has.
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
    band_of,
    place,
)
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import (
    ABSENT,
    BAND_PANELS,
    BF12,
    BLOCK_COLUMNS,
    LANES,
    STRAY_BYTES,
    TABLE_BYTES,
    TABLED,
    UNIT_BYTES,
    UNIT_COLUMNS,
    UPPERS,
    band_head_bytes,
)
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    TARGET,
    add_rows,
    add_tile,
    columns_of,
    f32x16,
    fma_column,
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
    set_value,
    store_rows,
    tile_of,
)

CODE = BF12
QUANTIZED = False
NO_COLUMN = 1 << 30
BAND_ROWS = BAND_PANELS * LANES
assert SUM_COLUMNS % UNIT_COLUMNS == BLOCK_COLUMNS % UNIT_COLUMNS == 0

zeros = tile_of(f32x16, 1, BAND_PANELS)
fma_first, fma_second, fma_third, fma_fourth = map(fma_column, range(UNIT_COLUMNS))
columns_of_first, columns_of_second = columns_of(0), columns_of(1)
UNPACKS_IN_TILE = TARGET.has_avx512  # while the first tile multiplies, see `start_block`
tile_zeros, tile_fma = tile_of(f32x16, TILE_ROWS, PANELS_AT_ONCE), fma_tile(load_f32)


@inline
def column_of(stray):
    """Of a stray's address: the first column of its unit."""
    return peek_i64(stray) >> 32


@inline
def with_strays(weights, stray, column):
    """A unit with its strays, of which `stray` is the first; and the first that is not its own."""
    while column_of(stray) == column:
        entry = peek_i64(stray)
        weights = set_value(weights, entry >> 16 & 0xFFFF, entry & 0xFFFF)
        stray += STRAY_BYTES
    return weights, stray


@inline
def fma_strays(part, at, table, stray, k, count, x):
    """part with a unit that has strays, of which `stray` is the first, or less than four columns; the next stray."""
    weights, stray = with_strays(load_unit(at, table), stray, k)
    part = fma_first(part, weights, x)
    if count > 1:
        part = fma_second(part, weights, x)
    if count > 2:
        part = fma_third(part, weights, x)
    if count > 3:
        part = fma_fourth(part, weights, x)
    return part, stray


def row_kernel(streams: int) -> Any:
    """The micro-kernel for one row of activations and a band, or two; `streams` is as bands.py has it."""

    @jit
    def row(matrix, p, x, apart):
        band = band_of(matrix, p)
        table, stray, at = load_table(band), band + TABLE_BYTES, place(matrix, p, 0)
        other_table, other_stray = load_table(band + apart), stray + apart
        acc, other = zeros(), zeros()
        for begin in range(0, matrix.columns, SUM_COLUMNS):
            part, other_part = zeros(), zeros()
            k, stop = begin, min(begin + SUM_COLUMNS, matrix.columns)
            while k < stop:
                until = min(stop - stop % UNIT_COLUMNS, column_of(stray))
                if streams == 2:
                    until = min(until, column_of(other_stray))
                for _ in range(k, until, UNIT_COLUMNS):
                    ask_ahead(at, UNIT_BYTES)
                    if streams == 2:
                        ask_ahead(at + apart, UNIT_BYTES)
                    part = fma_unit(part, at, table, x)
                    if streams == 2:
                        other_part = fma_unit(other_part, at + apart, other_table, x)
                    at, x = at + UNIT_BYTES, x + 4 * UNIT_COLUMNS
                k = max(k, until)
                if k < stop:
                    part, stray = fma_strays(part, at, table, stray, k, stop - k, x)
                    if streams == 2:
                        other_part, other_stray = fma_strays(
                            other_part, at + apart, other_table, other_stray, k, stop - k, x
                        )
                    k, at, x = k + UNIT_COLUMNS, at + UNIT_BYTES, x + 4 * UNIT_COLUMNS
            acc, other = add_tile(acc, part), add_tile(other, other_part)
        return acc, other

    return row


band_row, band_rows = row_kernel(1), row_kernel(2)


@inline
def unpack_unit(at, table, stray, k, p, target):
    """Four columns of PANELS_AT_ONCE panels from p on as float32; gives the next stray."""
    weights = load_unit(at, table)
    if column_of(stray) == k:
        weights, stray = with_strays(weights, stray, k)
    if PANELS_AT_ONCE == BAND_PANELS:
        store_rows(weights, target, UNPACKED_STRIDE)
    elif p % BAND_PANELS:
        store_rows(columns_of_second(weights), target, UNPACKED_STRIDE)
    else:
        store_rows(columns_of_first(weights), target, UNPACKED_STRIDE)
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
        for k in range(0, columns, UNIT_COLUMNS):
            stray = unpack_unit(at, table, stray, begin + k, p, unpacked + k * UNPACKED_STRIDE)
            at += UNIT_BYTES
        return 0
    for first in range(0, columns, SUM_COLUMNS):
        part = tile_zeros()
        for k in range(first, min(first + SUM_COLUMNS, columns), UNIT_COLUMNS):
            stray = unpack_unit(at, table, stray, begin + k, p, unpacked + k * UNPACKED_STRIDE)
            for j in range(k, min(k + UNIT_COLUMNS, columns)):
                part = tile_fma(part, unpacked + j * UNPACKED_STRIDE, VECTOR_BYTES, x + 4 * j, COPY_STRIDE)
            at += UNIT_BYTES
        store_rows(add_rows(part, sums, UNPACKED_STRIDE), sums, UNPACKED_STRIDE)
    return TILE_ROWS


# ------------------------------------------------------------------------------------------------------------- packing


@jit
def bits_of(rows, r, k, source, row_stride, column_stride):
    """The bits of a weight of output r of a band, whose source rows stand at `rows`, -1 for zeros."""
    source_row = peek_i64(rows + 8 * r)
    return np.int64(peek_u16(source + source_row * row_stride + k * column_stride)) if source_row >= 0 else np.int64(0)


@inline
def place_in_line(r, k):
    """The byte of output r of a band and column k in a unit's lines; see kernels/simd/narrow.py."""
    panel, n = r // LANES, r % LANES
    return n // 4 * 16 + panel * 8 + n % 4 * 2 + k % 2


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
    for begin in range(0, matrix.columns, UNIT_COLUMNS):
        at = place(matrix, p, begin)
        for k in range(UNIT_COLUMNS):
            is_there = begin + k < matrix.columns
            for r in range(BAND_ROWS):
                bits = bits_of(rows, r, begin + k, source, row_stride, column_stride) if is_there else np.int64(0)
                nibble = np.int64(peek_u8(places + (bits >> 8 & 127)))
                if nibble == ABSENT:
                    # There is room for all, unless somebody changes the file meanwhile; then it is not kept.
                    if is_there and stray < end:
                        poke_i64(stray, begin << 32 | (BAND_ROWS * k + r) << 16 | bits)
                        stray += STRAY_BYTES
                    nibble = 0
                nibble += bits >> 15 << 3
                i = place_in_line(r, k)
                poke_i8(at + 64 * (k // 2) + i, bits & 255)
                if k >= 2:
                    nibble = np.int64(peek_u8(at + 128 + i)) + (nibble << 4)
                poke_i8(at + 128 + i, nibble)
    while stray < place(matrix, p, 0):  # all that is left before the units
        poke_i64(stray, NO_COLUMN << 32)
        stray += STRAY_BYTES


@jit
def embed(matrix, row, out):
    """One row as float32."""
    p, r = row // LANES, row % BAND_ROWS
    band, at = band_of(matrix, p), place(matrix, p, 0)
    for k in range(matrix.columns):
        i, pair = place_in_line(r, k), k % UNIT_COLUMNS // 2
        upper = np.int64(peek_u8(band + (np.int64(peek_u8(at + 128 + i)) >> 4 * pair & 15)))
        poke_u32(out + 4 * k, upper << 24 | np.int64(peek_u8(at + 64 * pair + i)) << 16)
        if k % UNIT_COLUMNS == UNIT_COLUMNS - 1:
            at += UNIT_BYTES
    stray = band + TABLE_BYTES
    while column_of(stray) != NO_COLUMN:
        column, output = divmod(peek_i64(stray) >> 16 & 0xFFFF, BAND_ROWS)
        if output == r:
            poke_u32(out + 4 * (column_of(stray) + column), (peek_i64(stray) & 0xFFFF) << 16)
        stray += STRAY_BYTES


def unpack(packed: Any, rows: int, columns: int, strays: int) -> Any:
    """uint16 [rows, columns] of the bytes of packed bands; NumPy, for tests."""
    head, count = band_head_bytes(strays), -(-columns // UNIT_COLUMNS)
    bands = packed.reshape(-1, head + count * UNIT_BYTES)
    units = bands[:, head:].reshape(len(bands), count, UNIT_BYTES)
    places = np.concatenate([units[..., 128:] & 15, units[..., 128:] >> 4], axis=-1)
    upper = np.take_along_axis(bands[:, None, :TABLE_BYTES], places, axis=-1).astype(np.uint16)
    # unit, pair of columns, quarter of a panel, panel, lane of a quarter, column of a pair
    bits = (upper << 8 | units[..., :128]).reshape(*units.shape[:2], 2, 4, BAND_PANELS, 4, 2)
    weights = bits.transpose(0, 4, 3, 5, 1, 2, 6).reshape(len(bands), BAND_ROWS, UNIT_COLUMNS * count)
    for band, listed in enumerate(bands[:, TABLE_BYTES : TABLE_BYTES + STRAY_BYTES * (strays + 1)]):
        for stray in np.ascontiguousarray(listed).view(np.int64):
            if stray >> 32 == NO_COLUMN:
                break
            column, output = divmod(stray >> 16 & 0xFFFF, BAND_ROWS)
            weights[band, output, (stray >> 32) + column] = stray & 0xFFFF
    return weights.reshape(-1, UNIT_COLUMNS * count)[:rows, :columns]
