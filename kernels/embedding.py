"""Rows of the embedding, looked up in the packed panels: a tied unembedding needs no second copy. K is hidden_size."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import by_format
from tfm.kernels.jit import Entry, jit
from tfm.kernels.matmul import FORMATS, matrix_at
from tfm.kernels.ops import Op
from tfm.kernels.records import LANES
from tfm.kernels.simd import first_lanes, load_f32, peek_i64, splat, store_first
from tfm.kernels.weight import FLOAT_FORMATS, Weight, affine_kinds, random_weight


def reference(tokens_T: Any, weight: Weight, positions_TK: Any = None) -> Any:
    """float32 whatever the inputs are: the rows as float32 computes them, bit for bit."""
    rows_TK = weight.dequantized(np.float32)[tokens_T]
    return rows_TK if positions_TK is None else rows_TK + positions_TK.astype(np.float32)


# embed_row(matrix, row, out): row `row` of a matrix as float32
embed_row = by_format({module.CODE: module.embed for module in FORMATS})


@jit
def add_row(source, size, x):
    """x += source, `size` float32."""
    for i in range(0, size, LANES):
        more = first_lanes(load_f32(source + 4 * i), size - i, splat(0.0))
        store_first(x + 4 * i, load_f32(x + 4 * i) + more, size - i)


@jit
def embed_rows(matrix, tokens, count, positions, stride, out):
    matrix = matrix_at(matrix)
    for t in range(count):
        embed_row(matrix, peek_i64(tokens + 8 * t), out + t * stride)
        if positions != 0:
            add_row(positions + t * stride, matrix.columns, out + t * stride)


_embed_rows = Entry("tfm.kernels.embedding:embed_rows", "iiiiii")


def embedding(
    tokens_T: npt.NDArray[np.int64], weight: Weight, positions_TK: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """float32 [T, K]: the rows `tokens_T` of the packed weight, with positions_TK added to them where it is given."""
    tokens, (count,) = np.ascontiguousarray(tokens_T, np.int64), tokens_T.shape
    shape = count, -(-weight.columns // LANES) * LANES
    out, added, address = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), 0
    if positions_TK is not None:
        added[:, : weight.columns] = positions_TK
        address = added.ctypes.data
    _embed_rows(weight.record.ctypes.data, tokens.ctypes.data, count, address, out.strides[0], out.ctypes.data)
    return out[:, : weight.columns]


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    cases: list[tuple[str, Mapping[str, Any]]] = []

    def add(label: str, rows: int, weight: Weight) -> None:
        # The first and the last row, and some twice.
        tokens = np.r_[0, rows - 1, rng.integers(0, rows, 5)]
        label = f"{label} {rows}x{weight.columns}"
        cases.append((label, {"tokens_T": tokens, "weight": weight}))
        positions = rng.standard_normal((len(tokens), weight.columns)).astype(np.float32)
        cases.append((f"{label}, positions", {"tokens_T": tokens, "weight": weight, "positions_TK": positions}))

    for rows in (1, 15, 16, 17, 97):
        for format in FLOAT_FORMATS:
            for columns in (1, 15, 16, 17, 63):
                add(format, rows, random_weight(rng, format, rows, columns))
        for format, group, scale in affine_kinds():
            for columns in (group, 3 * group):
                weight = random_weight(rng, format, rows, columns, group, scale)
                add(f"{format} groups of {group}, {scale}", rows, weight)
    return cases


def _work(inputs: Mapping[str, Any]) -> tuple[int, int]:
    size = len(inputs["tokens_T"]) * inputs["weight"].columns
    return size * inputs["weight"].bits // 8 + 4 * size, size


OPS = [Op("embedding", embedding, reference, _cases, _work)]
