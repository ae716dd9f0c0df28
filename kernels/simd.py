"""Vector types and their operations: a kernel reads `acc = fma(a, b, acc)`. The only file that builds LLVM code.

A vector has 16 lanes of 32 bits (or 64 of 8), which is one AVX-512 register, two AVX2 registers or four NEON registers:
LLVM splits it. A lane is always one output of a kernel, so that no kernel ever sums across lanes of a long dot product
and the order of summation does not depend on the width of the machine's registers.

A tile is a fixed number of vectors, one for each row of activations (or each panel of weights) that a micro-kernel
holds in registers; its operations are unrolled when the kernel is compiled.

Memory is named by plain integer addresses: the layer table and the step record hold addresses, and a kernel that walks
packed panels counts bytes. Every address was checked in Python before.

What differs between CPUs is chosen here, from the target's features: the integer dot products, the pause instruction,
and whether a fused multiply-add or a conversion from half precision exists. Without them the generic forms below are
right everywhere.
"""

import operator
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numba
import numpy as np
from numba.core import cgutils, types
from numba.core.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

LANES = 16

# ---------------------------------------------------------------------------------------------- target


def target_features() -> frozenset[str]:
    """The features of the CPU compiled for: the host's, or what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES force."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is not None:
        return frozenset(f[1:] for f in features.split(",") if f.startswith("+"))
    if os.environ.get("NUMBA_CPU_NAME", "").lower() == "generic":  # any other name alone leaves the host's features on
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


FEATURES = target_features()
IS_X86 = llvm.get_default_triple().startswith(("x86_64", "i686"))
IS_AARCH64 = llvm.get_default_triple().startswith(("aarch64", "arm64"))
HAS_FMA = not IS_X86 or "fma" in FEATURES
HAS_F16C = not IS_X86 or "f16c" in FEATURES
HAS_AVX2 = IS_X86 and "avx2" in FEATURES
HAS_AVX512 = IS_X86 and "avx512f" in FEATURES and "avx512bw" in FEATURES
HAS_VNNI_512 = HAS_AVX512 and "avx512vnni" in FEATURES
HAS_VNNI_256 = HAS_AVX2 and ("avxvnni" in FEATURES or ("avx512vnni" in FEATURES and "avx512vl" in FEATURES))

# Rows of activations that a micro-kernel takes at once: an AVX2 machine has 16 registers, and 6 rows of 16 lanes are 12
# accumulators; AVX-512 and aarch64 have 32.
TILE = 8 if HAS_AVX512 or IS_AARCH64 else 6

# ---------------------------------------------------------------------------------------------- types

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
ELEMENTS = {"f32": F32, "i32": I32, "i8": I8, "i16": I16}


class Vector(types.Type):
    """`lanes` values of one element type in registers."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"{element}x{lanes}")


class Tile(types.Type):
    """`rows` vectors of one type in registers."""

    def __init__(self, vector: Vector, rows: int) -> None:
        self.vector, self.rows = vector, rows
        super().__init__(name=f"Tile({vector.name}, {rows})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ELEMENTS[fe_type.element], fe_type.lanes))


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Tile) -> None:
        vector = ir.VectorType(ELEMENTS[fe_type.vector.element], fe_type.vector.lanes)
        super().__init__(dmm, fe_type, ir.ArrayType(vector, fe_type.rows))


f32x16, i32x16, i8x64, i16x32 = Vector("f32", 16), Vector("i32", 16), Vector("i8", 64), Vector("i16", 32)
V_F32, V_I32 = ir.VectorType(F32, 16), ir.VectorType(I32, 16)
V_I8, V_I16 = ir.VectorType(I8, 64), ir.VectorType(I16, 32)

# ---------------------------------------------------------------------------------------------- building LLVM


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


def load_at(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = align
    return loaded


def store_at(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once where the target has the instruction (else that would be a libm call for each lane)."""
    if not HAS_FMA:
        return builder.fadd(builder.fmul(a, b), c)
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


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


# ---------------------------------------------------------------------------------------------- scalars and records

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


peek_f32, peek_u8, peek_u16, peek_i32, peek_u32, peek_i64 = map(_peek, ("f32", "u8", "u16", "i32", "u32", "i64"))
poke_f32, poke_i8, poke_u16, poke_i32, poke_u32, poke_i64 = map(_poke, ("f32", "i8", "u16", "i32", "u32", "i64"))


def record_at(dtype: np.dtype[Any]) -> Any:
    """An intrinsic that reads the address of a NumPy record as that record: `layer_at(address).q_proj.rows`."""
    record = numba.from_dtype(dtype)

    @intrinsic
    def at(typingctx: Any, address: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(types.int64), build

    return at


# ---------------------------------------------------------------------------------------------- loads and stores


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


# ---------------------------------------------------------------------------------------------- arithmetic on vectors


def _operator(op: Callable[..., Any], instruction: str) -> None:
    class Template(AbstractTemplate):
        key = op

        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) == 2 and args[0] == args[1] == f32x16:
                return signature(f32x16, f32x16, f32x16)
            return None

    infer_global(op)(Template)

    @lower_builtin(op, Vector, Vector)
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _op, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_op, _instruction)


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in every lane."""
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: multiply_add(builder, *args)


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A float32 scalar in every lane."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return broadcast(builder, context.cast(builder, args[0], sig.args[0], types.float32), LANES)

    return f32x16(value), build


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return f32x16(f32x16, f32x16), build


@intrinsic
def minimum(typingctx: Any, a: Any, b: Any) -> Any:
    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", *args), *args)

    return f32x16(f32x16, f32x16), build


@intrinsic
def absolute(typingctx: Any, a: Any) -> Any:
    return f32x16(f32x16), lambda context, builder, sig, args: call(builder, "llvm.fabs.v16f32", V_F32, args[0])


@intrinsic
def first_lanes(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of value, and of `other` beyond; all of value where count >= 16, none where <= 0."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = builder.trunc(args[1], I32)
        index = ir.Constant(V_I32, list(range(LANES)))
        return builder.select(builder.icmp_signed("<", index, broadcast(builder, count, LANES)), args[0], args[2])

    return f32x16(f32x16, types.int64, f32x16), build


def _reduce(build_pair: Callable[..., ir.Value]) -> Any:
    @intrinsic
    def reduce(typingctx: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = args[0]
            while value.type.count > 1:
                value = build_pair(builder, *halves(builder, value))
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(f32x16), build

    return reduce


# Lane i with lane i + 8, then i + 4, and so on: one order on every machine.
reduce_add = _reduce(lambda builder, a, b: builder.fadd(a, b))
reduce_max = _reduce(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def round_even(typingctx: Any, value: Any) -> Any:
    """The nearest whole number, ties to even, for |value| < 2**22: 1.5 * 2**23 added and taken away again."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        magic = constant(V_F32, 12582912.0)
        return builder.fsub(builder.fadd(args[0], magic), magic)

    return f32x16(f32x16), build


# exp(r) = 1 + r + r**2 q(r) on |r| <= ln(2)/2: q by a Remez fit in float64 that rounds its coefficients to float32 one
# after the other; the relative error of the polynomial is 0.055 * 2**-24.
EXP_COEFFICIENTS = (1.0, 1.0, 0.49999994, 0.16666517, 0.041668102, 0.0083691655, 0.0013838324)
# tanh(x) = x + x**3 q(x**2) on |x| <= 0.625, fitted likewise; the relative error of the polynomial is 0.076 * 2**-24.
TANH_COEFFICIENTS = (-0.3333328, 0.13331406, -0.053736515, 0.020628167, -0.0056922967)


def polynomial(builder: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """The polynomial with these coefficients, lowest power first, by Horner's rule."""
    p = constant(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        p = multiply_add(builder, p, x, constant(x.type, coefficient))
    return p


def exponential(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x: x = n ln 2 + r with ln 2 in two parts, so that r is right to its last bits; 2**n goes into the exponent in
    two halves, since n may be 128."""
    magic = constant(V_F32, 12582912.0)
    shifted = multiply_add(builder, x, constant(V_F32, 1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = multiply_add(builder, n, constant(V_F32, -0.693359375), x)
    r = multiply_add(builder, n, constant(V_F32, 2.12194440e-4), r)
    p = polynomial(builder, r, EXP_COEFFICIENTS)
    whole = builder.sub(builder.bitcast(shifted, V_I32), constant(V_I32, 0x4B400000))
    half = builder.ashr(whole, constant(V_I32, 1))
    for part in (half, builder.sub(whole, half)):
        exponent = builder.shl(builder.add(part, constant(V_I32, 127)), constant(V_I32, 23))
        p = builder.fmul(p, builder.bitcast(exponent, V_F32))
    p = builder.select(builder.fcmp_ordered("<", x, constant(V_F32, -87.33654)), constant(V_F32, 0.0), p)
    return builder.select(builder.fcmp_ordered(">", x, constant(V_F32, 88.72283)), constant(V_F32, float("inf")), p)


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """e**value in every lane, within 0.90 units in the last place (1.17 without fused multiply-add), exactly 1 at 0.

    Below -87.33654 it is 0 (a result that float32 could only hold as a subnormal), above 88.72283 infinity; NaN stays
    NaN.
    """
    return f32x16(f32x16), lambda context, builder, sig, args: exponential(builder, args[0])


@intrinsic
def tanh(typingctx: Any, value: Any) -> Any:
    """The hyperbolic tangent of every lane, within 1.4 units in the last place; -0 and NaN stay.

    A polynomial up to 0.625, so that it is right relative to itself near 0; beyond, 1 - 2 / (e**(2 |x|) + 1) with the
    sign of x.
    """

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        x = args[0]
        square = builder.fmul(x, x)
        near = multiply_add(builder, builder.fmul(square, x), polynomial(builder, square, TANH_COEFFICIENTS), x)
        size = call(builder, "llvm.fabs.v16f32", V_F32, x)
        power = exponential(builder, builder.fadd(size, size))
        one, two = constant(V_F32, 1.0), constant(V_F32, 2.0)
        far = builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))
        result = builder.select(builder.fcmp_unordered(">", size, constant(V_F32, 0.625)), far, near)
        return call(builder, "llvm.copysign.v16f32", V_F32, result, x)

    return f32x16(f32x16), build


# ---------------------------------------------------------------------------------------------- tiles


def tile_of(vector: Vector, rows: int) -> Any:
    """An intrinsic that gives a tile of `rows` zero vectors."""
    tile = Tile(vector, rows)

    @intrinsic
    def zeros(typingctx: Any) -> Any:
        return tile(), lambda context, builder, sig, args: ir.Constant(context.get_value_type(tile), None)

    return zeros


def _rows(builder: ir.IRBuilder, tile: ir.Value, change: Callable[[int, ir.Value], ir.Value]) -> ir.Value:
    """The tile whose row t is change(t, row t)."""
    result = ir.Constant(tile.type, ir.Undefined)
    for t in range(tile.type.count):
        result = builder.insert_value(result, change(t, builder.extract_value(tile, t)), t)
    return result


def _row_address(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, t: int) -> ir.Value:
    return builder.add(base, builder.mul(stride, ir.Constant(I64, t))) if t else base


@intrinsic
def fma_rows(typingctx: Any, acc: Any, w: Any, x: Any, stride: Any) -> Any:
    """acc[t] += w * (the float32 at x + t * stride): one vector of weights against a tile of activation rows."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, w, x, stride = args

        def change(t: int, row: ir.Value) -> ir.Value:
            scalar = load_at(builder, _row_address(builder, x, stride, t), F32)
            return multiply_add(builder, w, broadcast(builder, scalar, LANES), row)

        return _rows(builder, acc, change)

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
                return multiply_add(builder, build_load(builder, _row_address(builder, w, stride, p)), value, row)

            return _rows(builder, acc, change)

        return acc(acc, types.int64, types.int64, types.int64), build

    return fma


@intrinsic
def add_vector(typingctx: Any, acc: Any, vector: Any) -> Any:
    """acc[t] += vector, the same for every row."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _rows(builder, args[0], lambda t, row: builder.fadd(row, args[1]))

    return acc(acc, f32x16), build


@intrinsic
def add_tile(typingctx: Any, acc: Any, other: Any) -> Any:
    """acc[t] += other[t], two tiles of float32 vectors."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, other = args
        return _rows(builder, acc, lambda t, row: builder.fadd(row, builder.extract_value(other, t)))

    return acc(acc, acc), build


@intrinsic
def load_rows(typingctx: Any, like: Any, source: Any, stride: Any) -> Any:
    """A tile of float32 vectors, row t from source + t * stride; as many as the tile `like` has."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        like, source, stride = args
        return _rows(builder, like, lambda t, row: load_at(builder, _row_address(builder, source, stride, t), V_F32))

    return like(like, types.int64, types.int64), build


@intrinsic
def add_rows(typingctx: Any, acc: Any, source: Any, stride: Any) -> Any:
    """acc[t] = (the vector at source + t * stride) + acc[t]."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, source, stride = args

        def change(t: int, row: ir.Value) -> ir.Value:
            return builder.fadd(load_at(builder, _row_address(builder, source, stride, t), V_F32), row)

        return _rows(builder, acc, change)

    return acc(acc, types.int64, types.int64), build


@intrinsic
def store_rows(typingctx: Any, tile: Any, target: Any, stride: Any) -> Any:
    """Store row t of a tile of float32 vectors at target + t * stride."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        tile, target, stride = args
        for t in range(tile.type.count):
            store_at(builder, _row_address(builder, target, stride, t), builder.extract_value(tile, t))
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), build


# ---------------------------------------------------------------------------------------------- integer dot products

# A weight vector holds, for each of 16 outputs, 4 consecutive columns as unsigned bytes. Its dot product with 4 int8
# activations lands in the output's lane of 32 bits. AVX2 has no such instruction: `pmaddubsw` gives 16-bit sums of two,
# which stay in int16 for a group of 32 columns of 4-bit weights (8 sums of at most 2 * 15 * 127 = 3810 are below
# 32767).

NIBBLE_SUMS = i16x32 if HAS_AVX2 and not HAS_VNNI_256 else i32x16


def _sum_of_four(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    """acc + the four products a lane, in plain vector code: right on any CPU."""
    for c in range(4):
        lanes = list(range(c, 64, 4))
        weight, activation = shuffle(builder, w, lanes), shuffle(builder, a, lanes)
        product = builder.mul(builder.zext(weight, V_I32), builder.sext(activation, V_I32))
        acc = builder.add(acc, product)
    return acc


def _by_halves(build: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """Apply a 256-bit operation to both halves of 512-bit values."""

    def both(builder: ir.IRBuilder, *values: ir.Value) -> ir.Value:
        low, high = zip(*(halves(builder, value) for value in values), strict=True)
        return join(builder, build(builder, *low), build(builder, *high))

    return both


def _vpdpbusd(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{acc.type.count * 32}", acc.type, acc, w, a)


def _pmaddubsw(builder: ir.IRBuilder, w: ir.Value, a: ir.Value) -> ir.Value:
    return call(builder, "llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), w, a)


def _pmaddwd(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), a, b)


def _nibble_step_avx2(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return builder.add(acc, _pmaddubsw(builder, w, a))


def _byte_step_avx2(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    """Unsigned bytes times int8 would saturate int16, so w - 128 is used: its size, times a with its sign."""
    signed = builder.xor(w, constant(w.type, -128))
    magnitude = call(builder, "llvm.abs.v32i8", w.type, signed, ir.Constant(I1, 0))
    sums = _pmaddubsw(builder, magnitude, call(builder, "llvm.x86.avx2.psign.b", w.type, a, signed))
    return builder.add(acc, _pmaddwd(builder, sums, constant(sums.type, 1)))


if HAS_VNNI_512:
    _nibble_step = _byte_step = _vpdpbusd
elif HAS_VNNI_256:
    _nibble_step = _byte_step = _by_halves(_vpdpbusd)
elif HAS_AVX2:
    _nibble_step, _byte_step = _by_halves(_nibble_step_avx2), _by_halves(_byte_step_avx2)
else:
    _nibble_step = _byte_step = _sum_of_four

BYTES_ARE_OFFSET = _byte_step is not _sum_of_four and not HAS_VNNI_256  # the step sees w - 128


def _dot(step: Callable[..., ir.Value]) -> Any:
    @intrinsic
    def dot(typingctx: Any, acc: Any, w: Any, a: Any, stride: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, w, a, stride = args

            def change(t: int, row: ir.Value) -> ir.Value:
                four = load_at(builder, _row_address(builder, a, stride, t), I32)
                return step(builder, row, w, builder.bitcast(broadcast(builder, four, LANES), V_I8))

            return _rows(builder, acc, change)

        return acc(acc, i8x64, types.int64, types.int64), build

    return dot


# acc[t] += dot of each output's 4 columns with the 4 int8 at a + t * stride; weights 0..15, and 0..255. The
# activations are -127..127: AVX2 gives them the sign of w - 128, and -(-128) is no int8.
dot_nibbles, dot_bytes = _dot(_nibble_step), _dot(_byte_step)


def nibble_sums(rows: int) -> Any:
    """An intrinsic that gives the zero accumulators of `dot_nibbles`."""
    return tile_of(NIBBLE_SUMS, rows)


def byte_sums(rows: int) -> Any:
    """An intrinsic that gives the accumulators of `dot_bytes`: 128 * (sum of activations) where the step sees w - 128.

    The int32 sums of the rows lie at sums + t * stride.
    """
    tile = Tile(i32x16, rows)

    @intrinsic
    def start(typingctx: Any, sums: Any, stride: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            zero = ir.Constant(context.get_value_type(tile), None)
            if not BYTES_ARE_OFFSET:
                return zero

            def change(t: int, row: ir.Value) -> ir.Value:
                total = load_at(builder, _row_address(builder, args[0], args[1], t), I32)
                return broadcast(builder, builder.shl(total, ir.Constant(I32, 7)), LANES)

            return _rows(builder, zero, change)

        return tile(types.int64, types.int64), build

    return start


def _bitwise(build_vector: Callable[..., ir.Value]) -> Any:
    @intrinsic
    def apply(typingctx: Any, packed: Any) -> Any:
        return i8x64(i8x64), lambda context, builder, sig, args: build_vector(builder, args[0])

    return apply


low_nibbles = _bitwise(lambda builder, packed: builder.and_(packed, constant(V_I8, 15)))
high_nibbles = _bitwise(lambda builder, packed: builder.lshr(packed, constant(V_I8, 4)))


@intrinsic
def fma_dots(typingctx: Any, acc: Any, dots: Any, w_scale: Any, w_bias: Any, a: Any, stride: Any) -> Any:
    """acc[t] += w_scale * scale * dots[t] + w_bias * scaled_sum; those two are the float32 at a + t * stride."""

    def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        acc, dots, w_scale, w_bias, a, stride = args

        def change(t: int, row: ir.Value) -> ir.Value:
            address = _row_address(builder, a, stride, t)
            dot = builder.extract_value(dots, t)
            if dot.type == V_I16:
                dot = _by_halves(lambda b, sums: _pmaddwd(b, sums, constant(sums.type, 1)))(builder, dot)
            scale = broadcast(builder, load_at(builder, address, F32), LANES)
            scaled_sum = broadcast(builder, load_at(builder, builder.add(address, ir.Constant(I64, 4)), F32), LANES)
            row = multiply_add(builder, builder.sitofp(dot, V_F32), builder.fmul(w_scale, scale), row)
            return multiply_add(builder, w_bias, scaled_sum, row)

        return _rows(builder, acc, change)

    return acc(acc, dots, f32x16, f32x16, types.int64, types.int64), build


# ---------------------------------------------------------------------------------------------- between threads

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
        if IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        elif IS_AARCH64:
            call(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))
        return context.get_dummy_value()

    return types.void(), build
