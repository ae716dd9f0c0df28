"""Weights of few bits with a scale and a bias for each group of columns: what q4 and q8 share.

w[n, k] = scale[n, group of k] * q[n, k] + bias[n, group of k], q unsigned. For each group of 32, 64 or 128 columns a
panel holds the scales of its 16 outputs, their biases, and then their q, each 32 columns laid out by the format:

    | scale[0] .. scale[15] | bias[0] .. bias[15] | q of 32 columns | q of 32 columns | ...        next group ...

The activations are int8 with a scale a for each 32 columns (kernels/quantize.py), so that for these columns

    sum of w x = scale * a * (sum of q x8) + bias * a * (sum of x8)

where the sum of q x8 is exact in int32. The two products are added in float32, 32 columns after 32 columns in order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tfm.kernels.formats import bias_of, finish
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import GROUP, LANES, SCALE_TYPES
from tfm.kernels.simd import (
    AHEAD_BYTES,
    ASKED_BYTES,
    STREAMS,
    TILE,
    f32x16,
    fma_dots,
    load_bf16,
    load_f16,
    load_f32,
    peek_bf16,
    peek_f16,
    peek_f32,
    peek_i64,
    peek_u16,
    peek_u32,
    poke_f32,
    poke_u16,
    poke_u32,
    prefetch,
    tile_of,
)

ROW_BLOCK = 48 // TILE * TILE  # rows that stay in the second cache: with 1536 columns of int8 144 KB
SCALE_F32, SCALE_F16, SCALE_BF16 = SCALE_TYPES["f32"], SCALE_TYPES["f16"], SCALE_TYPES["bf16"]


@inline
def scale_bytes(scale_type):
    """Bytes of the 16 scales (or biases) of a group."""
    return 4 * LANES if scale_type == SCALE_F32 else 2 * LANES


@inline
def load_scales(address, scale_type):
    if scale_type == SCALE_F16:
        return load_f16(address)
    if scale_type == SCALE_BF16:
        return load_bf16(address)
    return load_f32(address)


@jit
def scale_at(address, scale_type):
    """One scale or bias."""
    if scale_type == SCALE_F16:
        return peek_f16(address)
    if scale_type == SCALE_BF16:
        return peek_bf16(address)
    return peek_f32(address)


def tile_kernel(dots_of_group: Any, group_bytes: int, rows: int, streams: int = 1) -> Any:
    """The micro-kernel for `rows` rows of activations and one panel; with two streams also for the one `apart` panels
    after it, read side by side.

    dots_of_group(q, x8, x8_stride, groups, groups_stride) gives the tile of integer dots for 32 columns; group_bytes is
    what they occupy.
    """
    zeros = tile_of(f32x16, rows)
    # Many rows keep the processor so long with a panel that memory would wait. Asking for the next panel meanwhile made
    # a step of 16 rows of a model of 135M weights take 5.5 ms, which had taken 8.4. One row asks for what it reads
    # soon: from memory, 4-bit weights then come at 29 GB/s, where they came at 20; 1 KB ahead it was 26, 4 KB 24. On
    # most processors it asks for every other line only: asked for each of them, a thread on a Zen 4 with the code for
    # AVX2 read 28 GB/s for 0.2 s and then 14 for good; asked for every other one or none, 28.
    # The results of many rows are asked for as well: those of 512 rows and 1536 outputs lie beyond the second cache,
    # and took 16 % longer when the stores at a tile's end came unannounced.
    next_panel = rows > 1
    line = 64 if next_panel else ASKED_BYTES

    @jit
    def tile(matrix, p, apart, acts, t, out, out_stride, add):
        panel, target = matrix.data + p * matrix.panel_bytes, out + t * out_stride + 4 * LANES * p
        acc, other, distance = zeros(), zeros(), apart * matrix.panel_bytes
        if next_panel:
            for r in range(rows):
                prefetch(target + r * out_stride)
        x8, x8_stride = acts.quantized + t * acts.quantized_stride, acts.quantized_stride
        groups, groups_stride = acts.groups + t * acts.groups_stride, acts.groups_stride
        scale_type = matrix.scale_type
        skip = scale_bytes(scale_type)
        ahead = matrix.panel_bytes if next_panel else AHEAD_BYTES
        for _ in range(matrix.columns // matrix.group_size):
            scale, offset = load_scales(panel, scale_type), load_scales(panel + skip, scale_type)
            if streams == 2:
                at = panel + distance
                other_scale, other_offset = load_scales(at, scale_type), load_scales(at + skip, scale_type)
            panel += 2 * skip
            for _ in range(matrix.group_size // GROUP):
                for begin in range(0, group_bytes + 64, line):
                    prefetch(panel + ahead + begin)
                    if streams == 2:
                        prefetch(panel + distance + ahead + begin)
                dots = dots_of_group(panel, x8, x8_stride, groups, groups_stride)
                acc = fma_dots(acc, dots, scale, offset, groups, groups_stride)
                if streams == 2:
                    dots = dots_of_group(panel + distance, x8, x8_stride, groups, groups_stride)
                    other = fma_dots(other, dots, other_scale, other_offset, groups, groups_stride)
                panel, x8, groups = panel + group_bytes, x8 + GROUP, groups + 16
        finish(acc, bias_of(matrix, p), target, out_stride, add)
        if streams == 2:
            finish(other, bias_of(matrix, p + apart), target + 4 * LANES * apart, out_stride, add)

    return tile


def driver(dots_of_group: Callable[[int], Any], group_bytes: int) -> Any:
    """y = x W^T for rows begin .. end - 1 and panels first .. last - 1; see kernels/matmul.py.

    dots_of_group(rows) is what tile_kernel takes.
    """
    full, four, two, one = (tile_kernel(dots_of_group(rows), group_bytes, rows) for rows in (TILE, 4, 2, 1))
    pair = tile_kernel(dots_of_group(1), group_bytes, 1, streams=2)

    @jit
    def drive(matrix, acts, begin, end, first, last, out, stride, add, scratch):
        if STREAMS == 2 and end - begin == 1:
            half = (last - first) // 2
            for p in range(first, first + half):
                pair(matrix, p, half, acts, begin, out, stride, add)
            first += 2 * half
        for block in range(begin, end, ROW_BLOCK):
            stop = min(end, block + ROW_BLOCK)
            for p in range(first, last):
                t = block
                while t + TILE <= stop:
                    full(matrix, p, 0, acts, t, out, stride, add)
                    t += TILE
                if t + 4 <= stop:
                    four(matrix, p, 0, acts, t, out, stride, add)
                    t += 4
                if t + 2 <= stop:
                    two(matrix, p, 0, acts, t, out, stride, add)
                    t += 2
                if t < stop:
                    one(matrix, p, 0, acts, t, out, stride, add)

    return drive


def packer(pack_word: Any, words: int) -> Any:
    """A packer of panel p; `rows` is the address of the int64 source rows of all outputs, -1 for zeros.

    A source row is a run of uint32 words (row_stride bytes apart), `words` of them for 32 columns; pack_word turns one
    into the word that the micro-kernel reads. scales and biases are [rows, groups] of the scale type.
    """

    @jit
    def pack(matrix, p, rows, source, row_stride, column_stride, scales, biases):
        panel, rows = matrix.data + p * matrix.panel_bytes, rows + 8 * LANES * p
        groups, per_group = matrix.columns // matrix.group_size, matrix.group_size // GROUP
        element = scale_bytes(matrix.scale_type) // LANES
        for g in range(groups):
            for table in (scales, biases):
                for r in range(LANES):
                    row = peek_i64(rows + 8 * r)
                    at = table + (row * groups + g) * element
                    if element == 4:
                        poke_u32(panel + 4 * r, peek_u32(at) if row >= 0 else np.uint32(0))
                    else:
                        poke_u16(panel + 2 * r, peek_u16(at) if row >= 0 else np.uint16(0))
                panel += element * LANES
            for word in range(words * per_group):
                for r in range(LANES):
                    row = peek_i64(rows + 8 * r)
                    at = source + row * row_stride + 4 * (g * per_group * words + word)
                    poke_u32(panel + 4 * r, pack_word(peek_u32(at)) if row >= 0 else np.uint32(0))
                panel += 4 * LANES

    return pack


def embedder(quant_at: Any, group_bytes: int) -> Any:
    """A function that writes row `row` of the matrix, dequantised, to out (float32, columns long)."""

    @jit
    def embed(matrix, row, out):
        panel, lane = matrix.data + row // LANES * matrix.panel_bytes, row % LANES
        scale_type = matrix.scale_type
        skip = scale_bytes(scale_type)
        element = skip // LANES
        for g in range(matrix.columns // matrix.group_size):
            scale = scale_at(panel + lane * element, scale_type)
            offset = scale_at(panel + skip + lane * element, scale_type)
            panel += 2 * skip
            for k in range(matrix.group_size):
                q = np.float32(quant_at(panel + k // GROUP * group_bytes, lane, k % GROUP))
                poke_f32(out + 4 * (g * matrix.group_size + k), scale * q + offset)
            panel += matrix.group_size // GROUP * group_bytes

    return embed


def unpack(packed: Any, rows: int, columns: int, group_size: int, scale: np.dtype[Any], unpack_group: Any) -> Any:
    """q [rows, columns] and the scales and biases [rows, groups] of the bytes of packed panels; NumPy, for tests."""
    skip = LANES * scale.itemsize
    groups = columns // group_size
    blocks = packed.reshape(-(-rows // LANES), groups, -1)
    scales = np.ascontiguousarray(blocks[:, :, :skip]).view(scale).transpose(0, 2, 1).reshape(-1, groups)
    biases = np.ascontiguousarray(blocks[:, :, skip : 2 * skip]).view(scale).transpose(0, 2, 1).reshape(-1, groups)
    quants = blocks[:, :, 2 * skip :].reshape(len(blocks), groups * group_size // GROUP, -1)
    q = unpack_group(quants).transpose(0, 2, 1, 3).reshape(-1, columns)
    return q[:rows], scales[:rows], biases[:rows]
