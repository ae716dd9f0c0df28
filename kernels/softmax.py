"""The softmax of a row, and the stable way to it; and the logarithm of its divisor. S is the number of scores.

    y_i = e^(x_i - m) / sum_j e^(x_j - m),   log sum_j e^x_j = m + log sum_j e^(x_j - m),   m = max_j x_j

A score of -inf (masked) gets 0; a row of nothing but -inf gets zeros, as a query that sees no key attends to nothing.
A NaN or +inf makes the row NaN. Attention has an online form of its own (`online_softmax.py`), which agrees with this.

The sum runs in float32 over 16 lanes in order of the column, in blocks of 64 vectors so that its error does not grow
with the length of the row, then over the lanes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry, jit
from tfm.kernels.logits import log_sum_exp
from tfm.kernels.ops import Op
from tfm.kernels.simd import (
    LANES,
    exp_below,
    first_lanes,
    load_f32,
    maximum,
    poke_f64,
    reduce_add,
    reduce_max,
    splat,
    store_f32,
)

BLOCK = 64 * LANES


def reference(x_TS: Any) -> Any:
    m_T1 = x_TS.max(-1, keepdims=True)
    e_TS = np.exp(x_TS - np.where(np.isneginf(m_T1), 0, m_T1))
    total_T1 = e_TS.sum(-1, keepdims=True)
    return e_TS / np.where(total_T1 == 0, 1, total_T1).astype(x_TS.dtype)


@jit
def softmax_row(x, size, out):
    """Write the softmax of the `size` float32 at x to out, which may be x; both are padded to a multiple of 16.

    What lies in x's padding does not matter; out's padding becomes zeros (NaN in a row that is NaN).
    """
    masked = splat(-np.inf)
    best = masked
    for i in range(0, size, LANES):
        best = maximum(best, first_lanes(load_f32(x + 4 * i), size - i, masked))
    m = reduce_max(best)
    if m == -np.inf:
        m = np.float32(0.0)
    total = splat(0.0)
    for start in range(0, size, BLOCK):
        part = splat(0.0)
        for i in range(start, min(start + BLOCK, size), LANES):
            e = exp_below(first_lanes(load_f32(x + 4 * i), size - i, masked) - splat(m))
            store_f32(out + 4 * i, e)
            part = part + e
        total = total + part
    divisor = reduce_add(total)
    if divisor == 0:
        divisor = np.float32(1.0)
    for i in range(0, size, LANES):
        store_f32(out + 4 * i, load_f32(out + 4 * i) / splat(divisor))


@jit
def softmax_rows(x, rows, size, stride, out):
    """`softmax_row` for `rows` rows, `stride` bytes apart in x and in out."""
    for t in range(rows):
        softmax_row(x + t * stride, size, out + t * stride)


@jit
def sum_exponentials(x, size, out):
    """Write to out, float64, m and the sum of e^(x - m) over the `size` float32 at x, padded to a multiple of 16.

    The sum is NaN where one of them is not finite.
    """
    best, strange, masked = splat(-np.inf), splat(0.0), splat(-np.inf)
    for i in range(0, size, LANES):
        v = load_f32(x + 4 * i)
        best = maximum(best, first_lanes(v, size - i, masked))
        strange = strange + first_lanes(v - v, size - i, splat(0.0))  # 0, or NaN
    m = reduce_max(best)
    total = np.float64(reduce_add(strange))
    for begin in range(0, size, 16 * LANES):
        part = splat(0.0)
        for i in range(begin, min(begin + 16 * LANES, size), LANES):
            part = part + exp_below(first_lanes(load_f32(x + 4 * i), size - i, masked) - splat(m))
        total += np.float64(reduce_add(part))
    poke_f64(out, np.float64(m))
    poke_f64(out + 8, total)


_softmax_rows = Entry("tfm.kernels.softmax:softmax_rows", "iiiii")


def softmax(x_TS: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The softmax of each row of x_TS (float32)."""
    rows, size = x_TS.shape
    padded = -(-size // LANES) * LANES
    x, out = (np.full((rows, padded), np.nan, np.float32) for _ in range(2))
    x[:, :size] = x_TS
    _softmax_rows(x.ctypes.data, rows, size, 4 * padded, out.ctypes.data)
    return out[:, :size]


def log_sum_exps(x_TS: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """log sum e^x of each row of x_TS."""
    return np.array([log_sum_exp(x_S) for x_S in x_TS])


def log_sum_exp_reference(x_TS: Any) -> Any:
    m_T = x_TS.max(-1)
    return m_T + np.log(np.exp(x_TS - m_T[:, None]).sum(-1, dtype=np.float64))


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    shapes = ((1, 1), (2, 15), (3, 16), (2, 17), (5, 63), (2, 1009), (1, 1025), (1, 49152))
    cases = [(f"{rows}x{size}", rng.normal(0, 3, (rows, size))) for rows, size in shapes]
    cases += [(f"steep {size}", rng.normal(0, 40, (2, size))) for size in (17, 4099)]
    masked = rng.normal(0, 3, (4, 37))
    masked[0, 1:], masked[1, :36], masked[2, ::2], masked[3] = -np.inf, -np.inf, -np.inf, -np.inf
    cases.append(("rows with -inf, one all -inf", masked))
    cases.append(("one score of -inf", np.full((1, 1), -np.inf)))
    cases += [(f"all equal to {value:g}", np.full((1, 33), value)) for value in (0.0, 1e-30, -3e38, 3e38)]
    cases.append(("huge", np.array([[3e38, -3e38, 3e38, 0.0, -np.inf]])))
    cases.append(("near the maximum", 1000 + rng.normal(0, 1e-3, (1, 31))))
    return [(label, {"x_TS": x_TS.astype(np.float32)}) for label, x_TS in cases]


def _finite_cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    return [(label, inputs) for label, inputs in _cases(rng) if np.isfinite(inputs["x_TS"]).all()]


OPS = [
    Op("softmax", softmax, reference, _cases, lambda inputs: (16 * inputs["x_TS"].size, 16 * inputs["x_TS"].size)),
    Op(
        "log_sum_exp", log_sum_exps, log_sum_exp_reference, _finite_cases,
        lambda inputs: (8 * inputs["x_TS"].size, 16 * inputs["x_TS"].size),
        # The logarithm makes of a relative error of the sum an absolute one; 256 exponentials are summed in float32.
        lambda inputs: float(np.finfo(np.float32).eps),
    ),
]  # fmt: skip
