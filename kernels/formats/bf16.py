"""bfloat16: the upper half of a float32. A shift makes the float32, exactly."""

from tfm.kernels.formats import dense
from tfm.kernels.records import BF16
from tfm.kernels.simd import load_bf16, peek_bf16

CODE = BF16
QUANTIZED = False
ELEMENT_BYTES = 2
load = load_bf16

multiply = dense.driver(load, ELEMENT_BYTES)
pack = dense.packer(ELEMENT_BYTES)
embed = dense.embedder(peek_bf16, ELEMENT_BYTES)
