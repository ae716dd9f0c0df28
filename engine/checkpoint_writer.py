"""Writing a safetensors file tensor by tensor, so that a model never lies in memory whole.

The file is, in this order:
    8 bytes   length of the header, little-endian
    header    JSON {name: {dtype, shape, data_offsets}}, padded with spaces so that the data starts on a cache line
    data      the tensors, widest elements first: each then starts on a multiple of its own element size
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tfm.engine.progress import Progress, silent

ITEM_BYTES = {"I64": 8, "F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1}
DATA_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written: what the header says of it, and how to make it when its turn comes (BF16 as uint16)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], npt.NDArray[np.generic]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data of tensors, name -> (dtype, shape), in the order of the file."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path,
    tensors: Sequence[PendingTensor],
    metadata: dict[str, str],
    progress: Progress = silent,
    label: str = "writing",
) -> None:
    """Write tensors to path and flush it to the disk; the caller gives path its final name afterwards."""
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    end = sum(tensor.nbytes for tensor in ordered)
    with path.open("wb") as file:
        file.write(header_bytes({tensor.name: (tensor.dtype, tensor.shape) for tensor in ordered}, metadata))
        written = 0
        for tensor in ordered:
            progress(label, written, end)
            array = np.ascontiguousarray(tensor.make())
            assert array.shape == tensor.shape, tensor.name
            assert array.nbytes == tensor.nbytes, tensor.name
            file.write(array.data)
            written += array.nbytes
        progress(label, end, end)
        file.flush()
        os.fsync(file.fileno())
