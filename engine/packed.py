"""Packed weights kept in the cache: a checkpoint is packed once, and then its image (image.py) is a file to be mapped.

    packed/CONTENT.LAYOUT.image    an image: digests of the checkpoint's files, and of the code that packs them
    packed/PLACE.json              what the files of a folder were when they were last read, and their CONTENT
    packed/.tfm-new-...            one being made; see kernels/new_file.py

Processes that run the same weights share the pages. Files are told apart by size, times and inode, so a checkpoint that
is changed in place is packed again; a copy of it elsewhere has the same content and shares the image.
"""

import hashlib
import json
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tfm.engine.files import refuse_changed
from tfm.engine.layers import Memory
from tfm.engine.machine import available_memory
from tfm.engine.progress import Progress
from tfm.engine.records import IMAGE
from tfm.kernels.cache_folder import cache_folder
from tfm.kernels.heap import LARGE_PAGE
from tfm.kernels.new_file import new_file
from tfm.kernels.packing import PACK, aligned_empty

if TYPE_CHECKING:
    from tfm.engine.checkpoint import Checkpoint
    from tfm.engine.config import ModelConfig

MOST_OF_DISK = 0.25  # of what is free or taken by images; beyond that, those that were used longest ago are dropped
RECORDS_BYTES = 1 << 18  # the layer table of 300 layers
LEAST_BYTES = 4_000_000  # smaller ones are packed in less time than it takes to keep them
COPIED_AT_ONCE = 1 << 24
MEMORY_TO_SPARE = 1.25  # times the weights must be free before a process takes them into its own memory
OUTDATED_S = 7 * 24 * 3600
ZEROS = bytes(2 * LARGE_PAGE)
FILLED = 0.1  # of the free memory
YOUNG_NS = 100_000_000  # a file changed so lately may change again without its times showing it
Files = list[list[Any]]


@dataclass(frozen=True)
class PackedModel:
    """An image in the cache, and the folder it was made of."""

    folder: Path
    image: Path
    size_bytes: int


def find_image(folder: Path) -> Memory | None:
    """The mapped image of a folder whose files are what they were when it was packed; it counts as used now."""
    place = _read_json(_place(folder))
    try:
        files = place["files"]
        if _files(folder, [name for name, *_ in files]) != files:
            return None
        image = _whole(_image_path(place["content"]))
        return image if image is not None and _records_digest(image) == place["records"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def content_of(folder: Path) -> str:
    """The digest of the checkpoint in folder, config.json and weights: as noted for its image, or read now.

    Raises TfmError for what is wrong with the checkpoint.
    """
    from tfm.engine.checkpoint import Checkpoint

    place = _read_json(_place(folder))
    with suppress(OSError, ValueError, KeyError, TypeError):
        if _files(folder, [name for name, *_ in place["files"]]) == place["files"]:
            return str(place["content"])
    return _content(folder, _files_of(Checkpoint(folder)))


def make_image(
    folder: Path, config: "ModelConfig", threads: int, check_size: Callable[[int], object], progress: Progress | None
) -> Memory:
    """The image of the checkpoint in folder, packed now and kept if there is room.

    check_size is told its bytes before memory is taken. Raises TfmError for what is wrong with the checkpoint.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tfm.engine.checkpoint import Checkpoint
    from tfm.engine.image import Plan
    from tfm.engine.weights import load_weights

    seen = _files(folder, ())  # before a header is read: the places of its tensors are of that file
    checkpoint = Checkpoint(folder)
    files = _files_of(checkpoint)
    plan = Plan(config, load_weights(checkpoint, config))
    check_size(plan.least_size)
    PACK.prepare(progress)  # here, where the wait is told of and can be stopped, and no file has been begun
    plan = plan.narrowed(threads, progress)
    check_size(plan.size)
    with _new_file(plan.size) as file:
        if file is None:
            memory = aligned_empty(plan.size)
            plan.write(memory, threads, progress)
            _refuse_changed(folder, seen + files)
            return memory
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(_content, folder, files)
            plan.write(np.frombuffer(mmap.mmap(file.fileno(), plan.size), np.uint8), threads, progress)
        _refuse_changed(folder, seen + files)
        with suppress(OSError):  # a disk that is full now: the weights are in memory all the same
            _keep(file, folder, files, reading.result())
        kept = find_image(folder)
        return _map(file) if kept is None else kept


def _refuse_changed(folder: Path, files: Files) -> None:
    """Raises TfmError where a file is not what it was: what was read of it may be of two checkpoints."""
    for name, size, changed_ns, _, inode in files:
        refuse_changed(folder / name, size, changed_ns, inode)


def _keep(file: BinaryIO, folder: Path, files: Files, content: str) -> None:
    """Give file its name, if it is certain that nobody changed the folder's files meanwhile.

    If there is an image of this content already, made of a copy of the folder, that one stays.
    """
    is_young = any(time.time_ns() - changed_ns < YOUNG_NS for _, _, _, changed_ns, _ in files)
    if is_young or _files(folder, [name for name, *_ in files]) != files:
        return
    image, records = _image_path(content), _records_digest(_map(file))
    there = _whole(image)
    if there is None or _records_digest(there) != records:
        os.fsync(file.fileno())  # else, after a loss of power, the name could stand for zeros
        os.replace(file.name, image)
    place = {"folder": str(folder.resolve()), "files": files, "content": content, "records": records}
    before = _read_json(_place(folder)).get("content", content)
    _write_json(_place(folder), place)
    if before != content:
        _drop_content(before)
    _drop_oldest(keep=image)


def own_copy(image: Memory) -> Memory | None:
    """A mapped image in this process's own memory; None where it is none already, or that would be no faster.

    Memory of one's own comes in pages of 2 MB. Reading all weights for each token is a tenth faster so where the file
    is mapped in pages of 4 KB, and 4 % where it is mapped in large ones (see `_allocate`). Pages of the file are let go
    as they are copied, so that both never take memory at once.
    """
    file = getattr(image.base, "obj", image.base)
    if not isinstance(file, mmap.mmap) or not _has_large_pages():
        return None
    free = available_memory()
    if free is not None and len(image) * MEMORY_TO_SPARE > free:
        return None
    copy = aligned_empty(len(image))
    for begin in range(0, len(image), COPIED_AT_ONCE):
        end = min(len(image), begin + COPIED_AT_ONCE)
        copy[begin:end] = image[begin:end]
        file.madvise(mmap.MADV_DONTNEED, begin, end - begin)
    return copy


def _has_large_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def list_packed() -> list[PackedModel]:
    """The images in the cache that can be used, by the folder they were made of."""
    found = []
    for path in _root().glob("[!.]*.json"):
        place = _read_json(path)
        image = _image_path(str(place.get("content")))
        if image.exists():
            found.append(PackedModel(Path(str(place.get("folder"))), image, image.stat().st_size))
    return sorted(found, key=lambda packed: packed.folder)


def _root() -> Path:
    return cache_folder() / "packed"


def _place(folder: Path) -> Path:
    return _root() / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]}.json"


def _image_path(content: str) -> Path:
    return _root() / f"{content}.{layout_digest()}.image"


@cache
def layout_digest() -> str:
    """A digest of `layout_sources`."""
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in layout_sources())).hexdigest()[:16]


def layout_sources() -> list[Path]:
    """The files that decide what an image looks like."""
    engine = Path(__file__).parent
    kernels = engine.parent / "kernels"
    names = "architectures", "checkpoint", "config", "fields", "image", "layers", "matrix", "records", "rope", "weights"
    own = [engine / f"{name}.py" for name in names] + sorted((engine / "quantized").glob("*.py"))
    packing = [kernels / f"{name}.py" for name in ("matmul", "packing", "records")]
    return own + packing + sorted((kernels / "formats").glob("*.py"))


def _files_of(checkpoint: "Checkpoint") -> Files:
    folder = checkpoint.folder
    return _files(folder, {str(tensor.file.relative_to(folder)) for tensor in checkpoint.tensors.values()})


def _files(folder: Path, names: Iterable[str]) -> Files:
    """[name, size, times, inode] of config.json, of all that weights are looked for in, and of names."""
    beside = (path.name for path in folder.glob("*.safetensors*"))
    stats = [(name, (folder / name).stat()) for name in sorted({"config.json", *beside, *names})]
    return [[name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for name, stat in stats]


def _content(folder: Path, files: Files) -> str:
    """The digest of the names and bytes of files."""
    digest = hashlib.sha256()
    for name, *_ in files:
        with (folder / name).open("rb") as file:
            digest.update(os.fsencode(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n"))
    return digest.hexdigest()[:24]


def _records_digest(image: Memory) -> str:
    """Of the image's beginning, where its records are: what damage there would do, nobody can say."""
    return hashlib.sha256(image[:RECORDS_BYTES].tobytes()).hexdigest()


def _whole(path: Path) -> Memory | None:
    """The mapped image at path, when all of it is there."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return None
        with path.open("rb") as file:
            image = _map(file)
            with suppress(OSError):  # somebody else's, or on a file system that is only read
                os.utime(file.fileno())  # used now; see _drop_oldest
    except (OSError, ValueError):
        return None
    is_whole = len(image) >= IMAGE.itemsize and int(image[: IMAGE.itemsize].view(IMAGE)["size"][0]) == len(image)
    return image if is_whole else None


def _map(file: BinaryIO) -> Memory:
    image = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        image.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(image, np.uint8)


@contextmanager
def _new_file(size: int) -> Iterator[BinaryIO | None]:
    """A file of `size` bytes to be filled and renamed, gone afterwards if it was not; None where none can be kept."""
    root = _root()
    with ExitStack() as stack:
        file = None
        if size >= LEAST_BYTES:
            with suppress(OSError):
                root.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(new_file(root))
        yield file if file is not None and size <= _room(root) and _allocate(file, size) else None


def _allocate(file: BinaryIO, size: int) -> bool:
    """Take all of the disk's space now: a disk that fills up while a mapped file is written would end the process.

    And write it in pieces so large that Linux (ext4 since 6.16, XFS before) holds it in large pages: that takes as long
    as to fill it page by page (36 and 34 ms for 98 MB), and then it is mapped in 0.2 ms, not in 6. Not where Linux
    would begin to write the zeros to the disk: by default when a tenth of the free memory waits for it.
    """
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        if not hasattr(os, "posix_fallocate") or size <= FILLED * (available_memory() or 0):
            written = 0
            while written < size:
                written += os.pwrite(file.fileno(), ZEROS[: size - written], written)
    except OSError:
        return False
    return True


def _images(root: Path) -> list[tuple[Path, os.stat_result]]:
    """All images, those that were used last first."""
    stats = []
    for path in root.glob("[!.]*.image"):
        with suppress(OSError):  # another process may have removed it by now
            stats.append((path, path.stat()))
    return sorted(stats, key=lambda image: -image[1].st_mtime_ns)


def _room(root: Path) -> int:
    """Bytes that all images together may take."""
    import shutil

    return int(MOST_OF_DISK * (shutil.disk_usage(root).free + sum(stat.st_size for _, stat in _images(root))))


def _drop_oldest(keep: Path) -> None:
    """Remove those used longest ago until the rest has room, and what is known of images that are gone."""
    root = _root()
    room = _room(root) - keep.stat().st_size
    for path, stat in _images(root):
        room -= 0 if path == keep else stat.st_size
        # One in another layout is of an earlier version of tfm, or of one that lives beside this and still uses it.
        is_outdated = not path.name.endswith(f".{layout_digest()}.image") and time.time() - stat.st_mtime > OUTDATED_S
        if path != keep and (room < 0 or is_outdated):
            path.unlink(missing_ok=True)
    for path in root.glob("[!.]*.json"):
        place = _read_json(path)
        content, is_there = str(place.get("content")), Path(str(place.get("folder"))).exists()
        if not _image_path(content).exists() or not is_there:
            path.unlink(missing_ok=True)
        if not is_there:
            _drop_content(content)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with new_file(path.parent) as file:
        file.write(json.dumps(content).encode())
        file.flush()
        os.replace(file.name, path)


def drop(folder: Path) -> int:
    """Forget the image of folder, and remove it unless it is another folder's as well. Gives the bytes freed.

    A process that has it mapped goes on with it. Raises OSError where the cache cannot be written.
    """
    note = _place(folder)
    content = _read_json(note).get("content")
    if content is None:
        return 0
    note.unlink(missing_ok=True)
    return _drop_content(content)


def _drop_content(content: str) -> int:
    """Remove the images of a content that no folder has any more. Gives the bytes freed."""
    others = [other for path in _root().glob("[!.]*.json") if (other := _read_json(path)).get("content") == content]
    if any(Path(str(other.get("folder"))).exists() for other in others):
        return 0
    gone = [(path, stat) for path, stat in _images(_root()) if path.name.partition(".")[0] == content]
    for path, _ in gone:
        path.unlink(missing_ok=True)
    return sum(stat.st_size for _, stat in gone)
