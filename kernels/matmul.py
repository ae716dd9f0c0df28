"""y = x W^T + bias for weights in panels: the driver that all formats share. M rows, N outputs, K columns.

A call computes some panels for some rows. Rows are taken in blocks that stay in the L2 cache, a panel is read once for
a block, and a micro-kernel takes up to TILE rows at once. Which tile a row falls into does not change its sums.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import bf16, by_format, dense, f16, f32, q4, q8
from tfm.kernels.jit import Entry, jit
from tfm.kernels.ops import FEW_RESULTS, Op
from tfm.kernels.quantize import quantize
from tfm.kernels.records import ACTIVATIONS, GROUP, LANES, MATRIX, SCALE_TYPES
from tfm.kernels.simd import PANELS_AT_ONCE, TILE, record_at
from tfm.kernels.weight import Weight, affine_kinds, random_weight

FORMATS = (q4, q8, f32, bf16, f16)
ROW_BLOCK = 48 // TILE * TILE  # rows; 48 times 1536 columns of int8 it is 144 KB
BLOCK_BYTES = 192 * 1024  # of float32 rows; with 2048 columns 24 rows made 234 G multiply-adds/s where 48 made 206

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


def driver(module: ModuleType) -> Any:
    """The loops over row blocks, panels and tiles for one weight format."""
    full, four, two, one = (module.tile_kernel(rows) for rows in (TILE, 4, 2, 1))
    row = module.row_kernel or one
    panels_at_once = dense.PANELS_AT_ONCE if module.row_kernel else 1
    has_pair = module.pair_kernel is not None and PANELS_AT_ONCE == 2
    pair = module.pair_kernel(TILE) if has_pair else full
    row_bytes = 0 if module.QUANTIZED else 4

    @jit
    def panel_of_rows(matrix, panel, acts, t, end, bias, out, stride, add):
        """One panel for rows t .. end - 1."""
        while t + TILE <= end:
            full(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += TILE
        if t + 4 <= end:
            four(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += 4
        if t + 2 <= end:
            two(matrix, panel, acts, t, bias, out + t * stride, stride, add)
            t += 2
        if t < end:
            one(matrix, panel, acts, t, bias, out + t * stride, stride, add)

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add):
        p = first
        if end - begin == 1:
            while p + panels_at_once <= last:
                bias = matrix.bias + 64 * p if matrix.bias != 0 else 0
                panel, target = matrix.data + p * matrix.panel_bytes, out + begin * stride + 64 * p
                row(matrix, panel, acts, begin, bias, target, stride, add)
                p += panels_at_once
        rows = ROW_BLOCK
        if row_bytes != 0:
            rows = max(TILE, min(rows, BLOCK_BYTES // (row_bytes * matrix.columns) // TILE * TILE))
        for block in range(begin, end, rows):
            stop = min(end, block + rows)
            q = p
            while q < last:
                t, count = block, 1
                bias = matrix.bias + 64 * q if matrix.bias != 0 else 0
                panel = matrix.data + q * matrix.panel_bytes
                if has_pair and q + 2 <= last:
                    count = 2
                    while t + TILE <= stop:
                        pair(matrix, panel, acts, t, bias, out + t * stride + 64 * q, stride, add)
                        t += TILE
                for i in range(count):
                    next_bias = bias + 64 * i if bias != 0 else 0
                    next_panel = panel + i * matrix.panel_bytes
                    panel_of_rows(matrix, next_panel, acts, t, stop, next_bias, out + 64 * (q + i), stride, add)
                q += count

    return drive


# multiply(matrix, acts, begin, end, first, last, out, stride, add): rows begin..end-1 and panels first..last-1 of
# out[t, n] = (out[t, n] if add) + x[t] . w[n] + bias[n]; out is float32, `stride` bytes from row to row, padded to
# whole panels.
multiply = by_format({module.CODE: driver(module) for module in FORMATS})
pack_panel = by_format({module.CODE: module.pack for module in FORMATS})


@jit
def multiply_part(matrix, acts, begin, end, first, last, out, stride, add):
    """`multiply` for the addresses of its records."""
    multiply(matrix_at(matrix), activations_at(acts), begin, end, first, last, out, stride, add != 0)


@jit
def pack_panels(matrix, first, last, rows, source, row_stride, column_stride, scales, biases):
    """Panels first .. last - 1 of the matrix whose record is at `matrix`; see the formats' packers."""
    for p in range(first, last):
        pack_panel(matrix_at(matrix), p, rows, source, row_stride, column_stride, scales, biases)


_multiply_part = Entry("tfm.kernels.matmul:multiply_part", "iiiiiiiii")


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
    _multiply_part(*addresses, int(add_MN is not None))
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

    many = 1, 2, 3, TILE - 1, TILE, TILE + 1, 13
    for outputs in (1, 15, 16, 17, 33):
        for format in SCALE_TYPES:
            for columns in (1, 2, 31, 127):
                for bias in (False, True):
                    weight = random_weight(rng, format, outputs, columns, bias=bias)
                    for rows in many:
                        add(format, rows, weight, bias)
        for format, group, scale in affine_kinds():
            for columns in (group, 3 * group):
                weight = random_weight(rng, format, outputs, columns, group, scale, columns > group)
                for rows in many:
                    add(f"{format} groups of {group}, {scale}", rows, weight, columns > group)
    # More rows than a block, more panels than are taken at once; sizes of real models.
    for format in (*SCALE_TYPES, "q4", "q8"):
        add(format, ROW_BLOCK + TILE + 1, random_weight(rng, format, 97, 64))
        for rows in (1, 64):
            add(format, rows, random_weight(rng, format, 576, 1536))
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
    sizes_NK, chain = weight.magnitudes(), dense.SUM_COLUMNS
    parts = [x_MK[:, k : k + chain] @ sizes_NK[:, k : k + chain].T for k in range(0, weight.columns, chain)]
    added = [np.abs(value).max() for value in (weight.bias_N, inputs.get("add_MN")) if value is not None]
    return 2 * float(np.finfo(np.float32).eps) * float(np.max(parts) + sum(added))


def _large(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    """A layer of a model of a billion parameters, for one row and for a prompt."""
    cases: list[tuple[str, Mapping[str, Any]]] = []
    for format in ("q4", "q8", "bf16", "f16", "f32"):
        weight = random_weight(rng, format, 2048, 2048)
        for rows in (1, 512):
            x_MK = rng.standard_normal((rows, 2048)).astype(np.float32)
            cases.append((f"{format} {rows}x2048x2048", {"x_MK": x_MK, "weight": weight}))
    return cases


OPS = [Op("matmul", matmul, reference, _cases, _work, _rounding, _large)]
