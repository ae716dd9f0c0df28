"""Fused attention over cache blocks: scores, softmax and the sum of values in one pass, in float32.

For a query q at position t, with the keys and values of the positions it may see (s <= t, and s > t - window):

    score[s] = cap(scale * q . k[s])        cap(z) = softcap * tanh(z / softcap), or z
    o = sum_s softmax(score)[s] * v[s]

Cache blocks of 64 positions are walked from the first that the window reaches, with the online softmax. Eight blocks
are a segment, summed by itself from nothing and then merged into the whole in order. So a result depends on the
position only: not on the rows that share a tile (they share the loads), nor on whether segments were summed by one
thread in turn or by many at once.

    kv_block.py         what a cache block looks like, and how a position is written to it
    attention_tiles.py  the inner loops: a tile of queries against the blocks of a segment
    online_softmax.py   the state of a query between blocks
    attention.py        who computes what, and the op
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.attention_tiles import rows_of_tile
from tfm.kernels.attention_tiles import segment as attend_segment
from tfm.kernels.jit import Entry, called_as_piece, jit
from tfm.kernels.kv_block import bytes_of_head, heads_at
from tfm.kernels.online_softmax import clear_state, finish_state, merge_state
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
from tfm.kernels.simd import TILE, atomic_add, load_f32, peek_i64, poke_i64, record_at, splat, store_f32

SPAN_BYTES = SPAN.itemsize

span_at, thread_at = record_at(SPAN), record_at(THREAD)


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


# ---------------------------------------------------------------------------------------------- driver


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
    kv_type, heads, span, layer_offset, kv_head, begin, segment, following,
    q, q_stride, out, out_stride, partial, scratch,
):  # fmt: skip
    """A tile of queries of one key head: all segments, and the result to out; or one `segment`, its state to partial.

    All segments where segment is -1. following: see `segment` in attention_tiles.py.
    """
    group = heads.num_attention_heads // heads.num_key_value_heads
    head_size = heads.head_size
    left = span.count * group - begin
    rows = rows_of_tile(kv_type, left)
    left = min(left, rows)
    stride = STATE_HEAD + 4 * head_size
    tile_q = scratch
    s = tile_q + 4 * TILE * head_size
    positions = s + 4 * TILE * KV_BLOCK
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
            after = peek_i64(span.blocks + 8 * high) + offset if segment < 0 and high < last else following
            attend_segment(
                kv_type, rows, left, heads, span.blocks, low, high, offset, after,
                tile_q, positions, s, states, stride,
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

    q is [T, N, head_size] and out is [T, N * head_dim], float32. segments is 0: a tile is one piece of work; or the
    number of segments of the longest sequence: a tile and a segment are, and `merge_segments` follows after a barrier.
    Such pieces are short: a thread begins with one dealt to it, and claims one ahead, to ask for its keys early.
    """
    group = heads.num_attention_heads // heads.num_key_value_heads
    parts, is_split = max(1, segments), segments != 0
    dealt = me.threads if is_split else 0  # pieces that nobody claims
    mine = me.index if is_split else atomic_add(claims, 1)
    begin = 0  # the number of the span's first piece
    for i in range(num_spans):
        span = span_at(spans + i * SPAN_BYTES)
        tiles = (span.count * group + TILE - 1) // TILE
        end = begin + tiles * heads.num_key_value_heads * parts
        while mine < end:
            piece, part = (mine - begin) // parts, (mine - begin) % parts
            kv_head = piece % heads.num_key_value_heads
            tile = tiles - 1 - piece // heads.num_key_value_heads  # the longest first
            # The last round's go to whoever is free.
            is_early, following = is_split and mine + me.threads < end, 0
            if is_early:
                mine = dealt + atomic_add(claims, 1)
                if mine < end:
                    following = keys_of_piece(kv_type, heads, span, layer_offset, mine - begin, parts)
            attend_tile(
                kv_type, heads, span, layer_offset, kv_head, tile * TILE, part if is_split else -1, following,
                q, q_stride, out, out_stride, partials + part * partial_bytes, me.scratch,
            )  # fmt: skip
            if not is_early:
                mine = dealt + atomic_add(claims, 1)
        begin = end


@jit
def keys_of_piece(kv_type, heads, span, layer_offset, piece, parts):
    """Where a span's piece will read keys, to be asked for early. A window may let it begin later; past the end of the
    text it is the last block."""
    block = min(piece % parts * SEGMENT_BLOCKS, (span.position + span.count - 1) // KV_BLOCK)
    kv_head = piece // parts % heads.num_key_value_heads
    return peek_i64(span.blocks + 8 * block) + layer_offset + kv_head * bytes_of_head(kv_type, heads.head_size)


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
_append_all = Entry("tfm.kernels.kv_block:append_all", "iiiiii")
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
