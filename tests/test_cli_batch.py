"""tfm batch as a person runs it: rows in, rows out."""

import json
import os
import pty
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_process import ANSWER, jsonl, objects
from cli_process import TFM, TIMEOUT_S, environment, read_terminal, run, shell, wait_for_work

TIMINGS = "timings"


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
    long = "The old bridge over the river is closed until May, and the bus stops at the mill instead. " * 5
    rows: list[dict[str, Any]] = [
        {"prompt": "Name three fruits.", "max_tokens": 12},
        {"prompt": f"{long}Why?", "max_tokens": 9, "temperature": 0.9, "seed": 7},
        {"prompt": f"{long}When?", "max_tokens": 7, "temperature": 0.7, "top_p": 0.8, "top_k": 40, "seed": 8},
        {"prompt": "A haiku about rain 🌧.", "max_tokens": 14, "temperature": 1.0, "seed": 9, "min_p": 0.05},
        {"prompt": "Once upon", "raw": True, "max_tokens": 10, "logprobs": 2, "repeat_penalty": 1.2},
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
def test_wrong_usage(wrong_usage: Callable[..., str], arguments: list[str], told: str) -> None:
    assert told in wrong_usage("batch", "-m", "/nowhere", *arguments)


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


# ------------------------------------------------------------------------------------------------ what is told


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
    known = re.findall(r"rows (\d+) of 40, \d+ tok/s, [\w ]* left", shown)
    assert min(map(int, known)) >= 4, "before as many rows are done as run together, nobody knows how long one takes"
    assert "so far" in shown, "a time without a word was taken for the time that is left"
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


def test_rows_that_come_while_others_are_answered(endless_parrot: Path) -> None:
    """A row of a slow pipe waited until all rows that came before it were answered."""
    command = [TFM, "batch", "--raw", "--unordered", "-m", endless_parrot]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        os.write(process.stdin.fileno(), b'{"prompt": "\\n", "max_tokens": 900000}\n')
        wait_for_work(process, 1)
        os.write(process.stdin.fileno(), b'{"prompt": "\\n", "max_tokens": 2}\n')
        assert json.loads(process.stdout.readline())["line"] == 2
        process.kill()
