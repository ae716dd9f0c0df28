"""Whether other processes keep the processors busy: helpers come late then, and one thread alone may be faster."""

import time
from collections.abc import Callable

MOST_PATIENCE = 256  # with 64, and a busy loop on each of two processors, decoding was 4 % slower than with one thread
LEAST_ALONE_NS = 40_000_000  # some time slices: what one step takes is all of a processor's time, or none of it
MOST_ALONE_NS = 4_000_000_000  # a pass of a prompt may lose a second; the machine may be quiet soon
OLD_NS = 4_000_000_000  # a context may be another by then, or a machine more or less busy
ENOUGH_AHEAD = 4


class Busy:
    """Decides which steps one thread runs alone, by what steps took with the team and without.

    A step of the team is held up where its first thread waited or did not run for more than half of the time. What such
    a step took more than one thread alone takes is lost; what others took less is won. Where more is lost than won, the
    next steps run alone, for `patience` times as long as what was lost, and patience grows. What was won brings it down
    again, so that a quiet machine is soon used in full, and one that stays busy loses less than a hundredth of its time
    to tries (more where a step takes a second). Steps that were not held up never count as lost, although in a longer
    context all take more time. Where the team is held up and yet ahead, some steps run alone now and then: what one
    takes may be less than it was.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.patience = 1
        self._clock = clock
        self._alone_ns: dict[int, float] = {}  # of a step of so many rows, the mean of when steps last ran alone
        self._counts: dict[int, int] = {}  # of steps in that mean
        self._ahead_ns = 0.0  # won since the team runs again, less what was lost
        self._until_ns = 0
        self._alone_at_ns = 0  # when a step last ran alone

    def is_now(self) -> bool:
        """Whether the next step is to run alone."""
        return self._clock() < self._until_ns

    def note_alone(self, rows: int, taken_ns: int) -> None:
        """After a step that ran alone."""
        self._alone_at_ns = self._clock()
        count = self._counts[rows] = self._counts.get(rows, 0) + 1
        mean_ns = self._alone_ns.get(rows, 0.0)
        self._alone_ns[rows] = mean_ns + (taken_ns - mean_ns) / count

    def note_together(self, rows: int, taken_ns: int, held_up_ns: int) -> None:
        """After a step of the team, of which held_up_ns were waiting for helpers, or for a processor."""
        is_held_up = 2 * held_up_ns > taken_ns
        alone_ns = self._alone_ns.get(rows)
        if alone_ns is None:
            if is_held_up:  # it is not known yet whether anything was lost
                self._run_alone(LEAST_ALONE_NS)
            return
        enough_ns = ENOUGH_AHEAD * alone_ns  # what was won by steps of more rows is not spent on this
        if is_held_up:
            self._ahead_ns = min(min(self._ahead_ns, enough_ns) + alone_ns - taken_ns, enough_ns)
            if self._ahead_ns < 0:
                self._run_alone(self.patience * round(-self._ahead_ns))
                self.patience = min(4 * self.patience, MOST_PATIENCE)
            elif self._clock() - self._alone_at_ns > OLD_NS:
                self._run_alone(LEAST_ALONE_NS)
        else:
            self._ahead_ns += max(alone_ns - taken_ns, 0.0)
            if self._ahead_ns > enough_ns:
                self._ahead_ns = enough_ns if self.patience == 1 else 0.0
                self.patience = max(1, self.patience // 2)

    def _run_alone(self, for_ns: int) -> None:
        self._until_ns = self._clock() + min(max(for_ns, LEAST_ALONE_NS), MOST_ALONE_NS)
        self._ahead_ns = 0.0
        self._counts.clear()
