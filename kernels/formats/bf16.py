"""bfloat16: the upper half of a float32. A shift makes the float32, exactly."""

from tfm.kernels.formats import dense
from tfm.kernels.records import BF16
from tfm.kernels.simd import load_bf16

CODE = BF16
QUANTIZED = False
ELEMENT_BYTES = 2

band_row, band_rows = (dense.row_kernel(load_bf16, ELEMENT_BYTES, streams) for streams in (1, 2))
start_block = dense.block_starter(load_bf16, ELEMENT_BYTES)
pack, embed = dense.pack, dense.embed
