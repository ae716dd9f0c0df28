"""A file that gets its name when it is whole: for what no reader may see half-made, and no crash may leave so."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX = ".tfm-new-"


@contextmanager
def new_file(folder: Path) -> Iterator[BinaryIO]:
    """An empty file in folder, with a temporary name that os.replace(file.name, ...) changes; gone if nobody did.

    What dead processes left there is removed before. Raises OSError where the folder cannot be written.
    """
    sweep(folder)
    file = _create(folder)
    try:
        with file:
            yield file
    finally:
        Path(file.name).unlink(missing_ok=True)


def _create(folder: Path) -> BinaryIO:
    """A new file, locked. Another process may have swept it away before it was; then one more."""
    while True:
        file = (folder / f"{PREFIX}{os.urandom(6).hex()}").open("x+b")
        with suppress(OSError):  # a file system without locks: sweep removes nothing there either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def sweep(folder: Path) -> None:
    """Remove what dead processes left half-made; what a living one makes is locked."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.is_file():  # a pipe would be waited for
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
