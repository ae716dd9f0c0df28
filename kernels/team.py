"""A team of threads that run one function together: each takes the slice of its index, and waits at barriers.

Nothing here starts a thread (engine/team.py does); these are the parts that compiled code needs. A barrier is one
atomic counter: a thread adds itself and waits until all of its round have come. It waits first in a short spin (a
barrier is usually less than a microsecond away), then gives its time slice away, so that a busy machine is not made
busier, and in the end sleeps.
"""

import numpy as np
from numba.core import types

from tfm.kernels.jit import jit
from tfm.kernels.records import TEAM_ARRIVED, TEAM_PARKED, TEAM_STEP
from tfm.kernels.simd import atomic_add, atomic_load, atomic_store, atomic_swap, pause

SPINS = 2000  # about 40 us; far longer than any imbalance between threads that all run
YIELDS = 200
NAP_US = 50
IDLE_SPINS = 20000  # between steps: about as long as sampling and detokenising take

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

RUNNING, PARKED = 0, 1


@jit
def wait_a_little(tries):
    """Spend a moment that grows with the number of tries: spin, yield, nap."""
    if tries < SPINS:
        pause()
    elif tries < SPINS + YIELDS:
        sched_yield()
    else:
        usleep(np.uint32(NAP_US))


@jit
def barrier(me):
    """Wait until every thread of the team has come here."""
    if me.threads == 1:
        return
    me.episode += 1
    target = me.episode * me.threads
    atomic_add(me.team + TEAM_ARRIVED, 1)
    tries = 0
    while atomic_load(me.team + TEAM_ARRIVED) < target:
        wait_a_little(tries)
        tries += 1


@jit
def share(count, me):
    """The slice first, last of `count` things that this thread takes."""
    return count * me.index // me.threads, count * (me.index + 1) // me.threads


@jit
def next_step(me):
    """Wait for the next step: True when there is one; False when there was none for a while: this thread is parked.

    Then it must return.

    The thread that gives out steps first counts TEAM_STEP up and then looks for parked helpers (`publish`); a helper
    first parks and then looks at TEAM_STEP again. So one of them sees the other, and no step is missed.
    """
    parked = me.team + TEAM_PARKED + 64 * me.index
    for _ in range(IDLE_SPINS):
        if atomic_load(me.team + TEAM_STEP) != me.step:
            me.step += 1
            return True
        pause()
    atomic_store(parked, PARKED)
    if atomic_load(me.team + TEAM_STEP) == me.step or atomic_swap(parked, RUNNING) == RUNNING:
        return False
    me.step += 1
    return True


@jit
def publish(team, threads):
    """Give out the next step; the number of helpers that are parked and must be woken by the caller."""
    atomic_add(team + TEAM_STEP, 1)
    asleep = 0
    for index in range(1, threads):
        asleep += atomic_swap(team + TEAM_PARKED + 64 * index, RUNNING)
    return asleep
