"""Weights of a checkpoint into panels: the Python side of kernels/formats, without Numba at run time."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from tfm.kernels.heap import LARGE_PAGE
from tfm.kernels.jit import Entry
from tfm.kernels.records import (
    ABSENT,
    BAND_PANELS,
    BF12,
    FORMATS,
    LANES,
    MATRIX,
    SCALE_TYPES,
    TABLED,
    UPPERS,
    panel_bytes,
    panels_of,
    stored_panels,
)

COUNT = Entry("tfm.kernels.matmul:count_uppers", "iiiiiii")
PACK = Entry("tfm.kernels.matmul:pack_panels", "iiiiiiiii", pieces=(COUNT,))
PANELS_A_TASK = 256  # whole bands
PART_ROWS = BAND_PANELS * LANES  # a matrix may be packed in parts of a multiple of so many rows
NOTHING = ctypes.c_char * 0  # also an empty array has one
ALIGN = 64  # bytes; a packed panel starts on a cache line


def aligned_empty(size: int) -> npt.NDArray[np.uint8]:
    """`size` uninitialised bytes that begin on a cache line; many of them on a large page, and in whole large pages.

    (NumPy asks the system for large pages from 4 MB on. Attention over keys and values of which a fifth lay in small
    ones, at the edges of their slabs, took 7 % longer.)
    """
    align = LARGE_PAGE if size >= 2 * LARGE_PAGE else ALIGN
    room = np.empty((size // align + 2) * align, np.uint8)
    start = -room.ctypes.data % align
    return room[start : start + size]


def data_address(array: npt.NDArray[Any]) -> int:
    """Of a writable array, array.ctypes.data. That takes 30 us between two steps, when Python is in no cache any more,
    and this takes 10."""
    return ctypes.addressof(NOTHING.from_buffer(array))


def describe(
    format: str, rows: int, columns: int, group_size: int = 0, scale_type: str | None = None, strays: int = 0
) -> np.ndarray[Any, np.dtype[Any]]:
    """The record of a matrix (an array of one) whose data are not there yet; rows as they will be packed.

    strays is the room for strays in each band of bf12, see Exponents.
    """
    code, scales = FORMATS[format], SCALE_TYPES[scale_type or "f32"]
    record = np.zeros(1, MATRIX)
    record["format"], record["rows"], record["columns"] = code, rows, columns
    record["panels"], record["panel_bytes"] = panels_of(rows), panel_bytes(code, columns, group_size, scales, strays)
    record["group_size"], record["scale_type"], record["strays"] = group_size, scales, strays
    return record


def part_of(record: np.ndarray[Any, np.dtype[Any]], first: int, rows: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The record of so many rows from `first`, a multiple of PART_ROWS, to pack them where they lie in the whole."""
    part = record.copy()
    part["rows"], part["panels"] = rows, panels_of(rows)
    part["data"] += first // LANES * record["panel_bytes"]
    return part


class Exponents(NamedTuple):
    """What bf12 must know of a matrix: the upper halves of its weights that each band uses most.

    places is uint8 [bands, UPPERS]: the place of each upper half in its band's table, or ABSENT. most is the number
    of strays, weights with another one, of the band that has the most, total that of all.
    """

    places: npt.NDArray[np.uint8]
    most: int
    total: int

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64]) -> Self:
        """From what `count_uppers` counted."""
        common = np.argsort(-counts, axis=1, kind="stable")[:, :TABLED]
        places = np.full(counts.shape, ABSENT, np.uint8)
        np.put_along_axis(places, common, np.arange(TABLED, dtype=np.uint8)[None], axis=1)
        strays = np.where(places == ABSENT, counts, 0).sum(axis=1)
        return cls(places, int(strays.max(initial=0)), int(strays.sum()))


def count_uppers(weight: npt.NDArray[np.uint16], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each band has each upper half: int64 [bands, UPPERS]; weight and rows as `pack_tasks` has them."""
    bands = stored_panels(BF12, panels_of(len(rows))) // BAND_PANELS
    source_rows, counts = np.full(bands * BAND_PANELS * LANES, -1, np.int64), np.zeros((bands, UPPERS), np.int64)
    source_rows[: len(rows)] = rows
    COUNT(weight.shape[1], bands, source_rows.ctypes.data, weight.ctypes.data, *weight.strides, counts.ctypes.data)
    return counts


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
    are [N, groups]; scales of bf12 are Exponents.places. rows names the source row of each packed row, -1 for zeros
    (default: 0, 1, 2 ...).
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
