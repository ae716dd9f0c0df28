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

import os
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from tfm.engine.errors import TfmError
from tfm.engine.files import CHANGED

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


def header_of(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """The bytes of the header, and how many the file has. Raises TfmError for a header whose counts or lengths lead out
    of the file, or that is not GGUF of this machine's byte order."""
    magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise TfmError(f"{path}: not a GGUF file", f"first bytes {magic!r}", f"{MAGIC!r}", "give another file")
    size = os.fstat(file.fileno()).st_size
    length = _Walk(path, file, size).header()
    file.seek(0)
    return file.read(length), size


class _Walk:
    """A place in the file that moves on over what it has checked. where is how an error calls what stands there."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._place = len(MAGIC)
        self._where = "header"

    def header(self) -> int:
        """Where the header ends."""
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
        return self._place

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
        found: int = form.unpack(self._read(form.size))[0]
        return found

    def _string(self, what: str) -> str:
        length = self._fit(what, self._number(U64), 1)
        begin = self._read(min(length, 100))
        self._skip(length - len(begin))
        return begin.decode(errors="replace")

    def _read(self, count: int) -> bytes:
        data = self._file.read(self._within(count))
        if len(data) < count:
            raise self._fault("bytes", "the end of the file, which was longer before", f"{count} at least", CHANGED)
        self._place += count
        return data

    def _skip(self, count: int) -> None:
        self._file.seek(self._within(count), os.SEEK_CUR)
        self._place += count

    def _within(self, count: int) -> int:
        rest = self._size - self._place
        if count > rest:
            raise self._fault("bytes", f"{rest} to the end of the file", f"{count} at least", DAMAGED)
        return count

    def _fit(self, what: str, count: int, bytes_each: int) -> int:
        """count, which must not stand for more than the bytes that are left."""
        most = (self._size - self._place) // bytes_each
        if count > most:
            raise self._fault(what, count, f"up to {most}, by the {self._size} bytes of the file", DAMAGED)
        return count

    def _fault(self, what: str, found: object, allowed: str, do: str) -> TfmError:
        return TfmError(f"{self._path}: {self._where}: {what}", found, allowed, do)
