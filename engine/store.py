"""The models on this disk: those that tfm made in its own cache, and those in the hub's cache that it can load.

tfm's cache is one folder (the user's cache folder, or $TFM_CACHE):
    models/NAME/            a checkpoint folder; there whole or not at all
    models/.NAME.partial/   one being made; whoever holds the lock owns it, so a dead process's is safe to remove
    models/.NAME.lock       held while NAME is made or removed, let go by the system when its process dies
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError
from tfm.engine.files import expanded
from tfm.engine.progress import Progress, silent

if TYPE_CHECKING:
    from huggingface_hub import CachedRevisionInfo

DEFAULT_MODEL = "smollm2-135m"
SOURCE_FILE = "tfm_source.json"
"""In an imported model's folder: {"ref": what the user called it}."""


def cache_root() -> Path:
    """The folder of everything tfm keeps; it may not exist yet."""
    from platformdirs import user_cache_dir

    return expanded(os.environ.get("TFM_CACHE") or user_cache_dir("tfm", appauthor=False))


def models_folder() -> Path:
    return cache_root() / "models"


@contextmanager
def building(name: str, progress: Progress = silent) -> Iterator[Path | None]:
    """Make the model NAME once: yields a new folder to make it in as `model`, or None when it is already there.

    Other processes wait meanwhile. On leaving, `model` gets its final name in one step; after an error nothing is left,
    after a kill the next process that makes any model removes what is left.
    """
    folder = models_folder() / name
    staging = folder.with_name(f".{name}.partial")
    if folder.exists():
        yield None
        return
    with _writing_to_cache(), _locked(name, progress):
        if folder.exists():
            yield None
            return
        _sweep(except_for=staging)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(exist_ok=True)
        try:
            yield staging
            os.rename(staging / "model", folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def write_source(model: Path, ref: str) -> None:
    """Note in an imported model's folder what the user called it."""
    (model / SOURCE_FILE).write_text(json.dumps({"ref": ref}) + "\n", encoding="utf-8")


@contextmanager
def _writing_to_cache() -> Iterator[None]:
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        found = f"{error.strerror or error}"
        remedy = "make room or set TFM_CACHE to a folder that can be written"
        raise TfmError(f"cache folder {cache_root()}: cannot be written", found, do=remedy) from error


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
                shutil.rmtree(staging, ignore_errors=True)
        except Timeout:
            continue


@dataclass(frozen=True)
class StoredModel:
    """A model on this disk. ref is what -m takes; kind is "default", "gguf" or "hub"."""

    ref: str
    kind: str
    folder: Path
    size_bytes: int


def list_models() -> list[StoredModel]:
    """All models in tfm's cache, then the loadable ones in the hub's cache, each by name."""
    own = [_own_model(config.parent) for config in sorted(models_folder().glob("[!.]*/config.json"))]
    return own + [_hub_model(repo_id, revision) for repo_id, revision in _hub_revisions() if _is_loadable(revision)]


def remove_model(ref: str) -> int:
    """Take a model from the disk and return the bytes freed. The .gguf file an import came from stays.

    Raises TfmError when nothing in the caches goes by that name; a folder of the user's own is never touched.
    """
    path = expanded(ref)
    for model in list_models():
        if ref == model.ref or (model.kind == "gguf" and str(path.resolve()) == model.ref):
            if model.kind == "hub":
                return _remove_from_hub_cache(model)
            _remove_folder(model.folder)
            return model.size_bytes
    names = ", ".join(model.ref for model in list_models()) or "nothing, the caches are empty"
    raise TfmError(f"model {ref}", "not in the cache", names)


def _own_model(folder: Path) -> StoredModel:
    size_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if folder.name == DEFAULT_MODEL:
        return StoredModel(DEFAULT_MODEL, "default", folder, size_bytes)
    try:
        ref = str(json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))["ref"])
    except (OSError, ValueError, KeyError):
        ref = str(folder)
    return StoredModel(ref, "gguf", folder, size_bytes)


def remove_other_versions(name: str, prefix: str) -> None:
    """Remove tfm's own models whose names start with prefix, except name itself."""
    for folder in models_folder().iterdir():
        if folder.name.startswith(prefix) and folder.name != name:
            _remove_folder(folder)


def _remove_folder(folder: Path) -> None:
    """In one step for whoever looks at it: it loses its name first."""
    staging = folder.with_name(f".{folder.name}.partial")
    with _writing_to_cache(), _locked(folder.name):
        shutil.rmtree(staging, ignore_errors=True)
        if folder.exists():
            os.rename(folder, staging)
            shutil.rmtree(staging)


def _hub_revisions() -> "list[tuple[str, CachedRevisionInfo]]":
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
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
