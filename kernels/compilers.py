"""Processes that compile side by side, for a first start. The one that wants the code need not import Numba for it."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from tfm.kernels.object_files import seal, unseal

if TYPE_CHECKING:
    import subprocess

    from tfm.kernels.jit import Entry

MOST_COMPILERS = 4  # processes, of 200 MB each; three of the entries of a model take nearly all of the time
COMPILE = "import sys; from tfm.kernels.compilers import compile_all; compile_all(sys.argv[1], sys.argv[2:])"


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _how_many() -> int:
    """Processes that compile at once: one more than processors, so that the system shares the last of the work out."""
    return 1 if processors() == 1 else min(processors() + 1, MOST_COMPILERS)


class Compilers:
    """Processes that compile entries, each the next one when it has done one; a context that ends them in any case.

    Object files come back in files of their own, as what else a Python prints when it starts goes to its stdout.
    """

    def __init__(self, entries: "Sequence[Entry]") -> None:
        self._entries = list(entries)
        self._files: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._done: set[int] = set()
        self._notices = -1
        self._stack = ExitStack()

    def __enter__(self) -> "Compilers":
        if self._entries:
            with suppress(OSError):  # no Python to start, or no folder for the files
                self._start()
        return self

    def _start(self) -> None:
        import subprocess
        import tempfile

        for _ in self._entries:
            self._files.append(self._stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115  the stack closes it
        self._notices, notify = os.pipe()
        self._stack.callback(os.close, self._notices)
        todo, give = os.pipe()
        os.write(give, bytes(range(len(self._entries))))
        os.close(give)
        numbers = [todo, notify, *(file.fileno() for file in self._files)]
        targets = [f"{entry.module}:{entry.function}:{entry.arguments}" for entry in self._entries]
        # -P: what lies in the working folder may bear the name of a module.
        command = [sys.executable or "", "-P", "-c", COMPILE, ",".join(map(str, numbers)), *targets]
        command[1:1] = ["-B"] if sys.dont_write_bytecode else []
        try:
            for _ in range(min(len(targets), _how_many())):
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=numbers,
                )  # fmt: skip
                self._processes.append(process)
                self._stack.enter_context(process)
                self._stack.callback(process.kill)
        finally:
            os.close(todo)
            os.close(notify)

    def result(self, entry: "Entry") -> bytes | None:
        """The object file of an entry, when there is one; None if nobody made it, or not all of it."""
        number = self._entries.index(entry)
        while number not in self._done and (notice := os.read(self._notices, 1) if self._processes else b""):
            self._done.add(notice[0])
        if number not in self._done:
            return None
        self._files[number].seek(0)
        return unseal(entry.symbol, self._files[number].read())

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def compile_all(descriptors: str, targets: Sequence[str]) -> None:
    """What each process of `Compilers` does.

    descriptors are numbers of open files: where the number of the next target is read, where it is written when that is
    done, and where the object file of each target goes.
    """
    from tfm.kernels.jit import Entry

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that wants the code decides; it may go on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    todo, notify, *files = map(int, descriptors.split(","))
    while number := os.read(todo, 1):
        module, function, arguments = targets[number[0]].split(":")
        entry = Entry(f"{module}:{function}", arguments)
        with os.fdopen(files[number[0]], "wb") as file:
            file.write(seal(entry.symbol, entry.compile()))
        os.write(notify, number)


def _end_with_parent() -> None:
    """The process that wants the code holds the other end of stdin: when it has ended, however, so does this one."""
    os.read(0, 1)
    os._exit(1)
