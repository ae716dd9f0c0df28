"""Activations as int8, a scale for every 32 columns: what the integer dot products of affine weights read.

    a = max |x| / 127        x8 = round(x / a), ties to even        x ~ a * x8

Beside x8, every group of 32 has 16 bytes: a (float32), a * sum(x8) (float32), sum(x8) (int32), unused. A group of zeros
has a = 0.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import Op
from tfm.kernels.records import GROUP, LANES
from tfm.kernels.simd import (
    absolute,
    load_f32,
    maximum,
    poke_f32,
    poke_i32,
    reduce_add,
    reduce_max,
    round_even,
    splat,
    store_i8,
)


def reference(x_TK: Any) -> Any:
    """The values that the int8 stand for, a * x8."""
    groups = x_TK.reshape(len(x_TK), -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / groups.dtype.type(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return (np.rint(groups * inverse) * scale).reshape(x_TK.shape)


@jit
def quantize_row(x, columns, quantized, groups):
    """Quantise a row of float32, columns a multiple of 32."""
    for k in range(0, columns, GROUP):
        low, high = load_f32(x + 4 * k), load_f32(x + 4 * (k + LANES))
        largest = reduce_max(maximum(absolute(low), absolute(high)))
        scale = largest / np.float32(127)
        inverse = splat(np.float32(127) / largest if largest != 0 else np.float32(0))
        low, high = round_even(low * inverse), round_even(high * inverse)
        store_i8(quantized + k, low)
        store_i8(quantized + k + LANES, high)
        total = reduce_add(low + high)
        group = groups + k // 2
        poke_f32(group, scale)
        poke_f32(group + 4, scale * total)
        poke_i32(group + 8, np.int32(total))


@jit
def quantize_rows(x, rows, columns, quantized, groups):
    """`quantize_row` for `rows` rows that lie one behind the other."""
    for t in range(rows):
        quantize_row(x + 4 * t * columns, columns, quantized + t * columns, groups + t * columns // 2)


_quantize_rows = Entry("tfm.kernels.quantize:quantize_rows", "iiiii")


def quantize(x_TK: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """int8 [T, K] and groups [T, K / 32, 4] (a, a * sum, the bits of the int32 sum, unused) of x_TK (float32)."""
    rows, columns = x_TK.shape
    quantized = np.zeros((rows, columns), np.int8)
    groups = np.zeros((rows, columns // GROUP, 4), np.float32)
    x = np.ascontiguousarray(x_TK)
    _quantize_rows(x.ctypes.data, rows, columns, quantized.ctypes.data, groups.ctypes.data)
    return quantized, groups


def quantized_values(x_TK: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 [T, K]: the values that the int8 of x_TK stand for."""
    quantized, groups = quantize(x_TK)
    return quantized * np.repeat(groups[:, :, 0], GROUP, axis=1)


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    cases = []
    for rows, columns in ((1, 32), (3, 64), (5, 576)):
        x = rng.standard_normal((rows, columns)).astype(np.float32)
        x[0, :32] = 0
        cases.append((f"{rows}x{columns}", {"x_TK": x}))
    return cases


def _work(inputs: Mapping[str, Any]) -> tuple[int, int]:
    return 5 * inputs["x_TK"].size, 4 * inputs["x_TK"].size


OPS = [Op("quantize", quantized_values, reference, _cases, _work)]
