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

READ, READ_SIDE_BY_SIDE, FLOATS, NIBBLES, OCTETS = (
    Entry(f"tfm.kernels.roofline:{name}", "iii")
    for name in ("read", "read_side_by_side", "floats", "nibbles", "octets")
)
READS = (READ, READ_SIDE_BY_SIDE)
"""The loops that read memory: which is faster differs between processors, and that one counts."""
PEAKS = {"f32": FLOATS, "bf16": FLOATS, "f16": FLOATS, "q8": OCTETS, "q4": NIBBLES}
"""The loop of multiply-adds of each weight format."""

PASSES = 12
CHOOSING = 6  # passes of each loop that reads, to find the faster
READ_BYTES = 512_000_000  # at least 4 times the last cache
ROUNDS = 8_000_000  # of a multiply loop: 30 ms. In 4 ms one thread was often done before the other had begun
PAGE = 4096


@dataclass(frozen=True)
class Machine:
    """Bytes a second from memory, and multiply-adds a second by weight format, of `threads` threads together."""

    threads: int
    bytes_s: float
    macs_s: dict[str, float]


def prepare(progress: Progress | None = None) -> None:
    """Load or compile the loops."""
    for entry in (*READS, FLOATS, NIBBLES, OCTETS):
        entry.prepare(progress)


def measure_machine(threads: int) -> Machine:
    """What the loops say; about a second."""
    return Loops(threads).measure(PASSES)


class Loops:
    """The loops and the memory that they read, kept to be run again."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._reads, self._read_bytes = _reading(threads)
        self._fastest_read: Callable[[int], int] | None = None
        self._multiply = {entry: _multiplying(entry, threads) for entry in dict.fromkeys(PEAKS.values())}

    def measure(self, passes: int) -> Machine:
        """Take the time of the loops, in turn, so that a quiet moment serves all of them."""
        together = Barrier(self._threads)
        bytes_s, macs_s = 0.0, dict.fromkeys(self._multiply, 0.0)
        with ThreadPoolExecutor(self._threads) as pool:
            for _ in range(passes):
                for read in self._reads:
                    bytes_s = max(bytes_s, self._read_bytes / _seconds(pool, together, read)[0])
                for entry, run in self._multiply.items():
                    seconds, macs = _seconds(pool, together, run)
                    macs_s[entry] = max(macs_s[entry], macs / seconds)
        return Machine(self._threads, bytes_s, {format: macs_s[entry] for format, entry in PEAKS.items()})

    def read_seconds(self, size: float) -> float:
        """Seconds to read `size` bytes, the same memory over and over: a measure of work that reads as much."""
        times = max(1, round(size / self._read_bytes))
        together = Barrier(self._threads)
        with ThreadPoolExecutor(self._threads) as pool:
            if self._fastest_read is None:
                passes = [min(_seconds(pool, together, read)[0] for _ in range(CHOOSING)) for read in self._reads]
                self._fastest_read = self._reads[int(np.argmin(passes))]
            read = self._fastest_read
            seconds, _ = _seconds(pool, together, lambda i: sum(read(i) for _ in range(times)))
        return seconds * size / (times * self._read_bytes)


def _reading(threads: int) -> tuple[list[Callable[[int], int]], int]:
    """What thread i may do to read its part of memory, and the bytes of all parts."""
    size = max(READ_BYTES, 4 * (last_cache_bytes() or 0))
    free = available_memory()
    size = (size if free is None else min(size, free // 4)) // threads // PAGE * PAGE
    memory = aligned_empty(size * threads)
    memory.view(np.float32)[:] = 1  # pages that nobody wrote to are all one page of zeros
    out = [aligned_empty(PAGE) for _ in range(threads)]

    def reading(entry: Entry) -> Callable[[int], int]:
        return lambda i: entry(memory.ctypes.data + i * size, size // 64, out[i].ctypes.data)

    return [reading(entry) for entry in READS], size * threads


def _multiplying(entry: Entry, threads: int) -> Callable[[int], int]:
    """What thread i does to multiply and add; it gives how often."""
    weights, out = ([aligned_empty(PAGE) for _ in range(threads)] for _ in range(2))
    rng = np.random.default_rng(0)
    for array in weights + out:  # as float32 about 1e-3, so that nothing overflows; as int8 anything
        array.view(np.float32)[:] = 1e-3 * rng.random(PAGE // 4, np.float32)
    return lambda i: entry(weights[i].ctypes.data, ROUNDS, out[i].ctypes.data)


def _seconds(pool: ThreadPoolExecutor, together: Barrier, run: Callable[[int], int]) -> tuple[float, int]:
    """Seconds of run(0) .. run(threads - 1) side by side, first start to last end; the sum of what they give."""

    def timed(i: int) -> tuple[int, int, int]:
        together.wait()
        begun_ns = time.perf_counter_ns()
        given = run(i)
        return begun_ns, time.perf_counter_ns(), given

    begins, ends, given = zip(*pool.map(timed, range(together.parties)), strict=True)
    return (max(ends) - min(begins)) / 1e9, sum(given)
