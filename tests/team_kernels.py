"""Compiled functions that test_team.py has a team's threads run. `work` is the address of a JOB."""

from typing import Any

import numpy as np

from tfm.engine import forward
from tfm.engine.forward import share_values
from tfm.kernels.jit import Entry, jit
from tfm.kernels.kv_block import heads_at
from tfm.kernels.records import THREAD
from tfm.kernels.simd import atomic_add, pause, peek_i64, poke_i64, record_at
from tfm.kernels.team import barrier, begin_step, next_step, publish

MOST_THREADS = 8
# rounds: barriers of a step; delay: the most pauses before each; marks: int64 [2, MOST_THREADS], what threads wrote;
# wrong: marks that were not as they should be, and steps: steps that a thread has run, both counted by all.
JOB = np.dtype([(name, np.int64) for name in ("rounds", "delay", "marks", "wrong", "steps")])
WRONG, STEPS = (JOB.fields[name][1] for name in ("wrong", "steps"))  # type: ignore[index]

job_at, thread_at = record_at(JOB), record_at(THREAD)


@jit
def work_through(me: Any, work: int, seed: int) -> None:
    """Write a mark, wait, and look at everyone's: rounds times. Two sets: some write the next while others look."""
    job = job_at(work)
    random = seed
    for r in range(job.rounds):
        random = (random * 1103515245 + 12345) & 0x7FFFFFFF
        if job.delay != 0 and random & 1 != 0:
            for _ in range((random >> 8) % job.delay):
                pause()
        marks = job.marks + 8 * MOST_THREADS * (r % 2)
        stamp = me.episode * 1000003 + r
        poke_i64(marks + 8 * me.index, stamp)
        barrier(me)
        for t in range(me.threads):
            if peek_i64(marks + 8 * t) != stamp:
                atomic_add(work + WRONG, 1)
    atomic_add(work + STEPS, 1)
    barrier(me)


@jit
def run(thread: int) -> int:
    """As engine/forward.py's: thread 0 gives out one step and runs it, a helper runs all of them."""
    me = thread_at(thread)
    if me.index == 0:
        begin_step(me)
        me.step += 1
        if me.threads > 1:
            publish(me.team)
    while me.index == 0 or next_step(me):
        work_through(me, me.work, me.index * 7919 + me.step)
        if me.index == 0:
            break
    return me.waited_ns


RUN = Entry("team_kernels:run", "i")


@jit
def panels_of_values(heads: int, kv_type: int, thread: int, found: int) -> None:
    """forward.share_values for the addresses of its records; found: int64 [2]."""
    first, last = share_values(heads_at(heads), kv_type, thread_at(thread))
    poke_i64(found, first)
    poke_i64(found + 8, last)


PANELS_OF_VALUES = Entry("team_kernels:panels_of_values", "iiii", (forward.__file__,))
