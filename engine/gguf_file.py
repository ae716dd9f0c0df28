"""A GGUF file opened for reading: every fault of the file becomes one TfmError that names it.

Nothing of it is mapped, since a file that somebody cuts short while it is mapped ends the process with SIGBUS. The
format's own library maps what it is given: it gets a file of holes, with a copy of the header at its beginning.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.files import open_file, read_part
from tfm.engine.gguf_header import DAMAGED, header_of

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor


class GgufFile:
    """Metadata fields with their types checked as they are asked for, and tensors by name; `data` reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path, DAMAGED) as file:
                header, size = header_of(path, file)
            reader = _reader(path, header, size)
        except OSError as error:
            raise TfmError(f"{path}: cannot be read", error.strerror or error) from error
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise TfmError(f"{path}: not readable as GGUF", error, do=DAMAGED) from error
        if reader.byte_order != "I":
            raise TfmError(f"{path}: byte order", "swapped", "this machine's own")
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}

    def data(self, name: str) -> npt.NDArray[Any]:
        """A tensor, read now; blocks are bytes. Raises TfmError where the file has become shorter."""
        tensor = self.tensors[name]
        data = read_part(self.path, f"tensor {name}", tensor.data_offset, int(tensor.n_bytes))
        return data.view(tensor.data.dtype).reshape(tensor.data.shape)

    def names(self) -> list[str]:
        """The names of all metadata fields."""
        return list(self._fields)

    def has(self, field: str) -> bool:
        return field in self._fields

    def _get(self, field: str, kinds: tuple[type, ...], default: Any) -> Any:
        if field not in self._fields:
            if default is None:
                raise TfmError(f"{self.path}: field {field}", "nothing", "it must be there")
            return default
        try:
            value = self._fields[field].contents()
        except (ValueError, IndexError) as error:
            raise TfmError(f"{self.path}: field {field}", error, do=DAMAGED) from error
        if not isinstance(value, kinds):
            raise TfmError(f"{self.path}: field {field}", repr(value)[:80], " or ".join(k.__name__ for k in kinds))
        return value

    def text(self, field: str, default: str | None = None) -> str:
        return str(self._get(field, (str,), default))

    def flag(self, field: str, default: bool) -> bool:
        return bool(self._get(field, (bool,), default))

    def integer(self, field: str, default: int | None = None) -> int:
        """A whole number; a list of equal ones, as some writers give one a layer, counts as that number."""
        value = self._get(field, (int, list), default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise TfmError(f"{self.path}: field {field}", f"{value[:8]}", "the same number for every layer")
            value = value[0]
        return int(value)

    def size(self, field: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(field, default)
        if value < 1:
            raise TfmError(f"{self.path}: field {field}", value, "1 or more")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """The shortest decimal that is this float32: 1e-05 where the file holds 9.999999747378752e-06."""
        return float(str(np.float32(self._get(field, (float, int), default))))

    def sequence(self, field: str) -> list[Any]:
        return list(self._get(field, (list,), None))


def _reader(path: Path, header: bytes, size: int) -> "GGUFReader":
    """The library's view of a file of `size` bytes that begins so; where tensors are, it has zeros."""
    from gguf import GGUFReader

    try:
        with _new_file() as copy:
            copy.write(header)
            copy.truncate(size)
            return GGUFReader(_as_path(copy))
    except OSError as error:
        do = "allow larger files (ulimit -f), or make room for temporary ones"
        raise TfmError(f"{path}: a copy of its header cannot be written", error.strerror or error, do=do) from error


def _new_file() -> BinaryIO:
    """A file without a name; in memory, where the system has that, for a disk may be full or only read."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("gguf-header"), "w+b")
    return tempfile.TemporaryFile()


def _as_path(file: BinaryIO) -> Any:
    """An open file in the place of a path: NumPy maps either, and the library only hands it on."""
    return file
