"""A process that has imported the libraries that each start of tfm imports, and forks a child for each command.

Such imports are two thirds of a start, and the tests start tfm a thousand times. Nothing of tfm itself is imported
before the fork: the child runs the installed script from its first line to its exit, with pipes, arguments, folder and
environment of its own. What depends on how Python itself starts (variables, streams, limits, signals, what libraries do
at exit) needs a start from nothing; cli_process.run makes that choice, and all that start a process themselves do.

As a script this is that process; `run` is the tests' side of it.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

LIBRARIES = ("click", "numpy", "filelock", "platformdirs", "tokenizers", "llvmlite.binding")
MOST_BYTES = 1 << 20  # of a command and its environment
STREAMS = 3
NUMBER_BYTES = 8
ALONE = threading.Lock()


def run(
    words: Sequence[str | bytes | Path], environment: Mapping[str, str], stdin: bytes, timeout_s: float
) -> subprocess.CompletedProcess[bytes]:
    """What subprocess.run gives for a Python script whose output is captured."""
    request = {"words": list(map(os.fsdecode, words)), "environment": dict(environment), "folder": os.getcwd()}
    (its_in, into), (out, its_out), (error, its_error) = (os.pipe() for _ in range(STREAMS))
    with ALONE, ThreadPoolExecutor(STREAMS) as threads:
        server = _server()
        socket.send_fds(server, [json.dumps(request).encode()], [its_in, its_out, its_error])
        for file in (its_in, its_out, its_error):
            os.close(file)
        child = _number(server)
        threads.submit(_write, into, stdin)
        shown, said = threads.submit(_read, out), threads.submit(_read, error)
        server.settimeout(timeout_s)
        try:
            status = _number(server)
        except BaseException as stopped:  # too late, or Ctrl-C: its status must not be taken for that of the next
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            server.settimeout(None)
            _number(server)
            if isinstance(stopped, TimeoutError):
                raise subprocess.TimeoutExpired(request["words"], timeout_s) from None
            raise
    return subprocess.CompletedProcess(words, status, shown.result(), said.result())


@functools.cache
def _server() -> socket.socket:
    """Its own streams are pipes, as a child's will be: Python remembers of a stream whether one can seek in it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[its.fileno()])
    its.close()
    atexit.register(_end, ours, process, os.getpid())
    return ours


def _end(server: socket.socket, process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() == owner:  # and not the child of a fork
        server.close()
        process.communicate()


def _number(server: socket.socket) -> int:
    data = server.recv(NUMBER_BYTES)
    assert data, "the process that starts others has ended"
    return int.from_bytes(data, "little", signed=True)


def _write(file: int, data: bytes) -> None:
    with open(file, "wb") as stream:
        stream.write(data)


def _read(file: int) -> bytes:
    with open(file, "rb") as stream:
        return stream.read()


def _serve(client: socket.socket) -> None:
    """Fork a child for each command, tell its id and how it ended. Comes back in the child alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(client, MOST_BYTES, STREAMS)
        if not data:
            os._exit(0)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            client.close()
            _become(json.loads(data), files)
            return
        for file in files:
            os.close(file)
        _tell(client, child)
        _tell(client, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _tell(client: socket.socket, number: int) -> None:
    client.sendall(number.to_bytes(NUMBER_BYTES, "little", signed=True))


def _become(request: Mapping[str, object], files: Sequence[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    sys.path[0] = os.path.dirname(sys.argv[0])


if __name__ == "__main__":
    for name in LIBRARIES:
        importlib.import_module(name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
