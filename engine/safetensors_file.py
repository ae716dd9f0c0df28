"""The header of a safetensors file, checked before anything is read by it.

    8 bytes   length of the header, little-endian
    header    JSON {name: {dtype, shape, data_offsets: [begin, end]}}, offsets counted from the start of the data
    data      the tensors, without gaps, to the end of the file

Own reading rather than the library's, because its errors name neither the file nor the tensor.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from tfm.engine.errors import TfmError
from tfm.engine.fields import is_integer, reason, shown
from tfm.engine.files import open_file

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
LENGTH_BYTES = 8
LONGEST_HEADER_BYTES = 100_000_000
AGAIN = "download the file again"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: bytes begin to end of file, row by row, in safetensors' own words for dtypes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a file. Raises TfmError for a file that is cut short or contradicts itself."""
    return read_header_and_metadata(path)[0]


def read_header_and_metadata(path: Path) -> tuple[dict[str, TensorInfo], object]:
    """All tensors of a file, and what it says of itself, unchecked (None: nothing). Raises TfmError as read_header."""
    with open_file(path, AGAIN) as file:
        size = os.fstat(file.fileno()).st_size
        text = _header_text(path, file, size)
    data_begin = LENGTH_BYTES + len(text)
    entries = _parse(path, text)
    metadata = entries.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, data_begin) for name, entry in entries.items()}
    _check_layout(path, list(tensors.values()), data_begin, size)
    return tensors, metadata


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    length_bytes = file.read(LENGTH_BYTES)
    if len(length_bytes) < LENGTH_BYTES:
        raise TfmError(f"file {path}: cut short", f"{size} bytes", "at least 8, a safetensors file", AGAIN)
    length = int.from_bytes(length_bytes, "little")
    if length > size - LENGTH_BYTES:
        allowed = f"{size - LENGTH_BYTES}, to the end of the file"
        raise TfmError(f"file {path}: header", f"{length} bytes", allowed, f"{AGAIN}; is it a safetensors file?")
    if length > LONGEST_HEADER_BYTES:
        raise TfmError(f"file {path}: header", f"{length} bytes", f"up to {LONGEST_HEADER_BYTES}", AGAIN)
    return file.read(length)


def _parse(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = dict(pairs)
        if len(names) < len(pairs):
            twice = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
            raise TfmError(f"file {path}: header", f"{twice!r} twice", "each name once", AGAIN)
        return names

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        found = error if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else reason(error)
        raise TfmError(f"file {path}: header: not JSON", found, do=f"{AGAIN}; is it a safetensors file?") from error
    if not isinstance(header, dict):
        raise TfmError(f"file {path}: header", shown(header), "a JSON object", AGAIN)
    return header


def _tensor(path: Path, name: str, entry: object, data_begin: int) -> TensorInfo:
    what = f"file {path}: tensor {name}"
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(word) for word in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise TfmError(f"{what}: dtype", shown(dtype), ", ".join(DTYPE_BITS))
    if not isinstance(shape, list) or not all(is_integer(size) and size >= 0 for size in shape):
        raise TfmError(f"{what}: shape", shown(shape), "whole numbers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_integer(byte) for byte in offsets):
        raise TfmError(f"{what}: data_offsets", shown(offsets), "two whole numbers")
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if begin < 0 or (end - begin) * 8 != bits:
        wanted = f"{bits // 8} bytes for {dtype} {shape}"
        raise TfmError(f"{what}: data_offsets", shown(offsets), wanted, AGAIN)
    return TensorInfo(name, dtype, tuple(shape), path, data_begin + begin, data_begin + end)


def _check_layout(path: Path, tensors: list[TensorInfo], data_begin: int, size: int) -> None:
    """Every byte of the data belongs to one tensor, and the last one ends with the file."""
    end, last = data_begin, None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin < end and last is not None:
            overlap = f"{tensor.name} begins {end - tensor.begin} bytes before {last.name} ends"
            raise TfmError(f"file {path}: tensors overlap", overlap, "one after the other", AGAIN)
        if tensor.begin > end:
            gap = f"{tensor.begin - end} bytes that belong to no tensor"
            raise TfmError(f"file {path}: before tensor {tensor.name}", gap, "none", AGAIN)
        if tensor.end > size:
            whole = max(tensor.end for tensor in tensors)
            raise TfmError(f"file {path}: cut short in tensor {tensor.name}", f"{size} bytes", whole, AGAIN)
        end, last = tensor.end, tensor
    if end < size:
        raise TfmError(f"file {path}: after the last tensor", f"{size - end} more bytes", "none", AGAIN)
