"""Where tfm keeps what it made, and what is said when that cannot be written."""

import os
import warnings
from functools import cache
from pathlib import Path

NOWHERE = Path(os.devnull) / "no home"  # nothing can be there


def cache_folder() -> Path:
    """Where tfm keeps what it made: $TFM_CACHE, else the platform's cache folder; NOWHERE for a user without a home."""
    import platformdirs

    try:
        folder = Path(os.environ.get("TFM_CACHE") or platformdirs.user_cache_dir("tfm", appauthor=False)).expanduser()
    except RuntimeError:  # neither HOME nor the user database knows a home
        return NOWHERE
    return NOWHERE if folder.parts[:1] == ("~",) else folder


def warn_not_kept(reason: str) -> None:
    """Say that the cache folder cannot be used, once in a process: every part of tfm may find it out for itself."""
    folder = cache_folder()
    if folder not in _told_of():
        _told_of().add(folder)
        again = "each run compiles, fetches and packs again, for what it makes is not kept"
        warnings.warn(f"{unwritable(reason)}; {again}; set TFM_CACHE to a folder that can be written", stacklevel=3)


def unwritable(reason: str) -> str:
    """That the cache folder cannot be written, in words."""
    folder = cache_folder()
    if folder == NOWHERE:
        return "no cache folder: this user has no home folder"
    return f"cache folder {folder}: cannot be written: {reason}"


@cache
def _told_of() -> set[Path]:
    return set()
