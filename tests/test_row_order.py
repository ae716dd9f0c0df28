"""Answers in the order of their rows: those that are early wait in a file, and none is lost there or comes twice."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from row_files import ROWS, answer, expected, key, resume, whole

from tfm.cli.batch import row_order
from tfm.cli.batch.row_file import RowFile
from tfm.cli.batch.row_order import Turns, Waiting
from tfm.engine.errors import TfmError


def shuffled(seed: int, slots: int, count: int) -> list[list[int]]:
    """Steps of a batch with so many slots: which lines finish, where lines begin in order."""
    draw = random.Random(seed)
    left, running, steps = list(range(1, count + 1)), [], []  # type: list[int], list[int], list[list[int]]
    while left or running:
        while left and len(running) < slots:
            running.append(left.pop(0))
        steps.append([running.pop(draw.randrange(len(running)))])
    return steps


# ------------------------------------------------------------------------------------------------ turns


def test_row_is_in_the_file_when_it_is_written(tmp_path: Path) -> None:
    """Rows stood in a buffer, and `kill -9` took those with it that had been reported as finished."""
    path = tmp_path / "out"
    with RowFile(str(path)) as rows:
        turns = Turns(rows.append, rows.waiting, in_order=True)
        for line in range(1, ROWS + 1):
            turns.begin(line)
        for line in range(2, ROWS + 1, 2):
            turns.finish(line, answer(line))
            assert (tmp_path / "out.waiting").read_bytes().endswith(f"{answer(line)}\n".encode())
            turns.finish(line - 1, answer(line - 1))
            assert path.read_bytes() == whole(range(1, line + 1))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, seed: int) -> None:
    """Whatever order rows finish in, they are handed over in order, each as soon as those before it are; and the file
    where they wait does not grow with all that ever waited."""
    monkeypatch.setattr(row_order, "SMALL_BYTES", 2_000)
    path = tmp_path / "out.waiting"
    written: list[str] = []
    waiting = Waiting(path if named else None)
    turns, begun, finished, largest = Turns(written.append, waiting, in_order=True), 0, set(), 0
    for (line,) in shuffled(seed, 8, 400):
        while begun < line:
            begun += 1
            turns.begin(begun)
        finished.add(line)
        turns.finish(line, answer(line % 60 + 1))
        assert len(written) == next(n for n in range(500) if n + 1 not in finished)
        largest = max(largest, path.stat().st_size) if named else 0
    assert written == [answer(line % 60 + 1) for line in range(1, 401)]
    assert len(waiting) == 0
    assert largest < 20_000
    waiting.close()
    assert list(tmp_path.iterdir()) == []


def test_as_they_finish_and_at_the_end(tmp_path: Path) -> None:
    """Without order nothing waits; with it, what waits is handed over when nothing else will come."""
    for in_order, first, last in ((False, ["c", "a"], ["c", "a"]), (True, ["a"], ["a", "c"])):
        written: list[str] = []
        turns = Turns(written.append, Waiting(None), in_order)
        for line in (1, 2, 3):
            turns.begin(line)
        turns.finish(3, "c")
        turns.finish(1, "a")
        assert written == first
        turns.release()
        assert written == last


# ------------------------------------------------------------------------------------------------ rows that wait


def test_empty_file_of_waiting_rows_is_taken_over(tmp_path: Path) -> None:
    """A run that was killed at its start leaves one: it must not be in the way of the next, nor stay for ever."""
    (tmp_path / "out.waiting").touch()
    assert resume(tmp_path / "out").count == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_waiting_rows_of_another_run(tmp_path: Path) -> None:
    """Rows that waited in a run with other options were taken over."""
    path = tmp_path / "out.waiting"
    path.write_text(f"{answer(2)}\n{answer(3, run=1)}\n{answer(4)[:-9]}", encoding="utf-8")
    waiting = Waiting(path)
    assert [waiting.take_kept(line, key(line)) for line in (1, 2, 3, 4)] == [
        (False, None), (True, None), (False, None), (False, None),
    ]  # fmt: skip
    assert len(waiting) == 1
    assert waiting.read(2) == answer(2)
    waiting.close()
    path.write_text("a diary\n")
    with pytest.raises(TfmError, match=f"^file {path}: line 1: found a diary; allowed: rows that tfm batch wrote"):
        Waiting(path)
    assert path.read_text() == "a diary\n"


@pytest.mark.parametrize("content", [b"", b"a diary\n"])
def test_waiting_rows_that_another_program_changes(tmp_path: Path, content: bytes) -> None:
    """An answer that was gone from the file of waiting rows was a bug in tfm, or other bytes were taken for it."""
    path = tmp_path / "out"
    beside = tmp_path / "out.waiting"
    told = f"^file {beside}: found {len(content)} bytes, changed by another program"

    def work(line: int) -> None:
        with RowFile(str(path)) as rows:
            turns = Turns(rows.append, rows.waiting, in_order=True)
            for begun in (1, 2, 3):
                turns.begin(begun)
            turns.finish(2, answer(2))
            beside.write_bytes(content)
            turns.finish(line, answer(line))

    for line in (1, 3):  # one that brings line 2 in its turn, and one that has to wait
        with pytest.raises(TfmError, match=told):
            work(line)
        assert beside.read_bytes() == content
        beside.unlink()
        path.unlink(missing_ok=True)


def test_waiting_rows_without_order(tmp_path: Path) -> None:
    """Rows that waited when an ordered run was killed were lost to one that has no order, or came twice."""
    path = tmp_path / "out.waiting"
    path.write_text(f"{answer(3)}\n{answer(2)}\n", encoding="utf-8")
    waiting, written = Waiting(path), []  # type: Waiting, list[str]
    turns = Turns(written.append, waiting, in_order=False)
    for line in (1, 2, 3):
        is_kept, _ = waiting.take_kept(line, key(line))
        turns.begin(line)
        assert is_kept == (line > 1)
    turns.finish(1, answer(1))
    assert written == [answer(2), answer(3), answer(1)]
    waiting.close()
    assert not path.exists()


# ------------------------------------------------------------------------------------------------ killed or stopped


@pytest.mark.parametrize("seed", range(6))
def test_killed_between_any_two_writes(tmp_path: Path, seed: int) -> None:
    """What had finished before a kill is there afterwards, in the file or among the rows that wait, and only once."""
    path = tmp_path / "out"
    steps = [line for (line,) in shuffled(seed, 5, 40)]
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        with RowFile(str(path)) as rows:
            turns, begun = Turns(rows.append, rows.waiting, in_order=True), 0
            for line in steps:
                while begun < line:
                    begun += 1
                    turns.begin(begun)
                turns.finish(line, answer(line))
                os.write(write, bytes([line]))
                time.sleep(0.002)
        os._exit(0)
    os.close(write)
    time.sleep(0.01 + 0.02 * random.Random(seed).random())
    os.kill(process, 9)
    os.waitpid(process, 0)
    told = set(os.read(read, 100))
    os.close(read)
    with RowFile(str(path)) as rows:
        done = rows.resume(lambda: expected(range(1, 41)), in_order=True)
        turns, lost = Turns(rows.append, rows.waiting, in_order=True), []
        for line in range(1, 41):
            if line in done:
                continue
            is_kept, _ = rows.waiting.take_kept(line, key(line))
            turns.begin(line)
            if not is_kept:
                lost.append(line)
                turns.finish(line, answer(line))
    assert not told & set(lost)
    assert path.read_bytes() == whole(range(1, 41))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "finished", "kept"),
    [("Waiting._write", [2], [2]), ("Waiting.drop", [2, 1], [1, 2]), ("RowFile.append", [2, 1], [1, 2])],
)
def test_stopped_between_a_row_and_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: None, name: str, finished: list[int], kept: list[int]
) -> None:
    """A stop told of a row less than the next run found, or one more; what had just been written was written again."""
    path, kind = tmp_path / "out", RowFile if name == "RowFile.append" else Waiting
    method = name.partition(".")[2]
    real = getattr(kind, method)

    def at_ctrl_c(*arguments: Any) -> None:
        if method == "append" and arguments[1] != answer(2):  # the row that waits, not the one before it
            return real(*arguments)
        monkeypatch.undo()
        if method == "drop":
            signal.raise_signal(signal.SIGINT)
            return real(*arguments)
        real(*arguments)
        signal.raise_signal(signal.SIGINT)

    with RowFile(str(path)) as rows:
        rows.resume(lambda: expected(range(1, 4)), in_order=True)
        turns = Turns(lambda row: rows.append(row), rows.waiting, True, rows.whole)
        for line in (1, 2, 3):
            turns.begin(line)
        for line in finished[:-1]:
            turns.finish(line, answer(line))
        monkeypatch.setattr(kind, method, at_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            turns.finish(finished[-1], answer(finished[-1]))
        assert rows.kept == len(kept)
        turns.release()
        assert rows.kept == len(kept)
        assert path.read_text(encoding="utf-8") == "".join(f"{answer(line)}\n" for line in kept)
