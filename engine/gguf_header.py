"""The header of a GGUF file, walked before GGUF's own library is let at it: that one believes every count.

    4 bytes   GGUF
    uint32    version
    uint64    number of tensors, number of fields
    fields    name, uint32 type, value; a string is a uint64 length and its bytes,
              an array a uint32 type, a uint64 count and its values, which may be arrays
    tensors   name, uint32 dimensions, uint64 each of them, uint32 type, uint64 offset

A damaged count of 2**60 would make the library go round for ever and take the memory. Here every count and length must
fit into the bytes that are left, so that the walk takes no longer than the file is.
"""

import mmap
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from tfm.engine.errors import TfmError

MAGIC = b"GGUF"
DAMAGED = "the file is truncated or damaged, fetch it again"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
LEAST_BYTES = {**SCALAR_BYTES, STRING: 8, ARRAY: 12}  # of a value of that type
LEAST_FIELD_BYTES = 8 + 4 + 1
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8
MOST_DIMENSIONS = 4  # GGUF's own limit
DEEPEST_ARRAY = 8
U32, U64 = Struct("<I"), Struct("<Q")


def check_header(path: Path, file: BinaryIO) -> None:
    """Raises TfmError for a header whose counts or lengths lead out of the file, or that is not GGUF of this machine's
    byte order."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise TfmError(f"{path}: not a GGUF file", f"first bytes {magic!r}", f"{MAGIC!r}", "give another file")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(path, data).header()


class _Walk:
    """A place in the file that moves on over what it has checked. where is how an error calls what stands there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data = path, data
        self._place = len(MAGIC)
        self._where = "header"

    def header(self) -> None:
        version = self._number(U32)
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0  # a file of the other byte order: a 3 in its upper bytes
            found = "the other byte order" if swapped else version
            raise self._fault("version", found, " or ".join(map(str, VERSIONS)), "use a file of a current converter")
        tensors, fields = self._number(U64), self._number(U64)
        self._fit("number of tensors", tensors, LEAST_TENSOR_BYTES)
        self._fit("number of fields", fields, LEAST_FIELD_BYTES)
        for index in range(fields):
            self._where = f"field {index + 1} of {fields}"
            self._where = f"field {self._string('length of its name')}"
            self._value(self._number(U32), 0)
        for index in range(tensors):
            self._where = f"tensor {index + 1} of {tensors}"
            self._where = f"tensor {self._string('length of its name')}"
            dimensions = self._number(U32)
            if dimensions > MOST_DIMENSIONS:
                raise self._fault("dimensions", dimensions, f"up to {MOST_DIMENSIONS}", DAMAGED)
            self._skip(dimensions * U64.size + U32.size + U64.size)

    def _value(self, kind: int, depth: int) -> None:
        if kind == STRING:
            self._skip(self._fit("length", self._number(U64), 1))
        elif kind == ARRAY:
            self._array(depth + 1)
        elif kind in SCALAR_BYTES:
            self._skip(SCALAR_BYTES[kind])
        else:
            raise self._fault("type", kind, f"0 to {max(LEAST_BYTES)}", DAMAGED)

    def _array(self, depth: int) -> None:
        kind = self._number(U32)
        if kind not in LEAST_BYTES:
            raise self._fault("type of the array", kind, f"0 to {max(LEAST_BYTES)}", DAMAGED)
        if depth > DEEPEST_ARRAY:
            raise self._fault("arrays in arrays", f"more than {DEEPEST_ARRAY}", f"up to {DEEPEST_ARRAY}", DAMAGED)
        count = self._fit("length of the array", self._number(U64), LEAST_BYTES[kind])
        if kind in SCALAR_BYTES:
            self._skip(count * SCALAR_BYTES[kind])
            return
        for _ in range(count):
            self._value(kind, depth)

    def _number(self, form: Struct) -> int:
        begin = self._place
        self._skip(form.size)
        found: int = form.unpack_from(self._data, begin)[0]
        return found

    def _string(self, what: str) -> str:
        length = self._fit(what, self._number(U64), 1)
        begin = self._place
        self._skip(length)
        return self._data[begin : min(self._place, begin + 100)].decode(errors="replace")

    def _skip(self, count: int) -> None:
        rest = len(self._data) - self._place
        if count > rest:
            raise self._fault("bytes", f"{rest} to the end of the file", f"{count} at least", DAMAGED)
        self._place += count

    def _fit(self, what: str, count: int, bytes_each: int) -> int:
        """count, which must not stand for more than the bytes that are left."""
        most = (len(self._data) - self._place) // bytes_each
        if count > most:
            raise self._fault(what, count, f"up to {most}, by the {len(self._data)} bytes of the file", DAMAGED)
        return count

    def _fault(self, what: str, found: object, allowed: str, do: str) -> TfmError:
        return TfmError(f"{self._path}: {self._where}: {what}", found, allowed, do)
