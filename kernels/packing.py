"""Weights of a checkpoint into panels: the Python side of kernels/formats, without Numba at run time."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.kernels.jit import Entry
from tfm.kernels.records import FORMATS, LANES, MATRIX, SCALE_TYPES, panel_bytes, panels_of, stored_panels

PACK = Entry("tfm.kernels.matmul:pack_panels", "iiiiiiiii")
PANELS_A_TASK = 256  # whole bands
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


def read_bytes(record: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Bytes that a product with the whole matrix reads."""
    return int(record["panels"][0] * record["panel_bytes"][0])


def packed_bytes(record: np.ndarray[Any, np.dtype[Any]]) -> int:
    """Bytes that the matrix occupies."""
    return stored_panels(int(record["format"][0]), int(record["panels"][0])) * int(record["panel_bytes"][0])


def pack_tasks(
    record: np.ndarray[Any, np.dtype[Any]],
    weight: npt.NDArray[Any],
    scales: npt.NDArray[Any] | None = None,
    biases: npt.NDArray[Any] | None = None,
    rows: npt.NDArray[np.int64] | None = None,
) -> Iterator[Callable[[], None]]:
    """Calls that together pack a checkpoint's matrix into the memory at record's data, in any order and thread.

    weight is [N, K] in a float type (any strides), or uint32 [N, K * bits / 32] with contiguous rows; scales and biases
    are [N, groups]. rows names the source row of each packed row, -1 for zeros (default: 0, 1, 2 ...).
    """
    panels, count = stored_panels(int(record["format"][0]), int(record["panels"][0])), int(record["rows"][0])
    source_rows = np.full(panels * LANES, -1, np.int64)
    source_rows[:count] = np.arange(count) if rows is None else rows
    scales, biases = (None if table is None else np.ascontiguousarray(table) for table in (scales, biases))

    def task(first: int, last: int) -> None:
        tables = [0 if table is None else table.ctypes.data for table in (scales, biases)]
        PACK(record.ctypes.data, first, last, source_rows.ctypes.data, weight.ctypes.data, *weight.strides, *tables)

    for first in range(0, panels, PANELS_A_TASK):
        yield partial(task, first, min(panels, first + PANELS_A_TASK))
