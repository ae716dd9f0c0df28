"""Tiles: a fixed number of vectors in registers, and what is done to all of them."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.extending import intrinsic

from tfm.kernels.simd.arithmetic import multiply_add
from tfm.kernels.simd.vectors import F32, I64, LANES, V_F32, Tile, Vector, broadcast, load_at, store_at


def tile_of(vector: Vector, rows: int, width: int = 1) -> Any:
    """An intrinsic that gives a tile of `rows` times `width` zero vectors."""
    tile = Tile(vector, rows, width)

    @intrinsic
    def zeros(typingctx: Any) -> Any:
        return tile(), lambda context, builder, sig, args: ir.Constant(context.get_value_type(tile), None)

    return zeros


def each_row(builder: ir.IRBuilder, tile: ir.Value, change: Callable[[int, ir.Value], ir.Value]) -> ir.Value:
    """The tile whose vector i is change(i, vector i); row after row."""
    result = ir.Constant(tile.type, ir.Undefined)
    for i in range(tile.type.count):
        result = builder.insert_value(result, change(i, builder.extract_value(tile, i)), i)
    return result


def row_address(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, t: int) -> ir.Value:
    return builder.add(base, builder.mul(stride, ir.Constant(I64, t))) if t else base


def vector_address(builder: ir.IRBuilder, tile: Tile, base: ir.Value, stride: ir.Value, i: int) -> ir.Value:
    """Of a tile's vector i in memory: rows are `stride` bytes apart, the vectors of a row side by side."""
    row, place = divmod(i, tile.width)
    address = row_address(builder, base, stride, row)
    return builder.add(address, ir.Constant(I64, 4 * LANES * place)) if place else address


def fma_tile(load: Any) -> Any:
    """An intrinsic: acc[t, i] += (the vector, `load` at w + i * w_stride) * (the float32 at x + t * x_stride)."""

    @intrinsic
    def fma(typingctx: Any, acc: Any, w: Any, w_stride: Any, x: Any, x_stride: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, w, w_stride, x, x_stride = args
            weights = _load_each(builder, load, sig.return_type.width, w, w_stride)
            return _multiply_rows(builder, acc, weights, x, x_stride)

        return acc(acc, types.int64, types.int64, types.int64, types.int64), build

    return fma


def fma_unpack_tile(load: Any) -> Any:
    """The same, and the vectors of weights are stored as float32 side by side at `unpacked`."""

    @intrinsic
    def fma(typingctx: Any, acc: Any, w: Any, w_stride: Any, x: Any, x_stride: Any, unpacked: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, w, w_stride, x, x_stride, unpacked = args
            weights = _load_each(builder, load, sig.return_type.width, w, w_stride)
            for i, weight in enumerate(weights):
                store_at(builder, builder.add(unpacked, ir.Constant(I64, 4 * LANES * i)), weight)
            return _multiply_rows(builder, acc, weights, x, x_stride)

        return acc(acc, *[types.int64] * 5), build

    return fma


def _load_each(builder: ir.IRBuilder, load: Any, width: int, w: ir.Value, stride: ir.Value) -> list[ir.Value]:
    return [load.vector_load(builder, row_address(builder, w, stride, i)) for i in range(width)]


def _multiply_rows(
    builder: ir.IRBuilder, acc: ir.Value, weights: list[ir.Value], x: ir.Value, stride: ir.Value
) -> ir.Value:
    """Row after row: with all broadcasts first, 12 rows of two vectors do not fit into 32 registers."""
    width, result = len(weights), acc
    for t in range(acc.type.count // width):
        value = broadcast(builder, load_at(builder, row_address(builder, x, stride, t), F32), LANES)
        for i, weight in enumerate(weights, width * t):
            added = multiply_add(builder, weight, value, builder.extract_value(acc, i))
            result = builder.insert_value(result, added, i)
    return result


def vector_of(i: int) -> Any:
    """An intrinsic that gives vector i of a tile."""

    @intrinsic
    def pick(typingctx: Any, tile: Any) -> Any:
        return tile.vector(tile), lambda context, builder, sig, args: builder.extract_value(args[0], i)

    return pick


@intrinsic
def add_tile(typingctx: Any, acc: Any, other: Any) -> Any:
    """acc[t] += other[t], two tiles of float32 vectors."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, other = args
        return each_row(builder, acc, lambda t, row: builder.fadd(row, builder.extract_value(other, t)))

    return acc(acc, acc), build


@intrinsic
def load_rows(typingctx: Any, like: Any, source: Any, stride: Any) -> Any:
    """A tile of float32 vectors in the shape of `like`, row t from source + t * stride."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        like, source, stride = args

        def change(i: int, vector: ir.Value) -> ir.Value:
            return load_at(builder, vector_address(builder, sig.return_type, source, stride, i), V_F32)

        return each_row(builder, like, change)

    return like(like, types.int64, types.int64), build


@intrinsic
def add_rows(typingctx: Any, acc: Any, source: Any, stride: Any) -> Any:
    """acc[t] = (the vectors at source + t * stride) + acc[t]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, source, stride = args

        def change(i: int, vector: ir.Value) -> ir.Value:
            address = vector_address(builder, sig.return_type, source, stride, i)
            return builder.fadd(load_at(builder, address, V_F32), vector)

        return each_row(builder, acc, change)

    return acc(acc, types.int64, types.int64), build


@intrinsic
def store_rows(typingctx: Any, tile: Any, target: Any, stride: Any) -> Any:
    """Store row t of a tile of float32 vectors at target + t * stride."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values, target, stride = args
        for i in range(values.type.count):
            address = vector_address(builder, sig.args[0], target, stride, i)
            store_at(builder, address, builder.extract_value(values, i))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), build
