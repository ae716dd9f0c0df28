"""Keys and values of the beginning of a text, in a file: what was run through a model once is not run again.

A safetensors file with n blocks of 64 positions, as they lie in memory (kernels/kv_block.py has their layout):

    __metadata__   format, version, and what the bits depend on: weights, kv_type, kernels (engine/identity.py)
    ids            int64 [n * 64]           the tokens
    blocks         uint8 [n, block_bytes]   their keys and values, of all layers
    digests        uint8 [n, 32]            SHA-256 of the digest before it, a block's ids and the block

The digest before the first is that of the metadata. So a digest speaks for everything up to its block, and no bit of a
file that was damaged, or exchanged while it was read, gets into a text. A file that was made by other weights, kernels
or another CPU, or with another KV type, would give other bits: it is left alone with a warning, and the text is run.

Only full blocks are kept, and bytes of a block that no kernel writes are zero in the file: nothing of other texts that
were in memory gets into it.
"""

import ctypes
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tfm.engine.cache import Sequence, common_prefix
from tfm.engine.checkpoint_writer import header_bytes
from tfm.engine.errors import TfmError
from tfm.engine.files import is_there, kind_of, open_file
from tfm.engine.identity import kernels_digest
from tfm.engine.layers import Memory, padded
from tfm.engine.safetensors_file import read_header_and_metadata
from tfm.kernels.new_file import new_file
from tfm.kernels.records import KV_BLOCK, KV_TYPES, head_bytes

if TYPE_CHECKING:
    from tfm.engine.model import Model

FORMAT = "tfm prompt cache"
VERSION = "1"
BEGIN = f'{{"__metadata__":{{"format":"{FORMAT}"'.encode()  # of the header, behind the 8 bytes of its length
DIGEST_BYTES = hashlib.sha256().digest_size
SHOWN_BYTES = 12
DAMAGED = "damaged"


class _Unusable(Exception):
    """Why nothing is taken from a file, as the end of a sentence that begins with its name."""


def check_path(path: Path) -> None:
    """Raises TfmError where `save` cannot write: no such folder, no right to, or a file that is something else."""
    target = Path(os.path.realpath(path))
    folder, what = target.parent, f"prompt cache {path}"
    if not folder.is_dir():
        found = kind_of(folder)
        raise TfmError(f"{what}: its folder {folder}", found, "a folder", f"make it, with mkdir -p {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TfmError(f"{what}: its folder {folder}", "no right to write", do="give yourself that right (chmod u+w)")
    if not is_there(target):
        return
    begin = _first_bytes(target)
    if not _is_prompt_cache(begin):
        found = f"a file of {target.stat().st_size} bytes that begins with {begin[:SHOWN_BYTES]!r}"
        allowed = "a prompt cache, or no file"
        raise TfmError(what, found, allowed, "name another file: what is there is not overwritten")
    if not os.access(target, os.W_OK):
        raise TfmError(what, "no right to write", do="give yourself that right (chmod u+w), or name another file")


def _first_bytes(path: Path) -> bytes:
    with open_file(path, "name another file") as file:
        return file.read(8 + len(BEGIN))


def _is_prompt_cache(begin: bytes) -> bool:
    """Whether a file begins like one, as far as it goes; an empty file will do, nothing is lost with it."""
    return not begin or (len(begin) > 8 and BEGIN.startswith(begin[8:]))


def restore(path: Path, model: "Model", sequence: Sequence, ids: Items[int]) -> int:
    """Begin an empty sequence with what the file has of ids, in full blocks; gives how many positions that is.

    One token of ids at least is left to be run. Warns, naming the file, when it is there and nothing can be taken from
    it. Raises TfmError when memory ends.
    """
    taken, blocks = load_blocks(path, model, ids[: max(0, len(ids) - 1)])
    sequence.adopt(blocks, taken)
    for block in blocks:
        model.pool.give(block)
    return len(taken)


def load_blocks(
    path: Path, model: "Model", ids: Items[int] | None = None, most: int | None = None
) -> tuple[list[int], list[int]]:
    """The file's ids and blocks of model.pool with their keys and values; the caller is the blocks' one user.

    ids: only what the file has in common with them. most: at most so many blocks. Warns and gives nothing for a file
    that does not match; gives nothing where there is none, or an empty one. Raises TfmError when memory ends.
    """
    blocks: list[int] = []
    try:
        saved = _open(path, model)
        if saved is None:
            return [], []
        with saved.file:
            common = len(saved.ids) if ids is None else common_prefix(saved.ids, ids)
            count = min(common, model.ctx) // KV_BLOCK
            if count == 0 and ids is not None:
                cure = "what prompts have in common must come first, a long text for example by -s"
                raise _Unusable(f"begins with {common} tokens of the prompt, and a block has {KV_BLOCK} ({cure})")
            for index in range(count if most is None else min(count, most)):
                blocks.append(model.pool.take())
                _memory(model, blocks[-1])[:] = saved.block(index)
        return saved.ids[: len(blocks) * KV_BLOCK], blocks
    except BaseException as error:
        for block in blocks:
            model.pool.give(block)
        if not isinstance(error, _Unusable):
            raise
        warnings.warn(f"prompt cache {path}: {error}; the prompt is computed anew", stacklevel=2)
        return [], []


def save(path: Path, model: "Model", sequence: Sequence) -> int:
    """Write the full blocks of sequence to path, in one step; gives how many positions the file then has of it.

    A file that has them already, and perhaps more behind them, stays as it is. Another prompt cache is replaced, also
    behind a link, and keeps its rights. Warns when there is no full block. Raises TfmError as check_path, and when the
    disk is full; then what was there before is still there.
    """
    check_path(path)
    count = sequence.length // KV_BLOCK
    ids = sequence.ids[: count * KV_BLOCK]
    if not ids:
        few = f"{sequence.length} tokens fill no block of {KV_BLOCK}"
        warnings.warn(f"prompt cache {path}: not saved, {few}", stacklevel=2)
    elif not _holds(path, model, ids):
        target = Path(os.path.realpath(path))
        try:
            with new_file(target.parent) as file:
                if target.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                _write(file, model, ids, sequence.blocks[:count])
                file.flush()
                os.fsync(file.fileno())  # else, after a loss of power, the name could stand for zeros
                os.replace(file.name, target)
        except OSError as error:
            what, do = f"prompt cache {path}: cannot be written", "make room, or name another file"
            raise TfmError(what, error.strerror or error, do=do) from error
    return len(ids)


def _write(file: BinaryIO, model: "Model", ids: list[int], blocks: Items[int]) -> None:
    metadata = _metadata(model)
    file.write(header_bytes(_shapes(len(blocks), model.pool.block_bytes), metadata))
    file.write(np.array(ids, "<i8").data)
    unwritten = _unwritten(model)
    digests = [_first_digest(metadata)]
    for index, address in enumerate(blocks):
        block = _memory(model, address).copy()
        for begin, end in unwritten:
            block[begin:end] = 0
        file.write(block.data)
        digests.append(_digest(digests[-1], ids, index, block))
    file.write(b"".join(digests[1:]))


def _holds(path: Path, model: "Model", ids: list[int]) -> bool:
    """Whether the file begins with ids, whole."""
    try:
        saved = _open(path, model)
        if saved is None:
            return False
        with saved.file:
            if saved.ids[: len(ids)] != ids:
                return False
            for index in range(len(ids) // KV_BLOCK):
                saved.block(index)
            return True
    except _Unusable:
        return False


@dataclass(frozen=True)
class _Saved:
    """An open file: its ids, its digests with that of the metadata before them, and where its blocks lie."""

    file: BinaryIO
    ids: list[int]
    digests: list[bytes]
    begin: int
    block_bytes: int

    def block(self, index: int) -> Memory:
        """Block `index`, whole. To be read in order: a digest speaks for the blocks before it when they were read."""
        block = np.frombuffer(_read(self.file, self.begin + index * self.block_bytes, self.block_bytes), np.uint8)
        if _digest(self.digests[index], self.ids, index, block) != self.digests[index + 1]:
            raise _Unusable(DAMAGED)
        return block


def _read(file: BinaryIO, begin: int, size: int) -> bytes:
    try:
        file.seek(begin)
        data = file.read(size)
    except OSError as error:
        raise _Unusable(f"cannot be read ({error.strerror})") from error
    if len(data) < size:
        raise _Unusable(DAMAGED)
    return data


def _open(path: Path, model: "Model") -> _Saved | None:
    """A file that was made by this very model, None where there is none, or one of 0 bytes. Raises _Unusable."""
    if not is_there(Path(os.path.realpath(path))):
        return None
    try:
        begin = _first_bytes(path)
    except TfmError as error:
        raise _Unusable("cannot be read") from error
    if not begin:
        return None
    if not _is_prompt_cache(begin):
        raise _Unusable("something else than a prompt cache")
    try:
        tensors, metadata = read_header_and_metadata(path)
    except TfmError as error:
        raise _Unusable(DAMAGED) from error
    own = _metadata(model)
    _check_metadata(metadata, own)
    size = model.pool.block_bytes
    count = tensors["blocks"].nbytes // size if "blocks" in tensors else 0
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if shapes != _shapes(count, size):
        raise _Unusable(DAMAGED)
    with ExitStack() as stack:
        file = stack.enter_context(open_file(path))
        ids = np.frombuffer(_read(file, tensors["ids"].begin, tensors["ids"].nbytes), "<i8").tolist()
        data = _read(file, tensors["digests"].begin, tensors["digests"].nbytes)
        digests = [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
        stack.pop_all()
    return _Saved(file, ids, [_first_digest(own), *digests], tensors["blocks"].begin, size)


def _shapes(count: int, block_bytes: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The file's tensors in order."""
    shapes = {"ids": (count * KV_BLOCK,), "blocks": (count, block_bytes), "digests": (count, DIGEST_BYTES)}
    return {name: ("I64" if name == "ids" else "U8", shape) for name, shape in shapes.items()}


def _metadata(model: "Model") -> dict[str, str]:
    """What a file says of itself; neither threads nor the context change a bit."""
    made_by = {"weights": model.weights_digest, "kv_type": model.kv_type, "kernels": kernels_digest()}
    return {"format": FORMAT, "version": VERSION, **made_by}


def _check_metadata(found: object, own: dict[str, str]) -> None:
    """Raises _Unusable that tells all that differs."""
    values: dict[str, Any] = found if isinstance(found, dict) else {}
    if values.get("version") != VERSION:
        raise _Unusable("made by another version of tfm")
    words = {
        "weights": "with other weights",
        "kv_type": f"with --kv-type {values.get('kv_type')}, not {own['kv_type']}",
        "kernels": "by another version of the kernels or on another CPU",
    }
    differing = [text for name, text in words.items() if values.get(name) != own[name]]
    if differing:
        raise _Unusable(f"made {', and '.join(differing)}")
    if values != own:
        raise _Unusable(DAMAGED)


def _first_digest(metadata: dict[str, str]) -> bytes:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).digest()


def _digest(before: bytes, ids: list[int], index: int, block: Memory) -> bytes:
    digest = hashlib.sha256(before)
    digest.update(np.array(ids[index * KV_BLOCK : (index + 1) * KV_BLOCK], "<i8").data)
    digest.update(block.data)
    return digest.digest()


def _memory(model: "Model", address: int) -> Memory:
    """The bytes of a block of the model's pool."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * model.pool.block_bytes).from_address(address)), np.uint8)


def _unwritten(model: "Model") -> list[tuple[int, int]]:
    """Bytes of a block, from begin to end, that no kernel writes: a head's keys are padded to 16 elements."""
    kv_type, spans = KV_TYPES[model.kv_type], []
    for layer, record in zip(model.config.layers, model.table.layers, strict=True):
        head_size = padded(layer.head_dim)
        half = head_bytes(kv_type, head_size)
        row = (half // KV_BLOCK - (4 if model.kv_type == "q8" else 0)) // head_size * KV_BLOCK
        for head in range(layer.num_key_value_heads):
            begin = int(record["cache_offset"]) + 2 * head * half
            spans.append((begin + layer.head_dim * row, begin + head_size * row))
    return spans
