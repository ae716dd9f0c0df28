"""bfloat16 held in 12 bits; see kernels/formats/bf12.py. A unit is 128 weights: four columns of a band of two panels.

It has three cache lines. A weight's lower half is a bit of the exponent and seven of the mantissa; what stands for its
upper half are its sign and a place in a table of eight. With i = 16 (n // 4) + 8 p + 2 (n % 4) + k % 2 for output n of
panel p and column k:

    line 0           byte i: the lower half of the weight in column 0 or 1
    line 1           byte i: the same for columns 2 and 3
    line 2           byte i: four bits for the weight in column 0 or 1, the upper four for that in column 2 or 3

so that a lookup of bytes and two interleavings, which every CPU does within 16 bytes, leave pairs of bfloat16 that are
two columns of an output. As a tile a unit has a row for each column, of a vector for each panel: value
16 (2 k + p) + n is output n of panel p in column k.
"""

from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.extending import intrinsic

from tfm.kernels.records import BAND_PANELS, UNIT_COLUMNS
from tfm.kernels.simd.arithmetic import multiply_add
from tfm.kernels.simd.tiles import each_row
from tfm.kernels.simd.vectors import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    TARGET,
    V_F32,
    V_I8,
    V_I32,
    Tile,
    broadcast,
    call,
    constant,
    f32x16,
    i8x64,
    in_parts,
    load_at,
    shuffle,
)


def _lookup_anywhere(builder: ir.IRBuilder, table: ir.Value, places: ir.Value) -> ir.Value:
    """In plain vector code: right on any CPU."""
    found = constant(places.type, 0)
    for i in range(16):
        entry = shuffle(builder, table, [i] * places.type.count)
        is_here = builder.icmp_unsigned("==", places, constant(places.type, i))
        found = builder.select(is_here, entry, found)
    return found


def _lookup(builder: ir.IRBuilder, table: ir.Value, places: ir.Value) -> ir.Value:
    """Byte table[place] for 64 places 0 .. 15; the 16 bytes of the table stand there four times."""
    if TARGET.has_avx512:
        return call(builder, "llvm.x86.avx512.pshuf.b.512", V_I8, table, places)
    if TARGET.has_avx2:
        name, parts = "llvm.x86.avx2.pshuf.b", 2
    elif TARGET.is_aarch64:
        name, parts = "llvm.aarch64.neon.tbl1.v16i8", 4
    else:
        return _lookup_anywhere(builder, table, places)
    return in_parts(parts, lambda b, table, places: call(b, name, places.type, table, places))(builder, table, places)


def _interleaved(builder: ir.IRBuilder, low: ir.Value, high: ir.Value, first: int) -> ir.Value:
    """Of each 16 bytes the eight from `first` on, of low and of high in turn."""
    lanes = [i for begin in range(first, 64, 16) for k in range(begin, begin + 8) for i in (k, k + 64)]
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 64), lanes))


@intrinsic
def load_table(typingctx: Any, address: Any) -> Any:
    """16 bytes in memory, four times in a vector."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return shuffle(builder, load_at(builder, args[0], ir.VectorType(I8, 16)), 4 * list(range(16)))

    return i8x64(types.int64), build


UNIT = Tile(f32x16, UNIT_COLUMNS, BAND_PANELS)


def _weights(builder: ir.IRBuilder, address: ir.Value, table: ir.Value) -> Iterator[tuple[int, int, ir.Value]]:
    """Column, panel, and the float32 vector of the two, of a unit."""
    nibbles = load_at(builder, builder.add(address, ir.Constant(I64, 128)), V_I8)
    for first in (0, 2):
        low = load_at(builder, builder.add(address, ir.Constant(I64, 32 * first)), V_I8)
        places = builder.lshr(nibbles, constant(V_I8, 4)) if first else builder.and_(nibbles, constant(V_I8, 15))
        high = _lookup(builder, table, places)
        pairs = [builder.bitcast(_interleaved(builder, low, high, 8 * p), V_I32) for p in range(BAND_PANELS)]
        for p, pair in enumerate(pairs):
            yield first, p, builder.bitcast(builder.shl(pair, constant(V_I32, 16)), V_F32)
        for p, pair in enumerate(pairs):
            yield first + 1, p, builder.bitcast(builder.and_(pair, constant(V_I32, -65536)), V_F32)


@intrinsic
def load_unit(typingctx: Any, address: Any, table: Any) -> Any:
    """A unit as a tile."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        result = ir.Constant(context.get_value_type(UNIT), ir.Undefined)
        for k, p, vector in _weights(builder, *args):
            result = builder.insert_value(result, vector, BAND_PANELS * k + p)
        return result

    return UNIT(types.int64, i8x64), build


@intrinsic
def fma_unit(typingctx: Any, acc: Any, address: Any, table: Any, x: Any) -> Any:
    """acc[p] += column k of panel p times the float32 at x + 4 k, for k = 0, 1, 2 and 3."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, address, table, x = args
        for k, p, vector in _weights(builder, address, table):
            added = multiply_add(builder, vector, _value(builder, x, k), builder.extract_value(acc, p))
            acc = builder.insert_value(acc, added, p)
        return acc

    return acc(acc, types.int64, i8x64, types.int64), build


def _value(builder: ir.IRBuilder, x: ir.Value, k: int) -> ir.Value:
    return broadcast(builder, load_at(builder, builder.add(x, ir.Constant(I64, 4 * k)), F32), LANES)


def fma_column(k: int) -> Any:
    """An intrinsic: acc[p] += column k of a unit's panel p times the float32 at x + 4 k."""

    @intrinsic
    def fma(typingctx: Any, acc: Any, weights: Any, x: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, weights, x = args
            value = _value(builder, x, k)

            def change(p: int, row: ir.Value) -> ir.Value:
                return multiply_add(builder, builder.extract_value(weights, BAND_PANELS * k + p), value, row)

            return each_row(builder, acc, change)

        return acc(acc, weights, types.int64), build

    return fma


def columns_of(p: int) -> Any:
    """An intrinsic: the columns of a unit's panel p, a tile."""

    @intrinsic
    def pick(typingctx: Any, weights: Any) -> Any:
        columns = Tile(f32x16, UNIT_COLUMNS)

        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            result = ir.Constant(context.get_value_type(columns), ir.Undefined)
            for k in range(UNIT_COLUMNS):
                result = builder.insert_value(result, builder.extract_value(args[0], BAND_PANELS * k + p), k)
            return result

        return columns(weights), build

    return pick


@intrinsic
def set_value(typingctx: Any, weights: Any, index: Any, bits: Any) -> Any:
    """Weights of a unit, with the bfloat16 of these bits as value `index`; an index beyond them changes nothing."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        weights, index, bits = args
        wanted = broadcast(builder, builder.trunc(index, I32), LANES)
        value = builder.bitcast(builder.shl(builder.trunc(bits, I32), ir.Constant(I32, 16)), F32)
        value = broadcast(builder, value, LANES)

        def change(i: int, vector: ir.Value) -> ir.Value:
            here = ir.Constant(V_I32, list(range(LANES * i, LANES * (i + 1))))
            return builder.select(builder.icmp_signed("==", here, wanted), value, vector)

        return each_row(builder, weights, change)

    return weights(weights, types.int64, types.int64), build
