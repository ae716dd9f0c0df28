"""32-bit floating point, as it is."""

from typing import Any

from tfm.kernels.formats import dense
from tfm.kernels.records import F32
from tfm.kernels.simd import load_f32, peek_f32

CODE = F32
QUANTIZED = False
ELEMENT_BYTES = 4


def tile_kernel(rows: int) -> Any:
    return dense.tile_kernel(load_f32, ELEMENT_BYTES, rows)


def pair_kernel(rows: int) -> Any:
    return dense.pair_kernel(load_f32, ELEMENT_BYTES, rows)


row_kernel = dense.row_kernel(load_f32, ELEMENT_BYTES)
pack = dense.packer(ELEMENT_BYTES)
embed = dense.embedder(peek_f32, ELEMENT_BYTES)
