"""Weights of a checkpoint into panels: the Python side of kernels/formats, without Numba at run time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry
from tfm.kernels.records import FORMATS, LANES, MATRIX, SCALE_TYPES, panel_bytes, panels_of

PACK = Entry("tfm.kernels.matmul:pack_panels", "iiiiiiiii")
ALIGN = 64  # bytes; a packed panel starts on a cache line


def aligned_empty(size: int) -> npt.NDArray[np.uint8]:
    """`size` uninitialised bytes that begin on a cache line."""
    room = np.empty(size + ALIGN, np.uint8)
    start = -room.ctypes.data % ALIGN
    return room[start : start + size]


def describe(
    format: str, rows: int, columns: int, group_size: int = 0, scale_type: str | None = None
) -> np.ndarray[Any, np.dtype[Any]]:
    """The record of a matrix (an array of one) whose data are not there yet; rows as they will be packed."""
    code, scales = FORMATS[format], SCALE_TYPES[scale_type or "f32"]
    record = np.zeros(1, MATRIX)
    record["format"], record["rows"], record["columns"] = code, rows, columns
    record["panels"], record["panel_bytes"] = panels_of(rows), panel_bytes(code, columns, group_size, scales)
    record["group_size"], record["scale_type"] = group_size, scales
    return record


def packed_bytes(record: np.ndarray[Any, np.dtype[Any]]) -> int:
    return int(record["panels"][0] * record["panel_bytes"][0])


def pack(
    record: np.ndarray[Any, np.dtype[Any]],
    weight: npt.NDArray[Any],
    scales: npt.NDArray[Any] | None,
    biases: npt.NDArray[Any] | None,
    rows: npt.NDArray[np.int64] | None = None,
    run: Callable[[Callable[[int, int], None], int], None] | None = None,
) -> None:
    """Pack a checkpoint's matrix into the memory at record's data.

    weight is [N, K] in a float type (any strides), or uint32 [N, K * bits / 32] with contiguous rows; scales and biases are [N, groups].
    rows names the source row of each packed row, -1 for zeros (default: 0, 1, 2 ...). run(task, panels) may split the panels over threads.
    """
    panels = int(record["panels"][0])
    source_rows = np.full(panels * LANES, -1, np.int64)
    count = int(record["rows"][0])
    source_rows[:count] = np.arange(count) if rows is None else rows
    tables = [None if table is None else np.ascontiguousarray(table) for table in (scales, biases)]
    addresses = [0 if table is None else table.ctypes.data for table in tables]
    row_stride, column_stride = weight.strides

    def task(first: int, last: int) -> None:
        PACK(
            record.ctypes.data, first, last, source_rows.ctypes.data, weight.ctypes.data, row_stride, column_stride, *addresses
        )  # fmt: skip

    if run is None:
        task(0, panels)
    else:
        run(task, panels)
