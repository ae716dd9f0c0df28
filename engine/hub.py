"""From what a person calls a model to a checkpoint folder on this disk: a path, the hub, or the default model."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm.engine.errors import TfmError
from tfm.engine.files import expanded, kind_of, open_file, read_text_bytes, refuse_changed
from tfm.engine.hub_cache import remove_damaged
from tfm.engine.progress import Progress, silent
from tfm.engine.store import DEFAULT_MODEL, imported, remove_other_versions

FORMS = f"a folder, a .gguf file, org/name[@revision] on the hub, {DEFAULT_MODEL}"
HUB_REF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^@]+))?")
POLL_S = 0.1
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    INDEX,
]
"""Everything a folder needs but the weights; which files hold those, the index says."""


def resolve(
    ref: str | Path, progress: Progress | None = None, offline: bool | None = None,
    refresh: bool = False, keep: bool = False,
) -> Path:  # fmt: skip
    """The checkpoint folder that ref means, downloaded or imported if it is not there yet. A path that exists wins.

    What is in the hub's cache is used without asking the hub; refresh asks it for something newer, and looks at every
    byte of what is there. Where tfm's cache cannot be written an import lasts as long as this process; with keep that
    is an error. offline forbids the network (None: what HF_HUB_OFFLINE says). Raises TfmError, also for a name of no
    known form.
    """
    progress = progress or silent
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    path = expanded(ref)
    there = _is_there(path)
    if ref and there and path.is_dir():
        return path
    if there and not path.is_dir():
        if path.suffix.lower() != ".gguf":
            raise TfmError(f"model {ref}", kind_of(path), FORMS, "give the folder that holds config.json")
        open_file(path).close()
        return _imported_gguf(path, progress, keep, refresh)
    if str(ref) == DEFAULT_MODEL:
        from tfm.engine.default_model import ensure_default_model

        return ensure_default_model(progress, offline, keep=keep, thorough=refresh)
    name = ref if isinstance(ref, str) else ""
    match = HUB_REF.fullmatch(name)
    if match is None or name.startswith((".", "~")) or name.endswith((".gguf", ".safetensors")):
        is_bare = re.fullmatch(r"[\w-][\w.-]*", name) and not name.endswith((".gguf", ".safetensors"))
        remedy = "tfm list tells what is here; on the hub a name is org/name" if is_bare else None
        raise TfmError(f"model {ref}", "no such folder or file", FORMS, remedy)
    return _from_hub(match["repo"], match["revision"], progress, offline, refresh)


def _is_there(path: Path) -> bool:
    """Whether a file or folder goes by this name, which may be none that a file can have."""
    try:
        path.stat()
    except PermissionError as error:
        raise TfmError(f"path {path}", error.strerror, do="give yourself the right to enter its folder") from error
    except (OSError, ValueError):  # too long, or with a NUL: it may be a name on the hub
        return False
    return True


def _imported_gguf(gguf: Path, progress: Progress, keep: bool, thorough: bool) -> Path:
    """The import of a GGUF file, made once for each path, size and time of change; older imports of it go."""
    gguf = gguf.resolve()
    state = gguf.stat()
    place = hashlib.sha256(os.fsencode(gguf)).hexdigest()[:8]
    version = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:8]
    stem = re.sub(r"[^\w.-]", "_", gguf.stem).lstrip(".")
    name = f"{stem}-{place}-{version}"
    made: list[Path] = []

    def make(staging: Path) -> None:
        from tfm.engine.gguf_import import import_gguf

        import_gguf(gguf, staging / "model", progress)
        refuse_changed(gguf, state.st_size, state.st_mtime_ns, state.st_ino)
        made.append(staging)

    folder = imported(name, str(gguf), make, progress, keep, thorough)
    if made and folder.name == name:  # in the cache
        remove_other_versions(folder, f"{stem}-{place}-")
    return folder


def _from_hub(repo: str, revision: str | None, progress: Progress, offline: bool, refresh: bool) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    ref = f"{repo}@{revision}" if revision else repo
    if os.path.expanduser(HF_HUB_CACHE).startswith("~"):
        raise TfmError(f"model {ref}: no folder to keep it in", "a user without a home", do="set HF_HOME to a folder")
    if not refresh or offline:
        cached = _cached_snapshot(repo, revision)
        if cached is not None:
            return cached
    if offline:
        raise TfmError(
            f"model {ref}", "not in the hub's cache, and offline was asked for", do="fetch it once with the network on"
        )
    label = f"downloading {ref}"
    with _hub_faults(ref, revision):
        folder = _download(repo, revision, SMALL_FILES, label, progress)
        if refresh and remove_damaged(folder):
            _download(repo, folder.name, SMALL_FILES, label, progress)
        names = _weight_files(folder)
        _download(repo, folder.name, names, label, progress)
    for name in ("config.json", *names):
        if not (folder / name).is_file():
            raise TfmError(f"model {ref}: {name}", "not in the repository", f"config.json and {SINGLE} or its shards")
    return folder


def _cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The snapshot in the hub's cache, when it is whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(repo, revision=revision, allow_patterns=SMALL_FILES, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise TfmError(f"model {repo}", _first_line(error), FORMS) from error
    folder = Path(found)
    needed = ("config.json", "tokenizer.json", *_weight_files(folder))
    return folder if all((folder / name).is_file() for name in needed) else None


def _weight_files(folder: Path) -> list[str]:
    """The files that hold the weights: what the index names, or the single file. A broken index is the loader's."""
    if not (folder / INDEX).exists():
        return [SINGLE]
    try:
        index = json.loads(read_text_bytes(folder / INDEX))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (TfmError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return [INDEX]


@contextmanager
def _hub_faults(ref: str, revision: str | None) -> Iterator[None]:
    """Each fault of the hub as one line; the hub's own log is kept quiet meanwhile."""
    import logging

    from huggingface_hub import errors
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    what = f"model {ref}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise TfmError(what, "a gated repository", do="accept its terms on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        remedy = "check the name; for a private repository set HF_TOKEN"
        raise TfmError(what, "no such folder, and no such repository on the hub", FORMS, remedy) from error
    except errors.RevisionNotFoundError as error:
        raise TfmError(f"{what}: revision", repr(revision), "a branch, tag or commit of the repository") from error
    except errors.HFValidationError as error:
        raise TfmError(what, _first_line(error), FORMS) from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        remedy = "check the network and run it again, what is already there is kept"
        raise TfmError(f"{what}: download failed", _first_line(error.__cause__ or error), do=remedy) from error
    finally:
        hub_logging.set_verbosity(verbosity)


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0]


class _Stopped(Exception):
    """Ends a download thread after the caller has been interrupted."""


@dataclass
class _Bytes:
    """What the download threads share with the thread that waits for them."""

    done: int = 0
    total: int | None = None
    stopped: bool = False


def _download(repo: str, revision: str | None, names: list[str], label: str, progress: Progress) -> Path:
    """The snapshot folder with these files of the repository in it, as far as it has them.

    The hub's library waits for its threads to finish their files when it is interrupted. So it runs in a thread of its
    own: this one stays free to be interrupted, tells progress, and stops the others at their next piece.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    from huggingface_hub import snapshot_download

    state = _Bytes()
    with ThreadPoolExecutor(1) as pool:
        snapshot = pool.submit(
            snapshot_download, repo, revision=revision, allow_patterns=names, tqdm_class=_bar_class(state)
        )
        try:
            finished = False
            while not finished:
                finished = bool(wait([snapshot], timeout=POLL_S).done)
                progress(label, state.done, state.total)
        except BaseException:
            state.stopped = True
            raise
        return Path(snapshot.result())


def _bar_class(state: _Bytes) -> type:
    """A tqdm that prints nothing and counts in state. The hub makes one for files and two for bytes: one counts."""
    from io import StringIO

    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts = kwargs.get("unit") == "B" and kwargs.get("desc") != "Downloading bytes"
            super().__init__(*args, **(kwargs | {"disable": False, "file": StringIO()}))

        def update(self, n: float | None = 1) -> bool | None:
            if state.stopped:
                raise _Stopped
            shown: bool | None = super().update(n)
            if self.counts:
                state.done, state.total = int(self.n), int(self.total) if self.total else None
            return shown

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Nothing."""

    return Bar
