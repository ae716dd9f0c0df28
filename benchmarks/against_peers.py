"""tfm beside its peers: the same model, the same tokens, the same threads, in one run, taking turns.

Each side is loaded once, in a process and with an interpreter of its own; then they run A B A B ... Samples are
seconds; medians count. cases.py says what is run on loaded models, processes.py what whole processes do, asked.py what
tfm must reach. See README.md beside this file.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import llvmlite.binding as llvm
import machine
import models
from cases import CASES, SHAPE, Case, Side
from processes import POSITIONS, process_tests
from turns import Test, Worker

from tfm.engine.default_model import SMOLLM2_135M
from tfm.engine.machine import available_threads
from tfm.engine.store import DEFAULT_MODEL

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PROCESS_TESTS = ("start", "exit", "help", "cold", "memory")
TESTS = (*(case.name for case in CASES), *PROCESS_TESTS)
FOREIGN_TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that may make NumPy's BLAS take another CPU's kernels; its worker does without them."""
QUIET_SHARE = 0.05
"""More than this of the machine used by others, or of a core by a side that waits, is worth a word."""
LIMIT_PASSES = 5
"""Of the loops that measure the machine, before each run of tfm: the best counts."""
LEAST_IDLE_S = 0.5
"""A side that has waited less than this slowed nobody."""


class Sides:
    """The workers, each started when it is first wanted."""

    def __init__(self, threads: int, llama_python: str, torch_python: str) -> None:
        self._threads, self._torch_python = threads, torch_python
        self._pythons = {"llama_cpp": llama_python, "transformers": torch_python, "ctranslate2": torch_python}
        self._running: dict[str, Worker] = {}
        self._loops: Worker | None = None
        self._check_ids: list[int] = []
        self._top: int | None = None
        self.abouts: dict[str, dict] = {}
        self.idle: dict[str, float] = {}

    def worker(self, side: Side) -> Worker:
        """The side, loaded; its model has been found to be the one that the others run."""
        if side.key not in self._running:
            worker = self._running[side.key] = Worker(self._command(side), environment_of(side, self._threads))
            self.abouts[side.key] = worker.about | {"program": side.program}
            if side.model in models.MODELS:
                self._check_same_model(side, worker)
        return self._running[side.key]

    def keep_only(self, sides: Sequence[Side]) -> None:
        """End all workers but those of the sides."""
        keys = {side.key for side in sides}
        for key in self._running.keys() - keys:
            worker = self._running.pop(key)
            worker.close()
            if worker.idle_s > LEAST_IDLE_S:
                self.idle[key] = round(worker.idle_cpu_s / worker.idle_s, 4)

    def close(self) -> None:
        self.keep_only(())
        if self._loops is not None:
            self._loops.close()
            self._loops = None

    @property
    def loops(self) -> Worker:
        """The one that says what the machine can do."""
        if self._loops is None:
            settings = {"threads": self._threads, "passes": LIMIT_PASSES}
            self._loops = Worker([sys.executable, str(HERE / "worker_limits.py"), json.dumps(settings)])
        return self._loops

    def limits(self) -> dict:
        """What the machine can do at this moment."""
        return self.loops.run()["limits"]

    def versions(self) -> dict[str, dict]:
        """By program."""
        return {about["program"]: about["versions"] for about in self.abouts.values()}

    def _command(self, side: Side) -> list[str]:
        place = side.model
        if side.model == SHAPE:
            place = str(HERE / SHAPE)
        elif side.program == "tfm" and side.model == "q4_1":
            place = DEFAULT_MODEL
        elif side.model in models.MODELS:
            place = str(models.model(side.model, self._torch_python))
        settings: dict[str, object] = {"model": place, "threads": self._threads, "ctx": side.ctx, **side.more}
        python = self._pythons.get(side.program, sys.executable)
        return [python, str(HERE / f"worker_{side.program}.py"), json.dumps(settings)]

    def _check_same_model(self, side: Side, worker: Worker) -> None:
        """All sides go on from the same text with the same token; otherwise there is nothing to compare."""
        self._check_ids = self._check_ids or worker.about["check_ids"]  # tfm is the first side of each test
        top = worker.run(self._check_ids, len(self._check_ids))["top"]
        self._top = top if self._top is None else self._top
        if top != self._top:
            found = f"token {top}, the others with {self._top}"
            raise SystemExit(f"{side.key} continues the text of the check with {found}: not the same model?")


def environment_of(side: Side, threads: int) -> dict[str, str]:
    """The worker's environment: NumPy's has its own BLAS as it comes, on as many threads as the others."""
    environment = dict(os.environ)
    if side.name == "NumPy":
        for name in FOREIGN_TUNING:
            environment.pop(name, None)
        environment |= {"OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return environment


def case_test(case: Case, sides: Sides) -> Test:
    """The test of a case, with the same random tokens on all sides."""
    workers = {side.name: sides.worker(side) for side in case.sides}
    draw = random.Random(0)
    vocab_size = min(worker.about["vocab_size"] for worker in workers.values())
    ids = [draw.randrange(vocab_size) for _ in range(case.depth + case.tokens)]

    is_model = case.sides[0].program == "tfm"
    half = 0.0  # of the bytes that a run reads

    def seconds(name: str) -> float:
        nonlocal half
        run = partial(workers[name].run, ids, case.rows, case.depth, case.batch)
        if not is_model or name != "tfm":
            return run()["seconds"]
        limits = sides.limits()
        before_s = sides.loops.run(bytes=half)["seconds"] if half else None
        answer = run(limits)
        limit_s, test.limit = answer["limit_s"], answer["limit"]
        # Memory of a machine that is shared was seen to give 34 GB/s in one second and 58 in the next: half of what a
        # run reads is read right before it, and half right after.
        if test.limit == "memory":
            half = limit_s * limits["bytes_s"] / 2
            after_s = sides.loops.run(bytes=half)["seconds"]
            limit_s = after_s + (after_s if before_s is None else before_s)
        test.limits_s.append(round(limit_s, 6))
        return answer["seconds"]

    runs = {name: partial(seconds, name) for name in workers}
    test = Test(case.name, case.title, runs, case.batch * case.tokens if is_model else None)
    return test


def all_tests(arguments: argparse.Namespace, sides: Sides) -> Iterator[Test]:
    """The tests in their order, each when the one before has been measured. A side lives as long as it is needed."""
    cases = [case for case in CASES if case.name in arguments.tests]
    for i, case in enumerate(cases):
        sides.keep_only([side for later in cases[i:] for side in later.sides])
        yield case_test(case, sides)
    sides.close()
    if set(arguments.tests) & set(PROCESS_TESTS):
        folder, gguf = models.default_folder(), models.model("q4_1", arguments.torch_python)
        tests = process_tests(DEFAULT_MODEL, folder, gguf, arguments.threads, arguments.llama_python, base_bytes(sides))
        yield from (test for test in tests if test.name in arguments.tests)


def base_bytes(sides: Sides) -> int:
    """Bytes of the default model's weights, and of keys and values at POSITIONS."""
    memory = tfm_q4(sides)["memory"]
    return int(memory["weights_bytes"] + POSITIONS * memory["kv_bytes_per_1000_tokens"] / 1000)


def tfm_q4(sides: Sides) -> dict:
    """What tfm says of the default model; it is loaded for that if no test did."""
    side = CASES[0].sides[0]
    if side.key not in sides.abouts:
        sides.worker(side)
        sides.close()
    return sides.abouts[side.key]


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Everything that is written to the results file."""
    make_models(arguments)
    refuse_busy_machine(arguments.output is None)
    busy = machine.Busy()
    sides = Sides(arguments.threads, arguments.llama_python, arguments.torch_python)
    with closing(sides):
        limits = sides.limits()
        done = [run_test(test, arguments.repetitions) for test in all_tests(arguments, sides)]
        about = tfm_q4(sides)
    for side, share in sides.idle.items():
        note_if(share > QUIET_SHARE, f"{side} uses {share:.0%} of a core while it waits, which slows the others")
    others = busy.others_share()
    note_if((others or 0) > QUIET_SHARE, f"others used {others or 0:.0%} of the machine during the run")
    versions = sides.versions()
    versions["tfm"] = about["versions"] | {"commit": commit()}
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe() | {"llvm_cpu": about["llvm_cpu"], "others_share": others, "limits": limits},
        "model": {"name": SMOLLM2_135M.gguf.split(".")[0], "tfm_weights_bytes": about["memory"]["weights_bytes"]},
        "threads": arguments.threads,
        "kv_type": about["kv_type"],
        "repetitions": arguments.repetitions,
        "versions": versions,
        "idle_cpu_share": sides.idle,
        "tests": done,
    }


def make_models(arguments: argparse.Namespace) -> None:
    """Make what is not in the cache yet, before the machine has to be quiet."""
    wanted = {side.model for case in CASES if case.name in arguments.tests for side in case.sides}
    for key in models.MODELS:
        if key in wanted:
            models.model(key, arguments.torch_python)


def refuse_busy_machine(for_the_record: bool) -> None:
    """See for a second whether the machine is quiet: threads that wait for others lose far more than their share."""
    busy = machine.Busy()
    time.sleep(1)
    others = busy.others_share() or 0
    text = f"the machine is not quiet: {others:.0%} of it is in use"
    if others > QUIET_SHARE and for_the_record:
        raise SystemExit(f"{text}; wait until it is, or name a file with --output that is not for the record")
    note_if(others > QUIET_SHARE, text)


def run_test(test: Test, repetitions: int) -> dict[str, object]:
    """Measure and say what came out."""
    test.measure(repetitions)
    for side, samples in test.samples.items():
        median = statistics.median(samples)
        figure = f"{median:.3f} s" if test.unit == "s" else f"{median / 1e6:.1f} MB"
        if test.tokens:
            figure = f"{test.tokens / median:.1f} tok/s"
        say(f"{test.name:18} {side:34} {figure:>13}   {min(samples):.3f} to {max(samples):.3f} {test.unit}")
    result = test.result()
    for ask in result["asked"]:
        bound = f"at least {ask['at_least']}" if "at_least" in ask else f"at most {ask['at_most']}"
        say(f"{'':18} {'met' if ask['met'] else 'NOT MET'}: {ask['measured']} {ask['asked']}, asked {bound}")
    return result


def commit() -> str | None:
    """The commit of this checkout, with a + where files that belong to it were changed; None outside one."""
    git = ("git", "-C", str(HERE))
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.strip() + "+" * changed


def write_results(
    arguments: argparse.Namespace, kind: str, busy: machine.Busy, versions: Mapping[str, object], tests: list[dict],
    **more: object,
) -> None:  # fmt: skip
    """Write what another script measured to arguments.output, else to results/KIND/DATE-CPU.json, and say where."""
    others = busy.others_share()
    note_if((others or 0) > QUIET_SHARE, f"others used {others or 0:.0%} of the machine during the run")
    results = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe() | {"llvm_cpu": llvm.get_host_cpu_name(), "others_share": others},
        "model": {"name": SMOLLM2_135M.gguf.split(".")[0]},
        "threads": arguments.threads,
        "repetitions": arguments.repetitions,
        **more,
        "versions": versions,
        "tests": tests,
    }
    output = arguments.output or results_file(results, RESULTS / kind)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(output)


def results_file(results: Mapping[str, dict], folder: Path = RESULTS) -> Path:
    """DATE-CPU.json in folder."""
    cpu = f"{results['machine']['cpu']} {results['machine']['llvm_cpu']}"
    plain = re.sub(r"\((r|tm)\)|@ *[0-9.]+ghz|\bcpu\b", " ", cpu.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return folder / f"{str(results['measured_at'])[:10]}-{slug}.json"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def note_if(condition: bool, text: str) -> None:
    if condition:
        say(f"note: {text}")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; counts that cannot be are wrong usage before anything is measured."""
    arguments = parser.parse_args()
    most = available_threads()
    if not 1 <= arguments.threads <= most:
        parser.error(f"--threads: found {arguments.threads}; allowed: 1 to {most}, the processors there are")
    for name in {"repetitions", "rows"} & vars(arguments).keys():
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: found {getattr(arguments, name)}; allowed: 1 or more")
    return arguments


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tfm beside its peers, the same model, in one run", allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2, help="for all sides (default 2)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each test and side (default 5)")
    parser.add_argument(
        "--llama-python", default=sys.executable, help="one that has llama-cpp-python (default: this one)"
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, help="one that has transformers, torch, ctranslate2 (default: this)"
    )
    parser.add_argument("--tests", default=",".join(TESTS), help="a comma list of %(default)s (default: all)")
    parser.add_argument("--output", type=Path, help="file for the results (default: benchmarks/results/DATE-CPU.json)")
    arguments = parsed(parser)
    arguments.tests = arguments.tests.split(",")
    if unknown := set(arguments.tests) - set(TESTS):
        parser.error(f"--tests: found {', '.join(sorted(unknown))}; allowed: {', '.join(TESTS)}")
    if arguments.output is None and set(arguments.tests) != set(TESTS):
        parser.error("--output is needed with --tests: a part of the results is not for benchmarks/results")
    return arguments


def main() -> None:
    arguments = options()
    results = measure(arguments)
    output = arguments.output or results_file(results)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
