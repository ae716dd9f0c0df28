"""A worker's side of a benchmark: a JSON object a line, in and out. So a model is loaded once and runs take turns.

The worker gets its settings as one JSON object and first says what it is. Then each request is

    ids      token ids; the first `depth` of them are in the context before the time is taken
    rows     how many of the others are run at once: 1 decodes
    batch    sequences that do this side by side
    limits   what the machine can do at this moment (worker_limits.py), for tfm's worker
    bytes    to be read from memory, for worker_limits.py

and is answered with {"seconds", "top", "idle_s", "idle_cpu_s"}: the time it took; the likeliest next token; how long
the worker had waited for the request, and how much processor time its threads used meanwhile. That slows the other
sides and should be nothing.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    ids: list[int]
    rows: int
    depth: int = 0
    batch: int = 1
    limits: dict[str, Any] | None = None
    bytes: float = 0.0

    @property
    def new(self) -> list[int]:
        """The ids whose time is taken."""
        return self.ids[self.depth :]

    def parts(self) -> list[list[int]]:
        """The new ids, `rows` at a time."""
        return [self.new[first : first + self.rows] for first in range(0, len(self.new), self.rows)]


def settings() -> dict[str, Any]:
    """The worker's only argument."""
    found: dict[str, Any] = json.loads(sys.argv[1])
    return found


def serve(about: Mapping[str, object], run: Callable[[Request], Mapping[str, object]]) -> None:
    """Answer requests until stdin ends. run gives at least "seconds" and "top"."""
    print(json.dumps(about), flush=True)
    since, cpu_since = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle = {"idle_s": time.perf_counter() - since, "idle_cpu_s": time.process_time() - cpu_since}
        print(json.dumps({**run(Request(**json.loads(line))), **idle}), flush=True)
        since, cpu_since = time.perf_counter(), time.process_time()
