"""IEEE half precision. The conversion to float32 is exact."""

from tfm.kernels.formats import dense
from tfm.kernels.records import F16
from tfm.kernels.simd import load_f16, peek_f16

CODE = F16
QUANTIZED = False
ELEMENT_BYTES = 2
load = load_f16

multiply = dense.driver(load, ELEMENT_BYTES)
pack = dense.packer(ELEMENT_BYTES)
embed = dense.embedder(peek_f16, ELEMENT_BYTES)
