"""4-bit affine weights. A vector of 64 bytes holds 8 columns of the panel's 16 outputs, two in a byte:

    byte 4 n + c of vector v:   low 4 bits  q[n, 8 v + c]      high 4 bits  q[n, 8 v + 4 + c]        n = 0..15, c = 0..3

so 32 columns are 4 vectors. The word of a checkpoint (8 columns of one output, lowest bits first) becomes one such
word.
"""

from typing import Any

import numpy as np

from tfm.kernels.formats import affine
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import LANES, Q4
from tfm.kernels.simd import dot_nibbles, high_nibbles, load_bytes, low_nibbles, nibble_sums, peek_u8

CODE = Q4
QUANTIZED = True
GROUP_BYTES = 256


def dots_of_group(rows: int) -> Any:
    start = nibble_sums(rows)

    @inline
    def dots(q, x8, stride, groups, groups_stride):
        acc = start()
        for v in range(4):
            w = load_bytes(q + 64 * v)
            acc = dot_nibbles(acc, low_nibbles(w), x8 + 8 * v, stride)
            acc = dot_nibbles(acc, high_nibbles(w), x8 + 8 * v + 4, stride)
        return acc

    return dots


multiply = affine.driver(dots_of_group, GROUP_BYTES)


@jit
def pack_word(word):
    word = np.uint32(word)
    low, high = word & np.uint32(0xFFFF), word >> np.uint32(16)
    packed = np.uint32(0)
    for c in range(4):
        shift = np.uint32(4 * c)
        pair = (low >> shift & np.uint32(15)) | (high >> shift & np.uint32(15)) << np.uint32(4)
        packed |= pair << np.uint32(8 * c)
    return packed


@jit
def quant_at(q, lane, k):
    byte = peek_u8(q + k // 8 * 64 + lane * 4 + k % 4)
    return byte >> 4 if k % 8 >= 4 else byte & 15


pack = affine.packer(pack_word, 4)
embed = affine.embedder(quant_at, GROUP_BYTES)


def unpack_group(quants: Any) -> Any:
    """uint8 [panels, groups of 32, 256] -> [panels, groups, 16, 32]; NumPy, for tests."""
    vectors = quants.reshape(*quants.shape[:2], 4, LANES, 4)
    both = np.stack([vectors & 15, vectors >> 4], axis=4)  # panel, group, v, n, half, c
    return both.transpose(0, 1, 3, 2, 4, 5).reshape(*quants.shape[:2], LANES, 32)
