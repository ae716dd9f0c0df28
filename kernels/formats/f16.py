"""IEEE half precision. The conversion to float32 is exact."""

from typing import Any

from tfm.kernels.formats import dense
from tfm.kernels.records import F16
from tfm.kernels.simd import load_f16, peek_f16

CODE = F16
QUANTIZED = False
ELEMENT_BYTES = 2


def tile_kernel(rows: int) -> Any:
    return dense.tile_kernel(load_f16, ELEMENT_BYTES, rows)


def pair_kernel(rows: int) -> Any:
    return dense.pair_kernel(load_f16, ELEMENT_BYTES, rows)


row_kernel = dense.row_kernel(load_f16, ELEMENT_BYTES)
pack = dense.packer(ELEMENT_BYTES)
embed = dense.embedder(peek_f16, ELEMENT_BYTES)
