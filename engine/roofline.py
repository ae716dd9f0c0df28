"""What this machine can do at most with so many threads: measured, as the measure of everything else.

Bandwidth is that of reading memory far larger than the last cache, all threads together, each its own part; a peak is
that of the multiply-adds that a weight format uses, in registers. Each is the best of several passes: a limit is what
the machine can do, not what it did while something else ran.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import numpy as np

from tfm.engine.machine import available_memory, last_cache_bytes
from tfm.engine.progress import Progress
from tfm.kernels.jit import Entry
from tfm.kernels.packing import aligned_empty

READ, FLOATS, NIBBLES, OCTETS = (
    Entry(f"tfm.kernels.roofline:{name}", "iii") for name in ("read", "floats", "nibbles", "octets")
)
PEAKS = {"f32": FLOATS, "bf16": FLOATS, "f16": FLOATS, "q8": OCTETS, "q4": NIBBLES}
"""The loop of multiply-adds of each weight format."""

PASSES = 10
READ_BYTES = 512_000_000  # at least 4 times the last cache
ROUNDS = 1_000_000  # of a multiply loop: some milliseconds
PAGE = 4096


@dataclass(frozen=True)
class Machine:
    """Bytes a second from memory, and multiply-adds a second by weight format, of `threads` threads together."""

    threads: int
    bytes_s: float
    macs_s: dict[str, float]


def prepare(progress: Progress | None = None) -> None:
    """Load or compile the loops."""
    for entry in (READ, FLOATS, NIBBLES, OCTETS):
        entry.prepare(progress)


def measure_machine(threads: int) -> Machine:
    """Take the time of the loops; about a second."""
    peaks = {entry: _peak(entry, threads) for entry in dict.fromkeys(PEAKS.values())}
    return Machine(threads, _bandwidth(threads), {format: peaks[entry] for format, entry in PEAKS.items()})


def _bandwidth(threads: int) -> float:
    size = max(READ_BYTES, 4 * (last_cache_bytes() or 0))
    free = available_memory()
    size = (size if free is None else min(size, free // 4)) // threads // PAGE * PAGE
    memory = aligned_empty(size * threads)
    memory.view(np.float32)[:] = 1  # pages that nobody wrote to are all one page of zeros
    out = [aligned_empty(PAGE) for _ in range(threads)]
    base = memory.ctypes.data
    return size * threads / _fastest(threads, lambda i: READ(base + i * size, size // 64, out[i].ctypes.data))


def _peak(entry: Entry, threads: int) -> float:
    weights = [aligned_empty(PAGE) for _ in range(threads)]
    out = [aligned_empty(PAGE) for _ in range(threads)]
    rng = np.random.default_rng(0)
    for array in weights + out:  # as float32 about 1e-3, so that nothing overflows; as int8 anything
        array.view(np.float32)[:] = 1e-3 * rng.random(PAGE // 4, np.float32)
    addresses = [(w.ctypes.data, ROUNDS, o.ctypes.data) for w, o in zip(weights, out, strict=True)]
    macs = [0] * threads

    def run(i: int) -> None:
        macs[i] = entry(*addresses[i])

    seconds = _fastest(threads, run)
    return sum(macs) / seconds


def _fastest(threads: int, run: Callable[[int], object]) -> float:
    """Seconds of the fastest pass of run(0) .. run(threads - 1) side by side, from the first start to the last end."""
    together = Barrier(threads)

    def timed(i: int) -> tuple[int, int]:
        together.wait()
        begun_ns = time.perf_counter_ns()
        run(i)
        return begun_ns, time.perf_counter_ns()

    passes_ns = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PASSES):
            begins, ends = zip(*pool.map(timed, range(threads)), strict=True)
            passes_ns.append(int(max(ends) - min(begins)))
    return min(passes_ns) / 1e9
