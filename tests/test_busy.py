"""When one thread runs alone because other processes keep the processors busy; the clock is the tests' own."""

import pytest

from tfm.engine.busy import ENOUGH_AHEAD, LEAST_ALONE_NS, MOST_ALONE_NS, MOST_PATIENCE, Busy

NOW_NS = 1_000


def test_patience_with_busy_processors() -> None:
    """Guards a machine that stays busy, where each try of the team costs twenty steps alone: tries get rarer, and one
    that happens to be quick does not begin all over. And one that is quiet again: the next try comes soon."""
    busy, alone_ns, lost_ns, waits = Busy(lambda: NOW_NS), 100_000, 50_000_000, []
    assert not busy.is_now()
    busy.note_together(1, lost_ns, held_up_ns=lost_ns)  # nothing is known yet of a step alone
    busy.note_alone(1, alone_ns)
    for _ in range(6):
        taken_ns = alone_ns + lost_ns
        busy.note_together(1, taken_ns, held_up_ns=taken_ns)
        assert busy.is_now()
        waits.append((busy._until_ns - NOW_NS) / lost_ns)
    assert waits[:4] == [1, 4, 16, 64]
    assert waits[4:] == [MOST_ALONE_NS / lost_ns] * 2
    assert busy.patience == MOST_PATIENCE
    for _ in range(8 * (ENOUGH_AHEAD + 1) * 2):  # eight halvings; each of these steps wins half of one alone
        busy.note_together(1, alone_ns // 2, held_up_ns=0)
    assert busy.patience == 1


def test_slow_steps_that_nobody_held_up() -> None:
    """Guards a quiet machine: in a longer context steps take longer than one that ran alone some time ago, and a pass
    of a prompt was to run alone for that. What was won beforehand bears a step that was held up a little."""
    now = [0]
    busy = Busy(lambda: now[0])
    busy.note_together(1, 1000, held_up_ns=900)
    busy.note_alone(1, 1000)
    now[0] += 2 * LEAST_ALONE_NS
    for _ in range(100):
        busy.note_together(1, 5000, held_up_ns=2400)
        assert not busy.is_now()
    for _ in range(40):
        busy.note_together(1, 500, held_up_ns=0)
    busy.note_together(1, 4000, held_up_ns=3500)
    assert not busy.is_now()
    busy.note_together(1, 4000, held_up_ns=3500)
    assert busy.is_now()


def test_how_long_at_least_and_at_most() -> None:
    """Guards what is held against a try: one step alone may have been held up itself. And passes of a prompt where
    the machine was busy once: one that lost a second, or of whose kind nothing was known, made minutes run alone."""
    for taken_ns, patience, expected_ns in ((2000, 1, LEAST_ALONE_NS), (2 * 10**9, MOST_PATIENCE, MOST_ALONE_NS)):
        busy = Busy(lambda: NOW_NS)
        busy.patience = patience
        busy.note_alone(1, 1000)
        busy.note_together(1, taken_ns, held_up_ns=taken_ns)
        assert busy._until_ns - NOW_NS == expected_ns
        busy.note_together(512, 10**9, held_up_ns=10**9)
        assert busy._until_ns - NOW_NS == LEAST_ALONE_NS


@pytest.mark.parametrize(("first", "then"), [((20, 40), (3, 12)), ((15, 40), (6, 12)), ((60_000, 40), (3, 12))])
def test_what_a_step_alone_takes_is_renewed(first: tuple[int, int], then: tuple[int, int]) -> None:
    """Guards a machine that stays busy: after a long context, heavier load or a process that was stopped, what a step
    alone took once was held beside the team for ever, and every slow step of the team counted as won."""
    now = [0]
    busy = Busy(lambda: now[0])
    spent_ms = {True: 0.0, False: 0.0}
    for (alone_ms, team_ms), steps in ((first, 30), (then, 20_000)):
        for _ in range(steps):
            is_alone = busy.is_now()
            taken_ms = alone_ms if is_alone else team_ms
            now[0] += taken_ms * 1_000_000
            if is_alone:
                busy.note_alone(1, taken_ms * 1_000_000)
            else:
                busy.note_together(1, taken_ms * 1_000_000, held_up_ns=taken_ms * 900_000)
            spent_ms[is_alone] += taken_ms
        if steps == 30:
            spent_ms = {True: 0.0, False: 0.0}
    assert spent_ms[False] < 0.1 * spent_ms[True], spent_ms


def test_what_many_rows_won_is_not_spent_on_one() -> None:
    """Guards decoding after a prompt: seconds won by its passes let hundreds of slow steps of one row pass."""
    busy = Busy(lambda: NOW_NS)
    busy.note_alone(512, 1_600_000_000)
    busy.note_alone(1, 3_000_000)
    for _ in range(9):
        busy.note_together(512, 900_000_000, held_up_ns=0)
    busy.note_together(1, 30_000_000, held_up_ns=29_000_000)
    assert busy.is_now()
