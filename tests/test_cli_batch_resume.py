"""tfm batch -o: nothing is lost whatever happens to the process, and nobody else's file is touched."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from batch_process import jsonl, mixed_rows, objects, options, start, wait_for_size
from cli_process import TFM, TIMEOUT_S, environment, run, shell, wait_for_work

ONE_ROW = b'{"prompt": "a"}\n'


@pytest.fixture(scope="module")
def mixed(endless_parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of rows, and its answers by a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "rows").write_bytes(mixed_rows(120))
    done = run("batch", *options(endless_parrot), folder / "rows", "-o", folder / "out")
    assert (done.returncode, done.stdout) == (1, b"")
    assert sorted(path.name for path in folder.iterdir()) == ["out", "rows"]
    return folder / "rows", (folder / "out").read_bytes()


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.parametrize("unordered", [False, True])
def test_killed_at_any_moment(
    endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path, seed: int, unordered: bool
) -> None:
    """kill -9, again and again: whole lines each time, none lost, and in the end the same bytes as without."""
    rows, expected = mixed
    draw, out, kills = random.Random(seed), tmp_path / "out", 0
    command: Sequence[str | Path] = [*options(endless_parrot), rows, "-q", "-o", out, *["--unordered"] * unordered]
    before: list[bytes] = []
    for _ in range(4):
        with start(*command, stderr=-1) as process:
            there = out.stat().st_size if out.exists() else 0
            wait_for_size(out, there + draw.randrange(1, 12_000), process)
            time.sleep(draw.random() * 0.02)
            process.kill()
            kills += process.wait(TIMEOUT_S) == -signal.SIGKILL
        lines = out.read_bytes().split(b"\n")[:-1]
        assert lines[: len(before)] == before
        assert set(lines) <= set(expected.split(b"\n"))
        before = lines
    assert kills
    done = run("batch", *command)
    assert (done.returncode, done.stdout) == (1, b"")
    found = out.read_bytes()
    assert (sorted(found.split(b"\n")) if unordered else found) == (
        sorted(expected.split(b"\n")) if unordered else expected
    )
    assert list(tmp_path.iterdir()) == [out]


def test_going_on_from_a_pipe_and_with_what_changes_no_answer(
    endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path
) -> None:
    """Rows on stdin are the same rows; slots, threads, sharing and speculation may change between the runs."""
    rows, expected = mixed
    out = tmp_path / "out"
    for share, how in (
        (3, []),
        (2, ["--slots", "2", "--threads", "1"]),
        (1, ["--no-prefix-sharing", "--speculate", "4"]),
    ):
        out.write_bytes(expected[: len(expected) // share - 7])
        there = out.read_bytes().count(b"\n")
        done = run("batch", *options(endless_parrot), *how, "-o", out, stdin=rows.read_bytes())
        assert out.read_bytes() == expected
        told, failed = done.stderr.decode().splitlines()
        assert told == f"tfm: {out}: {there} rows are there already"
        assert failed.startswith(
            "tfm: 6 of 120 rows have no answer but an error; the first: line 8: row: no such field"
        )


def test_finished_file_stays_as_it_is(endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path) -> None:
    """Run again, nothing is written, and the status is the same; more rows at the end of FILE are answered."""
    rows, expected = mixed
    out = tmp_path / "out"
    out.write_bytes(expected)
    assert run("batch", *options(endless_parrot), rows, "-o", out).returncode == 1
    assert out.read_bytes() == expected
    more = tmp_path / "more"
    more.write_bytes(rows.read_bytes() + b'{"id": "new", "prompt": "\\n", "max_tokens": 3}')
    run("batch", *options(endless_parrot), more, "-o", out)
    assert out.read_bytes().startswith(expected)
    assert objects(out.read_bytes()[len(expected) :])[0]["text"] == "abc"


@pytest.mark.parametrize(
    "change", [["-n", "9"], ["--seed", "1"], ["--kv-type", "f32"], ["--ctx", "999"], ["-m", "PARROT"], ["--stop", "x"]]
)
def test_other_runs_are_refused(
    parrot: Path, endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path, change: list[str]
) -> None:
    """Answers by other options or another model stood in one file."""
    rows, expected = mixed
    out = tmp_path / "out"
    out.write_bytes(expected[:-1])
    changed = [str(parrot) if word == "PARROT" else word for word in change]
    done = run("batch", *options(endless_parrot), *changed, rows, "-o", out)
    assert (done.returncode, done.stdout) == (1, b"")
    told = f"tfm: file {out}: line 1: found an answer from before FILE was changed at line 1, or the options or"
    assert done.stderr.startswith(told.encode())
    assert done.stderr.endswith(b"take out this line and those after it: they are made anew\n")
    assert out.read_bytes() == expected[:-1]


def test_two_runs_at_once(endless_parrot: Path, tmp_path: Path) -> None:
    """Two runs wrote into one file."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    rows.write_bytes(jsonl([{"prompt": "\n", "max_tokens": 100_000}]))
    command = ["--raw", "-m", endless_parrot, rows, "-o", out]
    with start(*command) as first:
        wait_for_size(tmp_path / "out.waiting", 0, first)
        second = run("batch", *command)
        assert first.poll() is None
        first.kill()
    assert (second.returncode, second.stdout) == (1, b"")
    assert second.stderr.startswith(f"tfm: file {out}: found another tfm batch that writes it".encode())


def test_full_disk(endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path) -> None:
    """A full disk left half a row, which the next run took for one; with room, the same command goes on."""
    rows, expected = mixed
    out = tmp_path / "out"
    words = " ".join(map(str, [*options(endless_parrot), rows, "-o", out]))
    done = shell(f"ulimit -f {len(expected) // 2048}; tfm batch -q {words}")  # blocks of 1024 bytes
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert done.stderr.startswith(f"tfm: file {out}".encode())
    assert b"cannot be written: found File too large; make room" in done.stderr
    content = out.read_bytes()
    assert expected.startswith(content)
    assert content.endswith(b"\n")
    assert shell(f"tfm batch -q {words}").returncode == 1
    assert out.read_bytes() == expected


# ------------------------------------------------------------------------------------------------ Ctrl-C


def test_ctrl_c(endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path) -> None:
    """Ctrl-C lost what was finished, left half a row, or did not say that one can go on."""
    rows, expected = mixed
    out = tmp_path / "out"
    command = [*options(endless_parrot), rows, "-o", out]
    with start(*command, stdout=-1, stderr=-1) as process:
        wait_for_size(out, 3000, process)
        process.send_signal(signal.SIGINT)
        told, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, told) == (130, b"")
    assert error.startswith(b"tfm: stopped, ")
    assert error.endswith(b" rows are answered; run the same command again to go on\n")
    assert expected.startswith(out.read_bytes())
    run("batch", *command)
    assert out.read_bytes() == expected


def test_ctrl_c_in_one_long_step(default_model_folder: Path, tmp_path: Path) -> None:
    """Where the main thread is in the middle of a step, another one ends the process, and says the same."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    rows.write_bytes(b'{"promt": 1}\n' + jsonl([{"prompt": f"{i} " + "hi " * 7000} for i in range(4)]))
    with start("--raw", "--threads", "1", "-m", default_model_folder, rows, "-o", out, stderr=-1) as process:
        wait_for_size(out, 1, process)
        wait_for_work(process, 2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert error == b"tfm: stopped, 1 rows are answered; run the same command again to go on\n"
    assert [row["line"] for row in objects(out.read_bytes())] == [1]


def test_ctrl_c_without_a_file(endless_parrot: Path) -> None:
    """Rows that were finished, and waited for one before them, were lost."""
    rows = [{"prompt": "\n", "max_tokens": 900_000}, *[{"prompt": "\n", "max_tokens": 3}] * 5]
    with subprocess.Popen(
        [TFM, "batch", "--raw", "-m", endless_parrot], stdin=-1, stdout=-1, stderr=-1, env=environment()
    ) as process:
        assert process.stdin is not None
        process.stdin.write(jsonl(rows))
        process.stdin.flush()
        wait_for_work(process, 1.5)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (130, b"")
    assert [row["line"] for row in objects(out)] == [2, 3, 4, 5, 6]


# ------------------------------------------------------------------------------------------------ other files


@pytest.mark.parametrize("name", ["out.waiting", "out"])
@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"prompt": "no newline"}', b"\xff"])
def test_files_of_others_stay(parrot: Path, tmp_path: Path, name: str, content: bytes) -> None:
    """A file of notes beside OUT was taken for a cut row, emptied and removed, with status 0."""
    (tmp_path / name).write_bytes(content)
    done = run("batch", "--raw", "-m", parrot, "-o", tmp_path / "out", stdin=ONE_ROW)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"{name}: line 1: found" in done.stderr.decode()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {name: content}


def test_waiting_rows_where_something_else_is(parrot: Path, tmp_path: Path) -> None:
    """A link was followed and its target emptied, a named pipe blamed on stdout, the file of rows removed."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "a.waiting").symlink_to(precious)
    os.mkfifo(tmp_path / "b.waiting")
    (tmp_path / "c.waiting").write_bytes(b'{"id": 1, "prompt": "a"}')
    cases = ("a", [], b"a link"), ("b", [], b"no regular file"), ("c", ["c.waiting"], b"rows are")
    for out, arguments, told in cases:
        source = [tmp_path / name for name in arguments]
        done = run("batch", "--raw", "-m", parrot, *source, "-o", tmp_path / out, stdin=ONE_ROW)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert told in done.stderr
        assert not (tmp_path / out).exists()
    assert precious.read_text() == "precious"
    assert (tmp_path / "c.waiting").stat().st_size


def test_out_that_is_taken_away(endless_parrot: Path, mixed: tuple[Path, bytes], tmp_path: Path) -> None:
    """Answers went to a file without a name, and the run ended as if all were well."""
    out = tmp_path / "out"
    command = [TFM, "batch", "--raw", "-m", endless_parrot, "--slots", "2", "-o", out, "-"]
    with subprocess.Popen(command, stdin=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        os.write(process.stdin.fileno(), b'{"prompt": "\\n", "max_tokens": 1}\n')
        while not out.exists() or not out.stat().st_size:
            time.sleep(0.05)
        out.unlink()
        _, error = process.communicate(b'{"prompt": "\\n", "max_tokens": 1}\n', timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"removed or renamed" in error


@pytest.mark.parametrize("content", [b"", b"a line of another program\n"])
def test_out_that_another_program_changes(endless_parrot: Path, tmp_path: Path, content: bytes) -> None:
    """`: > OUT` or `echo ... > OUT` in mid-run: answers were gone, and the status was 0. Each answer is in OUT before
    the next row is there, so that `kill -9` loses nothing that was finished."""
    out, row = tmp_path / "out", b'{"prompt": "\\n", "max_tokens": 1}\n'
    command = [TFM, "batch", "--raw", "-m", endless_parrot, "-o", out]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        for number in (1, 2, 3):
            process.stdin.write(row)
            process.stdin.flush()
            while not out.exists() or out.read_bytes().count(b"\n") < number:
                assert process.poll() is None
                time.sleep(0.001)
        written = out.stat().st_size
        out.write_bytes(content)
        told, error = process.communicate(row, timeout=TIMEOUT_S)
    found = f"found {len(content)} bytes, changed by another program while answers were written to it"
    assert (process.returncode, told) == (1, b"")
    assert error.startswith(f"tfm: file {out}: {found}; allowed: the {written} that were written; put right".encode())
    assert (error.count(b"\n"), out.read_bytes()) == (1, content)
