"""The vector operations one by one, each against NumPy; most to the last bit."""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from tfm.kernels import simd

LANES = simd.LANES
RNG = np.random.default_rng(5)


def run(body: Callable[..., None], *arguments: Any) -> None:
    """Compile body, which takes addresses and numbers, and call it."""
    numba.njit(body, error_model="numpy")(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments))


def apply(operation: Any, x: np.ndarray) -> np.ndarray:
    """A float32 operation of one vector over a whole array."""
    size = len(x)
    padded = np.concatenate([x, np.zeros(-size % LANES, np.float32)])
    out = np.full_like(padded, np.nan)

    def body(source, count, target):
        for i in range(0, count, 16):
            simd.store_f32(target + 4 * i, operation(simd.load_f32(source + 4 * i)))

    run(body, padded, size, out)
    return out[:size]


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal to the last bit, -0 and 0 apart; a NaN equals a NaN."""
    bits = f"u{found.itemsize}"
    return bool(np.all((found.view(bits) == expected.view(bits)) | (np.isnan(found) & np.isnan(expected))))


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units in the last place of float32, among normal numbers."""
    unit = np.spacing(np.maximum(np.abs(exact), 2.0**-126).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(found - exact) / unit))


@pytest.fixture(params=["native", "generic"])
def half_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to convert half precision: the target's instruction (if it has one), and integers."""
    if request.param == "generic":
        monkeypatch.setattr("tfm.kernels.simd.memory.HAS_F16C", False)
    return request.param


# ---------------------------------------------------------------------------------------------- conversions


@pytest.mark.usefixtures("half_path")
def test_every_half_becomes_its_float() -> None:
    """Guards subnormals, infinities, NaN and -0 in the integer path: all 65536 halves, by vector and one by one."""
    halves = np.arange(65536, dtype=np.uint16)
    vectors, scalars = np.full((2, 65536), 7, np.float32)

    def body(source, by_vector, by_scalar):
        for i in range(0, 65536, 16):
            simd.store_f32(by_vector + 4 * i, simd.load_f16(source + 2 * i))
        for i in range(65536):
            simd.poke_f32(by_scalar + 4 * i, simd.peek_f16(source + 2 * i))

    run(body, halves, vectors, scalars)
    expected = halves.view(np.float16).astype(np.float32)
    assert same_bits(vectors, expected)
    assert same_bits(scalars, expected)


@pytest.mark.usefixtures("half_path")
def test_floats_round_to_the_nearest_half_ties_to_even() -> None:
    """Guards rounding in the integer path: every half, every midpoint of two, the floats beside those, and any bits."""
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (every[:-1] + every[1:]) / 2
    around = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    edge = np.float32([65519.996, 65520, 65536, 3e38, np.inf, np.nan, 1e-45, 2.0**-25, 2.0**-25 * 1.000001])
    anything = RNG.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    x = np.concatenate([every, middles, *around, edge, anything])
    x = np.concatenate([x, -x])
    x = np.concatenate([x, np.zeros(-len(x) % LANES, np.float32)])
    vectors, scalars = np.full((2, len(x)), 7, np.uint16)

    def body(source, count, by_vector, by_scalar):
        for i in range(0, count, 16):
            simd.store_f16(by_vector + 2 * i, simd.load_f32(source + 4 * i))
        for i in range(count):
            simd.poke_u16(by_scalar + 2 * i, simd.half_bits(simd.peek_f32(source + 4 * i)))

    run(body, x, len(x), vectors, scalars)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(np.float16)
    assert same_bits(vectors.view(np.float16), expected)
    assert same_bits(scalars.view(np.float16), expected)


def test_bfloat16_and_int8_load_exactly() -> None:
    """Guards sign extension and the order of lanes, over every value."""
    bf16, i8 = np.arange(65536, dtype=np.uint16), np.arange(256, dtype=np.uint8)
    vectors, scalars = np.full((2, 65536), 7, np.float32)
    whole = np.full(256, 7, np.float32)

    def body(bf16, i8, by_vector, by_scalar, whole):
        for i in range(0, 65536, 16):
            simd.store_f32(by_vector + 4 * i, simd.load_bf16(bf16 + 2 * i))
        for i in range(65536):
            simd.poke_f32(by_scalar + 4 * i, simd.peek_bf16(bf16 + 2 * i))
        for i in range(0, 256, 16):
            simd.store_f32(whole + 4 * i, simd.load_i8(i8 + i))

    run(body, bf16, i8, vectors, scalars, whole)
    expected = (bf16.astype(np.uint32) << 16).view(np.float32)
    assert same_bits(vectors, expected)
    assert same_bits(scalars, expected)
    assert same_bits(whole, i8.view(np.int8).astype(np.float32))


def test_round_even_then_int8() -> None:
    """Guards ties (2.5 is 2, 3.5 is 4) and the ends of int8."""
    halves = np.arange(-256, 255, dtype=np.float32) / 2
    x = np.concatenate([halves, np.nextafter(halves, np.float32(1e9)), np.float32([2**22 - 1.5, -(2**22) + 0.5])])
    assert np.array_equal(apply(simd.round_even, x), np.rint(x))
    whole = np.rint(halves[halves >= -128][:496])
    out = np.zeros(len(whole), np.int8)

    def body(source, count, target):
        for i in range(0, count, 16):
            simd.store_i8(target + i, simd.load_f32(source + 4 * i))

    run(body, whole, len(whole), out)
    assert np.array_equal(out, whole)


# ---------------------------------------------------------------------------------------------- arithmetic


def test_operators() -> None:
    """Guards that + - * / and fma are what they say, rounded as float32; fma once where the target has one."""
    a, b, c = RNG.standard_normal((3, LANES)).astype(np.float32)
    out = np.full((8, LANES), np.nan, np.float32)

    def body(a, b, c, out):
        x, y, z = simd.load_f32(a), simd.load_f32(b), simd.load_f32(c)
        simd.store_f32(out, x + y)
        simd.store_f32(out + 64, x - y)
        simd.store_f32(out + 128, x * y)
        simd.store_f32(out + 192, x / y)
        simd.store_f32(out + 256, simd.fma(x, y, z))
        simd.store_f32(out + 320, simd.maximum(x, y))
        simd.store_f32(out + 384, simd.minimum(x, y))
        simd.store_f32(out + 448, simd.absolute(x))

    run(body, a, b, c, out)
    once = (a.astype(np.float64) * b + c).astype(np.float32)  # the product is exact in float64
    expected = [a + b, a - b, a * b, a / b, once if simd.TARGET.has_fma else a * b + c]
    expected += [np.maximum(a, b), np.minimum(a, b), np.abs(a)]
    for found, right in zip(out, expected, strict=True):
        assert same_bits(found, right)


def test_reductions_have_one_order() -> None:
    """Guards the order of summation, on which every promise of equal bytes rests: lanes i and i + 8, then i + 4, ..."""
    x = (RNG.standard_normal((97, LANES)) * 10.0 ** RNG.integers(-3, 3, (97, LANES))).astype(np.float32)
    sums, tops = np.full((2, 97), np.nan, np.float32)

    def body(x, rows, sums, tops):
        for t in range(rows):
            simd.poke_f32(sums + 4 * t, simd.reduce_add(simd.load_f32(x + 64 * t)))
            simd.poke_f32(tops + 4 * t, simd.reduce_max(simd.load_f32(x + 64 * t)))

    run(body, x, 97, sums, tops)
    expected = x
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] + expected[:, half:]
    assert same_bits(sums, expected[:, 0])
    assert same_bits(tops, x.max(1))


@pytest.mark.parametrize("count", [-1000, -1, 0, 1, 7, 15, 16, 17, 100000])
def test_first_lanes_and_store_first(count: int) -> None:
    """Guards the ends of a row: a NaN behind it must not leak in, nor memory behind it be written."""
    x, other = np.arange(LANES, dtype=np.float32), np.full(LANES, np.nan, np.float32)
    chosen, stored = np.full((2, LANES), -7, np.float32)

    def body(x, other, count, chosen, stored):
        simd.store_f32(chosen, simd.first_lanes(simd.load_f32(x), count, simd.load_f32(other)))
        simd.store_first(stored, simd.load_f32(x), count)

    run(body, x, other, count, chosen, stored)
    inside = np.arange(LANES) < count
    assert same_bits(chosen, np.where(inside, x, other))
    assert same_bits(stored, np.where(inside, x, np.float32(-7)))


def sweep(low: float, high: float) -> np.ndarray:
    """A million floats between low and high, and every power of two with both signs among them."""
    powers = 2.0 ** np.arange(-149, 128)
    x = np.concatenate([RNG.uniform(low, high, 1_000_000), RNG.uniform(-1, 1, 100_000), powers, -powers])
    return x[(x >= low) & (x <= high)].astype(np.float32)


def test_exp_over_its_range() -> None:
    """Guards the polynomial and the reduction (1.17 ulp without fused multiply-add, 0.90 with), and monotony at 0."""
    x = sweep(-87.33, 88.72)
    assert ulps(apply(simd.exp, x), np.exp(x.astype(np.float64))) < (0.9 if simd.TARGET.has_fma else 1.2)


def test_exp_at_the_edges() -> None:
    """Guards against NaN or a wrapped exponent beyond float32's range, and a NaN that softmax would hide."""
    x = np.float32([0, -0.0, np.inf, -np.inf, np.nan, -87.33654, -87.33655, -88, -104, -3e38, 88.72283, 88.72284, 3e38])
    found = apply(simd.exp, x)
    assert same_bits(found[:5], np.float32([1, 1, np.inf, 0, np.nan]))
    assert found[5] == pytest.approx(2.0**-126, rel=1e-6)
    assert same_bits(found[6:10], np.zeros(4, np.float32)), "a result below the normal numbers is 0"
    assert 3.4e38 < found[10] < np.inf
    assert np.all(found[11:] == np.inf)


def test_exp_below_zero_is_exp() -> None:
    """Attention's exponential is a shorter one: guards against other bits at any value that it may get."""
    x = np.concatenate([sweep(-87.33, 0), np.float32([0, -0.0, -np.inf, np.nan, -87.33654, -87.33655, -104, -3e38])])
    assert same_bits(apply(simd.exp_below, x), apply(simd.exp, x))


def test_tanh() -> None:
    """Guards its precision relative to itself near 0, where a soft-cap must leave scores alone, and its limits."""
    x = sweep(-12, 12)
    assert ulps(apply(simd.tanh, x), np.tanh(x.astype(np.float64))) < 1.5
    edges = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45])
    assert same_bits(apply(simd.tanh, edges), np.float32([0, -0.0, 1, -1, np.nan, 1, -1, 1e-45]))


# ---------------------------------------------------------------------------------------------- tiles


def test_tiles() -> None:
    """Guards that row t of a tile reads and writes at t strides, for a stride that is not a vector; and its vectors, 64
    bytes apart in rows and a stride of their own apart in weights, read in the format of the given load."""
    rows, width, stride = 3, 2, 37
    a, b = RNG.standard_normal((2, rows, stride)).astype(np.float32)
    w = RNG.standard_normal((width, 24)).astype(np.float16)
    out = np.full((rows, stride), 7, np.float32)
    zeros, fma = simd.tile_of(simd.f32x16, rows, width), simd.fma_tile(simd.load_f16)

    def body(a, b, w, out):
        acc = simd.load_rows(zeros(), a, 4 * 37)
        acc = simd.add_rows(acc, b, 4 * 37)
        acc = fma(acc, w, 48, a + 4, 4 * 37)
        simd.store_rows(simd.add_tile(acc, acc), out, 4 * 37)

    run(body, a, b, w, out)
    before, weights = b[:, :32] + a[:, :32], w[:, :16].reshape(32)
    fused = (weights.astype(np.float64) * a[:, 1:2] + before).astype(np.float32)
    expected = fused if simd.TARGET.has_fma else weights.astype(np.float32) * a[:, 1:2] + before
    assert same_bits(out[:, :32], 2 * expected)
    assert np.all(out[:, 32:] == 7)


def test_tile_that_unpacks() -> None:
    """Guards the weights that a block's first tile leaves for the others: in order, as float32, and the same sums."""
    w, x = RNG.standard_normal((2, 24)).astype(np.float16), RNG.standard_normal((3, 5)).astype(np.float32)
    out, unpacked = np.full((3, 32), np.nan, np.float32), np.full(40, 7, np.float32)
    zeros, fma = simd.tile_of(simd.f32x16, 3, 2), simd.fma_unpack_tile(simd.load_f16)

    def body(w, x, out, unpacked):
        simd.store_rows(fma(zeros(), w, 48, x + 4, 20, unpacked), out, 128)

    run(body, w, x, out, unpacked)
    weights = w[:, :16].reshape(32).astype(np.float32)
    assert same_bits(unpacked[:32], weights)
    assert np.all(unpacked[32:] == 7)
    assert same_bits(out, weights * x[:, 1:2])


# ---------------------------------------------------------------------------------------------- integer dots


def dots(w: np.ndarray, a: np.ndarray, nibbles: bool) -> np.ndarray:
    """[rows, 16] sums over the 32 columns of w [16, 32] and a [rows, 32], by the kernels' own operations."""
    rows = len(a)
    packed = np.ascontiguousarray(w.reshape(16, 8, 4).transpose(1, 0, 2)).astype(np.uint8)
    sums = a.astype(np.int32).sum(1, dtype=np.int32)
    scales = np.tile(np.float32([1, 0]), (rows, 1))
    one, out = np.ones(LANES, np.float32), np.full((rows, LANES), np.nan, np.float32)
    zeros, nibble_start, byte_start = simd.tile_of(simd.f32x16, rows), simd.nibble_sums(rows), simd.byte_sums(rows)

    if nibbles:

        def body(w, a, sums, scales, one, out):
            acc = nibble_start()
            for k in range(0, 32, 4):
                acc = simd.dot_nibbles(acc, simd.load_bytes(w + 16 * k), a + k, 32)
            unit = simd.load_f32(one)
            simd.store_rows(simd.fma_dots(zeros(), acc, unit, unit, scales, 8), out, 64)

    else:

        def body(w, a, sums, scales, one, out):
            acc = byte_start(sums, 4)
            for k in range(0, 32, 4):
                acc = simd.dot_bytes(acc, simd.load_bytes(w + 16 * k), a + k, 32)
            unit = simd.load_f32(one)
            simd.store_rows(simd.fma_dots(zeros(), acc, unit, unit, scales, 8), out, 64)

    run(body, packed, np.ascontiguousarray(a), sums, scales, one, out)
    return out


@pytest.mark.parametrize(("nibbles", "top"), [(True, 15), (False, 255)], ids=["nibbles", "bytes"])
def test_dots_are_exact_integers(nibbles: bool, top: int) -> None:
    """Guards saturation of 16-bit sums and signs: every extreme in every lane, and anything between.

    Activations are -127..127: AVX2 negates them, and -128 has no negative in int8.
    """
    w = RNG.integers(0, top + 1, (16, 32))
    w[0], w[1], w[2], w[3], w[4, ::2] = top, 0, (top + 1) // 2, top // 2, top
    a = RNG.integers(-127, 128, (4, 32)).astype(np.int8)
    a[0], a[1], a[2, ::2] = 127, -127, -127
    assert np.array_equal(dots(w, a, nibbles), a.astype(np.int64) @ w.T)


def test_dot_nibbles_take_minus_128() -> None:
    """Guards the 16-bit sums of a group: 8 times -128 * 15 * 2 = -30720 is the lowest, and fits."""
    w, a = np.full((16, 32), 15), np.full((1, 32), -128, np.int8)
    assert np.array_equal(dots(w, a, True), a.astype(np.int64) @ w.T)


def test_nibbles_are_split_low_and_high() -> None:
    """Guards which nibble is which, and that a byte's high bit does not spread."""
    packed, one, scale = np.arange(256, dtype=np.uint8), np.ones(LANES, np.float32), np.float32([1, 0])
    zeros, start = simd.tile_of(simd.f32x16, 1), simd.nibble_sums(1)
    found = np.full((4, 2, 4, LANES), np.nan, np.float32)
    picks = np.eye(4, dtype=np.int8)  # a dot with a unit vector reads one byte of each lane

    def body(packed, picks, scale, one, found):
        unit = simd.load_f32(one)
        for v in range(4):
            for c in range(4):
                both = simd.load_bytes(packed + 64 * v)
                low = simd.dot_nibbles(start(), simd.low_nibbles(both), picks + 4 * c, 4)
                high = simd.dot_nibbles(start(), simd.high_nibbles(both), picks + 4 * c, 4)
                target = found + 512 * v + 64 * c
                simd.store_rows(simd.fma_dots(zeros(), low, unit, unit, scale, 8), target, 64)
                simd.store_rows(simd.fma_dots(zeros(), high, unit, unit, scale, 8), target + 256, 64)

    run(body, packed, picks, scale, one, found)
    bytes_ = packed.reshape(4, LANES, 4).transpose(0, 2, 1)
    assert np.array_equal(found[:, 0], bytes_ & 15)
    assert np.array_equal(found[:, 1], bytes_ >> 4)


def test_fma_dots_scales_and_shifts() -> None:
    """Guards the affine step: w_scale * scale * dot + w_bias * scaled_sum, a pair of floats a row."""
    w, a = RNG.integers(0, 16, (16, 4)), RNG.integers(-127, 128, (3, 4)).astype(np.int8)
    w_scale, w_bias = RNG.standard_normal((2, LANES)).astype(np.float32)
    pairs = RNG.standard_normal((3, 2)).astype(np.float32)
    out = np.full((3, LANES), np.nan, np.float32)
    zeros, start = simd.tile_of(simd.f32x16, 3), simd.nibble_sums(3)

    def body(w, a, w_scale, w_bias, pairs, out):
        acc = simd.dot_nibbles(start(), simd.load_bytes(w), a, 4)
        acc = simd.fma_dots(zeros(), acc, simd.load_f32(w_scale), simd.load_f32(w_bias), pairs, 8)
        simd.store_rows(acc, out, 64)

    run(body, w.astype(np.uint8), a, w_scale, w_bias, pairs, out)
    exact = (a.astype(np.float64) @ w.T) * w_scale * pairs[:, :1] + w_bias.astype(np.float64) * pairs[:, 1:]
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-4)


# ---------------------------------------------------------------------------------------------- target


def test_machine_code_uses_only_what_the_target_has() -> None:
    """Guards a forced target: no wider registers or integer dots than it has, no call into libm or the compiler's."""
    zeros, start, finish = simd.nibble_sums(1), simd.byte_sums(1), simd.tile_of(simd.f32x16, 1)

    def body(w, a, sums, scales, out):
        acc = simd.dot_nibbles(zeros(), simd.low_nibbles(simd.load_bytes(w)), a, 32)
        more = simd.dot_bytes(start(sums, 4), simd.load_bytes(w), a, 32)
        unit = simd.load_f16(scales)
        tile = simd.fma_dots(simd.fma_dots(finish(), acc, unit, unit, scales, 8), more, unit, unit, scales, 8)
        simd.store_rows(tile, out, 64)
        simd.store_f16(out, simd.exp(simd.tanh(simd.round_even(simd.load_f32(out)))))

    function = numba.njit((numba.int64,) * 5, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(body)
    (assembly,) = function.inspect_asm().values()
    if simd.TARGET.is_x86:
        assert simd.TARGET.has_avx512 or "%zmm" not in assembly
        assert simd.TARGET.has_avx2 or "%ymm" not in assembly
        assert ("vpdpbusd" in assembly) == (simd.TARGET.has_vnni_256 or simd.TARGET.has_vnni_512)
        assert ("vfmadd" in assembly) == simd.TARGET.has_fma
        assert ("vcvtph2ps" in assembly) == simd.TARGET.has_f16c
    if simd.TARGET.is_aarch64:
        assert ("\tsdot" in assembly) == simd.TARGET.has_dotprod
        assert ("\tusdot" in assembly) == simd.TARGET.has_i8mm
        assert "\tfmla" in assembly
    for routine in ("fmaf", "expf", "tanhf", "roundf", "rintf", "extendhfsf2", "truncsfhf2", "gnu_h2f", "gnu_f2h"):
        assert routine not in assembly
