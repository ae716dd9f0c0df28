"""Whole processes: how long they take, and how much memory."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from turns import Test

HERE = Path(__file__).parent
TFM = str(Path(sysconfig.get_path("scripts")) / "tfm")
PROMPT = "Once upon a time"
POSITIONS = 2048
SHORT_TIMES = 3  # turns for each repetition: whole processes of 0.3 s were seen to take from 0.27 to 0.52
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""
"""Run a command and print the most bytes that it had in memory; a process this small adds nothing to them."""


def process_tests(ref: str, folder: Path, gguf: Path, threads: int, llama_python: str, base: int) -> list[Test]:
    """Starting, ending, compiling, help and memory. base: bytes of the weights, and of keys and values at POSITIONS."""
    generate = [TFM, "generate", "--threads", str(threads), "-n", "1", "-m"]
    warm = {
        "tfm": [*generate, ref, PROMPT],
        "llama-cpp-python": [llama_python, str(HERE / "start_llama_cpp.py"), str(gguf), str(threads), PROMPT],
    }
    ids = " ".join(map(str, range(POSITIONS - 1)))
    short = partial(Test, times=SHORT_TIMES)
    full = [*generate, ref, "--ids", "--ctx", str(POSITIONS), ids]
    return [
        short("start", "`tfm generate -n 1`, to the first byte",
              {s: lambda c=c: process_s(c)[0] for s, c in warm.items()}),
        short("exit", "`tfm generate -n 1`, to the exit", {s: lambda c=c: process_s(c)[1] for s, c in warm.items()}),
        short("help", "`tfm --help`", {"tfm": lambda: process_s([TFM, "--help"])[1]}),
        Test("cold", "first start, everything compiled", {"tfm": lambda: cold_s([*generate, str(folder), PROMPT])},
             warm=False),
        Test("memory", f"peak memory, q4, {POSITIONS:,} positions", {"tfm": lambda: peak_bytes(full)},
             unit="bytes", warm=False, base=base),
    ]  # fmt: skip


def process_s(command: Sequence[str], changes: Mapping[str, str] | None = None) -> tuple[float, float]:
    """Seconds from exec to the first byte on stdout, and to the exit."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=os.environ | (changes or {})
        )
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        first_s = time.perf_counter() - start
        process.communicate()
        exit_s = time.perf_counter() - start
        if process.returncode != 0 or not first:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-2000:]
            raise SystemExit(f"{command[0]}: status {process.returncode}, {'an' if first else 'no'} answer: {said}")
    return first_s, exit_s


def cold_s(command: Sequence[str]) -> float:
    """Seconds of a whole process that finds an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return process_s(command, {"TFM_CACHE": folder})[1]


def peak_bytes(command: Sequence[str]) -> float:
    """The most memory that a process had, what it shares with others included."""
    done = subprocess.run([sys.executable, "-c", PEAK, *command], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)
