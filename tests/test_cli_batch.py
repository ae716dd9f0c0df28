"""tfm batch as a person runs it: rows in, rows out, and nothing lost whatever happens to the process."""

import json
import os
import pty
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import TFM, TIMEOUT_S, environment, read_terminal, run, shell

ANSWER = "Hi é🙂!"
TIMINGS = "timings"


def jsonl(rows: Iterable[object]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def objects(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def mixed_rows(count: int, seed: int = 1) -> bytes:
    """Prompts of many lengths, answers of 1 to 400 tokens, some sampled, one row in 20 with a fault."""
    draw = random.Random(seed)
    rows: list[object] = []
    for i in range(count):
        row: dict[str, object] = {"id": i, "prompt": "abc " * draw.randrange(60) + "\n"}
        row["max_tokens"] = draw.choice([1, 2, 5, 20, 60, 400])
        if i % 3 == 0:
            row |= {"temperature": 0.8, "top_p": 0.9}
        rows.append(row if i % 20 != 7 else {"id": i, "promt": "\n"})
    return jsonl(rows)


# ------------------------------------------------------------------------------------------------ rows


def test_every_row_gives_one_row_in_order(parrot: Path) -> None:
    """Rows were lost, doubled or out of order; the first that ends is not the first that began."""
    rows = [{"id": "a", "prompt": "x\n"}, {"id": 2, "prompt": "x\n", "max_tokens": 1}, {"prompt": "x"}, {"ids": [11]}]
    done = run("batch", "--raw", "-m", parrot, stdin=jsonl(rows))
    assert (done.returncode, done.stderr) == (0, b"")
    first, second, third, fourth = objects(done.stdout)
    key = first.pop("key")
    assert len(key) == 16
    assert first == {
        "id": "a", "line": 1, "text": ANSWER, "finish_reason": "stop", "prompt_tokens": 2, "completion_tokens": 11,
        "model": str(parrot), "seed": 1,
    }  # fmt: skip
    assert (second["id"], second["line"], second["text"], second["finish_reason"]) == (2, 2, "H", "length")
    assert (third["id"], third["line"], third["text"], third["completion_tokens"]) == (None, 3, "", 1)
    assert (fourth["text"], fourth["ids"]) == (ANSWER, [byte + 1 for byte in ANSWER.encode()])


def test_as_they_finish(endless_parrot: Path) -> None:
    """With --unordered a short answer waited for a long one before it, or rows were lost."""
    rows = [{"prompt": "\n", "max_tokens": 300}, {"prompt": "\n", "max_tokens": 1}, {"prompt": "\n", "max_tokens": 30}]
    done = run("batch", "--raw", "--unordered", "-m", endless_parrot, stdin=jsonl(rows))
    assert [row["line"] for row in objects(done.stdout)] == [2, 3, 1]
    ordered = run("batch", "--raw", "-m", endless_parrot, stdin=jsonl(rows)).stdout
    assert sorted(done.stdout.splitlines()) == sorted(ordered.splitlines())


def test_a_row_equals_the_row_run_alone(default_model_folder: Path) -> None:
    """An answer depended on the rows beside it, on slots, shared prefixes or speculation; or said other things than
    generate --json does."""
    long = "The old bridge over the river is closed until May, and the bus stops at the mill instead. " * 9
    rows: list[dict[str, Any]] = [
        {"prompt": "Name three fruits.", "max_tokens": 24},
        {"prompt": f"{long}Why?", "max_tokens": 20, "temperature": 0.9, "seed": 7},
        {"prompt": f"{long}When?", "max_tokens": 12, "temperature": 0.7, "top_p": 0.8, "top_k": 40, "seed": 8},
        {"prompt": "A haiku about rain 🌧.", "max_tokens": 30, "temperature": 1.0, "seed": 9, "min_p": 0.05},
        {"prompt": "Once upon", "raw": True, "max_tokens": 25, "logprobs": 2, "repeat_penalty": 1.2},
        {"prompt": "Say yes.", "system": "You say no.", "prefill": "I ", "max_tokens": 8, "stop": ["."]},
        {"ids": [504, 3362], "max_tokens": 6},
        {"prompt": "A number:", "regex": "[0-9]{1,4}", "max_tokens": 9, "temperature": 1.0, "seed": 3},
        {"prompt": "x", "max_tokens": 0},
    ]
    model = "-m", default_model_folder
    together = run("batch", *model, stdin=jsonl(rows))
    assert (together.returncode, together.stderr) == (0, b"")
    for how in (["--slots", "1"], ["--slots", "3", "--no-prefix-sharing", "--speculate", "6"]):
        assert run("batch", *model, *how, stdin=jsonl(rows)).stdout == together.stdout
    for row, found in zip(rows, objects(together.stdout), strict=True):
        options = ["--ids"] if "ids" in row else []
        for name, value in row.items():
            for one in value if isinstance(value, list) else [value]:
                option = f"--{name.replace('_', '-')}"
                options += [] if name in ("prompt", "ids") else [option] if value is True else [f"{option}={one}"]
        prompt = row["prompt"] if "prompt" in row else " ".join(map(str, row["ids"]))
        alone = json.loads(run("generate", "--json", "--no-stdin", *model, *options, "--", prompt).stdout)
        del alone[TIMINGS]
        del found["id"], found["line"], found["key"]
        if "seed" not in row:  # drawn by the one, the line of the other
            del alone["seed"], found["seed"]
        assert found == alone


FAULTS = [
    b'{"prompt": "\xff"}', b"{", b"[1]", b'{"prompt": 1}', b'{"prompt": "a", "promt": 1}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "seed": NaN}', b'{"id": 5}', b'{"ids": [9999]}',
    b'{"messages": [{"role": "user", "content": "a"}]}', b'{"prompt": "' + b"a" * 5000 + b'"}',
    b'{"prompt": "a", "logit_bias": {"999": 1}}', b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
    b'{"prompt": "a", "regex": "["}', b"[" * 50_000,
]  # fmt: skip


def test_rows_with_faults(parrot: Path) -> None:
    """One bad row in the middle ended the batch, or left no trace; the status says that there was one."""
    good = b'{"prompt": "\\n", "id": "good"}'
    lines = [line for fault in FAULTS for line in (good, fault)] + [good]
    done = run("batch", "--raw", "-m", parrot, stdin=b"\n".join(lines))
    assert done.returncode == 1
    first = b"line 2: row: not UTF-8: found 0xff at byte 12"
    assert done.stderr == b"tfm: %d of %d rows have no answer but an error; the first: %s\n" % (
        len(FAULTS), len(lines), first,
    )  # fmt: skip
    rows = objects(done.stdout)
    assert [row["line"] for row in rows] == list(range(1, len(lines) + 1))
    assert {row["text"] for row in rows[::2]} == {ANSWER}
    assert all(row.keys() == {"id", "line", "key", "error"} for row in rows[1::2])
    assert "5001" in rows[23]["error"] or "5000" in rows[23]["error"]  # tokens, of a context of 1024


def test_lines_as_they_may_be(parrot: Path) -> None:
    """BOM, CRLF, blank lines, no LF at the end, separators that are content, NUL, and two rows with one id."""
    data = (
        b'\xef\xbb\xbf{"id": 1, "prompt": "\\n"}\r\n\r\n \t\n{"id": 1, "prompt": "\xe2\x80\xa8\xc2\x85\\u0000\\n"}\r\n'
    )
    done = run("batch", "--raw", "-m", parrot, stdin=data + b'{"id": "\xe2\x80\xa8", "prompt": "\\n"}')
    assert (done.returncode, done.stderr) == (0, b"")
    rows = objects(done.stdout)
    assert [(row["id"], row["line"], row["prompt_tokens"]) for row in rows] == [(1, 1, 1), (1, 4, 7), ("\u2028", 5, 1)]


def test_row_of_10_mb(parrot: Path, endless_parrot: Path) -> None:
    """A long row took quadratic time, or its end was lost; of a million tokens it says that they are too many."""
    row = {"prompt": "a" * 1_000_000, "id": "long" * 2_300_000}
    done = run("batch", "--raw", "-m", parrot, stdin=jsonl([row, {"prompt": "\n"}]))
    assert done.returncode == 1
    long, short = objects(done.stdout)
    assert "1000000 tokens" in long["error"]
    assert long["id"] == row["id"]
    assert short["text"] == ANSWER


@pytest.mark.parametrize("arguments", [[], ["-"], ["/dev/stdin"]])
def test_no_rows(parrot: Path, tmp_path: Path, arguments: list[str]) -> None:
    """No rows is no error, and an empty file of answers."""
    for data in (b"", b"\n\n"):
        out = tmp_path / "out"
        done = run("batch", "-m", parrot, *arguments, "-o", out, stdin=data)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert out.read_bytes() == b""


def test_stdin_that_is_open_and_silent(parrot: Path) -> None:
    """Nothing told that rows are waited for; a pipe that does not block ended the rows."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    command = [TFM, "batch", "--raw", "-m", parrot]
    with subprocess.Popen(command, stdin=reader, stdout=-1, stderr=-1, env=environment()) as process:
        os.close(reader)
        assert process.stderr is not None
        assert process.stderr.readline() == b"tfm: waiting for rows on stdin\n"
        for piece in (b'{"prompt": ', b'"\\n"}\n'):
            os.write(writer, piece)
            time.sleep(0.2)
        os.close(writer)
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (0, b"")
    assert objects(out)[0]["text"] == ANSWER


def test_rows_do_not_wait_for_rows_to_come(parrot: Path) -> None:
    """A program that writes a row and waits for its answer waited for ever."""
    command = [TFM, "batch", "--raw", "-m", parrot]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (1, 2, 3):
            os.write(process.stdin.fileno(), b'{"prompt": "\\n"}\n')
            assert json.loads(process.stdout.readline())["line"] == line
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


# ------------------------------------------------------------------------------------------------ usage and streams


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--slots", "0"], "--slots: found 0"), (["--stop", ""], "--stop needs"), (["--raw", "-s", "x"], "--system is"),
        (["--temperature", "-1"], "--temperature: found -1"), (["--speculate", "-1"], "--speculate: found -1"),
        (["--json"], "No such option '--json'"), (["a", "b"], "unexpected extra argument"),
        (["--regex", "a", "--json-schema", "{}"], "--json-schema and --regex"),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], told: str) -> None:
    done = run("batch", "-m", "/nowhere", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert told in done.stderr.decode()


def test_no_input(parrot: Path) -> None:
    """A terminal or a closed stdin, and no FILE."""
    terminal, its_end = pty.openpty()
    for done in (shell(f"tfm batch -m {parrot} <&-"), run("batch", "-m", parrot, stdin=its_end)):
        assert done.returncode == 2
        assert b"No rows" in done.stderr
    os.close(its_end)
    os.close(terminal)


def test_files_that_cannot_be_used(parrot: Path, tmp_path: Path) -> None:
    """Told before the model is loaded (here there is none), and nothing is left behind."""
    (tmp_path / "rows").write_bytes(b"{}")
    for arguments in (["no"], ["."], ["rows", "-o", "no/out"], ["rows", "-o", "."], ["rows", "-o", "rows"]):
        done = run("batch", "-m", "/nowhere", *(tmp_path / word if word[0] != "-" else word for word in arguments))
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
        assert b"/nowhere" not in done.stderr
    assert run("batch", "-m", "/nowhere", tmp_path / "rows", "-o", tmp_path / "out").returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert (tmp_path / "rows").read_bytes() == b"{}"


def test_one_file_for_both(parrot: Path, tmp_path: Path) -> None:
    """Answers were written over the rows, or read as rows."""
    content = b'{"prompt": "\\n"}\n'
    (tmp_path / "rows").write_bytes(content)
    (tmp_path / "hard").hardlink_to(tmp_path / "rows")
    (tmp_path / "soft").symlink_to("rows")
    for script in ("rows -o hard", "rows -o soft", "-o rows < soft", "rows >> hard", "rows -o /dev/stdout >> hard"):
        done = shell(f"cd {tmp_path}; tfm batch --raw -m {parrot} {script}")
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"found the file that rows are read from" in done.stderr
    assert (tmp_path / "rows").read_bytes() == content


def test_reader_that_leaves_early(endless_parrot: Path, tmp_path: Path) -> None:
    """`| head -n 1` ended in a traceback or ran to the end."""
    (tmp_path / "rows").write_bytes(jsonl([{"prompt": "\n", "max_tokens": 300}] * 2000))
    script = f"tfm batch --raw -m {endless_parrot} {tmp_path}/rows | head -n 1; echo :${{PIPESTATUS[0]}}"
    done = shell(script)
    assert done.stdout.endswith(b"}\n:141\n")
    assert (done.stdout.count(b"\n"), done.stderr) == (2, b"")


@pytest.mark.parametrize("where", ["-o /dev/stdout", "-o -", "-o >(cat) | cat", "-o out > out; cat out"])
def test_streams_as_output(parrot: Path, tmp_path: Path, where: str) -> None:
    """A pipe cannot be gone on with, and is written to all the same."""
    done = shell(f'cd {tmp_path}; tfm batch --raw -m {parrot} <<< \'{{"prompt": "\\n"}}\' {where}')
    assert (done.returncode, done.stderr) == (0, b"")
    assert [row["text"] for row in objects(done.stdout)] == [ANSWER]


def test_named_pipe_as_output(parrot: Path, tmp_path: Path) -> None:
    """It was opened as a file, with a lock and a file of waiting rows beside it."""
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", tmp_path / "fifo"], stdout=-1) as reader:
        done = run("batch", "--raw", "-m", parrot, "-o", tmp_path / "fifo", stdin=jsonl([{"prompt": "\n"}] * 2))
        out, _ = reader.communicate(timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert [row["text"] for row in objects(out)] == [ANSWER] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_devices_as_output(parrot: Path) -> None:
    rows = '<<< \'{"prompt": "\\n"}\''
    assert shell(f"tfm batch --raw -m {parrot} -o /dev/null {rows}").returncode == 0
    for where in ("-o /dev/full", "> /dev/full"):
        done = shell(f"tfm batch --raw -m {parrot} {where} {rows}")
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
        assert b"No space left on device" in done.stderr


# ------------------------------------------------------------------------------------------------ going on


@pytest.fixture(scope="module")
def mixed(endless_parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of rows, and its answers by a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "rows").write_bytes(mixed_rows(120))
    done = run("batch", *options(endless_parrot), folder / "rows", "-o", folder / "out")
    assert (done.returncode, done.stdout) == (1, b"")
    assert sorted(path.name for path in folder.iterdir()) == ["out", "rows"]
    return folder / "rows", (folder / "out").read_bytes()


def options(model: Path) -> list[str | Path]:
    return ["--raw", "-m", model, "--slots", "8", "--temperature", "0"]


def start(*arguments: str | Path, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([TFM, "batch", *arguments], stdin=subprocess.DEVNULL, env=environment(), **more)


def wait_for_size(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None and not (path.exists() and path.stat().st_size >= size):
        assert time.monotonic() < end
        time.sleep(0.001)


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
    assert done.stderr.startswith(f"tfm: file {out}: line 1: found key ".encode())
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


# ------------------------------------------------------------------------------------------------ Ctrl-C, the bar


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
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert error == b"tfm: stopped, 1 rows are answered; run the same command again to go on\n"
    assert [row["line"] for row in objects(out.read_bytes())] == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows"], "and no file of waiting rows"


def test_ctrl_c_without_a_file(endless_parrot: Path) -> None:
    """Rows that were finished, and waited for one before them, were lost."""
    rows = [{"prompt": "\n", "max_tokens": 900_000}, *[{"prompt": "\n", "max_tokens": 3}] * 5]
    with subprocess.Popen(
        [TFM, "batch", "--raw", "-m", endless_parrot], stdin=-1, stdout=-1, stderr=-1, env=environment()
    ) as process:
        assert process.stdin is not None
        process.stdin.write(jsonl(rows))
        process.stdin.flush()
        time.sleep(4)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, error) == (130, b"")
    assert [row["line"] for row in objects(out)] == [2, 3, 4, 5, 6]


def test_bar(endless_parrot: Path, tmp_path: Path) -> None:
    """On a terminal: how many rows of how many, how fast, how long still."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    rows.write_bytes(jsonl([{"prompt": "\n", "max_tokens": 100 + 40 * i} for i in range(40)]))
    process, terminal = pty.fork()
    if process == 0:
        command = [TFM, "batch", "--raw", "-m", endless_parrot, rows, "-o", out, "-v", "--slots", "4"]
        os.execve(TFM, list(map(str, command)), environment({"TERM": "xterm", "COLUMNS": "120"}))
    shown = read_terminal(terminal).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert " of 40, " in shown
    assert " tok/s, " in shown
    assert " left" in shown
    assert "tfm: rows    40 in " in shown


def test_timings(parrot: Path) -> None:
    """-v tells on stderr, and without it nothing is told."""
    done = run("batch", "--raw", "-v", "-m", parrot, stdin=jsonl([{"prompt": "\n"}] * 3))
    assert [line.split()[1] for line in done.stderr.splitlines()] == [b"load", b"rows", b"prompt", b"decode", b"memory"]
    assert b"rows    3 in" in done.stderr
    assert b"decode  33 tokens" in done.stderr


def test_help_tells_the_default_of_the_engine() -> None:
    from tfm.engine.batch import SLOTS

    assert f"default: {SLOTS}." in run("batch", "--help").stdout.decode()


ONE_ROW = b'{"prompt": "a"}\n'


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


def test_rows_that_come_while_others_are_answered(endless_parrot: Path) -> None:
    """A row of a slow pipe waited until all rows that came before it were answered."""
    command = [TFM, "batch", "--raw", "--unordered", "-m", endless_parrot]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.write(process.stdin.fileno(), b'{"prompt": "\\n", "max_tokens": 900000}\n')
        time.sleep(1)
        os.write(process.stdin.fileno(), b'{"prompt": "\\n", "max_tokens": 2}\n')
        assert json.loads(process.stdout.readline())["line"] == 2
        process.kill()
