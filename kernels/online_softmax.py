"""The online softmax (Milakov and Gimelshein 2018): sums that are scaled anew whenever a larger score comes.

A query's state is the maximum m of the scores so far in 16 lanes alike, at 64 bytes the sum l of exp(score - m) in 16
parts, and from STATE_HEAD on o, the sum of exp(score - m) times the values. A block of 64 scores is folded into it; two
states are merged. What is left at the end is o / l.
"""

import numpy as np

from tfm.kernels.jit import jit
from tfm.kernels.records import KV_BLOCK, LANES, STATE_HEAD
from tfm.kernels.simd import (
    exp_below,
    first_lanes,
    fma,
    load_f32,
    maximum,
    peek_f32,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    store_first,
    tanh,
)

NOTHING = np.float32(-1e30)  # the maximum of no scores; finite, so that exp(NOTHING - NOTHING) is 1 and not NaN


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
    shrink, weight = exp_below(m - largest), exp_below(n - largest)
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
def softmax_block(s, low, high, softcap, k_scales, v_scales, state, head_size):
    """A block's scores into weights, in place, and its state, for one query that sees positions low .. high - 1 of it.

    k_scales and v_scales are the addresses of 64 scales, 0 for none.
    """
    largest = load_f32(state)
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
    m = reduce_max(largest)
    largest = splat(m)
    if m > peek_f32(state):  # else the factor is 1
        shrink_state(state, largest, head_size)
    total = load_f32(state + 64)
    for j in range(0, KV_BLOCK, LANES):
        p = exp_below(load_f32(s + 4 * j) - largest)
        total = total + p
        if v_scales != 0:
            p = p * load_f32(v_scales + 4 * j)
        store_f32(s + 4 * j, p)
    store_f32(state + 64, total)


@jit
def shrink_state(state, largest, head_size):
    """Scale l and o to a larger maximum."""
    factor = exp_below(load_f32(state) - largest)
    store_f32(state, largest)
    for i in range(64, STATE_HEAD + 4 * head_size, 4 * LANES):
        store_f32(state + i, load_f32(state + i) * factor)
