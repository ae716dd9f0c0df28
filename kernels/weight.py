"""A weight matrix as ops on NumPy arrays take it, for tests and benchmarks; the engine packs by `packing` alone.

The op `pack` packs a matrix and unpacks it with the formats' oracles: every bit must come back. N rows, K columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.formats import affine, bf12, dense, q4, q8
from tfm.kernels.ops import Op
from tfm.kernels.packing import (
    PANELS_A_TASK,
    Exponents,
    aligned_empty,
    count_uppers,
    describe,
    pack_tasks,
    packed_bytes,
)
from tfm.kernels.records import LANES, SCALE_TYPES, panels_of

FLOAT_FORMATS = (*SCALE_TYPES, "bf12")
STRAY_SHARE = 0.02  # strays among the random weights of bf12; a model's matrix has at most one in a thousand


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [N, K] as a checkpoint has it, and, when a kernel asks for it, in panels: what ops on NumPy arrays take.

    values, scales, biases and rows as `pack_tasks` has them, scales and biases for affine formats only; bias_N is added
    to what a matmul gives.
    """

    format: str
    values: npt.NDArray[Any]
    scales: npt.NDArray[Any] | None = None
    biases: npt.NDArray[Any] | None = None
    bias_N: npt.NDArray[np.float32] | None = None
    rows: npt.NDArray[np.int64] | None = None

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None

    @property
    def bits(self) -> int:
        return int(self.format[1:]) if self.is_quantized else 8 * self.values.itemsize

    @property
    def columns(self) -> int:
        return self.values.shape[1] * (32 // self.bits if self.is_quantized else 1)

    @property
    def group_size(self) -> int:
        return 0 if self.scales is None else self.columns // self.scales.shape[1]

    @property
    def scale_type(self) -> str | None:
        return None if self.scales is None else {"<f4": "f32", "<f2": "f16", "<u2": "bf16"}[self.scales.dtype.str]

    @cached_property
    def _packed(self) -> tuple[np.ndarray[Any, np.dtype[Any]], npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        count = len(self.values) if self.rows is None else len(self.rows)
        scales, strays = self.scales, 0
        if self.format == "bf12":
            rows = np.arange(count) if self.rows is None else self.rows
            scales, strays, _ = Exponents.of(count_uppers(self.values, rows))
        record = describe(self.format, count, self.columns, self.group_size, self.scale_type, strays)
        memory, bias = aligned_empty(packed_bytes(record)), None
        record["data"] = memory.ctypes.data
        if self.bias_N is not None:
            bias = np.zeros(panels_of(count) * LANES, np.float32)
            bias[:count] = self.bias_N
            record["bias"] = bias.ctypes.data
        for task in pack_tasks(record, self.values, scales, self.biases, self.rows):
            task()
        return record, memory, bias

    @property
    def record(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The record (an array of one) of the packed matrix; it lives as long as this object."""
        return self._packed[0]

    @property
    def panels(self) -> npt.NDArray[np.uint8]:
        """The bytes of the panels."""
        return self._packed[1]

    def quants(self) -> npt.NDArray[np.uint8]:
        """The unsigned numbers of an affine format, [rows of values, K]."""
        codes = np.ascontiguousarray(self.values).view(np.uint8)
        return codes if self.bits == 8 else np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)

    def terms(self, dtype: Any) -> list[npt.NDArray[Any]]:
        """What the weights are sums of, [N, K] in dtype: themselves, or q * scale and bias."""
        if self.scales is None or self.biases is None:
            terms = [floats(self.values).astype(dtype)]
        else:
            tables = (floats(table).astype(dtype) for table in (self.scales, self.biases))
            scales, biases = (np.repeat(table, self.group_size, axis=1) for table in tables)
            terms = [self.quants() * scales, biases]
        if self.rows is None:
            return terms
        return [np.where(self.rows[:, None] < 0, dtype(0), term[self.rows]) for term in terms]

    def dequantized(self, dtype: Any) -> npt.NDArray[Any]:
        """The weights [N, K], computed in dtype from the exact values of the checkpoint."""
        return np.add.reduce(self.terms(dtype))

    def magnitudes(self) -> npt.NDArray[np.float32]:
        """The sizes of the terms of each weight, added."""
        return np.add.reduce([np.abs(term) for term in self.terms(np.float32)])


def floats(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 of float32, float16, or the bits of bfloat16 in uint16; exact."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)


def random_bits(rng: np.random.Generator, kind: str, shape: tuple[int, ...], scale: float = 1.0) -> npt.NDArray[Any]:
    """Normal values of a float type; bf16 and bf12 as bits of bfloat16, cut off. For bf12 some are far smaller."""
    values = (scale * rng.standard_normal(shape)).astype(np.float32)
    if kind == "bf12":
        values *= np.where(
            rng.random(shape) < STRAY_SHARE, np.float32(2) ** -rng.integers(10, 60, shape), np.float32(1)
        )
    if kind in ("bf16", "bf12"):
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if kind == "f16" else values


def random_weight(
    rng: np.random.Generator, format: str, rows: int, columns: int, group_size: int = 32, scale_type: str = "f16",
    bias: bool = False,
) -> Weight:  # fmt: skip
    """Weights of about unit size; those of an affine format use all of its numbers, and lie on both sides of 0."""
    bias_N = rng.standard_normal(rows).astype(np.float32) if bias else None
    if format in FLOAT_FORMATS:
        return Weight(format, random_bits(rng, format, (rows, columns)), bias_N=bias_N)
    bits = int(format[1:])
    words = rng.integers(0, 2**32, (rows, columns * bits // 32), np.uint32)
    scales = random_bits(rng, scale_type, (rows, columns // group_size), 4 / 2**bits)
    middle = -(2 ** (bits - 1)) * floats(scales) + 0.1 * rng.standard_normal(scales.shape)
    biases = (middle.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # a bfloat16 is also a float32
    biases = biases if scale_type == "bf16" else floats(biases).astype(scales.dtype)
    return Weight(format, words, scales, biases, bias_N)


# ---------------------------------------------------------------------------------------------- packed and unpacked

UNPACK_GROUP = {"q4": q4.unpack_group, "q8": q8.unpack_group}


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    return values.view({2: np.uint16, 4: np.uint32}[values.itemsize]).astype(np.uint32)


def round_trip(weight: Weight) -> npt.NDArray[np.uint32]:
    """What the panels hold, as bits: [N, K], and behind the numbers of an affine format its scales and biases."""
    rows, columns = int(weight.record["rows"][0]), weight.columns
    if weight.format == "bf12":
        return _bits(bf12.unpack(weight.panels, rows, columns, int(weight.record["strays"][0])))
    if weight.scales is None:
        return _bits(dense.unpack(weight.panels, rows, columns, weight.values.dtype))
    unpack_group = UNPACK_GROUP[weight.format]
    q, *tables = affine.unpack(weight.panels, rows, columns, weight.group_size, weight.scales.dtype, unpack_group)
    return np.hstack([q, *map(_bits, tables)])


def reference(weight: Weight) -> npt.NDArray[np.uint32]:
    if weight.scales is None or weight.biases is None:
        bits = _bits(np.ascontiguousarray(weight.values))
    else:
        bits = np.hstack([weight.quants(), *(_bits(np.ascontiguousarray(t)) for t in (weight.scales, weight.biases))])
    return bits if weight.rows is None else np.where(weight.rows[:, None] < 0, np.uint32(0), bits[weight.rows])


def affine_kinds() -> list[tuple[str, int, str]]:
    """Every affine format with every group size and type of scales."""
    return [(format, group, scale) for format in ("q4", "q8") for group in (32, 64, 128) for scale in SCALE_TYPES]


def _cases(rng: np.random.Generator) -> list[tuple[str, Mapping[str, Any]]]:
    weights: dict[str, Weight] = {}
    # More panels than one task packs.
    weights["f32 4113x1"] = Weight("f32", random_bits(rng, "f32", (LANES * PANELS_A_TASK + 17, 1)))
    for rows in (1, 15, 16, 17, 33, 257):
        order = rng.permutation(np.r_[np.arange(rows), [-1] * 5])  # rows in another order, some of them zeros
        for kind in FLOAT_FORMATS:
            for columns in (1, 7, 32):
                values = random_bits(rng, kind, (rows, columns))
                label = f"{kind} {rows}x{columns}"
                weights[label] = Weight(kind, values)
                weights[f"{label}, transposed in memory"] = Weight(kind, np.asfortranarray(values))
                weights[f"{label}, rows picked"] = Weight(kind, values, rows=order)
                stacked = random_bits(rng, kind, (columns + 1, 2 * rows + 3)).T
                weights[f"{label}, a part of a transposed matrix"] = Weight(kind, stacked[2::2, 1:])
        for kind, group, scale in affine_kinds():
            for groups in (1, 3):
                whole = random_weight(rng, kind, rows + 2, groups * group, group, scale)
                assert whole.scales is not None
                assert whole.biases is not None
                part = whole.values[1:-1], whole.scales[1:-1], whole.biases[1:-1]
                label = f"{kind} {rows}x{groups * group}, groups of {group}, {scale}"
                weights[label] = Weight(kind, *part)
                weights[f"{label}, rows picked"] = Weight(kind, *part, rows=order)
    return [(label, {"weight": weight}) for label, weight in weights.items()]


OPS = [Op("pack", round_trip, reference, _cases, lambda inputs: (2 * inputs["weight"].panels.nbytes, 0))]
