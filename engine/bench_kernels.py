"""Every kernel at its declared cases: verified against NumPy first, then timed beside it, on one thread."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress, silent
from tfm.kernels.jit import Entry, begun
from tfm.kernels.ops import Op, Verdict, find_ops, verify

TIMED_S = 0.005  # a call is repeated for so long, and at least LEAST times
LEAST = 3


@dataclass(frozen=True)
class KernelResult:
    """A case of an op. bytes_ and operations are what it reads and writes, and calculates; error is from float64.

    numpy_s is the time of the op's reference, which is written to be read: for weights of few bits it makes floats of
    them first.
    """

    op: str
    case: str
    passed: bool
    error: float
    allowed: float
    bytes_: int
    operations: int
    seconds: float
    numpy_s: float

    def as_json(self) -> dict[str, object]:
        return {
            "op": self.op,
            "case": self.case,
            "passed": self.passed,
            "error": self.error,
            "allowed": self.allowed,
            "seconds": self.seconds,
            "gb_s": self.bytes_ / self.seconds / 1e9,
            "gflop_s": self.operations / self.seconds / 1e9,
            "numpy_seconds": self.numpy_s,
            "numpy_gb_s": self.bytes_ / self.numpy_s / 1e9,
            "numpy_gflop_s": self.operations / self.numpy_s / 1e9,
        }


def choose_ops(name: str) -> list[Op]:
    """The op of a name, or all for "all". Raises TfmError for a name that no op has."""
    ops = find_ops()
    chosen = [op for op in ops if name in (op.name, "all")]
    if not chosen:
        raise TfmError("--kernels", name, ", ".join(["all", *(op.name for op in ops)]))
    return chosen


def prepare(ops: Sequence[Op], progress: Progress = silent) -> None:
    """Load or compile what the ops call."""
    values = [value for op in ops for value in vars(sys.modules[op.run.__module__]).values()]
    entries = dict.fromkeys(value for value in values if isinstance(value, Entry))
    with begun(*entries):
        for entry in entries:
            entry.prepare(progress)


def verified(
    op: Op, cases: list[tuple[str, Mapping[str, Any]]], progress: Progress = silent
) -> Iterator[tuple[str, Mapping[str, Any], Verdict]]:
    """Cases of an op with what became of them, each as it is there: (label, inputs, verdict)."""
    for i, (label, inputs) in enumerate(cases):
        progress(op.name, i, len(cases))
        yield label, inputs, verify(op, inputs)
    progress(op.name, 1, 1)


def measure_kernels(ops: list[Op], progress: Progress = silent) -> Iterator[KernelResult]:
    """All cases of all ops, each result as it is there; first the declared cases, then the large ones."""
    for op in ops:
        cases = op.cases(np.random.default_rng(0)) + op.large(np.random.default_rng(0))
        for label, inputs, verdict in verified(op, cases, progress):
            bytes_, operations = op.work(inputs)
            with np.errstate(all="ignore"):
                seconds, numpy_s = _seconds(partial(op.run, **inputs)), _seconds(partial(op.reference, **inputs))
            yield KernelResult(
                op.name, label, verdict.passed, verdict.error, verdict.allowed, bytes_, operations, seconds, numpy_s
            )


def _seconds(call: Callable[[], object]) -> float:
    """The median of the repetitions."""
    times: list[float] = []
    while len(times) < LEAST or sum(times) < TIMED_S:
        begun_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun_s)
    return sorted(times)[len(times) // 2]
