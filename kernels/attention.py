"""Fused attention over cache blocks: scores, softmax and the sum of values in one pass, in float32.

For a query q at position t, with the keys and values of the positions it may see (s <= t, and s > t - window):

    score[s] = cap(scale * q . k[s])        cap(z) = softcap * tanh(z / softcap), or z
    o = sum_s softmax(score)[s] * v[s]

A cache block holds 64 positions of a head: keys transposed, [head_size, 64], so that a lane is a position, and values
as [64, head_size], so that a lane is an element of the head; neither product sums across lanes. In q8 a position's key
(and value) has one float32 scale, 64 of them behind the int8.

Blocks are walked from the first that the window reaches, with the online softmax (Milakov and Gimelshein 2018): a
maximum m, a sum l and o are scaled by exp(m - m') when the maximum grows. Eight blocks are a segment, summed by itself
from nothing and then merged into the whole in order. So a result depends on the position only: not on the rows that
share a tile (they share the loads), nor on whether segments were summed by one thread in turn or by many at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import dense
from tfm.kernels.jit import Entry, called_as_piece, jit
from tfm.kernels.ops import FEW_RESULTS, Op
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import (
    HEADS,
    KV_BLOCK,
    KV_TYPES,
    LANES,
    SEGMENT_BLOCKS,
    SPAN,
    STATE_HEAD,
    THREAD,
    attention_scratch_bytes,
    head_bytes,
    state_bytes,
)
from tfm.kernels.simd import (
    TILE,
    absolute,
    add_tile,
    atomic_add,
    exp,
    f32x16,
    first_lanes,
    fma,
    fma_panels,
    fma_rows,
    half_bits,
    load_f16,
    load_f32,
    load_i8,
    load_rows,
    maximum,
    peek_f32,
    peek_i64,
    poke_f32,
    poke_i8,
    poke_i64,
    poke_u16,
    prefetch,
    record_at,
    reduce_add,
    reduce_max,
    round_even,
    splat,
    store_f16,
    store_f32,
    store_first,
    store_i8,
    store_rows,
    tanh,
    tile_of,
)

F32, F16, Q8 = KV_TYPES["f32"], KV_TYPES["f16"], KV_TYPES["q8"]
SPAN_BYTES = SPAN.itemsize
# 1.5 * 2**23: added and taken away, it leaves the nearest whole number, as simd.round_even.
MAGIC = np.float32(12582912)
NOTHING = np.float32(-1e30)  # the maximum of no scores; finite, so that exp(NOTHING - NOTHING) is 1 and not NaN
# A row's state: the maximum m, at 64 bytes the 16 partial sums of l, and from STATE_HEAD on o.

SUM_ELEMENTS = 16  # of a head, that are summed by themselves

heads_at, span_at, thread_at = record_at(HEADS), record_at(SPAN), record_at(THREAD)


def reference(
    q_TNH: Any, k_SKH: Any, v_SKH: Any, scale: float, window: int = 0, softcap: float = 0.0,
    kv_type: str = "f32", by_segment: bool = False,
) -> Any:  # fmt: skip
    """The T queries are the last of S positions; window 0 sees all before, softcap 0 caps nothing.

    kv_type and by_segment change nothing here: the cases have keys and values that their type holds exactly.
    """
    queries, keys = len(q_TNH), len(k_SKH)
    group = q_TNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNH = np.repeat(k_SKH, group, axis=1), np.repeat(v_SKH, group, axis=1)
    score_NTS = np.einsum("tnh,snh->nts", q_TNH, k_SNH) * q_TNH.dtype.type(scale)
    if softcap:
        score_NTS = softcap * np.tanh(score_NTS / softcap)
    t, s = np.arange(keys - queries, keys)[:, None], np.arange(keys)[None, :]
    hidden = (s > t) | ((s <= t - window) if window else False)
    score_NTS = np.where(hidden, -np.inf, score_NTS)
    p_NTS = np.exp(score_NTS - score_NTS.max(-1, keepdims=True))
    return np.einsum("nts,snh->tnh", p_NTS / p_NTS.sum(-1, keepdims=True), v_SNH)


# ---------------------------------------------------------------------------------------------- micro-kernels


def score_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """s[r, 0..63] = q[r] . k[0..63] for a tile of queries; rows of s are 256 bytes.

    The sum over the elements of a head runs in order in parts of 16, and the parts are added in order: with one chain
    of 64 or 80 the error was up to 4 times NumPy's.

    Few queries read keys and values faster than memory gives them: they ask for what is read next, `ahead` bytes on.
    With that, and blocks that lie in large pages, a model decoded 190 tok/s after 4,096 positions, and 131 without.
    """
    zeros = tile_of(f32x16, rows)
    few = rows < TILE

    @jit
    def scores(k, q, q_stride, head_dim, s, ahead):
        for j in range(0, KV_BLOCK, LANES):
            acc = zeros()
            for begin in range(0, head_dim, SUM_ELEMENTS):
                part = zeros()
                for h in range(begin, min(begin + SUM_ELEMENTS, head_dim)):
                    at = k + (h * KV_BLOCK + j) * element_bytes
                    if few:
                        prefetch(at + ahead)
                    part = fma_rows(part, load(at), q + 4 * h, q_stride)
                acc = add_tile(acc, part)
            store_rows(acc, s + 4 * j, 4 * KV_BLOCK)

    return scores


def score_row_kernel(load: Any, element_bytes: int) -> Any:
    """The same for one query: all 64 positions at once, since one chain of additions would wait for its own result."""
    zeros = tile_of(f32x16, KV_BLOCK // LANES)
    fma_four = fma_panels(load)

    @jit
    def scores(k, q, q_stride, head_dim, s, ahead):
        acc = zeros()
        for begin in range(0, head_dim, SUM_ELEMENTS):
            part = zeros()
            for h in range(begin, min(begin + SUM_ELEMENTS, head_dim)):
                at = k + h * KV_BLOCK * element_bytes
                for line in range(0, KV_BLOCK * element_bytes, 64):
                    prefetch(at + ahead + line)
                part = fma_four(part, at, LANES * element_bytes, q + 4 * h)
            acc = add_tile(acc, part)
        store_rows(acc, s, 4 * LANES)

    return scores


def value_kernel(load: Any, element_bytes: int, rows: int) -> Any:
    """o[r] += sum over first <= s < last of p[r, s] v[s] for a tile of queries that all see these positions."""
    zeros = tile_of(f32x16, rows)
    few = rows < TILE

    @jit
    def values(v, p, first, last, head_size, o, o_stride, ahead):
        for d in range(0, head_size, LANES):
            acc = load_rows(zeros(), o + 4 * d, o_stride)
            for s in range(first, last):
                at = v + (s * head_size + d) * element_bytes
                if few:
                    prefetch(at + ahead)
                acc = fma_rows(acc, load(at), p + 4 * s, 4 * KV_BLOCK)
            store_rows(acc, o + 4 * d, o_stride)

    return values


def value_row_kernel(load: Any, element_bytes: int) -> Any:
    """The same for one query, 64 elements of the head at once; what is left of the head goes one vector at a time."""
    zeros = tile_of(f32x16, dense.PANELS_AT_ONCE)
    fma_four = fma_panels(load)
    wide = dense.PANELS_AT_ONCE * LANES

    @jit
    def values(v, p, first, last, head_size, o, o_stride, ahead):
        d = 0
        while d + wide <= head_size:
            acc = load_rows(zeros(), o + 4 * d, 4 * LANES)
            for s in range(first, last):
                at = v + (s * head_size + d) * element_bytes
                for line in range(0, wide * element_bytes, 64):
                    prefetch(at + ahead + line)
                acc = fma_four(acc, at, LANES * element_bytes, p + 4 * s)
            store_rows(acc, o + 4 * d, 4 * LANES)
            d += wide
        while d < head_size:
            one = load_f32(o + 4 * d)
            for s in range(first, last):
                one = fma(load(v + (s * head_size + d) * element_bytes), splat(peek_f32(p + 4 * s)), one)
            store_f32(o + 4 * d, one)
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


@jit
def clear_state(state, head_size):
    store_f32(state, splat(NOTHING))
    for i in range(64, STATE_HEAD + 4 * head_size, 4 * LANES):
        store_f32(state + i, splat(0.0))


@jit
def merge_state(total, part, head_size):
    """Fold the state `part` into `total`; a part that saw nothing leaves total as it is."""
    m, n = load_f32(total), load_f32(part)
    largest = maximum(m, n)
    shrink, weight = exp(m - largest), exp(n - largest)
    store_f32(total, largest)
    for i in range(64, STATE_HEAD + 4 * head_size, 4 * LANES):
        store_f32(total + i, fma(load_f32(part + i), weight, load_f32(total + i) * shrink))


@jit
def finish_state(state, head_dim, out):
    """out = o / l."""
    whole = splat(reduce_add(load_f32(state + 64)))
    for d in range(0, head_dim, LANES):
        store_first(out + 4 * d, load_f32(state + STATE_HEAD + 4 * d) / whole, head_dim - d)


@jit
def softmax_block(s, low, high, softcap, k_scales, v_scales, state, shrink):
    """A block's scores into weights, in place, for one query that sees its positions low .. high - 1; m and l follow.

    k_scales and v_scales are the addresses of 64 scales, 0 for none. shrink gets the factor of what was summed before.
    """
    largest = m = load_f32(state)
    hidden = splat(-np.inf)
    for j in range(0, KV_BLOCK, LANES):
        v = load_f32(s + 4 * j)
        if k_scales != 0:
            v = v * load_f32(k_scales + 4 * j)
        if softcap != 0:
            v = tanh(v / splat(softcap)) * splat(softcap)
        if low > j or high < j + LANES:
            v = first_lanes(hidden, low - j, first_lanes(v, high - j, hidden))
        store_f32(s + 4 * j, v)
        largest = maximum(v, largest)
    largest = splat(reduce_max(largest))
    scale = exp(m - largest)
    total = load_f32(state + 64) * scale
    for j in range(0, KV_BLOCK, LANES):
        p = exp(load_f32(s + 4 * j) - largest)
        total = total + p
        if v_scales != 0:
            p = p * load_f32(v_scales + 4 * j)
        store_f32(s + 4 * j, p)
    store_f32(state, largest)
    store_f32(state + 64, total)
    store_f32(shrink, scale)


@jit
def shrink_state(state, shrink, head_size):
    """o *= shrink (16 lanes alike)."""
    factor = load_f32(shrink)
    for d in range(STATE_HEAD, STATE_HEAD + 4 * head_size, 4 * LANES):
        store_f32(state + d, load_f32(state + d) * factor)


@jit
def in_block(position):
    """A position counted from a block's start, moved to the block's nearest end where it lies outside."""
    return min(max(position, 0), KV_BLOCK)


# ---------------------------------------------------------------------------------------------- cache


@jit
def row_scale(x, head_size):
    """max |x| / 127 of a head's vector (padded with zeros), 0 where it is all zeros."""
    largest = splat(0.0)
    for d in range(0, head_size, LANES):
        largest = maximum(absolute(load_f32(x + 4 * d)), largest)
    return reduce_max(largest) / np.float32(127)


@jit
def inverse(scale):
    return np.float32(1) / scale if scale != 0 else np.float32(0)


@jit
def append_key(kv_type, head, slot, head_dim, head_size, k):
    """Write the key at k (float32, padded with zeros to head_size) into column `slot` of a block's head."""
    if kv_type == Q8:
        scale = row_scale(k, head_size)
        poke_f32(head + KV_BLOCK * head_size + 4 * slot, scale)
        by = inverse(scale)
        for h in range(head_dim):
            poke_i8(head + h * KV_BLOCK + slot, np.int8(peek_f32(k + 4 * h) * by + MAGIC - MAGIC))
    else:
        for h in range(head_dim):
            at = h * KV_BLOCK + slot
            if kv_type == F16:
                poke_u16(head + 2 * at, half_bits(peek_f32(k + 4 * h)))
            else:
                poke_f32(head + 4 * at, peek_f32(k + 4 * h))


@jit
def append_value(kv_type, head, slot, head_size, v):
    """Write the value at v (float32, padded with zeros to head_size) into row `slot` of a block's head."""
    values = head + bytes_of_head(kv_type, head_size) // 2
    if kv_type == Q8:
        scale = row_scale(v, head_size)
        poke_f32(values + KV_BLOCK * head_size + 4 * slot, scale)
        by = splat(inverse(scale))
        for d in range(0, head_size, LANES):
            store_i8(values + slot * head_size + d, round_even(load_f32(v + 4 * d) * by))
    else:
        for d in range(0, head_size, LANES):
            if kv_type == F16:
                store_f16(values + 2 * (slot * head_size + d), load_f32(v + 4 * d))
            else:
                store_f32(values + 4 * (slot * head_size + d), load_f32(v + 4 * d))


@jit
def bytes_of_head(kv_type, head_size):
    """Bytes of a head's keys and values in a block; kernels/records.py has the same for Python."""
    if kv_type == Q8:
        return 2 * KV_BLOCK * (head_size + 4)
    return 2 * KV_BLOCK * head_size * (2 if kv_type == F16 else 4)


# ---------------------------------------------------------------------------------------------- driver


EDGES = {load: edge_kernel(load, size) for load, size in ((load_f32, 4), (load_f16, 2), (load_i8, 1))}


def segment_kernel(load: Any, element_bytes: int, scale_bytes: int, rows: int) -> Any:
    """Blocks first .. last - 1 (of one segment) for a tile of queries: the state of each row from nothing."""
    scores = score_row_kernel(load, element_bytes) if rows == 1 else score_kernel(load, element_bytes, rows)
    values = value_row_kernel(load, element_bytes) if rows == 1 else value_kernel(load, element_bytes, rows)
    edge = EDGES[load]

    @jit
    def segment(heads, blocks, first, last, head_offset, q, positions, s, shrink, states, state_stride):
        head_size, window = heads.head_size, heads.sliding_window
        o = states + STATE_HEAD
        for r in range(rows):
            clear_state(states + r * state_stride, head_size)
        for b in range(first, last):
            begin = b * KV_BLOCK
            k = peek_i64(blocks + 8 * b) + head_offset
            k_scales = k + KV_BLOCK * head_size * element_bytes
            v = k_scales + scale_bytes
            v_scales = v + KV_BLOCK * head_size * element_bytes
            next_k = peek_i64(blocks + 8 * min(b + 1, last - 1)) + head_offset
            scores(k, q, 4 * head_size, heads.head_dim, s, v - k)
            for r in range(rows):
                high = peek_i64(positions + 8 * r) + 1 - begin
                low = high - window if window != 0 else 0
                softmax_block(
                    s + 4 * KV_BLOCK * r, low, high, heads.softcap,
                    k_scales if scale_bytes != 0 else 0, v_scales if scale_bytes != 0 else 0,
                    states + r * state_stride, shrink + 4 * LANES * r,
                )  # fmt: skip
                shrink_state(states + r * state_stride, shrink + 4 * LANES * r, head_size)
            # Queries lie in order of their positions: the first sees least far ahead, the last least far back.
            ahead = peek_i64(positions + 8 * (rows - 1)) + 1 - begin
            low, end = in_block(ahead - window) if window != 0 else 0, in_block(ahead)
            high = max(low, in_block(peek_i64(positions) + 1 - begin))
            edge(v, s, 0, low, rows, positions, begin, window, head_size, o, state_stride)
            values(v, s, low, high, head_size, o, state_stride, next_k - v)
            edge(v, s, high, end, rows, positions, begin, window, head_size, o, state_stride)

    return segment


TILES = (TILE, 4, 1)


def _pick(by_kind: dict[tuple[int, int], Any]) -> Any:
    """A compiled function that calls the one of the kernels for a KV type and a number of rows."""
    ((kv, size), function), *others = by_kind.items()
    if not others:

        @jit
        def last(kv_type, rows, *arguments):
            function(*arguments)

        return last
    otherwise = _pick(dict(others))

    @jit
    def pick(kv_type, rows, *arguments):
        if kv_type == kv and rows == size:
            function(*arguments)
        else:
            otherwise(kv_type, rows, *arguments)

    return pick


# KV type -> how its elements are loaded, their bytes, bytes of the scales of a block, how a position is written
KINDS = {
    F16: (load_f16, 2, 0),
    F32: (load_f32, 4, 0),
    Q8: (load_i8, 1, 4 * KV_BLOCK),
}
run_segment = _pick({(kind, rows): segment_kernel(*KINDS[kind], rows) for kind in KINDS for rows in TILES})


@jit
def gather_queries(heads, span, kv_head, begin, rows, q, q_stride, tile_q, positions):
    """Copy `rows` queries of a key head's group, scaled, side by side.

    Query i of the group is row i // G of the span, head i % G.
    """
    group = heads.num_attention_heads // heads.num_key_value_heads
    head_size = heads.head_size
    scale = splat(heads.scale)
    for r in range(rows):
        i = min(begin + r, span.count * group - 1)  # past the end the last query once more; nobody reads the result
        source = q + (span.first + i // group) * q_stride + 4 * head_size * (kv_head * group + i % group)
        poke_i64(positions + 8 * r, span.position + i // group)
        for d in range(0, head_size, LANES):
            store_f32(tile_q + 4 * (r * head_size + d), load_f32(source + 4 * d) * scale)


@jit
def attend_tile(
    kv_type, heads, span, layer_offset, kv_head, begin, segment, q, q_stride, out, out_stride, partial, scratch
):  # fmt: skip
    """A tile of queries of one key head: all segments, and the result to out; or one `segment`, its state to partial.

    All segments where segment is -1.
    """
    group = heads.num_attention_heads // heads.num_key_value_heads
    head_size = heads.head_size
    left = span.count * group - begin
    rows = TILE if left > 4 else (4 if left > 1 else 1)
    left = min(left, rows)
    stride = STATE_HEAD + 4 * head_size
    tile_q = scratch
    s = tile_q + 4 * TILE * head_size
    shrink = s + 4 * TILE * KV_BLOCK
    positions = shrink + 4 * TILE * LANES
    states = positions + 64 * 2
    totals = states + TILE * stride
    gather_queries(heads, span, kv_head, begin, rows, q, q_stride, tile_q, positions)
    bottom, top = peek_i64(positions), peek_i64(positions + 8 * (left - 1))
    first = max(0, bottom + 1 - heads.sliding_window) // KV_BLOCK if heads.sliding_window != 0 else 0
    last = top // KV_BLOCK + 1
    offset = layer_offset + kv_head * bytes_of_head(kv_type, head_size)
    for r in range(left):
        clear_state(totals + r * stride, head_size)
    for part in range(first // SEGMENT_BLOCKS, (last - 1) // SEGMENT_BLOCKS + 1):
        if segment < 0 or part == segment:
            low, high = max(first, part * SEGMENT_BLOCKS), min(last, (part + 1) * SEGMENT_BLOCKS)
            run_segment(
                kv_type, rows, heads, span.blocks, low, high, offset, tile_q, positions, s, shrink, states, stride
            )  # fmt: skip
            for r in range(left):
                merge_state(totals + r * stride, states + r * stride, head_size)
    for r in range(left):
        i = begin + r
        head = kv_head * group + i % group
        if segment < 0:
            target = out + (span.first + i // group) * out_stride + 4 * heads.head_dim * head
            finish_state(totals + r * stride, heads.head_dim, target)
        else:
            target = partial + ((span.first + i // group) * heads.num_attention_heads + head) * stride
            for d in range(0, stride, 4 * LANES):
                store_f32(target + d, load_f32(totals + r * stride + d))


@jit
def attend(
    me, kv_type, heads, spans, num_spans, layer_offset, q, q_stride, out, out_stride,
    claims, segments, partials, partial_bytes,
):  # fmt: skip
    """This thread's part of attention for the rows of all spans; the threads claim tiles from the counter at `claims`.

    q is [T, N, head_size] and out [T, N * head_dim], float32. segments is 0: a tile is one piece of work; or the number
    of segments of the longest sequence: a tile and a segment are, and `merge_segments` follows after a barrier.
    """
    group = heads.num_attention_heads // heads.num_key_value_heads
    mine = atomic_add(claims, 1)
    piece = 0
    for i in range(num_spans):
        span = span_at(spans + i * SPAN_BYTES)
        tiles = (span.count * group + TILE - 1) // TILE
        for tile in range(tiles):
            begin = (tiles - 1 - tile) * TILE  # the longest first
            for kv_head in range(heads.num_key_value_heads):
                for segment in range(max(1, segments)):
                    if piece == mine:
                        attend_tile(
                            kv_type, heads, span, layer_offset, kv_head, begin, segment if segments != 0 else -1,
                            q, q_stride, out, out_stride, partials + segment * partial_bytes, me.scratch,
                        )  # fmt: skip
                        mine = atomic_add(claims, 1)
                    piece += 1


@jit
def merge_segments(me, heads, spans, num_spans, out, out_stride, segments, partials, partial_bytes):
    """The results of all rows from the states of their segments, in order."""
    stride = STATE_HEAD + 4 * heads.head_size
    total = me.scratch
    piece = 0
    for i in range(num_spans):
        span = span_at(spans + i * SPAN_BYTES)
        for t in range(span.count):
            for head in range(heads.num_attention_heads):
                if piece % me.threads == me.index:
                    clear_state(total, heads.head_size)
                    at = ((span.first + t) * heads.num_attention_heads + head) * stride
                    for segment in range(segments):
                        merge_state(total, partials + segment * partial_bytes + at, heads.head_size)
                    finish_state(total, heads.head_dim, out + (span.first + t) * out_stride + 4 * heads.head_dim * head)
                piece += 1


# ---------------------------------------------------------------------------------------------- op


@jit
def append_all(kv_type, heads, blocks, positions, k, v):
    """Write float32 keys and values [S, K, head_size] of positions 0 .. S - 1."""
    heads = heads_at(heads)
    size = heads.head_size
    for s in range(positions):
        for kv_head in range(heads.num_key_value_heads):
            head = peek_i64(blocks + 8 * (s // KV_BLOCK)) + kv_head * bytes_of_head(kv_type, size)
            at = 4 * size * (s * heads.num_key_value_heads + kv_head)
            append_key(kv_type, head, s % KV_BLOCK, heads.head_dim, size, k + at)
            append_value(kv_type, head, s % KV_BLOCK, size, v + at)


@jit
def attend_part(
    thread, kv_type, heads, spans, num_spans, layer_offset, q, q_stride, out, out_stride,
    claims, segments, partials, partial_bytes,
):  # fmt: skip
    """`attend` for the addresses of its records."""
    attend(
        thread_at(thread), kv_type, heads_at(heads), spans, num_spans, layer_offset, q, q_stride, out, out_stride,
        claims, segments, partials, partial_bytes,
    )  # fmt: skip


@jit
def merge_part(thread, heads, span, out, out_stride, segments, partials, partial_bytes):
    """`merge_segments` for the addresses of its records."""
    merge_segments(thread_at(thread), heads_at(heads), span, 1, out, out_stride, segments, partials, partial_bytes)


_attend_part = Entry("tfm.kernels.attention:attend_part", 14 * "i")
attend_piece = called_as_piece(_attend_part)
_append_all = Entry("tfm.kernels.attention:append_all", "iiiiii")
_merge_part = Entry("tfm.kernels.attention:merge_part", "iiiiiiii")


def attention(
    q_TNH: npt.NDArray[np.float32],
    k_SKH: npt.NDArray[np.float32],
    v_SKH: npt.NDArray[np.float32],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_type: str = "f32",
    by_segment: bool = False,
) -> npt.NDArray[np.float32]:
    """[T, N, H]: causal attention of the last T of S positions, with keys and values held as kv_type.

    by_segment sums each segment of 512 positions by itself and merges them at the end, as threads do that share a long
    sequence.
    """
    (T, N, H), (S, K, _) = q_TNH.shape, k_SKH.shape
    kind, size, blocks = KV_TYPES[kv_type], -(-H // LANES) * LANES, -(-S // KV_BLOCK)
    padded = [np.zeros((*x.shape[:2], size), np.float32) for x in (q_TNH, k_SKH, v_SKH)]
    for array, x in zip(padded, (q_TNH, k_SKH, v_SKH), strict=True):
        array[..., :H] = x
    q, k, v = padded
    heads = np.zeros(1, HEADS)
    heads[0] = (N, K, H, size, window, scale, softcap)
    block_bytes = K * 2 * head_bytes(kind, size)
    cache = aligned_empty(blocks * block_bytes)
    cache[:] = 0
    table = cache.ctypes.data + np.arange(blocks) * block_bytes
    _append_all(kind, heads.ctypes.data, table.ctypes.data, S, k.ctypes.data, v.ctypes.data)

    span, claims = np.zeros(1, SPAN), np.zeros(1, np.int64)
    span[0] = (0, T, S - T, table.ctypes.data)
    segments = -(-blocks // SEGMENT_BLOCKS) if by_segment else 0
    partial_bytes = T * N * state_bytes(size)
    partials, scratch = aligned_empty(max(1, segments) * partial_bytes), aligned_empty(attention_scratch_bytes(size))
    thread = np.zeros(1, THREAD)
    thread["threads"], thread["scratch"] = 1, scratch.ctypes.data
    out = np.full((T, N, H), np.nan, np.float32)
    records = thread.ctypes.data, heads.ctypes.data, span.ctypes.data
    target = out.ctypes.data, 4 * N * H
    _attend_part(
        records[0], kind, *records[1:], 1, 0, q.ctypes.data, 4 * N * size, *target,
        claims.ctypes.data, segments, partials.ctypes.data, partial_bytes,
    )  # fmt: skip
    if segments:
        _merge_part(*records, *target, segments, partials.ctypes.data, partial_bytes)
    return out


def _held(values: npt.NDArray[np.float32], kv_type: str) -> npt.NDArray[np.float32]:
    """Values near these that the type holds exactly; of q8, multiples of 1/32 up to 127 of them in each row."""
    if kv_type != "q8":
        return values.astype(np.float16).astype(np.float32) if kv_type == "f16" else values
    held = np.clip(np.rint(32 * values), -127, 127)
    held[..., 0] = 127
    return (held / 32).astype(np.float32)


def _cases_of(
    rng: np.random.Generator, *sizes: tuple[Any, ...], kv_type: str = "f32", by_segment: bool = False
) -> list[tuple[str, Mapping[str, Any]]]:
    cases = []
    for T, S, N, K, H, window, softcap in sizes:
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, N, H), (S, K, H), (S, K, H)))
        inputs = {
            "q_TNH": q, "k_SKH": _held(k, kv_type), "v_SKH": _held(v, kv_type), "scale": H**-0.5,
            "window": window, "softcap": softcap, "kv_type": kv_type, "by_segment": by_segment,
        }  # fmt: skip
        how = f"{kv_type}{', by segment' if by_segment else ''}"
        cases.append((f"T{T} S{S} N{N} K{K} H{H} window{window} softcap{softcap:g} {how}", inputs))
    return cases


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    some = (5, 70, 4, 2, 17, 0, 0.0), (40, 131, 9, 3, 64, 0, 0.0), (2, 1100, 8, 2, 32, 600, 5.0)
    cases = [
        case
        for kv_type in KV_TYPES
        for by_segment in (False, True)
        for case in _cases_of(rng, *some, kv_type=kv_type, by_segment=by_segment)
    ]
    return cases + _cases_of(
        rng,
        (1, 1, 1, 1, 1, 0, 0.0),
        (1, 64, 3, 1, 16, 0, 0.0),
        (3, 65, 4, 2, 17, 0, 0.0),
        (70, 131, 9, 3, 64, 0, 0.0),
        (33, 200, 2, 2, 80, 50, 0.0),
        (5, 1200, 4, 4, 32, 0, 30.0),
        (2, 1100, 8, 1, 128, 600, 5.0),
    )


def _large(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    return _cases_of(rng, (1, 4096, 32, 8, 64, 0, 0.0), (512, 512, 9, 3, 64, 0, 0.0))


def _work(inputs: Mapping[str, Any]) -> tuple[int, int]:
    q, k = inputs["q_TNH"], inputs["k_SKH"]
    pairs = len(q) * len(k) - len(q) * (len(q) - 1) // 2
    return 8 * (q.size + k.size), 4 * pairs * q.shape[1] * q.shape[2]


def _rounding(inputs: Mapping[str, Any]) -> float:
    """Of few results: twice the machine epsilon of the largest value. NumPy may be lucky there; see matmul.py."""
    few = inputs["q_TNH"].size <= FEW_RESULTS
    return 2 * float(np.finfo(np.float32).eps) * float(np.abs(inputs["v_SKH"]).max()) if few else 0.0


OPS = [Op("attention", attention, reference, _cases, _work, _rounding, _large)]
