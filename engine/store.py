"""The models on this disk: those that tfm made in its own cache, and those in the hub's cache that it can load.

tfm's cache is one folder (the user's cache folder, or $TFM_CACHE). Where it cannot be written, a model is made in a
temporary folder that is removed when the process ends. In the cache:
    models/NAME/            a checkpoint folder; there whole or not at all
    models/.NAME.partial/   one being made; whoever holds the lock owns it, so a dead process's is safe to remove
    models/.NAME.lock       held while NAME is made or removed, let go by the system when its process dies
"""

import atexit
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError
from tfm.engine.files import expanded, remove_folder
from tfm.engine.hub_cache import damaged_files, ref_of_snapshot
from tfm.engine.manifest import SOURCE_FILE, fault_of, source_of, write_manifest
from tfm.engine.progress import Progress, silent
from tfm.kernels.cache_folder import cache_folder, unwritable, warn_not_kept

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from huggingface_hub import CachedRevisionInfo

    from tfm.engine.packed import PackedModel

DEFAULT_MODEL = "smollm2-135m"
RUN_FOLDER = "tfm-run-"
RUN_LOCK = ".lock"
SETTLED_S = 60  # by then a process has locked the temporary folder that it made


def models_folder() -> Path:
    """The folder of models that tfm keeps; it may not exist yet."""
    return cache_folder() / "models"


def imported(
    name: str, ref: str, make: Callable[[Path], None], progress: Progress = silent,
    keep: bool = False, thorough: bool = False,
) -> Path:  # fmt: skip
    """The folder of the model NAME, which the user calls ref; make(staging) makes it as staging/"model".

    It is made when it is not there or not whole (thorough: not byte for byte what it was). Where the cache cannot be
    written it is made for this process only, with a warning; with keep that is a TfmError.
    """

    def is_whole(folder: Path) -> bool:
        return fault_of(folder, thorough) is None

    def make_all(staging: Path) -> None:
        make(staging)
        write_manifest(staging / "model", ref)

    try:
        with building(name, progress, is_whole) as staging:
            if staging is not None:
                folder = models_folder() / name
                if folder.exists():
                    warnings.warn(f"{ref}: made anew in the cache, for {fault_of(folder, thorough)}", stacklevel=2)
                make_all(staging)
        return models_folder() / name
    except OSError as error:
        if keep:
            raise _not_writable(error) from error
        warn_not_kept(error.strerror or str(error))
    return _made_for_this_run(name, make_all)


@contextmanager
def building(
    name: str, progress: Progress = silent, is_whole: Callable[[Path], bool] = Path.exists
) -> Iterator[Path | None]:
    """Make the model NAME once: yields a new folder to make it in as `model`, or None when it is already there.

    Other processes wait meanwhile. On leaving, `model` gets its final name in one step; after an error nothing is left,
    after a kill the next process that makes any model removes what is left. Raises OSError where the cache cannot be
    written.
    """
    folder = models_folder() / name
    staging = folder.with_name(f".{name}.partial")
    if is_whole(folder):
        yield None
        return
    models_folder().mkdir(parents=True, exist_ok=True)
    with _locked(name, progress):
        if is_whole(folder):
            yield None
            return
        _sweep(except_for=staging)
        remove_folder(staging)
        staging.mkdir(exist_ok=True)
        try:
            yield staging
            if folder.exists():
                os.rename(folder, staging / "damaged")
            os.rename(staging / "model", folder)
        finally:
            remove_folder(staging)


def _not_writable(error: OSError) -> TfmError:
    remedy = "make room or set TFM_CACHE to a folder that can be written"
    return TfmError(unwritable(error.strerror or str(error)), do=remedy)


@contextmanager
def explaining_damage(folder: Path) -> Iterator[None]:
    """Add the remedy to a TfmError while a model is read, where folder is not what was imported or downloaded."""
    try:
        yield
    except TfmError as error:
        import shlex

        snapshot = ref_of_snapshot(folder)
        if snapshot is not None and any(damaged_files(folder)):
            remedy = f"the hub's cache is damaged: tfm pull {shlex.quote(snapshot)} mends it"
            raise TfmError(f"{error}; {remedy}") from error
        ref = source_of(folder)
        if ref is None or folder.parent != models_folder() or fault_of(folder, thorough=True) is None:
            raise
        remedy = f"its import in the cache is damaged: tfm pull {shlex.quote(ref)} makes it anew"
        raise TfmError(f"{error}; {remedy}") from error


def _made_for_this_run(name: str, make: Callable[[Path], None]) -> Path:
    """The model in the temporary folder of this process, made at the first call."""
    try:
        folder = run_folder() / name
        if not (folder / "model").exists():
            remove_folder(folder)
            folder.mkdir()
            make(folder)
        return folder / "model"
    except OSError as error:
        import tempfile

        place = error.filename or tempfile.gettempdir()
        remedy = "make room, or set TFM_CACHE or TMPDIR to a folder that can be written"
        raise TfmError(f"{place}: cannot be written", error.strerror or error, do=remedy) from error


@cache
def run_folder() -> Path:
    """A folder that is removed when this process ends; after a kill, the next process that makes one removes it."""
    import tempfile

    from filelock import FileLock

    _sweep_run_folders()
    folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER))
    lock = FileLock(folder / RUN_LOCK)
    lock.acquire()
    atexit.register(_remove_run_folder, folder, os.getpid(), lock)
    return folder


def _remove_run_folder(folder: Path, process: int, lock: "BaseFileLock") -> None:
    if os.getpid() == process:  # and no child that inherited it
        remove_folder(folder)
        lock.release()


def remove_run_folder() -> None:
    """Before the process is ended from the side: what was made for it only goes with it."""
    if run_folder.cache_info().currsize:
        remove_folder(run_folder())
        run_folder.cache_clear()


def _sweep_run_folders() -> None:
    """Remove the temporary folders of dead processes: nobody holds their locks."""
    import tempfile

    from filelock import FileLock, Timeout

    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_FOLDER}*"):
        try:
            if time.time() - folder.stat().st_mtime > SETTLED_S:
                with FileLock(folder / RUN_LOCK, timeout=0):
                    remove_folder(folder)
        except (OSError, Timeout):
            continue


@contextmanager
def _locked(name: str, progress: Progress = silent) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(models_folder() / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"waiting for the process that makes {name}", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sweep(except_for: Path) -> None:
    """Remove what dead processes left half-made; what a living one makes is locked."""
    from filelock import FileLock, Timeout

    for staging in set(models_folder().glob(".*.partial")) - {except_for}:
        try:
            with FileLock(staging.with_suffix(".lock"), timeout=0):
                remove_folder(staging)
        except Timeout:
            continue


@dataclass(frozen=True)
class StoredModel:
    """A model on this disk. ref is what -m takes; fault is what is amiss; packed_bytes is what its packed weights take.

    kind is "default", "gguf", "hub", or "packed" for a folder of the user's own, of which the caches hold these alone.
    shared_with is what -m takes for the others that have the same packed weights: these stay while one of them is here.
    """

    ref: str
    kind: str
    folder: Path
    size_bytes: int
    fault: str | None = None
    packed_bytes: int = 0
    shared_with: tuple[str, ...] = ()


def list_models() -> list[StoredModel]:
    """All models in tfm's cache, the loadable ones in the hub's cache, and folders with packed weights; by name."""
    try:
        models = [_own_model(folder) for folder in sorted(models_folder().glob("[!.]*")) if _is_own_model(folder)]
    except OSError:  # no cache, or one that may not be read
        models = []
    models += [_hub_model(repo_id, revision) for repo_id, revision in _hub_revisions() if _is_loadable(revision)]
    packed = _packed()
    known = {model.folder.resolve() for model in models}
    return _with_packed(models + [_packed_model(folder) for folder in packed if folder not in known], packed)


def remove_model(ref: str) -> int:
    """Take a model and its packed weights from the disk and return the bytes freed.

    The .gguf file an import came from stays, and so does a folder of the user's own: only its packed weights go. Raises
    TfmError when nothing in the caches goes by that name.
    """
    model = find_model(ref)
    if model is None:
        names = ", ".join(model.ref for model in list_models()) or "nothing, the caches are empty"
        raise TfmError(f"model {ref}", "not in the cache", names)
    freed = _drop_packed(model.folder)
    if model.kind == "hub":
        return freed + _remove_from_hub_cache(model)
    if model.kind != "packed":
        _remove_at_once(model.folder)
    return freed + model.size_bytes


def find_model(ref: str) -> StoredModel | None:
    """The one of list_models that a person calls ref."""
    path = str(expanded(ref).resolve())
    for model in list_models():
        if ref == model.ref or (model.kind in ("gguf", "packed") and path == model.ref):
            return model
    return None


def _is_own_model(folder: Path) -> bool:
    """Also one that has lost files."""
    if folder.name == DEFAULT_MODEL:
        return folder.is_dir()
    return (folder / SOURCE_FILE).exists() or (folder / "config.json").exists()


def _own_model(folder: Path) -> StoredModel:
    size_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    damage = fault_of(folder)
    fault = damage and f"to be made anew: {damage}"
    if folder.name == DEFAULT_MODEL:
        return StoredModel(DEFAULT_MODEL, "default", folder, size_bytes, fault)
    source = source_of(folder)
    if source is not None and not Path(source).exists():
        fault = "its file is gone"
    return StoredModel(source or str(folder), "gguf", folder, size_bytes, fault)


def _packed() -> "dict[Path, PackedModel]":
    """The packed weights of each folder."""
    from tfm.engine.packed import list_packed

    try:
        return {packed.folder: packed for packed in list_packed()}
    except OSError:  # a cache that may not be read
        return {}


def _packed_model(folder: Path) -> StoredModel:
    return StoredModel(str(folder), "packed", folder, 0, None if folder.exists() else "its folder is gone")


def _with_packed(models: list[StoredModel], packed: "dict[Path, PackedModel]") -> list[StoredModel]:
    """models, with what is known of the packed weights of each."""
    found = {model.ref: packed[folder] for model in models if (folder := model.folder.resolve()) in packed}
    users: dict[Path, list[str]] = {}
    for model in models:
        if model.ref in found and model.folder.exists():
            users.setdefault(found[model.ref].image, []).append(model.ref)
    return [
        replace(
            model,
            packed_bytes=found[model.ref].size_bytes,
            shared_with=tuple(ref for ref in users.get(found[model.ref].image, ()) if ref != model.ref),
        )
        if model.ref in found
        else model
        for model in models
    ]


def _drop_packed(folder: Path) -> int:
    from tfm.engine.packed import drop

    try:
        return drop(folder)
    except OSError as error:
        raise _not_writable(error) from error


def remove_other_versions(folder: Path, prefix: str) -> None:
    """Remove the models beside folder whose names start with prefix, except folder itself."""
    for other in folder.parent.iterdir():
        if other.name.startswith(prefix) and other != folder:
            _drop_packed(other)
            _remove_at_once(other)


def _remove_at_once(folder: Path) -> None:
    """In one step for whoever looks at it: it loses its name first."""
    import shutil

    staging = folder.with_name(f".{folder.name}.partial")
    try:
        with _locked(folder.name):
            remove_folder(staging)
            if folder.exists():
                os.rename(folder, staging)
                shutil.rmtree(staging)
    except OSError as error:
        raise _not_writable(error) from error


def _hub_revisions() -> "list[tuple[str, CachedRevisionInfo]]":
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError, ValueError, RuntimeError):  # none, not readable, a file, or no home to look in
        return []
    repos = sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [
        (repo.repo_id, revision)
        for repo in repos
        for revision in sorted(repo.revisions, key=lambda revision: revision.commit_hash)
    ]


def _hub_model(repo_id: str, revision: "CachedRevisionInfo") -> StoredModel:
    """Named without a revision when it is the repository's main one, else by its branch or tag, else by its commit."""
    name = "main" if "main" in revision.refs else min(revision.refs, default=revision.commit_hash)
    ref = repo_id if name == "main" else f"{repo_id}@{name}"
    return StoredModel(ref, "hub", Path(revision.snapshot_path), revision.size_on_disk)


def _is_loadable(revision: "CachedRevisionInfo") -> bool:
    """Whether config.json names a model that tfm runs and the weights are safetensors."""
    from tfm.engine.config import read_config

    folder = Path(revision.snapshot_path)
    try:
        read_config(folder)
    except TfmError:
        return False
    return any(folder.glob("*.safetensors"))


def _remove_from_hub_cache(model: StoredModel) -> int:
    from huggingface_hub import constants, scan_cache_dir

    strategy = scan_cache_dir(constants.HF_HUB_CACHE).delete_revisions(model.folder.name)
    strategy.execute()
    return int(strategy.expected_freed_size)
