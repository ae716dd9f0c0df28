"""RMS and layer norm of one row. D is the hidden size; rows are padded with zeros to a multiple of 16.

    rms:   y = x / sqrt(mean(x^2) + eps) * w
    layer: y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + b

Sums run in float32 over 16 lanes in order of the column, and then over the lanes: the same for every caller.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import Op
from tfm.kernels.simd import LANES, first_lanes, load_f32, reduce_add, splat, store_f32

NONE, RMS, LAYER = 0, 1, 2


def reference(x_TD: Any, w_D: Any, b_D: Any, eps: float, kind: int) -> Any:
    if kind == RMS:
        return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + eps) * w_D
    centred = x_TD - x_TD.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * w_D + b_D


@jit
def normalize(kind, x, size, eps, weight, bias, out):
    """Write the norm of the row at x (float32, padded with zeros) to out; kind NONE copies.

    weight, and bias (0: none), are padded as well.
    """
    zero = splat(0.0)
    mean = zero
    if kind == LAYER:
        total = zero
        for i in range(0, size, LANES):
            total = total + load_f32(x + 4 * i)
        mean = splat(reduce_add(total) / np.float32(size))
    scale = splat(1.0)
    if kind != NONE:
        squares = zero
        for i in range(0, size, LANES):
            centred = first_lanes(load_f32(x + 4 * i) - mean, size - i, zero)
            squares = squares + centred * centred
        scale = splat(np.float32(1.0) / np.sqrt(reduce_add(squares) / np.float32(size) + np.float32(eps)))
    for i in range(0, size, LANES):
        y = load_f32(x + 4 * i)
        if kind != NONE:
            y = (y - mean) * scale * load_f32(weight + 4 * i)
            if bias != 0:
                y = y + load_f32(bias + 4 * i)
        store_f32(out + 4 * i, y)


@jit
def normalize_rows(kind, x, rows, size, stride, eps, weight, bias, out):
    """`normalize` for `rows` rows, `stride` bytes apart in x and in out."""
    for t in range(rows):
        normalize(kind, x + t * stride, size, eps, weight, bias, out + t * stride)


_normalize_rows = Entry("tfm.kernels.norm:normalize_rows", "iiiiifiii")


def norm(
    x_TD: npt.NDArray[np.float32], w_D: npt.NDArray[np.float32], b_D: npt.NDArray[np.float32], eps: float, kind: int
) -> npt.NDArray[np.float32]:
    """The norm of each row of x_TD (float32); b_D is used by the layer norm only."""
    rows, size = x_TD.shape
    padded = -(-size // LANES) * LANES
    x = np.zeros((rows, padded), np.float32)
    x[:, :size] = x_TD
    w, b = np.zeros(padded, np.float32), np.zeros(padded, np.float32)
    w[:size], b[:size] = w_D, b_D
    out = np.full((rows, padded), np.nan, np.float32)
    bias = b.ctypes.data if kind == LAYER else 0
    _normalize_rows(kind, x.ctypes.data, rows, size, 4 * padded, eps, w.ctypes.data, bias, out.ctypes.data)
    return out[:, :size]


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    cases = []
    for kind in (RMS, LAYER):
        for rows, size in ((1, 1), (1, 15), (3, 16), (2, 17), (5, 576), (1, 4099)):
            x, w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, size), size, size))
            inputs = {"x_TD": x, "w_D": w, "b_D": b, "eps": 1e-5, "kind": kind}
            cases.append((f"{('none', 'rms', 'layer')[kind]} {rows}x{size}", inputs))
    return cases


OPS = [Op("norm", norm, reference, _cases, lambda inputs: (8 * inputs["x_TD"].size, 8 * inputs["x_TD"].size))]
