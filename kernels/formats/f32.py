"""32-bit floating point, as it is."""

from tfm.kernels.formats import dense
from tfm.kernels.records import F32
from tfm.kernels.simd import load_f32, peek_f32

CODE = F32
QUANTIZED = False
ELEMENT_BYTES = 4
load = load_f32

multiply = dense.driver(load, ELEMENT_BYTES)
pack = dense.packer(ELEMENT_BYTES)
embed = dense.embedder(peek_f32, ELEMENT_BYTES)
