"""A team of threads that run one function together: each takes the slice of its index, and waits at barriers.

Nothing here starts a thread (engine/team.py does); these are the parts that compiled code needs. A barrier is one
atomic counter: a thread adds itself and waits until all of its round have come. It waits first in a spin (a barrier is
usually less than a microsecond away), and then in short naps, so that a busy machine is not made busier.
"""

import time

import numpy as np
from numba.core import types

from tfm.kernels.jit import jit
from tfm.kernels.records import TEAM_ARRIVED, TEAM_CONDITION, TEAM_MUTEX, TEAM_SLEEPERS, TEAM_STEP, TEAM_STOP
from tfm.kernels.simd import atomic_add, atomic_load, atomic_store, pause, peek_i64

# With a busy process on each of two processors, decoding made 249 tok/s with these figures, 220 with one thread, and 90
# with 2,000 spins and then sched_yield, which gives the rest of the time slice away to whoever is busy.
SPINS = 20000  # half a millisecond, in the first wait of a step
QUICK_SPINS = 200  # 5 us: so long a wait is no sign of anything
NAP_US = 50
IDLE_SPINS = 20000  # between steps: about as long as sampling and detokenising take

CLOCK = time.CLOCK_MONOTONIC

ADDRESS, STATUS = types.int64, types.int32
usleep = types.ExternalFunction("usleep", STATUS(types.uint32))
clock_gettime = types.ExternalFunction("clock_gettime", STATUS(types.int32, ADDRESS))
pthread_mutex_init = types.ExternalFunction("pthread_mutex_init", STATUS(ADDRESS, ADDRESS))
pthread_mutex_lock = types.ExternalFunction("pthread_mutex_lock", STATUS(ADDRESS))
pthread_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", STATUS(ADDRESS))
pthread_cond_init = types.ExternalFunction("pthread_cond_init", STATUS(ADDRESS, ADDRESS))
pthread_cond_wait = types.ExternalFunction("pthread_cond_wait", STATUS(ADDRESS, ADDRESS))
pthread_cond_broadcast = types.ExternalFunction("pthread_cond_broadcast", STATUS(ADDRESS))


@jit
def now_ns(me):
    """The time of a clock that only goes forward."""
    clock_gettime(np.int32(CLOCK), me.clock)
    return peek_i64(me.clock) * 1_000_000_000 + peek_i64(me.clock + 8)


@jit
def barrier(me):
    """Wait until every thread of the team has come here. A wait that is not short is added to me.waited_ns.

    A wait that came to naps halves the spins of those after it, until the step ends: where two threads of a team share
    a processor, who spins keeps the other from coming. A step took 70 ms there and takes 13.
    """
    if me.threads == 1:
        return
    me.episode += 1
    target = me.episode * me.threads
    atomic_add(me.team + TEAM_ARRIVED, 1)
    tries = 0
    while atomic_load(me.team + TEAM_ARRIVED) < target and tries < QUICK_SPINS:
        pause()
        tries += 1
    if tries < QUICK_SPINS:
        return
    begun_ns, spins = now_ns(me), me.spins
    while atomic_load(me.team + TEAM_ARRIVED) < target:
        if tries < spins:
            pause()
        else:
            me.spins = spins // 2
            usleep(np.uint32(NAP_US))
        tries += 1
    me.waited_ns += now_ns(me) - begun_ns


@jit
def begin_step(me):
    """What a thread forgets of the step before."""
    me.waited_ns, me.spins = 0, SPINS


@jit
def share(count, me):
    """The slice first, last of `count` things that this thread takes."""
    return count * me.index // me.threads, count * (me.index + 1) // me.threads


@jit
def next_step(me):
    """Wait for the next step: True when there is one, False when the team ends.

    A helper spins for a while and then sleeps. It first counts itself among the sleepers and then looks at TEAM_STEP
    again; who gives out a step first counts TEAM_STEP up and then looks for sleepers. So one of them sees the other,
    and no step is missed.
    """
    team = me.team
    me.step += 1
    tries = 0
    while tries < IDLE_SPINS and atomic_load(team + TEAM_STEP) < me.step:
        pause()
        tries += 1
    if atomic_load(team + TEAM_STEP) < me.step:
        pthread_mutex_lock(team + TEAM_MUTEX)
        atomic_add(team + TEAM_SLEEPERS, 1)
        while atomic_load(team + TEAM_STEP) < me.step:
            pthread_cond_wait(team + TEAM_CONDITION, team + TEAM_MUTEX)
        atomic_add(team + TEAM_SLEEPERS, -1)
        pthread_mutex_unlock(team + TEAM_MUTEX)
    begin_step(me)
    return atomic_load(team + TEAM_STOP) == 0


@jit
def publish(team):
    """Give out the next step to the helpers, and wake those that sleep."""
    atomic_add(team + TEAM_STEP, 1)
    if atomic_load(team + TEAM_SLEEPERS) != 0:
        pthread_mutex_lock(team + TEAM_MUTEX)
        pthread_cond_broadcast(team + TEAM_CONDITION)
        pthread_mutex_unlock(team + TEAM_MUTEX)


@jit
def found(team):
    """Make the lock of a team whose memory is all zeros."""
    pthread_mutex_init(team + TEAM_MUTEX, 0)
    pthread_cond_init(team + TEAM_CONDITION, 0)


@jit
def dissolve(team):
    """End the helpers."""
    atomic_store(team + TEAM_STOP, 1)
    publish(team)
