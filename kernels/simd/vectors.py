"""The types of registers and memory, and the few steps that every operation builds its LLVM code from."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.core.extending import models, register_model

from tfm.kernels.targets import current_target

LANES = 16
TARGET = current_target()
# Rows of activations that a micro-kernel takes at once: an AVX2 machine has 16 registers, and 6 rows of 16 lanes are 12
# accumulators; AVX-512 has 32 of twice the size. aarch64 has 32 of half the size: 5 rows leave no accumulator in memory
# on any CPU that LLVM knows, 6 do on some, where 32 columns of q4 then take 106 instructions a row, not 88.
TILE = 8 if TARGET.has_avx512 else 5 if TARGET.is_aarch64 else 6
PANELS_AT_ONCE = 2 if TARGET.has_avx512 else 1  # tiles that the registers hold side by side
STREAMS, AHEAD_BYTES, ASKED_BYTES = TARGET.reading

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
ELEMENTS = {"f32": F32, "i32": I32, "i8": I8, "i16": I16}


class Vector(types.Type):
    """`lanes` values of one element type in registers."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")


class Tile(types.Type):
    """`rows` rows of `width` vectors of one type in registers."""

    def __init__(self, vector: Vector, rows: int, width: int = 1) -> None:
        self.vector, self.rows, self.width = vector, rows, width
        super().__init__(name=f"Tile({vector.name}, {rows}, {width})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ELEMENTS[fe_type.element], fe_type.lanes))


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Tile) -> None:
        vector = ir.VectorType(ELEMENTS[fe_type.vector.element], fe_type.vector.lanes)
        super().__init__(dmm, fe_type, ir.ArrayType(vector, fe_type.rows * fe_type.width))


f32x16, i32x16, i8x64, i16x32 = Vector("f32", 16), Vector("i32", 16), Vector("i8", 64), Vector("i16", 32)
V_F32, V_I32 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
V_I8, V_I16 = ir.VectorType(I8, 64), ir.VectorType(I16, 32)

# -------------------------------------------------------------------------------------------------------- building LLVM


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Call the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def constant(vector: ir.VectorType, value: float | int) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value)] * vector.count)


def broadcast(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    return shuffle(builder, one, [0] * lanes)


def shuffle(builder: ir.IRBuilder, value: ir.Value, lanes: list[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def halves(builder: ir.IRBuilder, value: ir.Value) -> list[ir.Value]:
    n = value.type.count
    return [shuffle(builder, value, list(range(n // 2))), shuffle(builder, value, list(range(n // 2, n)))]


def join(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    n = low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n))))


def in_parts(parts: int, build: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """Apply an operation of shorter registers to each half, or quarter, of 512-bit values."""

    def apply(builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
        if values[0].type.count * values[0].type.element.width == 512 // parts:
            return build(builder, *values)
        low, high = zip(*(halves(builder, value) for value in values), strict=True)
        return join(builder, apply(builder, *low), apply(builder, *high))

    return apply


def load_at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def store_at(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align
