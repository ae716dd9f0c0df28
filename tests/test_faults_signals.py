"""batch and score stopped by a signal: the status, what was finished until then, and nothing that stays behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import TFM, TIMEOUT_S, environment, run
from parrot import ids_of

from tfm.kernels import object_files

WORDS = {"batch": ("batch", "--raw"), "score": ("score", "--jsonl")}
COMMANDS = [*WORDS]
NO_ROW = b"tfm: stopped, no row is answered yet; run the same command again to begin anew\n"  # of batch -o
LONG = 150_000  # tokens of a prompt that is read for a minute


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def objects(out: bytes) -> list[dict[str, Any]]:
    """Rows of a result, all of which are whole."""
    assert out.endswith(b"\n") or not out
    return [json.loads(line) for line in out.split(b"\n")[:-1]]


def start(*words: str | Path, tfm: Sequence[str | Path] = (TFM,), **env: str) -> subprocess.Popen[bytes]:
    """The command as the first process of a group of its own."""
    command = [*tfm, *words]
    return subprocess.Popen(command, stdin=-3, stdout=-1, stderr=-1, env=environment(env), start_new_session=True)


def left_of(group: int) -> list[str]:
    """The commands of a group's processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if int(its_group) == group and state != "Z":
            found.append(command)
    return found


def stopped(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes, bytes]:
    """Status and what else comes out, after a signal; no process of its group is left."""
    process.send_signal(number)
    sent = time.monotonic()
    out, error = process.communicate(timeout=TIMEOUT_S)
    while left := left_of(process.pid):  # a compiler notices in a moment that it is alone
        assert time.monotonic() - sent < 5, left
        time.sleep(0.01)
    assert time.monotonic() - sent < 5
    return process.returncode, out, error


AT_ONCE = "import sys, tfm.cli.interrupt as i; i.GRACE_S = 0.001; from tfm.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize(("command", "tfm"), [("batch", (sys.executable, "-c", AT_ONCE)), ("score", (TFM,))])
def test_stopped_while_compiling(parrot: Path, tmp_path: Path, command: str, tfm: tuple[str, ...]) -> None:
    """The compiler is one long call, and a part of it runs in a process of its own: Ctrl-C was noticed ten seconds
    later, left that process behind, or a file of answers without one. Also where the main thread does not come back in
    time, and another one ends the process (AT_ONCE)."""
    file, cache = write_rows(tmp_path / "rows.jsonl", [{"ids": ids_of("\n")}]), tmp_path / "cache"
    more = ["-o", tmp_path / "out"] if command == "batch" else []
    process = start(*WORDS[command], "-m", parrot, file, *more, tfm=tfm, TFM_CACHE=str(cache))
    assert process.stderr is not None
    assert any(b"compiling" in line for line in iter(process.stderr.readline, b""))
    while len(left_of(process.pid)) < 2:  # on one processor there is no other process
        assert process.poll() is None
        time.sleep(0.01)
    assert stopped(process, signal.SIGINT) == (130, b"", NO_ROW if command == "batch" else b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "rows.jsonl"]
    kept = [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]
    assert all(object_files.read_object(path) is not None for path in kept), "whole ones only"


@pytest.mark.parametrize("command", COMMANDS)
def test_stopped_while_loading(parrot: Path, tmp_path: Path, command: str) -> None:
    """Ctrl-C among the imports ended in a traceback; a file of answers was left behind that has none."""
    fifo, out = tmp_path / "rows.jsonl", tmp_path / "out"
    os.mkfifo(fifo)
    process = start(*WORDS[command], "-m", parrot, fifo, *(["-o", out] if command == "batch" else []))
    with fifo.open("wb"):  # which waits until the command, too, has opened it: that is before it loads the model
        while command == "batch" and not (tmp_path / "out.waiting").exists():
            assert process.poll() is None
            time.sleep(0.001)
        status, shown, said = stopped(process, signal.SIGINT)
    assert (status, shown) == (130, b"")
    assert said in ((b"", NO_ROW) if command == "batch" else (b"",))  # nothing, where OUT has only just been opened
    assert list(tmp_path.iterdir()) == [fifo]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", COMMANDS)
def test_stopped_while_reading_a_long_prompt(
    endless_parrot: Path, tmp_path: Path, command: str, number: int, status: int
) -> None:
    """What was finished was lost or cut, or a row came of a prompt of which only a part was read."""
    rows = [{"ids": ids_of("\na"), "max_tokens": 1}, {"ids": ids_of("\n") * LONG}]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    process = start(*WORDS[command], "-m", endless_parrot, file)
    assert process.stdout is not None
    (row,) = objects(process.stdout.readline())
    assert row["text"] == "b" if command == "batch" else row["tokens"] == 1
    assert stopped(process, number) == (status, b"", b"")


def test_terminated_and_gone_on_with(endless_parrot: Path, tmp_path: Path) -> None:
    """A system that goes down sends SIGTERM: half a row was left, or rows that wait for others stayed for ever."""
    out, rows = tmp_path / "out", [{"ids": ids_of("\n"), "max_tokens": n} for n in (1, 3000, 2, 3)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = "batch", "-m", endless_parrot, file, "-o", out
    process = start(*words)
    while not (out.exists() and out.stat().st_size):
        assert process.poll() is None
        time.sleep(0.001)
    status, printed, error = stopped(process, signal.SIGTERM)
    assert (status, printed) == (143, b"")
    assert re.fullmatch(rb"tfm: stopped, [123] rows are answered; run the same command again to go on\n", error)
    assert [row["text"] for row in objects(out.read_bytes())] == ["a"]
    assert run(*words, "-q").returncode == 0
    assert [row["text"] for row in objects(out.read_bytes())] == ["a", "abcdefghij" * 300, "ab", "abc"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl"]
