"""Matmul to the last bit: what a row gives does not depend on how the work is cut; and what accuracy cannot show.

M rows, N outputs, K columns.
"""

import numpy as np
import numpy.typing as npt
import pytest

from tfm.kernels import embedding, matmul
from tfm.kernels.formats import bf12, dense
from tfm.kernels.packing import Exponents, aligned_empty, count_uppers, describe, pack_tasks, packed_bytes
from tfm.kernels.records import (
    BAND_PANELS,
    BLOCK_COLUMNS,
    BLOCK_PANELS,
    BLOCK_ROWS,
    LANES,
    MULTIPLY_SCRATCH_BYTES,
)
from tfm.kernels.simd import TILE
from tfm.kernels.weight import FLOAT_FORMATS, Weight, random_bits, random_weight, round_trip

KINDS = {
    "f32": ("f32", BLOCK_COLUMNS + 65), "bf16": ("bf16", BLOCK_COLUMNS + 1), "f16": ("f16", 129),
    "bf12": ("bf12", BLOCK_COLUMNS + 65),
    "q4-32": ("q4", 96, 32, "f16"), "q4-128": ("q4", 256, 128, "bf16"),
    "q8-32": ("q8", 96, 32, "f16"), "q8-64": ("q8", 192, 64, "f32"),
}  # fmt: skip
OUTPUTS = (BLOCK_PANELS + 3) * LANES - 5  # more than a block has, an odd number; the last is not full


def weight_of(kind: str, rng: np.random.Generator, bias: bool = True) -> Weight:
    format, *rest = KINDS[kind]
    return random_weight(rng, format, OUTPUTS, *rest, bias=bias)


def rows_of(rng: np.random.Generator, count: int, weight: Weight) -> npt.NDArray[np.float32]:
    return rng.standard_normal((count, weight.columns)).astype(np.float32)


def multiply(
    x_MK: npt.NDArray[np.float32], weight: Weight, pieces: list[tuple[int, int, int, int]], out: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Write the pieces (rows begin .. end - 1, panels first .. last - 1) of the product to out."""
    acts, kept = matmul.activations(x_MK, weight.is_quantized)
    scratch = aligned_empty(MULTIPLY_SCRATCH_BYTES)
    for piece in pieces:
        target = out.ctypes.data, out.strides[0]
        matmul._multiply_part(weight.record.ctypes.data, acts.ctypes.data, *piece, *target, 0, scratch.ctypes.data)
    del kept
    return out


def nan(*shape: int) -> npt.NDArray[np.float32]:
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_row_has_one_value_among_any_number_of_rows(kind: str) -> None:
    """Guards one order of summation: logits would depend on the batch if a tile or a single row summed otherwise."""
    rng = np.random.default_rng(0)
    weight = weight_of(kind, rng)
    for count in (*range(1, 2 * TILE + 2), BLOCK_ROWS - 1, BLOCK_ROWS + 1, 2 * BLOCK_ROWS + 3):
        x_MK = rows_of(rng, count, weight)
        together = matmul.matmul(x_MK, weight)
        alone = np.concatenate([matmul.matmul(x_MK[t : t + 1], weight) for t in range(count)])
        assert np.array_equal(together, alone), f"{count} rows"


@pytest.mark.parametrize("kind", KINDS)
def test_panels_and_rows_may_be_cut_anywhere(kind: str) -> None:
    """Guards the threads' shares: any cut gives the same bits, and nothing outside a piece is touched."""
    rng = np.random.default_rng(1)
    weight = weight_of(kind, rng)
    panels = int(weight.record["panels"][0])
    for count in (1, TILE + 3, BLOCK_ROWS + 2):
        x_MK = rows_of(rng, count, weight)
        whole = multiply(x_MK, weight, [(0, count, 0, panels)], nan(count, panels * LANES))
        for cut in range(panels + 1):
            pieces = [(0, count, 0, cut), (0, count, cut, panels)]
            assert np.array_equal(multiply(x_MK, weight, pieces, nan(*whole.shape)), whole), f"panels cut at {cut}"
            left = multiply(x_MK, weight, pieces[:1], nan(*whole.shape))
            assert np.isnan(left[:, cut * LANES :]).all(), f"panels from {cut} on were not asked for"
        for cut in {*range(min(count, TILE + 1)), count}:
            pieces = [(0, cut, 0, panels), (cut, count, 0, panels)]
            assert np.array_equal(multiply(x_MK, weight, pieces, nan(*whole.shape)), whole), f"rows cut at {cut}"
            below = multiply(x_MK, weight, pieces[1:], nan(*whole.shape))
            assert np.isnan(below[:cut]).all(), f"rows before {cut} were not asked for"


@pytest.mark.parametrize("kind", KINDS)
def test_add_is_a_sum_afterwards(kind: str) -> None:
    """Guards the residual: x + W y has one value, whether the product is added in the kernel or later."""
    rng = np.random.default_rng(2)
    weight = weight_of(kind, rng)
    for count in (1, 2, TILE, TILE + 1, 13):
        x_MK = rows_of(rng, count, weight)
        add_MN = rng.standard_normal((count, OUTPUTS)).astype(np.float32)
        assert np.array_equal(matmul.matmul(x_MK, weight, add_MN), add_MN + matmul.matmul(x_MK, weight)), count


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_no_row_makes_are_zero(kind: str) -> None:
    """Guards the padding of heads and of x: rows of -1, and what fills the last panel, give 0, with a bias the bias."""
    rng = np.random.default_rng(3)
    weight = weight_of(kind, rng, bias=False)
    order = np.r_[np.arange(20), [-1] * 12, np.arange(20, OUTPUTS)]
    bias_N = np.arange(len(order), dtype=np.float32)
    for count in (1, TILE + 1):
        x_MK = rows_of(rng, count, weight)
        plain = matmul.matmul(x_MK, weight)
        picked = Weight(weight.format, weight.values, weight.scales, weight.biases, rows=order)
        panels = int(picked.record["panels"][0])
        out = multiply(x_MK, picked, [(0, count, 0, panels)], nan(count, panels * LANES))
        assert np.array_equal(out[:, : len(order)], np.where(order < 0, 0, plain[:, order]))
        assert not out[:, len(order) :].any()
        biased = Weight(weight.format, weight.values, weight.scales, weight.biases, bias_N, order)
        found = matmul.matmul(x_MK, biased)
        assert np.array_equal(found, np.where(order < 0, bias_N, plain[:, order] + bias_N))


@pytest.mark.parametrize("format", FLOAT_FORMATS)
def test_a_band_is_filled_up_with_zeros(format: str) -> None:
    """Guards the file of packed weights: where a band has no outputs it would keep what was in memory before."""
    values = random_bits(np.random.default_rng(4), format, (LANES + 1, 3))
    places, strays = None, 0
    if format == "bf12":
        places, strays, _ = Exponents.of(count_uppers(values, np.arange(len(values))))
    record = describe(format, *values.shape, strays=strays)
    memory = aligned_empty(packed_bytes(record))
    memory[:], record["data"] = 255, memory.ctypes.data
    for task in pack_tasks(record, values, places):
        task()
    if format == "bf12":
        band = bf12.unpack(memory, BAND_PANELS * LANES, 3, strays)
    else:
        band = dense.unpack(memory, BAND_PANELS * LANES, 3, values.dtype)
    assert np.array_equal(band[: len(values)], values, equal_nan=True)
    assert not band[len(values) :].any()


def bits_of(kind: str, rows: int, columns: int) -> npt.NDArray[np.uint16]:
    """bfloat16 of which bf12 keeps none apart, some, or most of them."""
    rng = np.random.default_rng(5)
    if kind == "few exponents":
        return random_bits(rng, "bf16", (rows, columns)) & 0x81FF | 0x3E00
    if kind == "any finite":
        return rng.integers(0, 0x7F00, (rows, columns), np.uint16) | rng.choice([0, 0x8000], (rows, columns))
    return random_bits(rng, "bf12", (rows, columns))


@pytest.mark.parametrize("kind", ["few exponents", "strays", "any finite"])
def test_bf12_gives_the_bits_of_bf16(kind: str) -> None:
    """Guards the promise of exact weights: a stray that is lost, or set after its column was multiplied, or zeros of
    another sign, would change bits that no bound on the error sees."""
    outputs, columns = (BLOCK_PANELS + 3) * LANES - 5, BLOCK_COLUMNS + 65
    values = bits_of(kind, outputs, columns)
    narrow, plain = Weight("bf12", values), Weight("bf16", values)
    assert (int(narrow.record["strays"][0]) == 0) == (kind == "few exponents")
    rng = np.random.default_rng(6)
    for count in (1, 2, TILE + 1, 13, BLOCK_ROWS + 2):
        x_MK = 1e-3 * rows_of(rng, count, plain)
        with np.errstate(all="ignore"):
            assert matmul.matmul(x_MK, narrow).tobytes() == matmul.matmul(x_MK, plain).tobytes(), f"{count} rows"
        panels = int(narrow.record["panels"][0])
        for cut in (1, 2, 3, 5):
            pieces = [(0, count, 0, cut), (0, count, cut, cut), (0, count, cut, panels)]
            found = [multiply(x_MK, weight, pieces, nan(count, panels * LANES)) for weight in (narrow, plain)]
            assert found[0].tobytes() == found[1].tobytes(), f"{count} rows, panels cut at {cut}"


def test_bf12_keeps_every_bfloat16() -> None:
    """Guards infinities, NaN with all their bits, subnormals and both zeros: what is packed comes back."""
    values = np.random.default_rng(7).permutation(1 << 16).astype(np.uint16).reshape(256, 256)
    assert np.array_equal(round_trip(Weight("bf12", values)), values)


def test_bf12_writes_every_byte() -> None:
    """Guards images that are compared or shared: what was in memory before must not show in them."""
    values = random_bits(np.random.default_rng(8), "bf12", (70, 9))
    places, strays, _ = Exponents.of(count_uppers(values, np.arange(len(values))))
    record = describe("bf12", *values.shape, strays=strays)
    memory = aligned_empty(packed_bytes(record))
    found = []
    for before in (0, 255):
        memory[:], record["data"] = before, memory.ctypes.data
        for task in pack_tasks(record, values, places):
            task()
        found.append(memory.tobytes())
    assert found[0] == found[1]


def extreme(bits: int, q_NK: npt.NDArray[np.uint8], scale: float, bias: float) -> Weight:
    """A weight of given numbers, groups of 32 with the same scale and bias."""
    packed = q_NK if bits == 8 else q_NK[:, 0::2] | q_NK[:, 1::2] << 4
    tables = [np.full((len(q_NK), q_NK.shape[1] // 32), value, np.float32) for value in (scale, bias)]
    return Weight(f"q{bits}", np.ascontiguousarray(packed).view(np.uint32), *tables)


@pytest.mark.parametrize("bits", [4, 8])
def test_largest_integers_do_not_saturate(bits: int) -> None:
    """Guards the integer dots: 16-bit sums would saturate at full weights and activations of one sign, or at -128."""
    most, columns, rng = 2**bits - 1, 64, np.random.default_rng(4)
    numbers = np.array([0, 1, most // 2, most // 2 + 1, most - 1, most], np.uint8)
    q_NK = np.concatenate([np.tile(numbers[:, None], columns), rng.choice(numbers[[0, -1]], (17, columns))])
    weight = extreme(bits, q_NK, 1.0, 0.0)
    signs = np.concatenate([[np.ones(columns), -np.ones(columns)], np.sign(rng.standard_normal((TILE + 1, columns)))])
    x_MK = (127 * signs).astype(np.float32)  # the int8 are these values themselves
    exact = x_MK @ q_NK.T.astype(np.float32)  # integers below 2**24
    assert np.array_equal(matmul.matmul(x_MK, weight), exact)


def test_row_of_zeros_gives_the_bias() -> None:
    """Guards 0 / 0 in the scale of a group of zeros."""
    weight = weight_of("q4-32", np.random.default_rng(5))
    x_MK = np.zeros((TILE + 2, weight.columns), np.float32)
    assert np.array_equal(matmul.matmul(x_MK, weight), np.tile(weight.bias_N, (TILE + 2, 1)))


@pytest.mark.parametrize("kind", FLOAT_FORMATS)
def test_unit_rows_read_the_weights(kind: str) -> None:
    """Guards a column or an output in the wrong place: W e_k is column k, bit for bit."""
    weight = weight_of(kind, np.random.default_rng(6), bias=False)
    found = matmul.matmul(np.eye(weight.columns, dtype=np.float32), weight)
    assert np.array_equal(found, weight.dequantized(np.float32).T)


def test_embedding_is_exact() -> None:
    """Guards the embedding to the last bit: no product there may be fused with the sum, nor rounded otherwise."""
    for label, inputs in embedding._cases(np.random.default_rng(0)):
        found, expected = embedding.embedding(**inputs), embedding.reference(**inputs)
        assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)), label
