"""32-bit floating point, as it is."""

from tfm.kernels.formats import dense
from tfm.kernels.records import F32
from tfm.kernels.simd import load_f32

CODE = F32
QUANTIZED = False
ELEMENT_BYTES = 4

band_row, band_rows = (dense.row_kernel(load_f32, ELEMENT_BYTES, streams) for streams in (1, 2))
start_block = dense.block_starter(load_f32, ELEMENT_BYTES)
pack, embed = dense.pack, dense.embed
