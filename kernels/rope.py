"""Rotary position embedding. T rows, N heads, H head size, R = half of the dimensions that are turned.

Pair i of a head at position p is turned by the angle a = p * inv_freq[i] (Su and others 2021, arXiv 2104.09864):

    y = x cos(a) - x' sin(a)      x, x' = x[i], x[i + R]       half-split, as llama's checkpoints have it
    y' = x' cos(a) + x sin(a)           = x[2i], x[2i + 1]     interleaved: as in the paper

The dimensions beyond 2R stay. Angles are float64, for at position 100,000 a float32 angle is off by 0.004; cosines and
sines and all else are float32. A vector of lanes and a single element go through the same operations, so an element has
the same bits on either path.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import Op
from tfm.kernels.simd import LANES, load_f32, peek_f32, poke_f32, store_f32


def angles(
    positions_T: npt.NDArray[np.int64], inv_freq_R: npt.NDArray[np.float64], attention_factor: float = 1.0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The cosines and sines of the rows' angles, each [T, R], times attention_factor (YaRN's, and 1 without it)."""
    angles_TR = np.asarray(positions_T, np.float64)[:, None] * np.asarray(inv_freq_R, np.float64)
    return np.cos(angles_TR) * attention_factor, np.sin(angles_TR) * attention_factor


def reference(q_TNH: Any, positions_T: Any, inv_freq_R: Any, interleaved: bool) -> Any:
    half = len(inv_freq_R)
    cos_T1R, sin_T1R = (part.astype(q_TNH.dtype)[:, None] for part in angles(positions_T, inv_freq_R))
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    y_TNH, a, b = q_TNH.copy(), q_TNH[..., first], q_TNH[..., second]
    y_TNH[..., first], y_TNH[..., second] = a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R
    return y_TNH


@jit
def rotate_pair(first, second, cos, sin):
    a, b, c, s = peek_f32(first), peek_f32(second), peek_f32(cos), peek_f32(sin)
    poke_f32(first, a * c - b * s)
    poke_f32(second, b * c + a * s)


@jit
def rotate(head, cos, sin, half, interleaved):
    """Turn the first 2 * half float32 at head, in place; cos and sin are the float32 rows [half] of its position."""
    if interleaved:
        for i in range(half):
            rotate_pair(head + 8 * i, head + 8 * i + 4, cos + 4 * i, sin + 4 * i)
        return
    vectors = half - half % LANES
    for i in range(0, vectors, LANES):
        first, second = head + 4 * i, head + 4 * (half + i)
        a, b, c, s = load_f32(first), load_f32(second), load_f32(cos + 4 * i), load_f32(sin + 4 * i)
        store_f32(first, a * c - b * s)
        store_f32(second, b * c + a * s)
    for i in range(vectors, half):
        rotate_pair(head + 4 * i, head + 4 * (half + i), cos + 4 * i, sin + 4 * i)


@jit
def rotate_heads(q, rows, heads, head_dim, cos, sin, half, interleaved):
    """Turn every head of [rows, heads, head_dim] at q, in place; cos and sin are [rows, half]."""
    for t in range(rows):
        for n in range(heads):
            rotate(q + 4 * (t * heads + n) * head_dim, cos + 4 * t * half, sin + 4 * t * half, half, interleaved)


_rotate_heads = Entry("tfm.kernels.rope:rotate_heads", "iiiiiiii")


def rope(
    q_TNH: npt.NDArray[np.float32],
    positions_T: npt.NDArray[np.int64],
    inv_freq_R: npt.NDArray[np.float64],
    interleaved: bool,
) -> npt.NDArray[np.float32]:
    """q_TNH (float32) with each row's heads turned by the row's position."""
    rows, heads, head_dim = q_TNH.shape
    half = len(inv_freq_R)
    assert 2 * half <= head_dim, "more pairs than the head has"
    cos_TR, sin_TR = (part.astype(np.float32) for part in angles(positions_T, inv_freq_R))
    out_TNH = np.array(q_TNH, np.float32, order="C")
    tables = cos_TR.ctypes.data, sin_TR.ctypes.data, half, int(interleaved)
    _rotate_heads(out_TNH.ctypes.data, rows, heads, head_dim, *tables)
    return out_TNH


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    cases = []
    for interleaved in (False, True):
        for heads, head_dim, half in ((1, 2, 1), (3, 30, 15), (9, 64, 32), (2, 34, 17), (5, 80, 16), (1, 101, 37)):
            positions = np.array([0, 1, 63, 8191, 131071])
            q = rng.standard_normal((len(positions), heads, head_dim)).astype(np.float32)
            inv_freq = 10000.0 ** (-np.arange(half) / half)
            label = f"{'interleaved' if interleaved else 'half-split'} {heads}x{head_dim}, {2 * half} turned"
            inputs = {"q_TNH": q, "positions_T": positions, "inv_freq_R": inv_freq, "interleaved": interleaved}
            cases.append((label, inputs))
    return cases


OPS = [Op("rope", rope, reference, _cases, lambda inputs: (8 * inputs["q_TNH"].size, 3 * inputs["q_TNH"].size))]
