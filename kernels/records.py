"""The records that kernels read: NumPy structured types, so that Python fills them and a kernel reads `matrix.panels`.

This file imports neither Numba nor llvmlite: the engine needs it in every process. Fields are int64 addresses and
counts unless they say otherwise; an address of 0 means that the thing is not there.
"""

from typing import Any

import numpy as np

LANES = 16  # outputs of a panel, one lane each
BAND_PANELS = 2  # panels that lie interleaved, in the float formats
GROUP = 32  # columns that share one scale of quantised activations
KV_BLOCK = 64  # positions of a cache block
SEGMENT_BLOCKS = 8  # blocks that attention sums by themselves before it merges them; so the order of summation is fixed

# Weight formats. Float formats keep float32 activations; affine ones quantise the activations to int8. bf12 is how bf16
# is packed where it can be, without loss.
F32, BF16, F16, BF12, Q8, Q4 = range(6)
FORMATS = {"f32": F32, "bf16": BF16, "f16": F16, "bf12": BF12, "q8": Q8, "q4": Q4}
SCALE_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
KV_TYPES = {"f32": 0, "f16": 1, "q8": 2}
NORMS = {"none": 0, "rms": 1, "layer": 2}
HIDDEN_ACTS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

_I = np.int64


def _record(*fields: Any) -> np.dtype[Any]:
    return np.dtype([field if isinstance(field, tuple) else (field, _I) for field in fields], align=True)


# A weight matrix [N, K] in panels of 16 outputs; see kernels/formats. rows is N as it came; panels * 16 are computed.
# strays is the room for weights that bf12 keeps apart, in each band.
MATRIX = _record(
    "data", "bias", "format", "rows", "columns", "panels", "panel_bytes", "group_size", "scale_type", "strays"
)  # fmt: skip

# Rows that a matmul reads: float32 values, and the same as int8 with, for every 32 columns, 16 bytes:
# scale (float32), scale * sum (float32), sum of the int8 (int32), 4 unused. Strides are bytes from row to row.
ACTIVATIONS = _record("values", "stride", "quantized", "quantized_stride", "groups", "groups_stride")

# What attention needs to know of a layer. Sizes are in elements; head_size is head_dim padded to 16 lanes.
HEADS = _record(
    "num_attention_heads", "num_key_value_heads", "head_dim", "head_size", "sliding_window",
    ("scale", np.float32), ("softcap", np.float32),
)  # fmt: skip

# Consecutive positions of one sequence among the rows of a step: rows first .. first + count - 1 are positions
# position .. position + count - 1; blocks is the address of the sequence's table of block addresses.
SPAN = _record("first", "count", "position", "blocks")

# A thread of the team, and what it alone writes. waited_ns is its time at barriers, spins how often a wait looks before
# it naps; clock is room for the time of day.
THREAD = _record(
    "index", "threads", "team", "episode", "step", "work", "activations", "scratch", "waited_ns", "spins", "clock"
)  # fmt: skip

# What the threads share: arrivals at barriers, the number of the step, helpers that sleep, the order to end; and a
# POSIX mutex and condition variable (at most 64 bytes on any system) to sleep on. A cache line or two each.
TEAM_ARRIVED, TEAM_STEP, TEAM_SLEEPERS, TEAM_STOP = 0, 64, 128, 192
TEAM_MUTEX, TEAM_CONDITION, TEAM_BYTES = 256, 384, 512


# bf12, see kernels/formats/bf12.py: upper halves without their sign, how many of them a table has, and what marks one
# that it has not; columns and bytes of a unit, bytes of a band's table and of a stray.
UPPERS, TABLED, ABSENT = 128, 8, 255
UNIT_COLUMNS, UNIT_BYTES, TABLE_BYTES, STRAY_BYTES = 4, 192, 2 * TABLED, 8


def panels_of(rows: int) -> int:
    return -(-rows // LANES)


def panels_together(format: int) -> int:
    """Panels that lie interleaved in memory: the matrix has room for a multiple of them."""
    return 1 if format in (Q4, Q8) else BAND_PANELS


def stored_panels(format: int, panels: int) -> int:
    """Panels that there is room for."""
    together = panels_together(format)
    return -(-panels // together) * together


def panel_bytes(format: int, columns: int, group_size: int, scale_type: int, strays: int) -> int:
    """Bytes of one packed panel: 16 outputs by all columns, with what else the format has beside them."""
    if format in (F32, BF16, F16):
        return columns * LANES * (4 if format == F32 else 2)
    if format == BF12:
        return (band_head_bytes(strays) + -(-columns // UNIT_COLUMNS) * UNIT_BYTES) // BAND_PANELS
    scales = 2 * LANES * (4 if scale_type == SCALE_TYPES["f32"] else 2)
    return columns // group_size * (scales + group_size * LANES * (4 if format == Q4 else 8) // 8)


def band_head_bytes(strays: int) -> int:
    """Bytes of the table and of `strays` strays with the one that ends them, on cache lines."""
    return -(-(TABLE_BYTES + STRAY_BYTES * (strays + 1)) // 64) * 64


def head_bytes(kv_type: int, head_size: int) -> int:
    """Bytes of the keys (or of the values) of one head in one cache block."""
    element = {0: 4, 1: 2, 2: 1}[kv_type]
    return KV_BLOCK * (head_size * element + (4 if kv_type == KV_TYPES["q8"] else 0))


# Bytes of an attention state before its sums of values: the maximum, and at 64 the 16 partial sums of weights.
STATE_HEAD = 128
MOST_TILE = 8  # rows of the largest tile on any CPU (simd.TILE)


def state_bytes(head_size: int) -> int:
    return STATE_HEAD + 4 * head_size


# A matmul in floating point takes so many rows, panels and columns at a time; see kernels/formats/bands.py. Its scratch
# space holds, in float32, the columns of at most two panels, those of the rows, and the sums. With 64 panels the rows'
# columns are copied a quarter as often as with 16: 44 and not 42 G multiply-adds/s on AVX2, though the sums, of which
# a tile touches a line in 18,000 multiply-adds, then lie in the third cache.
BLOCK_ROWS, BLOCK_PANELS, BLOCK_COLUMNS = 192, 64, 192
MULTIPLY_SCRATCH_BYTES = 4 * (LANES * 2 * BLOCK_COLUMNS + BLOCK_ROWS * (BLOCK_COLUMNS + LANES * (BLOCK_PANELS + 1)))


def attention_scratch_bytes(head_size: int) -> int:
    """Bytes that a thread needs for attention: a tile's queries, scores, positions, and two states a row."""
    return MOST_TILE * (4 * (head_size + KV_BLOCK) + 16 + 2 * state_bytes(head_size))
