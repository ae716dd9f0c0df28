"""How long whole processes of tfm take: from exec to the first byte on stdout, and to the exit."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress
from tfm.engine.store import run_folder

TFM = (sys.executable, "-c", "import sys; from tfm.cli.main import main; sys.exit(main())")


@dataclass(frozen=True)
class Start:
    """The medians of some processes."""

    command: str
    processes: int
    first_byte_s: float
    exit_s: float

    def as_json(self) -> dict[str, object]:
        return {
            "command": self.command,
            "processes": self.processes,
            "first_byte_s": self.first_byte_s,
            "exit_s": self.exit_s,
        }


def measure_starts(ref: str, repetitions: Sequence[int], cold: bool, progress: Progress) -> Iterator[Start]:
    """tfm --help and tfm generate -n 1, each once before it counts; cold once more with an empty cache, once.

    ref is a model's folder, so that it is not fetched again for an empty cache.
    """
    generate = ["generate", "-m", ref, "--no-stdin", "--raw", "-n", "1", "Once upon a time"]
    for label, arguments in (("tfm --help", ["--help"]), ("tfm generate -n 1", generate)):
        _run(arguments, {})
        for count in repetitions:
            times = []
            for i in range(count):
                progress(label, i, count)
                times.append(_run(arguments, {}))
            progress(label, 1, 1)
            firsts, exits = zip(*times, strict=True)
            yield Start(label, count, median(firsts), median(exits))
    if cold:
        with tempfile.TemporaryDirectory(dir=run_folder()) as empty:
            yield Start("tfm generate -n 1, cold", 1, *_run(generate, {"TFM_CACHE": empty}))


def _run(arguments: list[str], changes: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first byte and to the exit. Raises TfmError for a process that fails, or says nothing."""
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        [*TFM, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | changes,
    )  # fmt: skip
    with process, ExitStack() as stack:
        stack.callback(process.kill)  # a stop would wait for it, and it would go on in a cache that is taken away
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        first_byte_s = time.perf_counter() - begun_s
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip()
        process.wait()
    if process.returncode:
        raise TfmError(f"tfm {arguments[0]}: status {process.returncode}", said.splitlines()[-1] if said else "no word")
    if not first:
        raise TfmError(
            f"tfm {arguments[0]}", "no byte to wait for: the model ends its answer at once", do="name another"
        )
    return first_byte_s, time.perf_counter() - begun_s
