"""Rows of the embedding, looked up in the packed panels: a tied unembedding needs no second copy. K is hidden_size."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import by_format
from tfm.kernels.jit import Entry, jit
from tfm.kernels.matmul import FORMATS, matrix_at
from tfm.kernels.records import LANES
from tfm.kernels.simd import first_lanes, load_f32, peek_i64, splat, store_first

# embed_row(matrix, row, out): row `row` of a matrix as float32
embed_row = by_format({module.CODE: module.embed for module in FORMATS})


@jit
def add_row(source, size, x):
    """x += source, `size` float32."""
    for i in range(0, size, LANES):
        more = first_lanes(load_f32(source + 4 * i), size - i, splat(0.0))
        store_first(x + 4 * i, load_f32(x + 4 * i) + more, size - i)


@jit
def embed_rows(matrix, tokens, count, out):
    matrix = matrix_at(matrix)
    for t in range(count):
        embed_row(matrix, peek_i64(tokens + 8 * t), out + 4 * t * matrix.columns)


_embed_rows = Entry("tfm.kernels.embedding:embed_rows", "iiii")


def embedding(record: np.ndarray[Any, np.dtype[Any]], tokens_T: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """float32 [T, K]: the rows `tokens_T` of the packed matrix that the record describes."""
    tokens = np.ascontiguousarray(tokens_T, np.int64)
    out = np.full((len(tokens), int(record["columns"][0])), np.nan, np.float32)
    _embed_rows(record.ctypes.data, tokens.ctypes.data, len(tokens), out.ctypes.data)
    return out
