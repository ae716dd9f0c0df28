"""The command as a person runs it: the installed script, in a process of its own, with real pipes."""

import os
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import ready_process

TFM = Path(sysconfig.get_path("scripts")) / "tfm"
TIMEOUT_S = 120
NO_CHANGES: Mapping[str, str | None] = {}
NEITHER = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}
C_LOCALE = {"LC_ALL": "C", **NEITHER}
"""A locale of ASCII, which Python would by itself treat as UTF-8."""
LOCALES = {
    "C": C_LOCALE,
    "C.UTF-8": {"LC_ALL": "C.UTF-8", **NEITHER},
    "one that is not there": {"LC_ALL": "xx_YY.KOI8-R", **NEITHER},
    "ASCII by Python's own variable": {"PYTHONIOENCODING": "ascii:strict"},
}


def environment(changes: Mapping[str, str | None] = NO_CHANGES) -> dict[str, str]:
    """This process's, without what would change tfm's manners, with changes (None takes a variable away)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TFM_MODEL", "TFM_DEBUG")}
    return {name: value for name, value in (kept | dict(changes)).items() if value is not None}


def run(
    *arguments: str | bytes | Path,
    stdin: bytes | int = b"",
    stdout: int = subprocess.PIPE,
    env: Mapping[str, str | None] = NO_CHANGES,
) -> subprocess.CompletedProcess[bytes]:
    """Run tfm to its end. stdin is what is piped in, or the number of an open file.

    Where pipes and environment are as they are for all, what the libraries' imports cost is paid once.
    """
    command = [TFM, *arguments]
    if isinstance(stdin, bytes) and stdout == subprocess.PIPE and not env:
        return ready_process.run(command, environment(), stdin, TIMEOUT_S)
    streams = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    return subprocess.run(
        command, stdout=stdout, stderr=-1, env=environment(env), timeout=TIMEOUT_S, check=False, **streams
    )


def shell(
    script: str, env: Mapping[str, str | None] = NO_CHANGES, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[bytes]:
    """Run a script in bash, where tfm is on the path."""
    path = f"{TFM.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script], env=environment(env) | {"PATH": path}, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def wait_for_work(process: subprocess.Popen[bytes], cpu_s: float) -> None:
    """Wait until a process has used so much processor time: on a busy machine it is as far as on an idle one.

    A start takes about half a second of it.
    """
    end = time.monotonic() + TIMEOUT_S
    used = 0.0
    while used < cpu_s:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_terminal(terminal: int) -> bytes:
    """What a terminal gets until its other end is closed."""
    shown = b""
    with suppress(OSError):  # how Linux says that it is closed
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    return shown
