"""Files of the hub's cache that are no longer what the hub sent.

A snapshot's files are links to blobs, and a blob is named by its digest: SHA-256 for large files, git's own for small
ones. Where the cache is made without links, or the names are none of these, nothing is said of a file.
"""

import hashlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path


def damaged_files(folder: Path) -> Iterator[Path]:
    """The files of a snapshot whose bytes are not those that their name promises. Every byte is read."""
    for link in sorted(folder.rglob("*")):
        if link.is_symlink() and link.is_file():
            blob = link.resolve()
            with blob.open("rb") as file:
                if _digest(file, blob.name, blob.stat().st_size) != blob.name:
                    yield link


def _digest(file: BufferedReader, name: str, size: int) -> str:
    """The digest of the kind that name is; name itself where it is none."""
    if len(name) == 64:
        return hashlib.file_digest(file, "sha256").hexdigest()
    if len(name) == 40:
        return hashlib.file_digest(file, lambda: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)).hexdigest()
    return name


def remove_damaged(folder: Path) -> bool:
    """Remove what is damaged, so that the hub's library fetches it again. Whether there was anything."""
    found = list(damaged_files(folder))
    for link in found:
        link.resolve().unlink()
        link.unlink()
    return bool(found)


def ref_of_snapshot(folder: Path) -> str | None:
    """What a person calls the model in a snapshot's folder: org/name, with the commit where main is another one."""
    repo = folder.parent.parent
    kind, *names = repo.name.split("--", 2)
    if folder.parent.name != "snapshots" or kind != "models" or len(names) != 2:
        return None
    try:
        main = (repo / "refs" / "main").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        main = ""
    return "/".join(names) + ("" if main == folder.name else f"@{folder.name}")
