"""Safetensors files written byte by byte, so that a test can also write one that is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "uint16": "BF16", "uint32": "U32", "uint8": "U8"}
"""NumPy's name -> safetensors'; uint16 stands for the bits of bfloat16."""


def entry(dtype: str, shape: list[int], begin: int, end: float) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with this header (bytes as they are, anything else as JSON) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A right file with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = entry(DTYPES[array.dtype.name], list(array.shape), begin, end)
    return write_raw(path, header, b"".join(array.tobytes() for array in tensors.values()))


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, as uint16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
