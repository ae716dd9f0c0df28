"""y = x W^T + bias for weights in panels, in every format. M rows, N outputs, K columns.

A call computes some panels for some rows. Rows are taken in blocks that stay in the second cache, and a micro-kernel
takes several at once (kernels/formats). Which block or tile a row falls into does not change its sums.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import bands, bf12, bf16, by_float, by_format, f16, f32, q4, q8
from tfm.kernels.jit import Entry, called_as_piece, jit
from tfm.kernels.ops import FEW_RESULTS, Op
from tfm.kernels.packing import aligned_empty
from tfm.kernels.quantize import quantize
from tfm.kernels.records import (
    ACTIVATIONS,
    BLOCK_ROWS,
    GROUP,
    LANES,
    MATRIX,
    MULTIPLY_SCRATCH_BYTES,
    SCALE_TYPES,
)
from tfm.kernels.simd import TILE, record_at
from tfm.kernels.weight import Weight, affine_kinds, random_bits, random_weight

FLOATS = (f32, bf16, bf12, f16)
FORMATS = (q4, q8, *FLOATS)
matrix_at = record_at(MATRIX)
activations_at = record_at(ACTIVATIONS)


def reference(x_MK: Any, weight: Weight, add_MN: Any = None) -> Any:
    """An affine format multiplies activations of int8: here their exact values stand for x."""
    if weight.is_quantized:
        x8_MK, groups = quantize(x_MK.astype(np.float32))
        x_MK = x8_MK * np.repeat(groups[:, :, 0], GROUP, axis=1).astype(x_MK.dtype)
    y_MN = x_MK @ weight.dequantized(x_MK.dtype.type).T
    if weight.bias_N is not None:
        y_MN = y_MN + weight.bias_N
    return y_MN if add_MN is None else add_MN + y_MN


# multiply(matrix, acts, begin, end, first, last, out, stride, add, scratch): rows begin..end-1 and panels first..last-1
# of out[t, n] = (out[t, n] if add) + x[t] . w[n] + bias[n]; out is float32, `stride` bytes from row to row, padded to
# whole panels. scratch is the address of MULTIPLY_SCRATCH_BYTES that this thread alone writes.
multiply_floats = bands.driver(
    by_float({module.CODE: module.band_row for module in FLOATS}),
    by_float({module.CODE: module.band_rows for module in FLOATS}),
    by_float({module.CODE: module.start_block for module in FLOATS}),
)
multiply = by_format({q4.CODE: q4.multiply, q8.CODE: q8.multiply} | {module.CODE: multiply_floats for module in FLOATS})
pack_panel = by_format({module.CODE: module.pack for module in FORMATS})


@jit
def multiply_part(matrix, acts, begin, end, first, last, out, stride, add, scratch):
    """`multiply` for the addresses of its records."""
    multiply(matrix_at(matrix), activations_at(acts), begin, end, first, last, out, stride, add != 0, scratch)


@jit
def pack_panels(matrix, first, last, rows, source, row_stride, column_stride, scales, biases):
    """Panels first .. last - 1 of the matrix whose record is at `matrix`; see the formats' packers."""
    for p in range(first, last):
        pack_panel(matrix_at(matrix), p, rows, source, row_stride, column_stride, scales, biases)


@jit
def count_uppers(columns, bands, rows, source, row_stride, column_stride, counts):
    """bf12.count_band for each band, with counts of its own."""
    for band in range(bands):
        at = counts + 8 * bf12.UPPERS * band
        bf12.count_band(columns, rows + 8 * bf12.BAND_ROWS * band, source, row_stride, column_stride, at)


_multiply_part = Entry("tfm.kernels.matmul:multiply_part", 10 * "i")
multiply_piece = called_as_piece(_multiply_part)


def activations(x_MK: npt.NDArray[np.float32], quantized: bool) -> tuple[np.ndarray[Any, np.dtype[Any]], Any]:
    """An ACTIVATIONS record (an array of one) of the rows of x_MK, and the arrays that it points into."""
    record = np.zeros(1, ACTIVATIONS)
    x = np.ascontiguousarray(x_MK, np.float32)
    if not quantized:
        record["values"], record["stride"] = x.ctypes.data, x.strides[0]
        return record, x
    x8, groups = quantize(x)
    record["quantized"], record["quantized_stride"] = x8.ctypes.data, x8.strides[0]
    record["groups"], record["groups_stride"] = groups.ctypes.data, groups.strides[0]
    return record, (x8, groups)


def matmul(
    x_MK: npt.NDArray[np.float32], weight: Weight, add_MN: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """float32 [M, N]: x W^T, with the weight's bias, and added to add_MN where it is given."""
    (rows, columns), matrix = x_MK.shape, weight.record
    assert columns == weight.columns, "x and the weight differ in columns"
    acts, kept = activations(x_MK, weight.is_quantized)
    panels, count = int(matrix["panels"][0]), int(matrix["rows"][0])
    out = np.empty((rows, panels * LANES), np.float32)
    if add_MN is not None:
        out[:, :count] = add_MN
    addresses = matrix.ctypes.data, acts.ctypes.data, 0, rows, 0, panels, out.ctypes.data, out.strides[0]
    scratch = aligned_empty(MULTIPLY_SCRATCH_BYTES)
    _multiply_part(*addresses, int(add_MN is not None), scratch.ctypes.data)
    del kept  # until here the kernel read it
    return out[:, :count]


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    cases: list[tuple[str, Mapping[str, Any]]] = []

    def add(label: str, rows: int, weight: Weight, residual: bool = False) -> None:
        x_MK = rng.standard_normal((rows, weight.columns)).astype(np.float32)
        inputs: dict[str, Any] = {"x_MK": x_MK, "weight": weight}
        if residual:
            inputs["add_MN"] = rng.standard_normal((rows, len(weight.values))).astype(np.float32)
        with_bias = "" if weight.bias_N is None else ", bias"
        cases.append((f"{label} {rows}x{len(weight.values)}x{weight.columns}{with_bias}", inputs))

    many, outputs = (1, 2, 3, TILE - 1, TILE, TILE + 1, 13), (1, 15, 16, 17, 33)

    def add_floats(format: str, count: int) -> None:
        for columns in (1, 2, 31, 127):
            for bias in (False, True):
                weight = random_weight(rng, format, count, columns, bias=bias)
                for rows in many:
                    add(format, rows, weight, bias)

    def add_large(format: str) -> None:
        """More rows than a block, more panels than are taken at once; sizes of real models."""
        add(format, BLOCK_ROWS + TILE + 1, random_weight(rng, format, 97, 64))
        for rows in (1, 64):
            add(format, rows, random_weight(rng, format, 576, 1536))

    for count in outputs:
        for format in SCALE_TYPES:
            add_floats(format, count)
        for format, group, scale in affine_kinds():
            for columns in (group, 3 * group):
                weight = random_weight(rng, format, count, columns, group, scale, columns > group)
                for rows in many:
                    add(f"{format} groups of {group}, {scale}", rows, weight, columns > group)
    for format in (*SCALE_TYPES, "q4", "q8"):
        add_large(format)
    # Last, so that the numbers drawn for the others stay: of others one case in 2,398 exceeded its bound, by chance.
    for count in outputs:
        add_floats("bf12", count)
    add_large("bf12")
    return cases


def _work(inputs: Mapping[str, Any]) -> tuple[int, int]:
    (rows, columns), weight = inputs["x_MK"].shape, inputs["weight"]
    count = len(weight.values)
    return weight.panels.nbytes + 4 * rows * (columns + count), 2 * rows * columns * count


def _rounding(inputs: Mapping[str, Any]) -> float:
    """Of few sums: twice the machine epsilon of the largest sum of sizes (signs left out) in one chain of additions.

    The largest error of a few sums is chance: in seven draws of 2,115 cases 90 to 107 exceeded twice NumPy's, none of
    them with more than 429 sums. With many sums there is no excuse.
    """
    if len(inputs["x_MK"]) * len(inputs["weight"].values) > FEW_RESULTS:
        return 0.0
    x_MK, weight = np.abs(inputs["x_MK"]), inputs["weight"]
    sizes_NK, chain = weight.magnitudes(), bands.SUM_COLUMNS
    parts = [x_MK[:, k : k + chain] @ sizes_NK[:, k : k + chain].T for k in range(0, weight.columns, chain)]
    added = [np.abs(value).max() for value in (weight.bias_N, inputs.get("add_MN")) if value is not None]
    return 2 * float(np.finfo(np.float32).eps) * float(np.max(parts) + sum(added))


def _large(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    """A layer of a model of a billion parameters, for one row and for a prompt."""
    cases: list[tuple[str, Mapping[str, Any]]] = []
    for format in ("q4", "q8", "bf12", "bf16", "f16", "f32"):
        # bf12 as in a model: the random weights of the cases have twenty times as many strays as a matrix may have.
        if format == "bf12":
            weight = Weight(format, random_bits(rng, "bf16", (2048, 2048)))
        else:
            weight = random_weight(rng, format, 2048, 2048)
        for rows in (1, 512):
            x_MK = rng.standard_normal((rows, 2048)).astype(np.float32)
            cases.append((f"{format} {rows}x2048x2048", {"x_MK": x_MK, "weight": weight}))
    return cases


OPS = [Op("matmul", matmul, reference, _cases, _work, _rounding, _large)]
