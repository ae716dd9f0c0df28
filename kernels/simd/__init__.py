"""Vector types and their operations: a kernel reads `acc = fma(a, b, acc)`. The only package that builds LLVM code.

A vector has 16 lanes of 32 bits (or 64 of 8), which is one AVX-512 register, two AVX2 registers or four NEON registers:
LLVM splits it. A lane is always one output of a kernel, so that no kernel ever sums across lanes of a long dot product
and the order of summation does not depend on the width of the machine's registers.

A tile is a fixed number of vectors, one for each row of activations (or each panel of weights) that a micro-kernel
holds in registers; its operations are unrolled when the kernel is compiled.

Memory is named by plain integer addresses: the layer table and the step record hold addresses, and a kernel that walks
packed panels counts bytes. Every address was checked in Python before.

What differs between CPUs follows from TARGET (kernels/targets.py): the integer dot products, the lookup of bytes, the
pause instruction, and whether a fused multiply-add or a conversion from half precision exists. Without them the generic
forms are right everywhere.

    vectors.py   the types, and the steps that all operations are built from
    memory.py    scalars, records and vectors in memory, half precision, atomics
    arithmetic.py   + - * / fma exp tanh ... on a vector
    tiles.py     the same on all vectors of a tile
    narrow.py    bfloat16 in 12 bits, with a lookup of bytes for each family of CPUs
    dots.py      integer dot products of 4- and 8-bit weights, one way for each family of CPUs
"""

from tfm.kernels.simd.arithmetic import (
    absolute,
    exp,
    exp_below,
    first_lanes,
    fma,
    maximum,
    minimum,
    reduce_add,
    reduce_max,
    round_even,
    splat,
    tanh,
)
from tfm.kernels.simd.dots import byte_sums, dot_bytes, dot_nibbles, fma_dots, high_nibbles, low_nibbles, nibble_sums
from tfm.kernels.simd.memory import (
    address_of,
    atomic_add,
    atomic_load,
    atomic_store,
    half_bits,
    load_bf16,
    load_bytes,
    load_f16,
    load_f32,
    load_i8,
    pause,
    peek_bf16,
    peek_f16,
    peek_f32,
    peek_i64,
    peek_u8,
    peek_u16,
    peek_u32,
    poke_f32,
    poke_f64,
    poke_i8,
    poke_i32,
    poke_i64,
    poke_u16,
    poke_u32,
    prefetch,
    record_at,
    store_f16,
    store_f32,
    store_first,
    store_i8,
)
from tfm.kernels.simd.narrow import columns_of, fma_column, fma_unit, load_table, load_unit, set_value
from tfm.kernels.simd.tiles import (
    add_rows,
    add_tile,
    fma_tile,
    fma_unpack_tile,
    load_rows,
    store_rows,
    tile_of,
    vector_of,
)
from tfm.kernels.simd.vectors import (
    AHEAD_BYTES,
    ASKED_BYTES,
    LANES,
    PANELS_AT_ONCE,
    STREAMS,
    TARGET,
    TILE,
    f32x16,
)

# fmt: off
__all__ = [
    "AHEAD_BYTES", "ASKED_BYTES", "LANES", "PANELS_AT_ONCE", "STREAMS", "TARGET", "TILE", "absolute", "add_rows",
    "add_tile", "address_of", "atomic_add", "atomic_load", "atomic_store", "byte_sums", "columns_of", "dot_bytes",
    "dot_nibbles", "exp", "exp_below", "f32x16", "first_lanes", "fma", "fma_column", "fma_dots", "fma_tile",
    "fma_unit", "fma_unpack_tile", "half_bits", "high_nibbles", "load_bf16", "load_bytes", "load_f16", "load_f32",
    "load_i8", "load_rows", "load_table", "load_unit", "low_nibbles", "maximum", "minimum", "nibble_sums", "pause",
    "peek_bf16", "peek_f16", "peek_f32", "peek_i64", "peek_u8", "peek_u16", "peek_u32", "poke_f32", "poke_f64",
    "poke_i8", "poke_i32", "poke_i64", "poke_u16", "poke_u32", "prefetch", "record_at", "reduce_add", "reduce_max",
    "round_even", "set_value", "splat", "store_f16", "store_f32", "store_first", "store_i8", "store_rows", "tanh",
    "tile_of", "vector_of",
]
