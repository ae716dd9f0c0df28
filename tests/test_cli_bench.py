"""tfm bench: its shapes, its lists, and what is wrong usage. No time is asserted."""

import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import GROUPED
from cli_process import TFM, environment, run

QUICK = ("-r", "2", "-p", "3", "-n", "2", "--threads", "1")
KEYS = [
    "model", "size_bytes", "params", "backend", "cpu", "threads", "test", "batch", "depth",
    "avg_ts", "stddev_ts", "samples_ts", "limit_ts", "limit_share",
]  # fmt: skip
TITLES = ["model", "size", "params", "backend", "threads", "test", "t/s", "of limit", "limit"]


def table(text: str) -> list[list[str]]:
    """The cells of a Markdown table, heading first; its lines must be aligned."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(set(cell) <= {"-", ":"} for cell in cells[1])
    return [cells[0], *cells[2:]]


def bench(*arguments: Any) -> str:
    done = run("bench", *arguments)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    return done.stdout.decode()


def test_table(parrot: Path) -> None:
    """The columns that people know, aligned, and what the limit was measured to be."""
    out = bench("-m", parrot, *QUICK)
    heading, *rows = table(out)
    assert heading == TITLES
    assert [row[5] for row in rows] == ["pp3", "tg2"]
    assert all(" ± " in row[6] and row[7].endswith("%") and row[8] in ("memory", "multiply") for row in rows)
    assert "GB/s" in out.splitlines()[-1]


def test_json(parrot: Path) -> None:
    """Scripts read these keys."""
    rows = json.loads(bench("-m", parrot, "-o", "json", *QUICK))
    assert [row["test"] for row in rows] == ["pp3", "tg2"]
    for row in rows:
        assert list(row) == KEYS
        assert len(row["samples_ts"]) == 2
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["limit_share"] == pytest.approx(row["avg_ts"] / row["limit_ts"])
        assert (row["backend"], row["threads"], row["batch"], row["depth"]) == ("CPU", 1, 1, 0)


def test_csv(parrot: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(bench("-m", parrot, "-o", "csv", *QUICK))))
    assert [row["test"] for row in rows] == ["pp3", "tg2"]
    assert all(list(row) == [*KEYS, "limit"] and len(row["samples_ts"].split()) == 2 for row in rows)


def test_lists(parrot: Path) -> None:
    """Every combination, in the field's order: prompts, then decoding, for each batch, each depth, each count."""
    lists = ("-p", "3,5", "-n", "2,1", "-b", "1,3", "-d", "0,70", "--threads", "1", "-r", "1")
    rows = [json.loads(line) for line in bench("-m", parrot, "-o", "jsonl", *lists).splitlines()]
    names = [f"{name}{b}{d}" for d in ("", " @ d70") for b in ("", " b3") for name in ("pp3", "pp5", "tg2", "tg1")]
    assert [row["test"] for row in rows] == names
    assert [row["batch"] for row in rows] == [1] * 4 + [3] * 4 + [1] * 4 + [3] * 4
    assert [row["depth"] for row in rows] == [0] * 8 + [70] * 8
    assert all(row["stddev_ts"] == 0 for row in rows)
    rows = [
        json.loads(line) for line in bench("-m", parrot, "-o", "jsonl", *QUICK, "-n", "2,1", "-r", "3,1").splitlines()
    ]
    found = [(row["test"], len(row["samples_ts"])) for row in rows]
    assert found == [("pp3", 3), ("pp3", 1), ("tg2", 3), ("tg2", 1), ("tg1", 3), ("tg1", 1)]


def test_zero_leaves_out(parrot: Path) -> None:
    assert [row[5] for row in table(bench("-m", parrot, *QUICK, "-n", "0"))[1:]] == ["pp3"]
    assert [row[5] for row in table(bench("-m", parrot, *QUICK, "-p", "0,3"))[1:]] == ["pp3", "tg2"]


def test_more_threads_than_there_are(parrot: Path) -> None:
    done = run("bench", "-m", parrot, *QUICK, "--threads", "1,100000,100001", "-n", "0")
    assert b"100000 threads asked for" in done.stderr
    counts = [row[4] for row in table(done.stdout.decode())[1:]]
    assert counts == list(dict.fromkeys(counts))
    assert counts[0] == "1"


@pytest.mark.parametrize("weights", [[], ["--weights", "q8"], ["--weights", "bf16"]])
def test_shape_without_a_checkpoint(tmp_path: Path, parrot: Path, weights: list[str]) -> None:
    """No tokenizer and no tensors are needed, and the file may have any name."""
    (tmp_path / "shape.json").write_text(json.dumps(GROUPED["llama-grouped"]))
    (row,) = json.loads(bench("--config", tmp_path / "shape.json", *weights, "-o", "json", *QUICK, "-n", "0"))
    assert row["model"] == f"shape {weights[-1] if weights else 'q4'}, random"
    assert row["params"] > 600_000


def test_config_errors(tmp_path: Path) -> None:
    """Of a file that is there: what is wrong in it is no wrong usage."""
    (tmp_path / "shape.json").write_text('{"model_type": "llama"}')
    done = run("bench", "--config", tmp_path / "shape.json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"vocab_size" in done.stderr or b"field" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-p", "-1"], "-p"),
        (["-p", "1,,2"], "-p"),
        (["-p", "x"], "-p"),
        (["-p", "1" * 5000], "--n-prompt: found '111"),
        (["-n", "1.5"], "-n"),
        (["-b", "0"], "-b"),
        (["-d", "-5"], "-d"),
        (["-r", "1,0"], "-r"),
        (["--threads", "0"], "--threads"),
        (["--threads", "1,0"], "--threads"),
        (["--kv-type", "q4"], "'f32', 'f16', 'q8'"),
        (["-o", "xml"], "'md', 'csv', 'json', 'jsonl'"),
        (["-p", "0", "-n", "0"], "both 0"),
        (["--config", "/nowhere/config.json"], "does not exist"),
        (["--weights", "q4"], "--weights needs --config"),
        (["--weights", "q5"], "--weights"),
        (["--cold"], "--cold needs --startup"),
        (["--startup", "--kernels"], "choose one"),
        (["--kernels", "nothing"], "norm"),
        (["--kernels", ""], "--kernels is empty"),
        (["--kernels", "norm", "-r", "2"], "-r says how a model is run; --kernels has no use for it"),
        (["--startup", "-n", "8"], "-n says how a model is run; --startup has no use for it"),
        (["--startup", "--threads", "1"], "--threads"),
        (["-m", "/nowhere", "--kernels", "norm"], "-m is a model"),
    ],
)
def test_wrong_usage(wrong_usage: Callable[..., str], arguments: list[str], word: str) -> None:
    """A value that is clamped or ignored gives a figure of something else than was asked for."""
    assert word in wrong_usage("bench", *arguments)


def test_too_long_for_the_context(parrot: Path) -> None:
    done = run("bench", "-m", parrot, *QUICK, "-d", "0,1023")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"at most 1024" in done.stderr


def test_interrupted(parrot: Path) -> None:
    """A row is on its way when it is measured, and Ctrl-C ends with 130."""
    command = [TFM, "bench", "-m", parrot, "-o", "jsonl", "-p", "2", "-n", "1000", "-r", "100"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["test"] == "pp2"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130


def test_interrupted_table(parrot: Path) -> None:
    """What has been measured for half an hour is not lost."""
    script = (
        "import os, signal, sys; import tfm.engine.bench as bench; limit_of = bench.limit_of\n"
        "def once(model, test, machine):\n"
        "    if test.kind == 'tg': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return limit_of(model, test, machine)\n"
        "bench.limit_of = once; from tfm.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "bench", "-m", parrot, *QUICK]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 130
    assert [row[5] for row in table(done.stdout.decode())[1:]] == ["pp3"]


def test_kernels(parrot: Path) -> None:
    """All cases of one kernel, verified."""
    heading, *rows = table(bench("--kernels", "norm"))
    assert heading[:5] == ["op", "case", "verified", "GB/s", "GFLOP/s"]
    assert {row[0] for row in rows} == {"norm"}
    assert {row[2] for row in rows} == {"yes"}
    assert len(rows) == 12
    found = [json.loads(line) for line in bench("--kernels", "norm", "-o", "jsonl").splitlines()]
    assert all(row["passed"] and row["seconds"] > 0 and row["numpy_seconds"] > 0 for row in found)


def test_wrong_kernel(parrot: Path) -> None:
    """A kernel that is not as exact as it must be makes the command fail, after the table."""
    script = (
        "import dataclasses, sys; import tfm.kernels.norm as norm\n"
        "norm.OPS[:] = [dataclasses.replace(norm.OPS[0], run=lambda **inputs: norm.norm(**inputs) + 1)]\n"
        "from tfm.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "bench", "--kernels", "norm"]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 1
    assert all(row[2].startswith("NO") for row in table(done.stdout.decode())[1:])
    assert b"12 cases are wrong" in done.stderr


def test_startup(endless_parrot: Path) -> None:
    """Whole processes, for each count of them; the first byte comes before the exit."""
    rows = json.loads(bench("--startup", "-m", endless_parrot, "-r", "2,1", "-o", "json"))
    assert [(row["command"], row["processes"]) for row in rows] == [
        ("tfm --help", 2), ("tfm --help", 1), ("tfm generate -n 1", 2), ("tfm generate -n 1", 1),
    ]  # fmt: skip
    assert all(0 < row["first_byte_s"] <= row["exit_s"] for row in rows)


def test_cold_startup_that_is_stopped(endless_parrot: Path, tmp_path: Path) -> None:
    """The process that was measured went on, and made the cache anew that had been taken away."""
    command = [TFM, "bench", "--startup", "--cold", "-m", endless_parrot, "-r", "1"]
    env = environment({"TMPDIR": str(tmp_path)})
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=env) as process:
        end_s = time.monotonic() + 60
        while not list(tmp_path.glob("tfm-run-*/*/kernels/*")) and time.monotonic() < end_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []


def test_startup_of_a_model_that_says_nothing(parrot: Path) -> None:
    """There is no first byte to wait for; the end of the process was told as one."""
    done = run("bench", "--startup", "-m", parrot, "-r", "1")
    assert done.returncode == 1
    assert b"tfm generate: found no byte to wait for" in done.stderr


def test_startup_of_a_model_that_does_not_load(tmp_path: Path) -> None:
    """A process that fails is quick, and no measurement."""
    done = run("bench", "--startup", "-m", tmp_path, "-r", "1")
    assert done.returncode == 1
    assert b"config.json" in done.stderr
