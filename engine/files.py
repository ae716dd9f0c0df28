"""Files of a model, opened: only regular ones. A pipe would be waited for, a device read, without end."""

import stat
from pathlib import Path
from typing import BinaryIO

from tfm.engine.errors import TfmError

LONGEST_TEXT_BYTES = 1 << 29  # no tokenizer.json or index comes near; such a file would take the memory first
CHECK = "check the folder, or download the model again"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path, do: str = CHECK) -> BinaryIO:
    """The regular file at path, or behind the link there. Raises TfmError for another kind, or what cannot be read."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise TfmError(f"file {path}", KINDS.get(kind, "no regular file"), "a regular file, or a link to one", do)
        return path.open("rb")
    except FileNotFoundError as error:
        found = "a link to a file that is gone" if path.is_symlink() else "nothing there"
        raise TfmError(f"file {path}", found, do=do) from error
    except PermissionError as error:
        remedy = "give yourself the right to read it (chmod u+r), and to enter its folder"
        raise TfmError(f"file {path}: cannot be read", error.strerror, do=remedy) from error
    except OSError as error:
        raise TfmError(f"file {path}: cannot be read", error.strerror or error, do=do) from error


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
