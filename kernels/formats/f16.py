"""IEEE half precision. The conversion to float32 is exact."""

from tfm.kernels.formats import dense
from tfm.kernels.records import BAND_PANELS, F16
from tfm.kernels.simd import load_f16

CODE = F16
QUANTIZED = False
ELEMENT_BYTES = 2

band_row, half_row = (dense.row_kernel(load_f16, ELEMENT_BYTES, panels) for panels in (BAND_PANELS, BAND_PANELS // 2))
start_block = dense.block_starter(load_f16, ELEMENT_BYTES)
pack, embed = dense.pack, dense.embed
