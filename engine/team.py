"""The threads that run a step together: started once, asleep when there is nothing to do."""

import os
import threading
import weakref
from typing import Any

import numpy as np

from tfm.engine import records
from tfm.kernels.jit import Entry, Progress
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import ACTIVATIONS, GROUP, TEAM_PARKED, THREAD

RUN = Entry("tfm.engine.forward:run", "i", (records.__file__,))
PUBLISH = Entry("tfm.kernels.team:publish", "ii")


def activation_rows(rows: int, columns: int) -> tuple[np.ndarray[Any, np.dtype[Any]], Any]:
    """An ACTIVATIONS record with room for so many rows and columns, and the memory that it points into."""
    record = np.zeros(1, ACTIVATIONS)
    memory = aligned_empty(rows * activation_bytes(columns))
    address = memory.ctypes.data
    for name, stride in _activation_strides(columns).items():
        record[name] = address
        record["stride" if name == "values" else f"{name}_stride"] = stride
        address += rows * stride
    return record, memory


def activation_bytes(columns: int) -> int:
    """Bytes of a row of activations: float32, int8, and 16 bytes for each group of 32."""
    return sum(_activation_strides(columns).values())


def _activation_strides(columns: int) -> dict[str, int]:
    groups = -(-columns // GROUP)
    return {"values": 4 * GROUP * groups, "quantized": GROUP * groups, "groups": 16 * groups}


class Team:
    """`threads` threads, this one among them, that run the step at address `work`.

    columns is the widest row that a matmul reads, scratch_bytes what attention needs. The helpers are daemon threads:
    between steps they spin for a moment, and then sleep on a semaphore; they hold no reference to the team, which ends
    them when it goes.
    """

    def __init__(self, threads: int, work: int, columns: int, scratch_bytes: int) -> None:
        self.threads = threads
        self._sizes = work, columns, scratch_bytes
        self._start()

    def _start(self) -> None:
        work, columns, scratch_bytes = self._sizes
        self._pid = os.getpid()
        self._shared = aligned_empty(TEAM_PARKED + 64 * self.threads)
        self._shared[:] = 0
        self._records = np.zeros(self.threads, THREAD)
        self._memory = [aligned_empty(scratch_bytes) for _ in range(self.threads)]
        for index in range(self.threads):
            acts, memory = activation_rows(records.FEW_ROWS, columns)
            self._memory += [acts, memory]
            self._records[index] = (
                index, self.threads, self._shared.ctypes.data, 0, 0, work,
                acts.ctypes.data, self._memory[index].ctypes.data,
            )  # fmt: skip
        self._wake = threading.Semaphore(0)
        self._closing = threading.Event()
        kept = self._records, self._memory, self._shared
        for index in range(1, self.threads):
            # Helpers begin as parked: they wait for the semaphore first.
            self._shared.view(np.int64)[(TEAM_PARKED + 64 * index) // 8] = 1
            address = self._records[index:].ctypes.data
            threading.Thread(target=_help, args=(address, self._wake, self._closing, kept), daemon=True).start()
        self._end = weakref.finalize(self, _close, self._wake, self._closing, self.threads)

    @staticmethod
    def prepare(progress: Progress | None = None) -> None:
        """Load or compile what the team runs."""
        for entry in (RUN, PUBLISH):
            entry.prepare(progress)

    def run(self) -> None:
        """Run the step; back when all threads have done their part."""
        if self._pid != os.getpid():  # a forked child has the memory but not the threads
            self._end.detach()
            self._start()
        if self.threads > 1:
            asleep = PUBLISH(self._shared.ctypes.data, self.threads)
            if asleep:
                self._wake.release(asleep)
        RUN(self._records.ctypes.data)

    def close(self) -> None:
        self._end()


def _help(address: int, wake: threading.Semaphore, closing: threading.Event, kept: Any) -> None:
    """A helper's life: kept is the memory that it works in."""
    while True:
        wake.acquire()
        if closing.is_set():
            return
        RUN(address)


def _close(wake: threading.Semaphore, closing: threading.Event, threads: int) -> None:
    closing.set()
    wake.release(threads)
