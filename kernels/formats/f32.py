"""32-bit floating point, as it is."""

from tfm.kernels.formats import dense
from tfm.kernels.records import BAND_PANELS, F32
from tfm.kernels.simd import load_f32

CODE = F32
QUANTIZED = False
ELEMENT_BYTES = 4

band_row, half_row = (dense.row_kernel(load_f32, ELEMENT_BYTES, panels) for panels in (BAND_PANELS, BAND_PANELS // 2))
start_block = dense.block_starter(load_f32, ELEMENT_BYTES)
pack, embed = dense.pack, dense.embed
