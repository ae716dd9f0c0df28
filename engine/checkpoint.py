"""The tensors of a model folder: one safetensors file, or shards told by an index. Mapped, read when they are used.

`model.safetensors` wins, as in transformers; else `model.safetensors.index.json` names the shard of every tensor; else
the only *.safetensors of the folder is taken.
"""

from collections import Counter
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields, read_json
from tfm.engine.files import is_there
from tfm.engine.safetensors_file import TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download the model again"

NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}
"""What arrays are handed out as; BF16 as its bits."""


class Checkpoint:
    """The tensors in folder. Opening reads the headers only and raises TfmError for what is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = _find_tensors(folder)
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def where(self, name: str) -> str:
        """How an error names a tensor."""
        info = self.tensors.get(name)
        return f"{self.folder if info is None else info.file}: tensor {name}"

    def array(self, name: str) -> npt.NDArray[Any]:
        """A read-only view of a tensor in its mapped file: float32, float16, uint32, or uint16 for the bits of BF16."""
        info = self.tensors[name]
        if info.dtype not in NUMPY_DTYPES:
            raise TfmError(f"{self.where(name)}: dtype", info.dtype, ", ".join(NUMPY_DTYPES))
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, np.uint8, mode="r").view(np.ndarray)
        return self._maps[info.file][info.begin : info.end].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def checked(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """array(name), after making sure that it is there, with this shape and one of these dtypes."""
        info = self.tensors.get(name)
        if info is None:
            remedy = f"{AGAIN}; config.json and the weights may not belong together"
            raise TfmError(self.where(name), "nothing", f"{' or '.join(dtypes)} {list(shape)}", remedy)
        if info.dtype not in dtypes:
            raise TfmError(f"{self.where(name)}: dtype", info.dtype, ", ".join(dtypes))
        if info.shape != shape:
            remedy = "config.json and the weights do not belong together"
            raise TfmError(f"{self.where(name)}: shape", list(info.shape), list(shape), remedy)
        return self.array(name)


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
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
    for path in (PurePosixPath(shard), PureWindowsPath(shard)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            raise TfmError(f"{index}: tensor {tensor}: file", repr(shard), allowed, "do not trust this model")
    return str(PurePosixPath(shard))
