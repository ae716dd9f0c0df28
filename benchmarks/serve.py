"""A worker's side of a benchmark: a JSON object a line, in and out. So a model is loaded once and runs take turns.

The worker first says what it is. Then each request {"ids": [...], "rows": n} runs the ids through an empty context,
n at a time, and is answered with {"seconds", "top", "idle_s", "idle_cpu_s"}: the time it took; the likeliest next
token; how long the worker had waited for the request, and how much processor time its threads used meanwhile. That
slows the other side and should be nothing.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence


def serve(about: Mapping[str, object], run: Callable[[Sequence[int], int], tuple[float, int]]) -> None:
    """Answer requests until stdin ends. run(ids, rows) gives the seconds and the likeliest next token."""
    print(json.dumps(about), flush=True)
    since, cpu_since = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle_s, idle_cpu_s = time.perf_counter() - since, time.process_time() - cpu_since
        request = json.loads(line)
        seconds, top = run(request["ids"], request["rows"])
        print(json.dumps({"seconds": seconds, "top": top, "idle_s": idle_s, "idle_cpu_s": idle_cpu_s}), flush=True)
        since, cpu_since = time.perf_counter(), time.process_time()
