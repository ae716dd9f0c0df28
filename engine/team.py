"""The threads that run a step together: started once, asleep when there is nothing to do."""

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tfm.engine import records
from tfm.engine.busy import Busy
from tfm.kernels.jit import Entry, Progress
from tfm.kernels.logits import SUM_EXPONENTIALS
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import ACTIVATIONS, GROUP, TEAM_BYTES, THREAD

ATTEND = Entry("tfm.kernels.attention:attend_part", 14 * "i")
MULTIPLY = Entry("tfm.kernels.matmul:multiply_part", 10 * "i")
FOUND = Entry("tfm.kernels.team:found", "i")
DISSOLVE = Entry("tfm.kernels.team:dissolve", "i")
RUN = Entry("tfm.engine.forward:run", "i", (records.__file__,), (MULTIPLY, ATTEND, SUM_EXPONENTIALS, FOUND, DISSOLVE))

Result = TypeVar("Result")


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

    columns is the widest row that a matmul reads, scratch_bytes what attention and matmuls need. The helpers are daemon
    threads that never leave compiled code: between steps they spin for a moment and then sleep. They hold no reference
    to the team, which ends them when it goes. A step is prepared and run by `step`; what else must not change during
    one holds `lock`.
    """

    def __init__(
        self, threads: int, work: int, columns: int, scratch_bytes: int, alone_when_busy: bool = True
    ) -> None:  # fmt: skip
        self.threads, self.lock, self._alone_when_busy = threads, threading.RLock(), alone_when_busy and threads > 1
        self._is_stepping = self._ends_after_step = False
        self._busy = Busy()
        self.steps_alone = 0  # of all so far
        self._sizes = work, columns, scratch_bytes
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_forked, weakref.ref(self)))

    def _start(self) -> None:
        work, columns, scratch_bytes = self._sizes
        shared = aligned_empty(TEAM_BYTES)
        shared[:] = 0
        team = shared.ctypes.data
        FOUND(team)
        self._records = np.zeros(self.threads, THREAD)
        self._address, self._memory = self._records.ctypes.data, [shared]
        self._threads_of = self._records["threads"]  # to set it through the record would take longer
        for index in range(self.threads):
            acts, memory = activation_rows(records.FEW_ROWS, columns)
            scratch = aligned_empty(scratch_bytes)
            clock = aligned_empty(16)
            self._memory += [acts, memory, scratch, clock]
            addresses = acts.ctypes.data, scratch.ctypes.data
            self._records[index] = (index, self.threads, team, 0, 0, work, *addresses, 0, 0, clock.ctypes.data)
        self._end = weakref.finalize(self, DISSOLVE, team)  # before there are helpers: not all may get to begin
        for index in range(1, self.threads):
            helper = threading.Thread(target=_help, args=(self._records, index, self._memory), daemon=True)
            helper.start()

    @staticmethod
    def prepare(progress: Progress | None = None) -> None:
        """Load or compile what the team runs."""
        RUN.prepare(progress)

    def run(self, rows: int) -> None:
        """Run the step, of so many rows; back when it is done. It is one call, so that no signal can come in between.

        Where other processes keep the processors busy, this thread runs some steps alone.
        """
        if not self._end.alive:  # closed, or the child of a fork
            self._start()
        is_alone = self._busy.is_now()
        self._threads_of[0] = 1 if is_alone else self.threads
        begun_ns, used_ns = time.monotonic_ns(), time.thread_time_ns()
        waited_ns = RUN(self._address)
        taken_ns, used_ns = time.monotonic_ns() - begun_ns, time.thread_time_ns() - used_ns
        if is_alone:
            self.steps_alone += 1
            self._busy.note_alone(rows, taken_ns)
        elif self._alone_when_busy:
            self._busy.note_together(rows, taken_ns, waited_ns + taken_ns - used_ns)

    def step(self, prepare_and_run: Callable[..., Result], *arguments: Any) -> Result:
        """Call it, for one Python thread at a time.

        A signal handler that comes meanwhile cannot run a step, which raises RuntimeError, and helpers that it ends
        stay until the step has ended. (No context manager: Ctrl-C may come between its first line and the `with`, and
        the lock would stay.)
        """
        with self.lock:
            if self._is_stepping:  # the lock lets its own thread in
                raise RuntimeError("a signal handler cannot run a step: the step that it interrupted has not ended")
            try:
                self._is_stepping = True
                return prepare_and_run(*arguments)
            finally:
                self._is_stepping = False
                if self._ends_after_step:
                    self.close()

    def close(self) -> None:
        """End the helpers, after the step that a signal handler has interrupted. A later step starts new ones."""
        with self.lock:
            self._ends_after_step = self._is_stepping
            if not self._is_stepping:
                self._end()


def _forked(team_ref: "weakref.ref[Team]") -> None:
    """In a child process: it has the memory, but neither the helpers nor whoever held the lock."""
    team = team_ref()
    if team is not None:
        team.lock = threading.RLock()
        team._is_stepping = team._ends_after_step = False
        team._end.detach()


def _help(threads: np.ndarray[Any, np.dtype[Any]], index: int, kept: Any) -> None:
    """A helper's life; kept is the memory that it works in."""
    RUN(threads[index:].ctypes.data)
