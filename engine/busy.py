"""Whether other processes keep the processors busy: helpers come late then, and one thread alone may be faster."""

import time

MOST_PATIENCE = 256  # with 64, and a busy loop on each of two processors, decoding was 4 % slower than with one thread
FEWEST_ALONE = 8  # one step alone may be all of the processor's time or have none of it
ENOUGH_AHEAD = 4


class Busy:
    """Decides which steps one thread runs alone, by what steps took with the team and without.

    A step of the team is held up where its first thread waited or did not run for more than half of the time. What such
    a step took more than one thread alone takes is lost; what others took less is won. Where more is lost than won, the
    next steps run alone, for `patience` times as long as what was lost, and patience grows. What was won brings it down
    again, so that a quiet machine is soon used in full, and one that stays busy loses less than a hundredth of its time
    to tries. Steps that were not held up never count as lost, although in a longer context all take more time.
    """

    def __init__(self) -> None:
        self.patience = 1
        self._alone_ns: dict[int, float] = {}  # of a step of so many rows, when it last ran alone
        self._ahead_ns = 0.0  # won since the team runs again, less what was lost
        self._until_ns = self._least = self._count = 0  # of steps alone: their end, how many at least and so far

    def is_now(self) -> bool:
        """Whether the next step is to run alone."""
        return self._count < self._least or time.monotonic_ns() < self._until_ns

    def note_alone(self, rows: int, taken_ns: int) -> None:
        """After a step that ran alone."""
        self._count += 1
        mean_ns = self._alone_ns.get(rows, 0.0) if self._count > 1 else 0.0
        self._alone_ns[rows] = mean_ns + (taken_ns - mean_ns) / self._count

    def note_together(self, rows: int, taken_ns: int, held_up_ns: int) -> None:
        """After a step of the team, of which held_up_ns were waiting for helpers, or for a processor."""
        alone_ns = self._alone_ns.get(rows, 0.0)
        if 2 * held_up_ns > taken_ns:
            self._ahead_ns += alone_ns - taken_ns
            if self._ahead_ns < 0:
                self._until_ns = time.monotonic_ns() - round(self.patience * self._ahead_ns)
                self._least, self._count, self._ahead_ns = min(self.patience, FEWEST_ALONE), 0, 0.0
                self.patience = min(4 * self.patience, MOST_PATIENCE)
        else:
            self._ahead_ns += max(alone_ns - taken_ns, 0.0)
            if self._ahead_ns > ENOUGH_AHEAD * alone_ns:
                self._ahead_ns = ENOUGH_AHEAD * alone_ns if self.patience == 1 else 0.0
                self.patience = max(1, self.patience // 2)
