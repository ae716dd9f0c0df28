"""The activations of the MLP. F is the feed-forward size; rows are padded to a multiple of 16, with anything.

    silu:      x / (1 + e^-x)
    gelu:      x P(x), P the distribution function of the normal law (the exact form, with erf)
    gelu_tanh: x (1 + tanh(u)) / 2 = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    relu:      max(x, 0)

    gated:     y = act(gate) * up        (SwiGLU and its kin: Shazeer 2020, arXiv 2002.05202)
    not gated: y = act(up)

All in float32, element by element. At -0, 0 and for |x| as large as float32 goes the result is finite; NaN stays NaN.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import Op
from tfm.kernels.simd import LANES, absolute, exp, fma, load_f32, maximum, minimum, splat, store_f32

SILU, GELU, GELU_TANH, RELU = 0, 1, 2, 3
NAMES = ("silu", "gelu", "gelu_tanh", "relu")

# The tail of the normal law, 1 - P(t) = e^(-t^2 / 2) m(t) for t >= 0: m is a polynomial in u = t / (1 + t / 4) whose
# constant term is 1/2, from a Remez fit in float64 (on 0 <= t <= 13.3, beyond which the tail is below float32's normal
# numbers) that rounds the coefficients to float32 one after the other; its relative error is below 0.32 * 2**-24.
# Evaluated in float32 with fused multiply-adds it is 0.8 * 2**-24 up to t = 0.1, 2.7 up to 1, 6.2 up to 3, 17 up to 6
# and 54 up to 13.3.
TAIL_1, TAIL_2, TAIL_3 = -0.39894217, 0.15026347, -0.032911852
TAIL_4, TAIL_5, TAIL_6 = 0.0034025214, 0.00010383935, -4.9518516e-05
TAIL_7, TAIL_8, TAIL_9 = -3.4109926e-06, 1.7481854e-06, -1.3483546e-07

# -2 sqrt(2 / pi), and that times 0.044715.
GELU_TANH_1, GELU_TANH_3 = -1.5957691216057308, -0.07135481627159475


def _activate(kind: int, x: Any) -> Any:
    if kind == SILU:
        return x / (1 + np.exp(-x))
    if kind == GELU:
        erf = np.vectorize(math.erf, otypes=[x.dtype])
        return x * (1 + erf(x / np.sqrt(x.dtype.type(2)))) / 2
    if kind == GELU_TANH:
        return x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3))) / 2
    return np.maximum(x, 0)


def reference(kind: int, up_TF: Any, gate_TF: Any = None) -> Any:
    with np.errstate(over="ignore", under="ignore"):
        return _activate(kind, up_TF) if gate_TF is None else _activate(kind, gate_TF) * up_TF


@jit
def gelu(x):
    """max(x, 0) - |x| (1 - P(|x|)): no cancellation in the negative tail, where 1 + erf would lose every digit."""
    t = minimum(absolute(x), splat(16.0))
    u = t / fma(splat(0.25), t, splat(1.0))
    m = fma(splat(TAIL_9), u, splat(TAIL_8))
    m = fma(m, u, splat(TAIL_7))
    m = fma(m, u, splat(TAIL_6))
    m = fma(m, u, splat(TAIL_5))
    m = fma(m, u, splat(TAIL_4))
    m = fma(m, u, splat(TAIL_3))
    m = fma(m, u, splat(TAIL_2))
    m = fma(m, u, splat(TAIL_1))
    m = fma(m, u, splat(0.5))
    return maximum(splat(0.0), x) - t * (m * exp(splat(-0.5) * t * t))


@jit
def activate(kind, x):
    """The activation of every lane of x; kind is SILU, GELU, GELU_TANH or RELU."""
    if kind == SILU:
        return x / (splat(1.0) + exp(splat(0.0) - x))
    if kind == GELU:
        return gelu(x)
    if kind == GELU_TANH:
        return x / (splat(1.0) + exp(x * fma(splat(GELU_TANH_3), x * x, splat(GELU_TANH_1))))
    return maximum(splat(0.0), x)


@jit
def activate_row(kind, gated, gate, up, size, out):
    """Write act(gate) * up (gated), else act(up), to out, which may be gate or up.

    All are float32 and padded to a multiple of 16.
    """
    for i in range(0, size, LANES):
        if gated:
            y = activate(kind, load_f32(gate + 4 * i)) * load_f32(up + 4 * i)
        else:
            y = activate(kind, load_f32(up + 4 * i))
        store_f32(out + 4 * i, y)


@jit
def activate_rows(kind, gated, gate, up, rows, size, stride, out):
    for t in range(rows):
        activate_row(kind, gated, gate + t * stride, up + t * stride, size, out + t * stride)


_activate_rows = Entry("tfm.kernels.activation:activate_rows", "iiiiiiii")


def activation(
    kind: int, up_TF: npt.NDArray[np.float32], gate_TF: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """act(gate_TF) * up_TF, or act(up_TF) without a gate (float32)."""
    rows, size = up_TF.shape
    padded = -(-size // LANES) * LANES
    up, gate, out = (np.full((rows, padded), np.nan, np.float32) for _ in range(3))
    up[:, :size] = up_TF
    if gate_TF is not None:
        gate[:, :size] = gate_TF
    addresses = gate.ctypes.data, up.ctypes.data, rows, size, 4 * padded, out.ctypes.data
    _activate_rows(kind, int(gate_TF is not None), *addresses)
    return out[:, :size]


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    sizes = (0.0, 1e-42, 1e-20, 6, 14, 88.8, 100, 1e18)
    extremes = np.float32([sign * size for size in sizes for sign in (1, -1)])
    cases = []
    for kind, name in enumerate(NAMES):
        for rows, size in ((1, 1), (1, 15), (3, 16), (2, 17), (1, 1531), (1, 4099)):
            up, gate = (rng.normal(0, 3, (rows, size)).astype(np.float32) for _ in range(2))
            cases.append((f"{name} {rows}x{size}", {"kind": kind, "up_TF": up}))
            cases.append((f"{name} gated {rows}x{size}", {"kind": kind, "up_TF": up, "gate_TF": gate}))
        # Apart, since the error of a large result would hide that of a small one.
        tail = -rng.uniform(3, 13, (1, 997)).astype(np.float32)
        near = rng.normal(0, 1e-3, (1, 257)).astype(np.float32)
        cases += [(f"{name} {label}", {"kind": kind, "up_TF": x}) for label, x in (("tail", tail), ("near 0", near))]
        cases += [(f"{name} of {x:g}", {"kind": kind, "up_TF": np.full((1, 1), x)}) for x in extremes]
    return cases


def _work(inputs: Mapping[str, Any]) -> tuple[int, int]:
    arrays = 2 if inputs.get("gate_TF") is None else 3
    return 4 * arrays * inputs["up_TF"].size, 20 * inputs["up_TF"].size


OPS = [Op("activation", activation, reference, _cases, _work)]
