"""Scalars, records and vectors in memory, half precision, and what threads share."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.extending import intrinsic

from tfm.kernels.simd.vectors import (
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LANES,
    TARGET,
    V_F32,
    V_I8,
    V_I32,
    Vector,
    broadcast,
    call,
    constant,
    f32x16,
    i8x64,
    load_at,
    store_at,
)

HAS_F16C = TARGET.has_f16c


def half_to_float(builder: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """float32 lanes of float16 bits held in i16 lanes; exact, subnormals and infinities included."""
    n = half.type.count
    if HAS_F16C:
        return builder.fpext(builder.bitcast(half, ir.VectorType(F16, n)), ir.VectorType(F32, n))
    wide, floats = ir.VectorType(I32, n), ir.VectorType(F32, n)
    bits = builder.zext(half, wide)
    sign = builder.shl(builder.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
    magnitude = builder.and_(bits, constant(wide, 0x7FFF))
    shifted = builder.bitcast(builder.shl(magnitude, constant(wide, 13)), floats)
    finite = builder.bitcast(builder.fmul(shifted, constant(floats, 2.0**112)), wide)
    special = builder.or_(builder.shl(magnitude, constant(wide, 13)), constant(wide, 0x7F800000))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(wide, 0x7C00))
    return builder.bitcast(builder.or_(sign, builder.select(is_special, special, finite)), floats)


def float_to_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """float16 bits in i16 lanes, rounded to nearest even; beyond 65504 it becomes infinity."""
    n = value.type.count
    if HAS_F16C:
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(F16, n)), ir.VectorType(I16, n))
    wide, floats = ir.VectorType(I32, n), ir.VectorType(F32, n)
    bits = builder.bitcast(value, wide)
    magnitude = builder.and_(bits, constant(wide, 0x7FFFFFFF))
    sign = builder.lshr(builder.and_(bits, constant(wide, 0x80000000)), constant(wide, 16))
    odd = builder.and_(builder.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    rounded = builder.add(builder.add(magnitude, constant(wide, 0xFFF)), odd)
    normal = builder.lshr(builder.sub(rounded, constant(wide, 112 << 23)), constant(wide, 13))
    # A subnormal half is a multiple of 2**-24: adding 0.5 lets the float adder round at just that bit.
    nudged = builder.fadd(builder.bitcast(magnitude, floats), constant(floats, 0.5))
    tiny = builder.sub(builder.bitcast(nudged, wide), constant(wide, 0x3F000000))
    small = builder.icmp_unsigned("<", magnitude, constant(wide, 113 << 23))
    result = builder.select(small, tiny, normal)
    huge = builder.icmp_unsigned(">=", magnitude, constant(wide, 0x477FF000))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(wide, 0x7F800000))
    result = builder.select(huge, constant(wide, 0x7C00), result)
    result = builder.select(is_nan, constant(wide, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), ir.VectorType(I16, n))


# -------------------------------------------------------------------------------------------------- scalars and records

SCALARS: dict[str, tuple[types.Type, ir.Type]] = {
    "f32": (types.float32, F32),
    "f64": (types.float64, F64),
    "i8": (types.int8, I8),
    "u8": (types.uint8, I8),
    "u16": (types.uint16, I16),
    "i32": (types.int32, I32),
    "u32": (types.uint32, I32),
    "i64": (types.int64, I64),
}


def _peek(name: str) -> Any:
    kind, low = SCALARS[name]

    @intrinsic
    def peek(typingctx: Any, address: Any) -> Any:
        return kind(types.int64), lambda context, builder, sig, args: load_at(builder, args[0], low)

    return peek


def _poke(name: str) -> Any:
    kind, _ = SCALARS[name]

    @intrinsic
    def poke(typingctx: Any, address: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            store_at(builder, args[0], context.cast(builder, args[1], sig.args[1], kind))
            return context.get_dummy_value()

        return types.void(types.int64, value), build

    return poke


peek_f32, peek_u8, peek_u16, peek_u32, peek_i64 = map(_peek, ("f32", "u8", "u16", "u32", "i64"))
poke_f32, poke_f64, poke_i8, poke_u16, poke_i32, poke_u32, poke_i64 = map(
    _poke, ("f32", "f64", "i8", "u16", "i32", "u32", "i64")
)


def record_at(dtype: np.dtype[Any]) -> Any:
    """An intrinsic that reads the address of a NumPy record as that record: `layer_at(address).q_proj.rows`."""
    record = numba.from_dtype(dtype)

    @intrinsic
    def at(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), build

    return at


@intrinsic
def _prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for the cache line at address, into the second cache; nothing happens where there is no such memory."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        flags = [number(value) for value in (0, 2, 1)]  # to be read; locality; data
        builder.call(function, [builder.inttoptr(args[0], byte), *flags])
        return context.get_dummy_value()

    return types.none(types.int64), build


prefetch: Any = _prefetch


@intrinsic
def _address_of(typingctx: Any, record: Any) -> Any:
    """The address of a record, as int64."""
    return types.int64(record), lambda context, builder, sig, args: builder.ptrtoint(args[0], ir.IntType(64))


address_of: Any = _address_of  # for the type checker, which sees no call of compiled code


# ----------------------------------------------------------------------------------------------------- loads and stores


def _memory(name: str, vector: Vector, build_load: Callable[..., ir.Value]) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        return vector(types.int64), lambda context, builder, sig, args: build_load(builder, args[0])

    load.__name__ = name
    load.vector_load = build_load
    return load


def _load_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load_at(builder, address, V_F32)


def _load_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return half_to_float(builder, load_at(builder, address, ir.VectorType(I16, LANES)))


def _load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    bits = builder.zext(load_at(builder, address, ir.VectorType(I16, LANES)), V_I32)
    return builder.bitcast(builder.shl(bits, constant(V_I32, 16)), V_F32)


def _load_i8(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.sitofp(builder.sext(load_at(builder, address, ir.VectorType(I8, LANES)), V_I32), V_F32)


# Each reads 16 consecutive values at an address and gives them as float32 lanes; the conversions are exact.
load_f32 = _memory("load_f32", f32x16, _load_f32)
load_f16 = _memory("load_f16", f32x16, _load_f16)
load_bf16 = _memory("load_bf16", f32x16, _load_bf16)
load_i8 = _memory("load_i8", f32x16, _load_i8)
load_bytes = _memory("load_bytes", i8x64, lambda builder, address: load_at(builder, address, V_I8))


@intrinsic
def store_f32(typingctx: Any, address: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_at(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), build


@intrinsic
def store_f16(typingctx: Any, address: Any, value: Any) -> Any:
    """Store 16 lanes as float16, rounded to nearest even."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store_at(builder, args[0], float_to_half(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), build


@intrinsic
def store_i8(typingctx: Any, address: Any, value: Any) -> Any:
    """Store 16 lanes, whole numbers in -128..127 (see `round_even`), as int8."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = builder.fptosi(args[1], V_I32)
        store_at(builder, args[0], builder.trunc(whole, ir.VectorType(I8, LANES)))
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), build


@intrinsic
def half_bits(typingctx: Any, value: Any) -> Any:
    """The float16 bits of a float32 scalar."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = builder.insert_element(constant(ir.VectorType(F32, 4), 0.0), args[0], ir.Constant(I32, 0))
        return builder.extract_element(float_to_half(builder, lanes), ir.Constant(I32, 0))

    return types.uint16(types.float32), build


@intrinsic
def peek_f16(typingctx: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = load_at(builder, args[0], I16)
        lanes = builder.insert_element(constant(ir.VectorType(I16, 4), 0), bits, ir.Constant(I32, 0))
        return builder.extract_element(half_to_float(builder, lanes), ir.Constant(I32, 0))

    return types.float32(types.int64), build


@intrinsic
def peek_bf16(typingctx: Any, address: Any) -> Any:
    """The bfloat16 at an address, as float32."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.zext(load_at(builder, args[0], I16), I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)

    return types.float32(types.int64), build


@intrinsic
def store_first(typingctx: Any, address: Any, value: Any, count: Any) -> Any:
    """Store the first `count` float32 lanes (all where count >= 16) and leave the memory beyond alone."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address, value, count = args
        index = ir.Constant(V_I32, list(range(LANES)))
        mask = builder.icmp_signed("<", index, broadcast(builder, builder.trunc(count, I32), LANES))
        pointer = builder.inttoptr(address, V_F32.as_pointer())
        call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), value, pointer, ir.Constant(I32, 4), mask)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, types.int64), build


# ------------------------------------------------------------------------------------------------------ between threads

# All are sequentially consistent, on int64.


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address; what it was before."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), build


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the processor that this is a spin."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if TARGET.is_x86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif TARGET.is_aarch64:
            call(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
        return context.get_dummy_value()

    return types.void(), build
