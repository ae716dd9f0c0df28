"""Arithmetic on a vector of 16 float32 lanes."""

import operator
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.extending import intrinsic, lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from tfm.kernels.simd.vectors import I32, LANES, TARGET, V_F32, V_I32, Vector, broadcast, call, constant, f32x16, halves


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, rounded once where the target has the instruction (else that would be a libm call for each lane)."""
    if not TARGET.has_fma:
        return builder.fadd(builder.fmul(a, b), c)
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


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


def exponential(builder: ir.IRBuilder, x: ir.Value, at_most_zero: bool = False) -> ir.Value:
    """e**x: x = n ln 2 + r with ln 2 in two parts, so that r is right to its last bits; 2**n goes into the exponent in
    two halves, since n may be 128; at once where x is at most 0, since n is at least -126."""
    magic = constant(V_F32, 12582912.0)
    shifted = multiply_add(builder, x, constant(V_F32, 1.4426950408889634), magic)
    n = builder.fsub(shifted, magic)
    r = multiply_add(builder, n, constant(V_F32, -0.693359375), x)
    r = multiply_add(builder, n, constant(V_F32, 2.12194440e-4), r)
    p = polynomial(builder, r, EXP_COEFFICIENTS)
    whole = builder.sub(builder.bitcast(shifted, V_I32), constant(V_I32, 0x4B400000))
    half = builder.ashr(whole, constant(V_I32, 1))
    for part in [whole] if at_most_zero else [half, builder.sub(whole, half)]:
        exponent = builder.shl(builder.add(part, constant(V_I32, 127)), constant(V_I32, 23))
        p = builder.fmul(p, builder.bitcast(exponent, V_F32))
    p = builder.select(builder.fcmp_ordered("<", x, constant(V_F32, -87.33654)), constant(V_F32, 0.0), p)
    if at_most_zero:
        return p
    return builder.select(builder.fcmp_ordered(">", x, constant(V_F32, 88.72283)), constant(V_F32, float("inf")), p)


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """e**value in every lane, within 0.90 units in the last place (1.17 without fused multiply-add), exactly 1 at 0.

    Below -87.33654 it is 0 (a result that float32 could only hold as a subnormal), above 88.72283 infinity; NaN stays
    NaN.
    """
    return f32x16(f32x16), lambda context, builder, sig, args: exponential(builder, args[0])


@intrinsic
def exp_below(typingctx: Any, value: Any) -> Any:
    """The same bits as `exp`, of lanes that are at most 0 or NaN, in two thirds of the instructions."""
    return f32x16(f32x16), lambda context, builder, sig, args: exponential(builder, args[0], at_most_zero=True)


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
