"""Machine code that is kept: object files in a folder named by a digest of everything they depend on.

That is the sources, the versions of Numba and llvmlite, the CPU's name and its features. Each file is written under a
temporary name and renamed, and carries the digest of its own bytes: a truncated or foreign file is compiled again, and
where the folder cannot be written, or none is known, the work goes on without.
"""

import fcntl
import hashlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tfm.kernels.cache_folder import warn_not_kept
from tfm.kernels.new_file import new_file

LONGEST_WAIT_S = 120  # for another process that compiles; it may have been stopped
KEPT_FOLDERS = 8  # compiled kernels of so many versions or CPU types are kept; each is about 1 MB


@cache
def machine() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        # As Numba has it: any other name alone leaves the host's features on.
        features = "" if name.lower() == "generic" else llvm.get_host_cpu_features().flatten()
    spec = importlib.util.find_spec("numba")
    assert spec is not None
    assert spec.origin is not None
    # Read, not imported: importlib.metadata takes 10 ms to tell a version, Numba half a second.
    version = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8")
    return f"{llvm.get_default_triple()} {name} {features} llvmlite {llvmlite.__version__} numba {version}"


def digest(sources: tuple[Path, ...]) -> str:
    """A name for the machine code of these sources, the kernels beside this file, and this machine."""
    kernels = Path(__file__).parent
    found = hashlib.sha256(machine().encode() + _digest_of_files(kernels))
    for path in sources:
        if kernels not in path.parents:
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:24]


@cache
def _digest_of_files(folder: Path) -> bytes:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.digest()


@contextmanager
def one_process_at_a_time(
    folder: Path, longest_s: float = LONGEST_WAIT_S, is_needless: Callable[[], bool] = lambda: False
) -> Iterator[bool]:
    """Processes that start together on a new machine compile once, and the others wait; but not for ever, and not when
    that has become needless.

    Gives whether the turn is this process's own.
    """
    with ExitStack() as stack:
        is_own = True
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("w"))
            end_s = time.monotonic() + longest_s
            while not (is_own := _is_locked(file)) and not is_needless() and time.monotonic() < end_s:
                time.sleep(0.1)
        yield is_own


def _is_locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_object(path: Path) -> bytes | None:
    """The object file kept at path; None where there is none, or it is not whole."""
    try:
        if not path.is_file():  # a pipe or a device would be read without end
            return None
        return unseal(path.stem, path.read_bytes())
    except OSError:
        return None


def seal(symbol: str, code: bytes) -> bytes:
    """An object file behind a line that has its checksum, and that of the symbol.

    A call of a symbol that the code does not have would end the process.
    """
    return hashlib.sha256(f"{symbol}\n".encode() + code).hexdigest().encode() + b"\n" + code


def unseal(symbol: str, sealed: bytes) -> bytes | None:
    """The object file of `seal`, None if not every byte is what it was."""
    code = sealed.partition(b"\n")[2]
    return code if seal(symbol, code) == sealed else None


def write_object(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path.parent) as file:
            file.write(seal(path.stem, code))
            file.flush()
            os.replace(file.name, path)
        _drop_oldest(path.parent.parent)
    except OSError as error:
        warn_not_kept(error.strerror or str(error))


def _drop_oldest(folder: Path) -> None:
    import shutil

    times = []
    for entry in folder.iterdir():
        with suppress(OSError):  # another process may have removed it by now
            times.append((entry.stat().st_mtime, entry))
    for _, old in sorted(times, reverse=True)[KEPT_FOLDERS:]:
        shutil.rmtree(old, ignore_errors=True)
