"""Tiles: a fixed number of vectors in registers, and what is done to all of them."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.extending import intrinsic

from tfm.kernels.simd.arithmetic import multiply_add
from tfm.kernels.simd.vectors import F32, I64, LANES, V_F32, Tile, Vector, broadcast, f32x16, load_at, store_at


def tile_of(vector: Vector, rows: int) -> Any:
    """An intrinsic that gives a tile of `rows` zero vectors."""
    tile = Tile(vector, rows)

    @intrinsic
    def zeros(typingctx: Any) -> Any:
        return tile(), lambda context, builder, sig, args: ir.Constant(context.get_value_type(tile), None)

    return zeros


def each_row(builder: ir.IRBuilder, tile: ir.Value, change: Callable[[int, ir.Value], ir.Value]) -> ir.Value:
    """The tile whose row t is change(t, row t)."""
    result = ir.Constant(tile.type, ir.Undefined)
    for t in range(tile.type.count):
        result = builder.insert_value(result, change(t, builder.extract_value(tile, t)), t)
    return result


def row_address(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, t: int) -> ir.Value:
    return builder.add(base, builder.mul(stride, ir.Constant(I64, t))) if t else base


@intrinsic
def fma_rows(typingctx: Any, acc: Any, w: Any, x: Any, stride: Any) -> Any:
    """acc[t] += w * (the float32 at x + t * stride): one vector of weights against a tile of activation rows."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, w, x, stride = args

        def change(t: int, row: ir.Value) -> ir.Value:
            scalar = load_at(builder, row_address(builder, x, stride, t), F32)
            return multiply_add(builder, w, broadcast(builder, scalar, LANES), row)

        return each_row(builder, acc, change)

    return acc(acc, f32x16, types.int64, types.int64), build


def fma_panels(load: Any) -> Any:
    """An intrinsic: acc[p] += (the panel's vector, `load` at w + p * stride) * (the row's float32 at x)."""
    build_load = load.vector_load

    @intrinsic
    def fma(typingctx: Any, acc: Any, w: Any, stride: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, w, stride, x = args
            value = broadcast(builder, load_at(builder, x, F32), LANES)

            def change(p: int, row: ir.Value) -> ir.Value:
                return multiply_add(builder, build_load(builder, row_address(builder, w, stride, p)), value, row)

            return each_row(builder, acc, change)

        return acc(acc, types.int64, types.int64, types.int64), build

    return fma


@intrinsic
def add_vector(typingctx: Any, acc: Any, vector: Any) -> Any:
    """acc[t] += vector, the same for every row."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return each_row(builder, args[0], lambda t, row: builder.fadd(row, args[1]))

    return acc(acc, f32x16), build


@intrinsic
def add_tile(typingctx: Any, acc: Any, other: Any) -> Any:
    """acc[t] += other[t], two tiles of float32 vectors."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, other = args
        return each_row(builder, acc, lambda t, row: builder.fadd(row, builder.extract_value(other, t)))

    return acc(acc, acc), build


@intrinsic
def load_rows(typingctx: Any, like: Any, source: Any, stride: Any) -> Any:
    """A tile of float32 vectors, row t from source + t * stride; as many as the tile `like` has."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        like, source, stride = args
        return each_row(builder, like, lambda t, row: load_at(builder, row_address(builder, source, stride, t), V_F32))

    return like(like, types.int64, types.int64), build


@intrinsic
def add_rows(typingctx: Any, acc: Any, source: Any, stride: Any) -> Any:
    """acc[t] = (the vector at source + t * stride) + acc[t]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, source, stride = args

        def change(t: int, row: ir.Value) -> ir.Value:
            return builder.fadd(load_at(builder, row_address(builder, source, stride, t), V_F32), row)

        return each_row(builder, acc, change)

    return acc(acc, types.int64, types.int64), build


@intrinsic
def store_rows(typingctx: Any, tile: Any, target: Any, stride: Any) -> Any:
    """Store row t of a tile of float32 vectors at target + t * stride."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        tile, target, stride = args
        for t in range(tile.type.count):
            store_at(builder, row_address(builder, target, stride, t), builder.extract_value(tile, t))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), build
