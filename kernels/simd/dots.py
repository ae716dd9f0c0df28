"""Integer dot products of 4- and 8-bit weights with int8 activations: the same sums, exact, on every CPU.

A weight vector holds, for each of 16 outputs, 4 consecutive columns as unsigned bytes. Its dot product with 4 int8
activations lands in the output's lane of 32 bits.

    CPU                     weights 0..15                           weights 0..255
    AVX-512 VNNI, AVX-VNNI  vpdpbusd                                vpdpbusd
    AVX-512, AVX2           vpmaddubsw, sums of a group in int16    |w - 128| vpmaddubsw (a, sign of w - 128), vpmaddwd
    aarch64 i8mm            sdot                                    usdot
    aarch64 dotprod         sdot                                    sdot of w - 128
    aarch64                 smull, addp, sadalp                     the same, of w - 128
    others                  multiplications of widened lanes

The 16-bit sums of two hold a group of 32 columns of 4-bit weights: 8 of at most 2 * 15 * 127 = 3810 are below 32767.
Where the weights are taken as w - 128, 128 * (sum of activations) is what the sums begin with. There the activations
are -127..127: -(-128) is no int8, and two products of -128 by -128 no int16.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.extending import intrinsic

from tfm.kernels.simd.arithmetic import multiply_add
from tfm.kernels.simd.tiles import each_row, row_address, tile_of
from tfm.kernels.simd.vectors import (
    F32,
    I1,
    I16,
    I32,
    I64,
    LANES,
    TARGET,
    V_F32,
    V_I8,
    V_I16,
    V_I32,
    Tile,
    Vector,
    broadcast,
    call,
    constant,
    f32x16,
    halves,
    i8x64,
    i16x32,
    i32x16,
    in_parts,
    load_at,
    shuffle,
)
from tfm.kernels.targets import Target


def _sum_of_four(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    """acc + the four products a lane, in plain vector code: right on any CPU."""
    for c in range(4):
        lanes = list(range(c, 64, 4))
        weight, activation = shuffle(builder, w, lanes), shuffle(builder, a, lanes)
        product = builder.mul(builder.zext(weight, V_I32), builder.sext(activation, V_I32))
        acc = builder.add(acc, product)
    return acc


def _vpdpbusd(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{acc.type.count * 32}", acc.type, acc, w, a)


def _pmaddubsw(builder: ir.IRBuilder, w: ir.Value, a: ir.Value) -> ir.Value:
    name = "avx512.pmaddubs.w.512" if w.type.count == 64 else "avx2.pmadd.ub.sw"
    return call(builder, f"llvm.x86.{name}", ir.VectorType(I16, w.type.count // 2), w, a)


def _sums_of_two(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    """int32 lanes, each the sum of two int16."""
    name = "avx512.pmaddw.d.512" if sums.type.count == 32 else "avx2.pmadd.wd"
    return call(builder, f"llvm.x86.{name}", ir.VectorType(I32, sums.type.count // 2), sums, constant(sums.type, 1))


def _nibble_step_avx(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return builder.add(acc, _pmaddubsw(builder, w, a))


def _byte_step_avx(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    """Unsigned bytes times int8 would saturate int16, so w - 128 is used: its size, times a with its sign."""
    signed = builder.xor(w, constant(w.type, -128))
    magnitude = call(builder, f"llvm.abs.v{w.type.count}i8", w.type, signed, ir.Constant(I1, 0))
    if w.type.count == 64:  # AVX-512 has no psign; it negates under a mask
        is_negative = builder.icmp_signed("<", signed, constant(w.type, 0))
        turned = builder.select(is_negative, builder.sub(constant(a.type, 0), a), a)
    else:
        turned = call(builder, "llvm.x86.avx2.psign.b", w.type, a, signed)
    return builder.add(acc, _sums_of_two(builder, _pmaddubsw(builder, magnitude, turned)))


def _sdot(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, w, a)


def _usdot(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    return call(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", acc.type, acc, w, a)


def _smull(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
    """Products in int16, added two by two there and once more into int32."""
    pairs = zip(halves(builder, w), halves(builder, a), strict=True)
    v_i16 = ir.VectorType(I16, 8)
    products = [call(builder, "llvm.aarch64.neon.smull.v8i16", v_i16, *pair) for pair in pairs]
    sums = call(builder, "llvm.aarch64.neon.addp.v8i16", v_i16, *products)
    return builder.add(acc, call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, sums))


def _of_signed(step: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """The step with w - 128 for w, which is signed."""

    def apply(builder: ir.IRBuilder, acc: ir.Value, w: ir.Value, a: ir.Value) -> ir.Value:
        return step(builder, acc, builder.xor(w, constant(w.type, -128)), a)

    return apply


def _steps(target: Target) -> tuple[Callable[..., ir.Value], Callable[..., ir.Value], Vector, bool]:
    """The steps for nibbles and for bytes, the sums of the former, and whether the latter sees w - 128."""
    if target.has_vnni_512:
        return _vpdpbusd, _vpdpbusd, i32x16, False
    if target.has_vnni_256:
        vpdpbusd = in_parts(2, _vpdpbusd)
        return vpdpbusd, vpdpbusd, i32x16, False
    if target.has_avx512:
        return _nibble_step_avx, _byte_step_avx, i16x32, True
    if target.has_avx2:
        return in_parts(2, _nibble_step_avx), in_parts(2, _byte_step_avx), i16x32, True
    if target.is_aarch64:
        signed = in_parts(4, _sdot if target.has_dotprod else _smull)
        if target.has_i8mm:
            return signed, in_parts(4, _usdot), i32x16, False
        return signed, _of_signed(signed), i32x16, True
    return _sum_of_four, _sum_of_four, i32x16, False


NIBBLE_STEP, BYTE_STEP, NIBBLE_SUMS, BYTES_ARE_OFFSET = _steps(TARGET)


def _dot(step: Callable[..., ir.Value]) -> Any:
    @intrinsic
    def dot(typingctx: Any, acc: Any, w: Any, a: Any, stride: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            acc, w, a, stride = args

            def change(t: int, row: ir.Value) -> ir.Value:
                four = load_at(builder, row_address(builder, a, stride, t), I32)
                return step(builder, row, w, builder.bitcast(broadcast(builder, four, LANES), V_I8))

            return each_row(builder, acc, change)

        return acc(acc, i8x64, types.int64, types.int64), build

    return dot


# acc[t] += dot of each output's 4 columns with the 4 int8 at a + t * stride; weights 0..15, and 0..255.
dot_nibbles, dot_bytes = _dot(NIBBLE_STEP), _dot(BYTE_STEP)


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
                total = load_at(builder, row_address(builder, args[0], args[1], t), I32)
                return broadcast(builder, builder.shl(total, ir.Constant(I32, 7)), LANES)

            return each_row(builder, zero, change)

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
            address = row_address(builder, a, stride, t)
            dot = builder.extract_value(dots, t)
            if dot.type == V_I16:
                dot = in_parts(1 if TARGET.has_avx512 else 2, _sums_of_two)(builder, dot)
            scale = broadcast(builder, load_at(builder, address, F32), LANES)
            scaled_sum = broadcast(builder, load_at(builder, builder.add(address, ir.Constant(I64, 4)), F32), LANES)
            row = multiply_add(builder, builder.sitofp(dot, V_F32), builder.fmul(w_scale, scale), row)
            return multiply_add(builder, w_bias, scaled_sum, row)

        return each_row(builder, acc, change)

    return acc(acc, dots, f32x16, f32x16, types.int64, types.int64), build
