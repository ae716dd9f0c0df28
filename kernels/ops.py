"""What every kernel op declares, so that tests and benchmarks find ops and cases by themselves.

An op is a Python function on NumPy arrays with a NumPy reference of the same signature. A case names its inputs; `verify` runs both in float32
and float64 and compares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Op:
    """run(**inputs) is the kernel, reference(**inputs) the same in NumPy, in the precision of its inputs.

    cases(rng) gives (label, inputs); inputs are arrays (float32, or the bits of a format) and plain numbers. work(inputs) gives (bytes read and
    written, arithmetic operations) for the benchmark.
    """

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Callable[[np.random.Generator], list[tuple[str, Mapping[str, Any]]]]
    work: Callable[[Mapping[str, Any]], tuple[int, int]] = field(default=lambda inputs: (0, 0))
