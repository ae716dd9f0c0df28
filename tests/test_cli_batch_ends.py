"""tfm batch -o, ended by a signal before it has written anything: nothing of it is left, and all that was there is."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_process import jsonl, objects, start, wait_for_size
from cli_process import TFM, TIMEOUT_S, environment, run, wait_for_work

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
ENDLESS = {"prompt": "\n", "max_tokens": 900_000}
WHEN: dict[str, Callable[[subprocess.Popen[bytes]], object]] = {
    "at once": lambda _: None, "loading": lambda _: time.sleep(0.15),
    "answering": lambda process: wait_for_work(process, 1.2),
}  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("number", "when", "there"),
    [*((number, when, None) for number in STATUS for when in WHEN), *((number, "loading", b"") for number in STATUS)],
)
def test_before_the_first_answer(
    endless_parrot: Path, tmp_path: Path, number: int, when: str, there: bytes | None
) -> None:
    """An empty OUT and an empty OUT.waiting stayed behind; an OUT of the user's own stays, though it is empty.

    Nothing was said, either. At once, that is before the file is ready to be answered into, nothing needs to be.
    """
    rows, folder = tmp_path / "rows", tmp_path / "answers"
    folder.mkdir()
    rows.write_bytes(jsonl([ENDLESS]))
    if there is not None:
        (folder / "out").write_bytes(there)
    with start("--raw", "-m", endless_parrot, rows, "-o", folder / "out", stderr=-1) as process:
        wait_for_size(folder / "out.waiting", 0, process)
        WHEN[when](process)
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    told = b"tfm: stopped, no row is answered yet; run the same command again to begin anew\n"
    assert process.returncode == STATUS[number], error
    assert error == told or (when == "at once" and not error)
    assert files(folder) == ({} if there is None else {"out": there})


@pytest.mark.parametrize("number", STATUS)
def test_in_one_long_step(default_model_folder: Path, tmp_path: Path, number: int) -> None:
    """Where another thread ends the process, because the main one is in the middle of a step, it tidies up as well."""
    rows, folder = tmp_path / "rows", tmp_path / "answers"
    folder.mkdir()
    rows.write_bytes(jsonl([{"prompt": f"{i} " + "hi " * 7000} for i in range(4)]))
    with start("--threads", "1", "--raw", "-m", default_model_folder, rows, "-o", folder / "out") as process:
        wait_for_size(folder / "out.waiting", 0, process)
        wait_for_work(process, 2)
        process.send_signal(number)
        assert process.wait(TIMEOUT_S) == STATUS[number]
    assert files(folder) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_answers_that_are_there_stay(endless_parrot: Path, tmp_path: Path, number: int) -> None:
    """OUT of an earlier run is as it was, byte for byte; what has finished and waits for its turn is kept, too."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    short = {"prompt": "\n", "max_tokens": 3}
    rows.write_bytes(jsonl([short, short]))
    command = ["--raw", "-m", endless_parrot, rows, "-o", out]
    assert run("batch", *command).returncode == 0
    before = out.read_bytes()
    rows.write_bytes(jsonl([short, short, {**ENDLESS, "max_tokens": 90_000}, short]))
    with start(*command, stderr=-1) as process:
        wait_for_size(tmp_path / "out.waiting", 1, process)
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == STATUS[number]
    told, stopped = error.decode().splitlines()
    assert told == f"tfm: {out}: 2 rows are there already"
    assert stopped == "tfm: stopped, 3 rows are answered; run the same command again to go on"
    assert out.read_bytes() == before
    (kept,) = objects((tmp_path / "out.waiting").read_bytes())
    assert (kept["line"], kept["text"]) == (4, "abc")
    with start(*command, stderr=-1) as process:  # "3 rows are answered" was followed by "2 rows are there already"
        assert process.stderr is not None
        first = process.stderr.readline().decode()
        process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert first == f"tfm: {out}: 2 rows are there already, 1 more wait for those before them\n"
    assert error.decode().splitlines()[-1] == stopped


def test_rows_that_wait_outlive_an_out_of_nothing(endless_parrot: Path, tmp_path: Path) -> None:
    """With the first row unfinished OUT has none and goes; the others are taken over by the next run."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    short = {"prompt": "\n", "max_tokens": 3}
    rows.write_bytes(jsonl([{"prompt": "\n", "max_tokens": 3000}, *[short] * 3]))
    command = ["--raw", "-q", "-m", endless_parrot, rows, "-o", out]
    with start(*command) as process:
        wait_for_size(tmp_path / "out.waiting", 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.waiting", "rows"]
    assert run("batch", *command).returncode == 0
    assert [(row["line"], len(row["text"])) for row in objects(out.read_bytes())] == [(1, 3000), (2, 3), (3, 3), (4, 3)]
    assert not (tmp_path / "out.waiting").exists()


def test_a_signal_that_is_ignored_stays_ignored(parrot: Path, tmp_path: Path) -> None:
    """`nohup tfm batch ... &` lives on when the terminal is closed."""
    reader, writer = os.pipe()
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", TFM, "batch", "--raw", "-m", parrot, "-o", tmp_path / "out"]
    with subprocess.Popen(command, stdin=reader, env=environment()) as process:
        os.close(reader)
        wait_for_size(tmp_path / "out.waiting", 0, process)
        process.send_signal(signal.SIGHUP)
        time.sleep(1.5)
        os.write(writer, b'{"prompt": "\\n"}\n')
        os.close(writer)
        assert process.wait(TIMEOUT_S) == 0
    assert len(objects((tmp_path / "out").read_bytes())) == 1
