"""What every kernel op declares, so that tests and benchmarks find ops and cases by themselves.

An op is a Python function on NumPy arrays with a NumPy reference of the same signature. A case names its inputs;
`verify` runs the kernel, and the reference in float32 and in float64, and compares.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FEW_RESULTS = 500
"""With so few, the largest error is chance, and twice NumPy's no measure: `Op.rounding` may allow what is explained."""


@dataclass(frozen=True)
class Op:
    """run(**inputs) is the kernel, reference(**inputs) the same in NumPy, in the precision of its inputs.

    cases(rng) gives (label, inputs); inputs are arrays (float32, or the bits of a format) and plain numbers.
    work(inputs) gives (bytes read and written, arithmetic operations) for the benchmark. rounding(inputs) is an error
    to be allowed at any rate, for an op whose terms cancel: NumPy may be lucky where a result is small. large(rng) are
    cases of the sizes of real models, to be timed.
    """

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Callable[[np.random.Generator], list[tuple[str, Mapping[str, Any]]]]
    work: Callable[[Mapping[str, Any]], tuple[int, int]] = field(default=lambda inputs: (0, 0))
    rounding: Callable[[Mapping[str, Any]], float] = field(default=lambda inputs: 0.0)
    large: Callable[[np.random.Generator], list[tuple[str, Mapping[str, Any]]]] = field(default=lambda rng: [])


@dataclass(frozen=True)
class Verdict:
    """The largest distances from the float64 reference, of the kernel and of plain NumPy, and what is allowed."""

    error: float
    numpy_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def find_ops() -> list[Op]:
    """The ops of every module of this package, by name."""
    package = importlib.import_module(__package__)
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{__package__}.")]
    ops = [op for name in names for op in getattr(importlib.import_module(name), "OPS", ())]
    return sorted(ops, key=lambda op: op.name)


def verify(op: Op, inputs: Mapping[str, Any]) -> Verdict:
    """Run a case. Allowed is twice NumPy's error, at least one unit in the last place of the largest result.

    An element that is not finite in the reference must be the same in the kernel; a shape or a type that differs, or a
    result that should be finite and is not, is an infinite error.
    """
    wide = {name: _widened(value) for name, value in inputs.items()}
    with np.errstate(all="ignore"):
        exact = np.asarray(op.reference(**wide))
        plain = np.asarray(op.reference(**inputs))
        rounded = exact.astype(plain.dtype)
    finite = np.isfinite(rounded)
    scale = np.abs(rounded[finite]).max(initial=0)
    ulp = float(np.spacing(scale)) if plain.dtype.kind == "f" else 0.0

    def error(found: Any) -> float:
        if found.shape != exact.shape or found.dtype != plain.dtype:
            return float("inf")
        if not np.array_equal(found[~finite], rounded[~finite], equal_nan=True):
            return float("inf")
        distance = np.abs(found[finite].astype(np.float64) - exact[finite]).max(initial=0.0)
        return float("inf") if np.isnan(distance) else float(distance)

    numpy_error = error(plain)
    # Where float32 NumPy overflows it sets no measure.
    allowed = max(2 * numpy_error if np.isfinite(numpy_error) else 0.0, ulp, op.rounding(inputs))
    return Verdict(error(op.run(**inputs)), numpy_error, allowed)


def _widened(value: Any) -> Any:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value
