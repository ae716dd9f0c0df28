"""The tensors of a model folder: one safetensors file, or shards told by an index. Read when they are used.

`model.safetensors` wins, as in transformers; else `model.safetensors.index.json` names the shard of every tensor; else
the only *.safetensors of the folder is taken.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields, read_json, shown
from tfm.engine.files import is_there, kind_of, read_part
from tfm.engine.safetensors_file import DTYPE_BITS, TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download the model again"
LONGEST_NAME = 255
COMPARED_AT_ONCE = 1 << 22  # bytes

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}
"""What arrays are handed out as; BF16 as its bits."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of a tensor, which are read when they are asked for: rows[begin:end] is a new array, rows[[7, 2]] too.

    first and count are those of the rows in the tensor, or with is_transposed of its columns, which are the rows then.
    """

    tensor: TensorInfo
    first: int
    count: int
    is_transposed: bool = False

    def part(self, first: int, count: int) -> "StoredRows":
        """Some of them, not read yet."""
        return replace(self, first=self.first + first, count=count)

    @property
    def transposed(self) -> "StoredRows":
        """A whole matrix with its columns as rows."""
        return replace(self, first=0, count=self.tensor.shape[1], is_transposed=True)

    @property
    def nbytes(self) -> int:
        total = self.tensor.shape[1 if self.is_transposed else 0]
        return self.tensor.nbytes // total * self.count

    def __getitem__(self, rows: slice | list[int]) -> npt.NDArray[Any]:
        if self.is_transposed:
            return _read(self.tensor).T[self.first : self.first + self.count][rows]
        if isinstance(rows, list):
            return self[:][rows]
        begin, end, _ = rows.indices(self.count)
        return _read(self.tensor, self.first + begin, self.first + max(begin, end))


def _read(tensor: TensorInfo, begin: int = 0, end: int | None = None) -> npt.NDArray[Any]:
    """A tensor, or rows begin to end of one that has rows. Raises TfmError where its file has become shorter."""
    shape, start, size = tensor.shape, tensor.begin, tensor.nbytes
    if end is not None:
        row_bytes = prod(shape[1:]) * DTYPE_BITS[tensor.dtype] // 8
        shape, start, size = (end - begin, *shape[1:]), start + begin * row_bytes, (end - begin) * row_bytes
    data = read_part(tensor.file, f"tensor {tensor.name}", start, size)
    return data.view(NUMPY_DTYPES[tensor.dtype]).reshape(shape)


class Checkpoint:
    """The tensors in folder. Opening reads the headers only and raises TfmError for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = _find_tensors(folder)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def where(self, name: str) -> str:
        """How an error names a tensor."""
        info = self.tensors.get(name)
        return f"{self.folder if info is None else info.file}: tensor {name}"

    def array(self, name: str) -> npt.NDArray[Any]:
        """A tensor, read now: float32, float16, uint32, or uint16 for the bits of BF16."""
        info = self.tensors[name]
        if info.dtype not in NUMPY_DTYPES:
            raise TfmError(f"{self.where(name)}: dtype", info.dtype, ", ".join(NUMPY_DTYPES))
        return _read(info)

    def checked(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> StoredRows:
        """The rows of a tensor, not read yet, when it is there with this shape and one of these dtypes."""
        info = self.tensors.get(name)
        if info is None:
            remedy = f"{AGAIN}; config.json and the weights may not belong together"
            raise TfmError(self.where(name), "nothing", f"{' or '.join(dtypes)} {list(shape)}", remedy)
        if info.dtype not in dtypes:
            raise TfmError(f"{self.where(name)}: dtype", info.dtype, ", ".join(dtypes))
        if info.shape != shape:
            remedy = "config.json and the weights do not belong together"
            raise TfmError(f"{self.where(name)}: shape", list(info.shape), list(shape), remedy)
        return StoredRows(info, 0, info.shape[0])

    def are_same(self, name: str, other: str) -> bool:
        """Whether two tensors are the same, bit for bit; they are read part by part."""
        one, two = self.tensors[name], self.tensors[other]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        for place in range(0, one.nbytes, COMPARED_AT_ONCE):
            size = min(COMPARED_AT_ONCE, one.nbytes - place)
            parts = [read_part(t.file, f"tensor {t.name}", t.begin + place, size).tobytes() for t in (one, two)]
            if parts[0] != parts[1]:
                return False
        return True


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not folder.is_dir():
        found = kind_of(folder)
        raise TfmError(f"model folder {folder}", found, "a folder with config.json and *.safetensors")
    single, index = folder / SINGLE, folder / INDEX
    if is_there(single):
        return read_header(single)
    if is_there(index):
        return _indexed_tensors(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    allowed = f"{SINGLE}, or shards with {INDEX}"
    if files:
        names = f"{len(files)} *.safetensors files, {files[0].name} ..., and no index"
        raise TfmError(f"model folder {folder}", names, allowed, AGAIN)
    others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.gguf", "*.npz") for file in folder.glob(pattern))
    found = f"no weights in safetensors, only {', '.join(others[:3])}" if others else "no weights"
    raise TfmError(f"model folder {folder}", found, allowed, AGAIN)


def _indexed_tensors(folder: Path, index: Path) -> dict[str, TensorInfo]:
    """The tensors of all shards. A shard must hold what the index says; what else it holds counts as well."""
    fields = Fields(str(index), read_json(index))
    weight_map = fields.group("weight_map")
    if not weight_map.words():
        raise fields.fault("weight_map", "an object with the file of every tensor", AGAIN)
    shard_of = {name: _shard(index, name, weight_map.value(name)) for name in weight_map.words()}
    tensors: dict[str, TensorInfo] = {}
    for shard, count in Counter(shard_of.values()).items():
        path = folder / shard
        if not path.exists():
            found = "a link to a file that is gone" if path.is_symlink() else "nothing there"
            raise TfmError(f"shard {path}", found, f"the file with {count} tensors that {INDEX} names", AGAIN)
        for name, info in read_header(path).items():
            if name in tensors:
                raise TfmError(f"{path}: tensor {name}", f"in {tensors[name].file.name} too", "one place")
            tensors[name] = info
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file != folder / shard:
            elsewhere = tensors[name].file.name if name in tensors else "no shard"
            raise TfmError(f"{folder / shard}: tensor {name}", f"in {elsewhere}", f"where {INDEX} says", AGAIN)
    return tensors


def _shard(index: Path, tensor: str, shard: object) -> str:
    """The file name that the index gives. It may not lead out of the folder; links inside the folder may."""
    allowed = "a file in the folder of the index"
    if not isinstance(shard, str) or not shard.strip() or "\0" in shard:
        raise TfmError(f"{index}: tensor {tensor}: file", repr(shard), allowed)
    if len(shard) > LONGEST_NAME:
        raise TfmError(f"{index}: tensor {tensor}: file", f"{shown(shard)}, {len(shard)} characters", allowed)
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            raise TfmError(f"{index}: tensor {tensor}: file", repr(shard), allowed, "do not trust this model")
    return str(PurePosixPath(shard))
