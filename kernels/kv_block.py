"""A cache block: keys and values of 64 positions, laid out for attention.

For each key head keys transposed, [head_size, 64], so that a lane is a position, and values as [64, head_size], so that
a lane is an element of the head; neither product of attention sums across lanes. In q8 a position's key (and value) has
one float32 scale, 64 of them behind the int8.
"""

import numpy as np

from tfm.kernels.jit import jit
from tfm.kernels.records import HEADS, KV_BLOCK, KV_TYPES, LANES
from tfm.kernels.simd import (
    absolute,
    half_bits,
    load_f32,
    maximum,
    peek_f32,
    peek_i64,
    poke_f32,
    poke_i8,
    poke_u16,
    record_at,
    reduce_max,
    round_even,
    splat,
    store_f16,
    store_f32,
    store_i8,
)

F16, Q8 = KV_TYPES["f16"], KV_TYPES["q8"]
# 1.5 * 2**23: added and taken away, it leaves the nearest whole number, as simd.round_even.
MAGIC = np.float32(12582912)

heads_at = record_at(HEADS)


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
def append_value(kv_type, head, slot, head_size, begin, end, v):
    """Write elements begin .. end - 1, whole vectors, of the value at v (float32, padded with zeros to head_size) into
    row `slot` of a block's head. In q8 they have to be all: they share a scale.
    """  # fmt: skip
    values = head + bytes_of_head(kv_type, head_size) // 2
    if kv_type == Q8:
        scale = row_scale(v, head_size)
        poke_f32(values + KV_BLOCK * head_size + 4 * slot, scale)
        by = splat(inverse(scale))
        for d in range(0, head_size, LANES):
            store_i8(values + slot * head_size + d, round_even(load_f32(v + 4 * d) * by))
    else:
        for d in range(begin, end, LANES):
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
            append_value(kv_type, head, s % KV_BLOCK, size, 0, size, v + at)
