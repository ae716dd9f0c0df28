"""Files of a model, opened: only regular ones. A pipe would be waited for, a device read, without end."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tfm.engine.errors import TfmError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LONGEST_TEXT_BYTES = 1 << 29  # no tokenizer.json or index comes near; such a file would take the memory first
CHECK = "check the folder, or download the model again"
CHANGED = "another program may be changing it: wait for that, then run again; or download the file again"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def kind_of(path: Path) -> str:
    """What is there in a message that wanted a folder."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode), "a file")
    except OSError:
        return "nothing there"


def open_file(path: Path, do: str = CHECK) -> BinaryIO:
    """The regular file at path, or behind the link there. Raises TfmError for another kind, or what cannot be read."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise TfmError(f"file {path}", KINDS.get(kind, "no regular file"), "a regular file, or a link to one", do)
        return path.open("rb")
    except OSError as error:
        raise _not_opened(path, error, do) from error


def refuse_changed(path: Path, size: int, changed_ns: int, inode: int) -> None:
    """Raises TfmError where the file is not what it was (by stat): what was read of it may be of two files.

    Its inode's own time (a new link, other rights) says nothing of the content.
    """
    try:
        now = path.stat()
        is_same = (now.st_size, now.st_mtime_ns, now.st_ino) == (size, changed_ns, inode)
    except OSError:
        is_same = False
    if not is_same:
        raise TfmError(f"file {path}: changed while it was read", do=CHANGED)


def _not_opened(path: Path, error: OSError, do: str) -> TfmError:
    if isinstance(error, FileNotFoundError):
        found = "a link to a file that is gone" if path.is_symlink() else "nothing there"
        return TfmError(f"file {path}", found, do=do)
    if isinstance(error, PermissionError):
        do = "give yourself the right to read it (chmod u+r), and to enter its folder"
    return TfmError(f"file {path}: cannot be read", error.strerror or error, do=do)


def remove_folder(folder: Path) -> None:
    """All of it, as far as that can be; nothing where there is none."""
    import shutil  # it brings all kinds of compression: 2 ms of a start that removes nothing

    shutil.rmtree(folder, ignore_errors=True)


def read_text_bytes(path: Path, do: str = CHECK) -> bytes:
    """All of a regular file of text, such as config.json. Raises TfmError as open_file, and when it is too long."""
    with open_file(path, do) as file:
        try:
            data = file.read(LONGEST_TEXT_BYTES + 1)
        except OSError as error:
            raise TfmError(f"file {path}: cannot be read", error.strerror or error) from error
    if len(data) > LONGEST_TEXT_BYTES:
        allowed = f"up to {LONGEST_TEXT_BYTES}"
        raise TfmError(f"file {path}: length", f"more than {LONGEST_TEXT_BYTES} bytes", allowed, do)
    return data


def read_part(path: Path, part: str, begin: int, size: int) -> "npt.NDArray[np.uint8]":
    """`size` bytes of a file from byte begin on, as an array of their own.

    Files that others may change are read and not mapped: one that is cut short while it is mapped ends the process with
    SIGBUS. Raises TfmError where the file ends before, which names the part; or when it cannot be read.
    """
    import numpy as np

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe by now would be waited for
    except OSError as error:
        raise _not_opened(path, error, CHECK) from error
    try:
        data = os.pread(descriptor, size, begin)
        while len(data) < size and (more := os.pread(descriptor, size - len(data), begin + len(data))):
            data += more
        there = os.fstat(descriptor).st_size
    except OSError as error:
        raise TfmError(f"file {path}: {part} cannot be read", error.strerror or error) from error
    finally:
        os.close(descriptor)
    if len(data) < size:
        raise TfmError(f"file {path}: cut short in {part}", f"{there} bytes", f"{begin + size} at least", CHANGED)
    return np.frombuffer(data, np.uint8)


def expanded(ref: str | Path) -> Path:
    """ref as a path, a tilde at its start replaced. Raises TfmError for the tilde of a user that there is not."""
    try:
        return Path(ref).expanduser()
    except RuntimeError as error:
        found = "no such user, or no home folder"
        raise TfmError(f"path {ref}", found, do="write the folder out, or ./~ for a name with a tilde") from error


def is_there(path: Path) -> bool:
    """Whether anything goes by this name, be it a link to nothing. Raises TfmError where the folder hides it."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        remedy = "give yourself the right to enter its folder"
        raise TfmError(f"file {path}: cannot be read", error.strerror or error, do=remedy) from error
    return True
