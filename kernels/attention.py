"""Fused attention over cache blocks: scores, softmax and the sum of values in one pass, in float32.

For a query q at position t, with the keys and values of the positions it may see (s <= t, and s > t - window):

    score[s] = cap(scale * q . k[s])        cap(z) = softcap * tanh(z / softcap), or z        o = sum_s softmax(score)[s] * v[s]

A cache block holds 64 positions of a head: keys transposed, [head_size, 64], so that a lane is a position, and values as [64, head_size], so
that a lane is an element of the head; neither product sums across lanes. In q8 a position's key (and value) has one float32 scale,
64 of them behind the int8.

Blocks are walked from the first that the window reaches, with the online softmax (Milakov and Gimelshein 2018): a maximum m, a sum l and o are
scaled by exp(m - m') when the maximum grows. Eight blocks are a segment, summed by itself from nothing and then merged into the
whole in order. So a result depends on the position only: not on the rows that share a tile (they share the loads), nor on
whether segments were summed by one thread in turn or by many at once.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import dense
from tfm.kernels.jit import jit
from tfm.kernels.records import HEADS, KV_BLOCK, LANES, SEGMENT_BLOCKS, SPAN
from tfm.kernels.simd import (
    absolute,
    add_rows,
    atomic_add,
    exp,
    f32x16,
    first_lanes,
    fma,
    fma_panels,
    fma_rows,
    load_f16,
    load_f32,
    load_i8,
    maximum,
    multiply_rows,
    peek_f32,
    peek_i64,
    poke_f32,
    record_at,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
    store_first,
    store_rows,
    tanh,
    tile_of,
)
