"""8-bit affine weights. A vector of 64 bytes holds 4 columns of the panel's 16 outputs:

    byte 4 n + c of vector v:   q[n, 4 v + c]        n = 0..15, c = 0..3

so 32 columns are 8 vectors. The word of a checkpoint (4 columns of one output) is taken as it is.
"""

from typing import Any

from tfm.kernels.formats import affine
from tfm.kernels.jit import inline, jit
from tfm.kernels.records import LANES, Q8
from tfm.kernels.simd import byte_sums, dot_bytes, load_bytes, peek_u8

CODE = Q8
QUANTIZED = True
GROUP_BYTES = 512


def dots_of_group(rows: int) -> Any:
    start = byte_sums(rows)

    @inline
    def dots(q, x8, stride, groups, groups_stride):
        acc = start(groups + 8, groups_stride)
        for v in range(8):
            acc = dot_bytes(acc, load_bytes(q + 64 * v), x8 + 4 * v, stride)
        return acc

    return dots


multiply = affine.driver(dots_of_group, GROUP_BYTES)


@jit
def pack_word(word):
    return word


@jit
def quant_at(q, lane, k):
    return peek_u8(q + k // 4 * 64 + lane * 4 + k % 4)


pack = affine.packer(pack_word, 8)
embed = affine.embedder(quant_at, GROUP_BYTES)


def unpack_group(quants: Any) -> Any:
    """uint8 [panels, groups of 32, 512] -> [panels, groups, 16, 32]; NumPy, for tests."""
    vectors = quants.reshape(*quants.shape[:2], 8, LANES, 4)
    return vectors.transpose(0, 1, 3, 2, 4).reshape(*quants.shape[:2], LANES, 32)
