"""The inner loops of attention: some queries against the keys and values of cache blocks, in every KV type.

A micro-kernel is made for a number of queries (rows) and of vectors that it takes side by side (width): as many as keep
the multipliers busy. Neither changes the order of a sum. The layout of a block is in kernels/kv_block.py.
"""

from typing import Any

from tfm.kernels.jit import jit
from tfm.kernels.kv_block import bytes_of_head
from tfm.kernels.online_softmax import clear_state, softmax_block
from tfm.kernels.records import KV_BLOCK, KV_TYPES, LANES, STATE_HEAD
from tfm.kernels.simd import (
    PANELS_AT_ONCE,
    TARGET,
    TILE,
    add_tile,
    f32x16,
    fma,
    fma_tile,
    load_f16,
    load_f32,
    load_i8,
    load_rows,
    peek_f32,
    peek_i64,
    prefetch,
    splat,
    store_f32,
    store_rows,
    tile_of,
)

F32, F16, Q8 = KV_TYPES["f32"], KV_TYPES["f16"], KV_TYPES["q8"]
FEW_WIDTH = 4 if TARGET.has_avx512 else 1
# Vectors of keys (or of a value) that a micro-kernel takes at once.
WIDTHS = {1: 4, 3: FEW_WIDTH, 4: FEW_WIDTH, TILE: PANELS_AT_ONCE}

SUM_ELEMENTS = 16  # of a head, that are summed by themselves


def score_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """s[r, 0..63] = q[r] . k[0..63] for a tile of queries; rows of s are 256 bytes.

    The sum over the elements of a head runs in order in parts of 16, and the parts are added in order: with one chain
    of 64 or 80 the error was up to 4 times NumPy's.

    Few queries read keys and values faster than memory gives them: they ask for the same of the next block, `ahead`
    bytes on. Without, attention of a token over 3,600 positions took 3.8 ms, and 2.8 with it; with a distance of half
    as much 2.9, of twice as much 3.0. It needs blocks that lie in large pages.
    """
    width = WIDTHS[rows]
    zeros, fma = tile_of(f32x16, rows, width), fma_tile(load)
    few = rows < TILE
    step = LANES * element_bytes

    @jit
    def scores(k, q, q_stride, head_dim, s, ahead):
        for j in range(0, KV_BLOCK, width * LANES):
            total = zeros()
            for begin in range(0, head_dim, SUM_ELEMENTS):
                part = zeros()
                for h in range(begin, min(begin + SUM_ELEMENTS, head_dim)):
                    at = k + (h * KV_BLOCK + j) * element_bytes
                    if few:
                        for line in range(0, width * step, 64):
                            prefetch(at + ahead + line)
                    part = fma(part, at, step, q + 4 * h, q_stride)
                total = add_tile(total, part)
            store_rows(total, s + 4 * j, 4 * KV_BLOCK)

    return scores


def value_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """o[r] += sum over first <= s < last of p[r, s] v[s] for a tile of queries that all see these positions.

    What the wide tiles leave of a head goes one vector at a time.
    """
    width = WIDTHS[rows]
    zeros, one, fma = tile_of(f32x16, rows, width), tile_of(f32x16, rows), fma_tile(load)
    few = rows < TILE
    step = LANES * element_bytes

    @jit
    def values(v, p, first, last, head_size, o, o_stride, ahead):
        d = 0
        while d + width * LANES <= head_size:
            acc = load_rows(zeros(), o + 4 * d, o_stride)
            for s in range(first, last):
                at = v + (s * head_size + d) * element_bytes
                if few:
                    for line in range(0, width * step, 64):
                        prefetch(at + ahead + line)
                acc = fma(acc, at, step, p + 4 * s, 4 * KV_BLOCK)
            store_rows(acc, o + 4 * d, o_stride)
            d += width * LANES
        while d < head_size:
            rest = load_rows(one(), o + 4 * d, o_stride)
            for s in range(first, last):
                rest = fma(rest, v + (s * head_size + d) * element_bytes, 0, p + 4 * s, 4 * KV_BLOCK)
            store_rows(rest, o + 4 * d, o_stride)
            d += LANES

    return values


def edge_kernel(load: Any, element_bytes: int) -> Any:
    """The same for positions that only some of a tile's queries see; `begin` is the block's first position.

    A weight of 0 would not do: 0 times a NaN of a later position is NaN, and the logits would depend on the chunks.
    """

    @jit
    def edge(v, p, first, last, rows, positions, begin, window, head_size, o, o_stride):
        for r in range(rows):
            high = peek_i64(positions + 8 * r) + 1 - begin
            low = high - window if window != 0 else first
            for s in range(max(first, low), min(last, high)):
                weight = splat(peek_f32(p + 4 * (KV_BLOCK * r + s)))
                for d in range(0, head_size, LANES):
                    at = o + r * o_stride + 4 * d
                    store_f32(at, fma(load(v + (s * head_size + d) * element_bytes), weight, load_f32(at)))

    return edge


# KV type -> how its elements are loaded, and their bytes
ELEMENTS = {F16: (load_f16, 2), F32: (load_f32, 4), Q8: (load_i8, 1)}


@jit
def rows_of_tile(kv_type, queries):
    """Of the micro-kernels that take so many queries at once, if there is one, the smallest.

    There are some for TILE, 4 and 1, and for 3 in f16, the usual type of keys and values. Each one more takes 0.2 s to
    compile.
    """
    if queries > 4:
        return TILE
    if queries == 1:
        return 1
    return 3 if queries < 4 and kv_type == F16 else 4


def by_kind(kernel: Any) -> Any:
    """A compiled function that calls the kernel for a KV type and a number of queries."""
    f16_many, f16_four, f16_three, f16_one = (kernel(*ELEMENTS[F16], rows) for rows in (TILE, 4, 3, 1))
    f32_many, f32_four, f32_one = (kernel(*ELEMENTS[F32], rows) for rows in (TILE, 4, 1))
    q8_many, q8_four, q8_one = (kernel(*ELEMENTS[Q8], rows) for rows in (TILE, 4, 1))

    @jit
    def call(kv_type, rows, *arguments):
        if kv_type == F16:
            if rows == 1:
                f16_one(*arguments)
            elif rows == 3:
                f16_three(*arguments)
            elif rows == 4:
                f16_four(*arguments)
            else:
                f16_many(*arguments)
        elif kv_type == F32:
            if rows == 1:
                f32_one(*arguments)
            elif rows == 4:
                f32_four(*arguments)
            else:
                f32_many(*arguments)
        elif rows == 1:
            q8_one(*arguments)
        elif rows == 4:
            q8_four(*arguments)
        else:
            q8_many(*arguments)

    return call


scores, values = by_kind(score_kernel), by_kind(value_kernel)
f16_edge, f32_edge, q8_edge = (edge_kernel(*ELEMENTS[kv_type]) for kv_type in (F16, F32, Q8))


@jit
def edge(kv_type, *arguments):
    if kv_type == F16:
        f16_edge(*arguments)
    elif kv_type == F32:
        f32_edge(*arguments)
    else:
        q8_edge(*arguments)


@jit
def in_block(position):
    """A position counted from a block's start, moved to the block's nearest end where it lies outside."""
    return min(max(position, 0), KV_BLOCK)


@jit
def segment(
    kv_type, rows, left, heads, blocks, first, last, head_offset, following, q, positions, s, states, state_stride
):  # fmt: skip
    """Blocks first .. last - 1 (of one segment) for a tile of queries: the state of each row from nothing.

    Of the tile's rows only the first `left` are queries; the others repeat the last one, and nobody reads their states.
    `following` is the address of the keys that this thread will read after these, 0 where that is not known.
    """
    head_size, window = heads.head_size, heads.sliding_window
    half = bytes_of_head(kv_type, head_size) // 2
    scales = half - 4 * KV_BLOCK if kv_type == Q8 else 0  # where they are in the keys, and in the values
    o = states + STATE_HEAD
    for r in range(rows):
        clear_state(states + r * state_stride, head_size)
    for b in range(first, last):
        begin = b * KV_BLOCK
        k = peek_i64(blocks + 8 * b) + head_offset
        v = k + half
        next_k = peek_i64(blocks + 8 * (b + 1)) + head_offset if b + 1 < last else following
        ahead = next_k - k if next_k != 0 else 0
        scores(kv_type, rows, k, q, 4 * head_size, heads.head_dim, s, ahead)
        for r in range(left):
            high = peek_i64(positions + 8 * r) + 1 - begin
            low = high - window if window != 0 else 0
            softmax_block(
                s + 4 * KV_BLOCK * r, low, high, heads.softcap,
                k + scales if scales != 0 else 0, v + scales if scales != 0 else 0,
                states + r * state_stride, head_size,
            )  # fmt: skip
        # Queries lie in order of their positions: the first sees least far ahead, the last least far back.
        longest = peek_i64(positions + 8 * (rows - 1)) + 1 - begin
        low, end = in_block(longest - window) if window != 0 else 0, in_block(longest)
        high = max(low, in_block(peek_i64(positions) + 1 - begin))
        if low > 0:
            edge(kv_type, v, s, 0, low, left, positions, begin, window, head_size, o, state_stride)
        values(kv_type, rows, v, s, low, high, head_size, o, state_stride, ahead)
        if end > high:
            edge(kv_type, v, s, high, end, left, positions, begin, window, head_size, o, state_stride)
