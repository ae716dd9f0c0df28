"""The team of threads: its barriers, its sleep, and what surrounds it (busy machines, forks, other models, threads)."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import team_kernels

from tfm.engine import load, team
from tfm.engine.busy import LEAST_ALONE_NS
from tfm.engine.model import Model
from tfm.kernels.records import HEADS, KV_TYPES, LANES, THREAD

PATIENCE_S = 60.0  # a step of these tests takes milliseconds; one that takes so long hangs
TESTS = Path(__file__).parent


class Crew:
    """A Team that runs team_kernels.run instead of the forward pass."""

    def __init__(self, threads: int) -> None:
        self.job = np.zeros(1, team_kernels.JOB)
        self.marks = np.zeros((2, team_kernels.MOST_THREADS), np.int64)
        self.job["marks"] = self.marks.ctypes.data
        self.threads = threads
        self.team = team.Team(threads, self.job.ctypes.data, 32, 64, alone_when_busy=False)

    def step(self, rounds: int, delay: int = 0) -> None:
        """A step of so many barriers; every thread must have run it and seen all others' marks."""
        before = int(self.job["steps"][0])
        self.job["rounds"], self.job["delay"] = rounds, delay
        self.team.run(1)
        assert self.job["steps"][0] - before == self.threads
        assert self.job["wrong"][0] == 0


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Crew]]:
    """Makes crews, and ends their threads."""
    monkeypatch.setattr(team, "RUN", team_kernels.RUN)
    made: list[Crew] = []

    def make(threads: int) -> Crew:
        made.append(Crew(threads))
        return made[-1]

    yield make
    for one in made:
        one.team.close()


def in_time(function: Callable[[], Any]) -> Any:
    """function(), or a failure where it hangs."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "hangs"
    assert results, "raised an error"
    return results[0]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_nobody_passes_a_barrier_early(threads: int, crew: Callable[[int], Crew]) -> None:
    """Guards the counter of arrivals: after a barrier each thread sees what every other wrote before, late or not."""
    crowd = crew(threads)

    def work() -> bool:
        for delay in (0, 100, 3000):
            for _ in range(10):
                crowd.step(rounds=40, delay=delay)
        return True

    assert in_time(work)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_no_step_is_missed(threads: int, crew: Callable[[int], Crew]) -> None:
    """Guards waking: steps come while helpers spin, while they fall asleep, and while they sleep; none may be lost.

    The pauses between steps run through the moment at which a helper gives up spinning.
    """
    crowd, rng = crew(threads), np.random.default_rng(threads)

    def work() -> bool:
        for pause_s in (*rng.uniform(0, 3e-3, 300), 0.05, 0.2):
            time.sleep(pause_s)
            crowd.step(rounds=2)
        return True

    assert in_time(work)


def test_idle_helpers_burn_no_cpu(crew: Callable[[int], Crew]) -> None:
    """Guards a helper that spins on between steps: 0.5 s of idleness may cost milliseconds, not 0.5 s a thread."""
    crowd = crew(3)
    crowd.step(rounds=2)
    time.sleep(0.1)  # until the helpers sleep
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.01
    crowd.step(rounds=2)


def test_closed_and_dropped_teams_leave_no_thread(crew: Callable[[int], Crew]) -> None:
    """Guards threads that pile up: with close, and without it when the team goes."""
    before = set(threading.enumerate())
    one, other = crew(3), Crew(3)
    one.step(rounds=2)
    other.step(rounds=2)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 4
    one.team.close()
    one.team.close()
    del other
    for helper in helpers:
        helper.join(PATIENCE_S)
    assert not any(helper.is_alive() for helper in helpers)


def test_closed_team_does_not_hang(crew: Callable[[int], Crew]) -> None:
    """Guards a step after `close`, which would wait at a barrier for helpers that are gone: it starts new ones."""
    crowd = crew(2)
    crowd.step(rounds=2)
    crowd.team.close()
    assert in_time(lambda: crowd.step(rounds=2) is None)


def test_busy_machine_is_slow_but_not_stuck(crew: Callable[[int], Crew]) -> None:
    """Guards barriers that wait whole time slices for each other when other processes keep every processor busy."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    crowd = crew(max(2, processors))
    crowd.step(rounds=2)
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processors)]
    try:
        time.sleep(0.3)
        begin = time.monotonic()
        for _ in range(20):
            in_time(lambda: crowd.step(rounds=150) is None)
        spent_s = time.monotonic() - begin
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert spent_s < 15, f"{1e6 * spent_s / 3000:.0f} us a barrier"


# ---------------------------------------------------------------------------------------------- with a model

IDS = [5, 17, 80, 3, 41, 66, 2, 9, 30, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("llama"), checkpoints.LLAMA)


def decode(model: Model, ids: list[int]) -> bytes:
    """The bytes of the logits after each of ids, one step a token."""
    with model.sequence() as sequence:
        return b"".join(model.step([(sequence, [token])]).tobytes() for token in ids)


PINNED = """
import os
from test_team import IDS, decode
from tfm.engine import load

model = load({folder!r}, threads=2)
expected = decode(model, IDS)
before = model.steps_alone
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), [min(os.sched_getaffinity(0))])
for _ in range(20):
    assert decode(model, IDS) == expected
alone = model.steps_alone - before
assert alone > 150, f"{{alone}} of 200 steps ran alone"
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir() or len(os.sched_getaffinity(0)) < 2,
    reason="threads are pinned through /proc, to one processor of some",
)
def test_two_threads_on_one_processor(folder: Path) -> None:
    """Guards the fallback: two threads that have one processor between them wait for each other at each barrier, and
    no test failed when the team went on so, at a tenth of the speed."""
    script = PINNED.format(folder=str(folder))
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_models_in_one_process(folder: Path, tmp_path: Path) -> None:
    """Guards state that models share by mistake: each gives what it gives alone, in turns and at once."""
    other = checkpoints.write_checkpoint(tmp_path, checkpoints.GPT2)
    alone = []
    for path in (folder, other):
        model = load(path, threads=2)
        alone.append(decode(model, IDS))
        model.close()
    models = [load(path, threads=2) for path in (folder, other)]
    assert [decode(model, IDS) for model in models] == alone
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            assert list(pool.map(lambda model: decode(model, IDS), models)) == alone
    models[0].close()
    assert decode(models[1], IDS) == alone[1]
    models[1].close()


def test_two_threads_step_one_model(folder: Path) -> None:
    """Guards the buffers of a step: Python threads that use one model take turns, and each gets its own numbers."""
    model = load(folder, threads=2)
    texts = [[(7 * i + j) % 97 for j in range(12)] for i in range(8)]
    expected = [decode(model, ids) for ids in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda ids: decode(model, ids), texts)) == expected
    model.close()


FORK = """
import os, sys, threading, time
import checkpoints
from test_team import IDS, decode
from tfm.engine import load

folder = {folder!r}
model = load(folder, threads=2)
expected = decode(model, IDS)

def child(work):
    "Run work in a forked process; its exit code, or an error where it hangs."
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    for _ in range({patience}):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

{body}
"""


def run_fork(folder: Path, body: str) -> None:
    """Run a script that forks, in a process of its own: a child of pytest itself would carry on with the tests."""
    script = FORK.format(folder=str(folder), body=textwrap.dedent(body), patience=int(50 * PATIENCE_S))
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@needs_fork
def test_forked_child_works(folder: Path) -> None:
    """Guards a child without the helpers of its parent, which it would wait for; the parent goes on as before."""
    run_fork(
        folder,
        """
        for _ in range(3):
            assert child(lambda: decode(model, IDS) != expected) == 0
            assert decode(model, IDS) == expected
        assert child(lambda: child(lambda: decode(model, IDS) != expected)) == 0
        """,
    )


@needs_fork
def test_child_forked_during_a_step_works(folder: Path) -> None:
    """Guards the lock that another thread holds at the moment of the fork: in the child nobody would give it back."""
    run_fork(
        folder,
        """
        stop = threading.Event()

        def keep_stepping():
            while not stop.is_set():
                decode(model, IDS)

        other = threading.Thread(target=keep_stepping)
        other.start()
        result = 0
        for _ in range(20):
            result = result or child(lambda: decode(model, IDS) != expected)
        stop.set()
        other.join()
        assert result == 0, result
        """,
    )


@needs_fork
def test_child_forked_while_another_thread_loads_is_refused(folder: Path) -> None:
    """Guards against a child that waits for ever for a thread that it does not have: for modules that were imported at
    that moment, LLVM's lock or the turn to compile. What was loaded before the fork works, and the parent goes on."""
    run_fork(
        folder,
        """
        from tfm.kernels.forks import loading

        def refuse():
            try:
                load(folder)
            except RuntimeError as error:
                return "was forked while another thread loaded" not in str(error)

        entered, leave = threading.Event(), threading.Event()

        @loading()
        def load_slowly():
            entered.set()
            leave.wait()

        other = threading.Thread(target=load_slowly)
        other.start()
        entered.wait()
        assert child(refuse) == 0
        assert child(lambda: child(refuse)) == 0
        assert child(lambda: decode(model, IDS) != expected) == 0
        assert decode(load(folder), IDS) == expected
        leave.set()
        other.join()
        assert child(lambda: decode(load(folder), IDS) != expected) == 0
        with loading():
            assert child(lambda: decode(load(folder), IDS) != expected) == 0
        """,
    )


@needs_fork
def test_forked_child_ends_in_peace(folder: Path) -> None:
    """Guards the end of a child that never used the model: it must not try to end the helpers of its parent."""
    run_fork(
        folder,
        """
        def end_as_python_does():
            sys.stdout.flush()
            import atexit
            atexit._run_exitfuncs()
            return 0

        assert [child(end_as_python_does) for _ in range(5)] == [0] * 5
        assert decode(model, IDS) == expected
        """,
    )


SIGNALS = """
import os, signal, sys, time
from test_team import IDS, decode
from tfm.engine import load, team

model = load({folder!r}, threads=2)
model._team._alone_when_busy = False
expected, errors = decode(model, IDS), []

def handler(*_):
    model.close()
    try:
        decode(model, IDS[:3])
    except RuntimeError as error:
        errors.append(str(error))

class Clock:
    "Read right before the threads run a step that has been prepared, and after it: the handler comes in there."
    monotonic_ns = staticmethod(time.monotonic_ns)

    @staticmethod
    def thread_time_ns():
        os.kill(os.getpid(), signal.SIGUSR1)
        return time.thread_time_ns()

signal.signal(signal.SIGUSR1, handler)
team.time = Clock
assert decode(model, IDS) == expected
assert len(errors) == 2 * len(IDS), errors
assert "signal handler" in errors[0], errors
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no signals of one's own here")
def test_signal_handler_that_closes_and_steps(folder: Path) -> None:
    """Guards a step that a handler interrupts: helpers that it ended were waited for, for ever, and a step of its own
    put its numbers in the place of those that had been prepared."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", SIGNALS.format(folder=str(folder))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_helpers_end_where_not_all_can_begin(crew: Callable[[int], Crew], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards threads that nobody ends: a machine gave two of three helpers, and they waited for ever."""
    before, start = set(threading.enumerate()), threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if len(set(threading.enumerate()) - before) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start"):
        crew(4)
    for helper in set(threading.enumerate()) - before:
        helper.join(PATIENCE_S)
        assert not helper.is_alive()


def test_alone_where_others_are_busy(crew: Callable[[int], Crew]) -> None:
    """Guards the change between team and single thread: helpers that sat out some steps must join again in order."""
    crowd = crew(2)
    crowd.team._alone_when_busy = True
    counts = []
    for round_ in range(60):
        if round_ % 7 == 0:
            # As if the processors had been found busy: some steps alone.
            crowd.team._busy.note_together(1, 1_000_000, held_up_ns=1_000_000)
        if round_ % 7 == 3:
            time.sleep(2 * LEAST_ALONE_NS / 1e9)
        before = int(crowd.job["steps"][0])
        crowd.job["rounds"] = 5
        crowd.team.run(1)
        counts.append(int(crowd.job["steps"][0]) - before)
        assert crowd.job["wrong"][0] == 0
    assert counts[0] == 1
    assert set(counts) == {1, 2}


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_values_are_shared_out_once(kv_type: str, threads: int) -> None:
    """Guards q8: two threads that share a head would each scale it before the other's half is there, seldom enough for
    logits not to show it. And any type: a panel that no thread makes, or two."""
    record, heads, found = np.zeros(1, THREAD), np.zeros(1, HEADS), np.zeros(2, np.int64)
    record["threads"] = threads
    for count, size in ((1, 16), (1, 64), (2, 48), (3, 64)):
        heads["num_key_value_heads"], heads["head_size"] = count, size
        end = 0
        for index in range(threads):
            record["index"] = index
            addresses = heads.ctypes.data, KV_TYPES[kv_type], record.ctypes.data, found.ctypes.data
            team_kernels.PANELS_OF_VALUES(*addresses)
            assert found[0] == end
            assert kv_type != "q8" or found[1] % (size // LANES) == 0
            end = int(found[1])
        assert end == count * size // LANES
