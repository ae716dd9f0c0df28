"""IEEE half precision. The conversion to float32 is exact."""

from tfm.kernels.formats import dense
from tfm.kernels.records import F16
from tfm.kernels.simd import load_f16

CODE = F16
QUANTIZED = False
ELEMENT_BYTES = 2

band_row, band_rows = (dense.row_kernel(load_f16, ELEMENT_BYTES, streams) for streams in (1, 2))
start_block = dense.block_starter(load_f16, ELEMENT_BYTES)
pack, embed = dense.pack, dense.embed
