"""What the machine can do at most: bytes read from memory a second, and multiply-adds a second in registers.

Each function is the loop that one thread runs; engine/roofline.py has all threads run it together and takes the time.

    read      reads `count` vectors of 64 bytes, one after the other, and adds them up
    read_side_by_side
              the same at four places in turn, which is the faster on some processors
    floats    `count` rounds of ROWS vectors of 16 float32 multiply-adds: what weights in floating point need
    nibbles   `count` rounds of ROWS vectors of 64 integer multiply-adds, as for 4-bit weights
    octets    the same as for 8-bit weights

The multiply loops use the very operations of the micro-kernels in kernels/formats. They have as many accumulators as
keep the multipliers busy (two a cycle, four cycles each), and take a vector of weights for each round from 4 KB in the
nearest cache: a product of what never changes would be computed once, before the loop. `memory` is that 4 KB, `out`
room for 12 vectors, where sums begin and end: sums that begin alike would be computed once as well.
"""

from tfm.kernels.jit import jit
from tfm.kernels.simd import (
    AHEAD_BYTES,
    TARGET,
    TILE,
    add_tile,
    byte_sums,
    dot_bytes,
    dot_nibbles,
    f32x16,
    fma_tile,
    load_bytes,
    load_f32,
    load_rows,
    nibble_sums,
    prefetch,
    store_rows,
    tile_of,
)

ROWS = 12 if TARGET.has_avx512 else TILE
FLOAT_MACS, INTEGER_MACS = 16 * ROWS, 64 * ROWS  # of a round
WEIGHTS = 63 * 64  # the places of 64 vectors of weights, as a mask

read_sums, float_sums, fma = tile_of(f32x16, 8), tile_of(f32x16, ROWS), fma_tile(load_f32)
nibbles_start, octets_start = nibble_sums(ROWS), byte_sums(ROWS)


@jit
def read(memory, count, out):
    """count is a multiple of 8."""
    acc = read_sums()
    # As the kernels of a single row do: on a Zen 4 28.3 GB/s, and 27.3 without.
    for at in range(memory, memory + 64 * count, 64 * 8):
        for line in range(0, 64 * 8, 64):
            prefetch(at + line + AHEAD_BYTES)
        acc = add_tile(acc, load_rows(acc, at, 64))
    store_rows(acc, out, 64)


@jit
def read_side_by_side(memory, count, out):
    """count is a multiple of 32. On a Zen 3 25 GB/s, and 19 with `read`; two places gave 24, asking for them 22."""
    acc, size = read_sums(), 64 * count // 4
    for at in range(memory, memory + size, 64 * 8):
        for place in range(at, at + 4 * size, size):
            acc = add_tile(acc, load_rows(acc, place, 64))
    store_rows(acc, out, 64)


@jit
def floats(memory, count, out):
    """The multiply-adds that were done."""
    acc = load_rows(float_sums(), out, 64)
    for i in range(count):
        acc = fma(acc, memory + (64 * i & WEIGHTS), 0, out, 0)
    store_rows(acc, out, 64)
    return count * FLOAT_MACS


@jit
def nibbles(memory, count, out):
    """The multiply-adds that were done."""
    acc = nibbles_start()
    for i in range(count):
        acc = dot_nibbles(acc, load_bytes(memory + (64 * i & WEIGHTS)), out, 4)
    store_rows(acc, out, 64)
    return count * INTEGER_MACS


@jit
def octets(memory, count, out):
    """The multiply-adds that were done."""
    acc = octets_start(out, 4)
    for i in range(count):
        acc = dot_bytes(acc, load_bytes(memory + (64 * i & WEIGHTS)), out, 4)
    store_rows(acc, out, 64)
    return count * INTEGER_MACS
