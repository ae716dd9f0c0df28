"""What a busy machine costs the team: tfm decodes with it and with one thread, in turns, beside loops that never rest.

    python benchmarks/busy_machine.py [--threads 2] [--repetitions 31]

writes results/busy/DATE-CPU.json: with one busy loop, and with one on each processor. tfm must not be slower than with
one thread there. Whoever shares a processor with a loop is at the mercy of the scheduler, so a second model with one
thread takes its turns too: by what it differs from the first, any two sides of this run may differ.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import machine
from against_peers import commit, parsed, refuse_busy_machine, run_test, write_results
from asked import ONE_THREAD
from turns import Test
from worker_tfm import PACKAGES

from tfm.engine import load
from tfm.engine.model import Model
from tfm.engine.store import DEFAULT_MODEL

CTX = 1024
TOKENS = 500
CONTROL = f"{ONE_THREAD}, again"
LOOP = "while True: pass"
COUNTS = {"one": 1, "all": os.cpu_count() or 1}


@contextmanager
def loops(count: int) -> Iterator[None]:
    """So many processes that keep a processor busy each."""
    processes = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    try:
        time.sleep(1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def seconds(model: Model) -> float:
    """Of TOKENS tokens, one by one."""
    with model.sequence() as sequence:
        begin = time.perf_counter()
        for id_ in range(TOKENS):
            model.step([(sequence, [id_])])
        return time.perf_counter() - begin


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what a busy machine costs the team", allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2, help="of the team (default 2)")
    parser.add_argument("--repetitions", type=int, default=31, help="of each side (default 31)")
    parser.add_argument("--output", type=Path, help="file for the results (default: results/busy/DATE-CPU.json)")
    return parsed(parser)


def main() -> None:
    arguments = options()
    refuse_busy_machine(arguments.output is None)
    busy = machine.Busy()
    done = []
    with (
        closing(load(DEFAULT_MODEL, threads=arguments.threads, ctx=CTX)) as team,
        closing(load(DEFAULT_MODEL, threads=1, ctx=CTX)) as alone,
        closing(load(DEFAULT_MODEL, threads=1, ctx=CTX)) as again,
    ):
        models = {"tfm": team, ONE_THREAD: alone, CONTROL: again}
        for model in models.values():
            model.take_weights()  # as a run of many steps does by itself
        runs = {side: partial(seconds, model) for side, model in models.items()}
        for name, count in COUNTS.items():
            title = f"decode, q4, beside {count} busy loop{'s' * (count != 1)}"
            with loops(count):
                done.append(run_test(Test(f"busy {name}", title, runs, tokens=TOKENS), arguments.repetitions))
    own = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    write_results(arguments, "busy", busy, {"tfm": own | {"commit": commit()}}, done)


if __name__ == "__main__":
    main()
