"""--prompt-cache: the second run answers the same and computes less; whatever else happens, the file is whole."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, random_ids, write_checkpoint
from cli_process import TFM, environment, run

CONFIG = {**LLAMA, "eos_token_id": None, "bos_token_id": None}
IDS = random_ids(CONFIG, 150)
PROMPT = " ".join(map(str, IDS))


@pytest.fixture(scope="module")
def tiny(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, whose answer depends on all of its context."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), CONFIG)


def answer(model: Path, *options: str | Path, notes: bytes = b"", prompt: str = PROMPT) -> dict[str, Any]:
    """A run with --json, without what differs from run to run."""
    sampling = ("--temperature", "1.5", "--seed", "3", "-n", "60")
    done = run(
        "generate", "-m", model, "--ids", "--json", "--logprobs", "2", *sampling, *options, stdin=prompt.encode()
    )
    assert done.returncode == 0, done.stderr
    assert notes in done.stderr if notes else done.stderr == b""
    found: dict[str, Any] = json.loads(done.stdout)
    del found["timings"]
    return found


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
def test_second_run_answers_the_same(tiny: Path, tmp_path: Path, kv_type: str) -> None:
    """Guards another answer after a restored prompt: ids and log-probabilities are the same, to the last digit."""
    options = ("--kv-type", kv_type)
    plain = answer(tiny, *options)
    for cached in (0, 128):
        assert answer(tiny, *options, "--prompt-cache", tmp_path / "cache") == plain | {"cached_tokens": cached}
    assert os.listdir(tmp_path) == ["cache"]


def test_answer_is_kept_as_well(tiny: Path, tmp_path: Path) -> None:
    """Guards a conversation whose last answer is computed again: prompt and answer together are the next prompt."""
    file = tmp_path / "cache"
    first = answer(tiny, "--prompt-cache", file)
    longer = f"{PROMPT} {' '.join(map(str, first['ids']))} 5 6 7"
    assert answer(tiny, "--prompt-cache", file, prompt=longer)["cached_tokens"] == 192
    assert answer(tiny, "--prompt-cache", file)["cached_tokens"] == 128


def test_report(tiny: Path, tmp_path: Path) -> None:
    """Guards speed that was not there: tokens from the file count as none that were run."""
    for cached in (0, 128):
        file = tmp_path / "cache"
        done = run("generate", "-v", "-m", tiny, "--ids", "-n", "3", "--prompt-cache", file, stdin=PROMPT.encode())
        assert f"tfm: prompt  150 tokens, {cached} from the prompt cache, ".encode() in done.stderr


def test_other_weights_are_told(tiny: Path, tmp_path: Path) -> None:
    """Guards an answer of keys that other weights made, after training or a mixed-up name."""
    file, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(tiny, model)
    assert answer(model, "--prompt-cache", file)["cached_tokens"] == 0
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (model / "model.safetensors").write_bytes(data)
    note = f"tfm: prompt cache {file}: made with other weights; the prompt is computed anew\n".encode()
    plain = answer(model)
    assert answer(model, "--prompt-cache", file, notes=note) == plain | {"cached_tokens": 0}
    assert answer(model, "--prompt-cache", file) == plain | {"cached_tokens": 128}


def test_quiet(tiny: Path, tmp_path: Path) -> None:
    done = run("generate", "-q", "-m", tiny, "--ids", "-n", "3", "--prompt-cache", tmp_path / "cache", "1 2 3")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("kind", ["text", "folder", "nowhere", "/dev/null"])
def test_refused_before_the_model_is_loaded(tmp_path: Path, kind: str) -> None:
    """Guards work that is done for nothing, and a file of the user's that is lost: there is not even a model here."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("mine")
    file = "/dev/null" if kind == "/dev/null" else tmp_path / ("none/cache" if kind == "nowhere" else kind)
    done = run("generate", "-m", tmp_path / "no-model", "--prompt-cache", file, "hello")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert str(file).encode() in done.stderr
    assert (tmp_path / "text").read_text() == "mine"


def test_empty_name(tmp_path: Path) -> None:
    done = run("generate", "-m", tmp_path, "--prompt-cache", "", "hello")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--prompt-cache is empty" in done.stderr


@pytest.mark.parametrize("end", ["Ctrl-C", "closed pipe"])
def test_answer_that_is_broken_off(endless_parrot: Path, tmp_path: Path, end: str) -> None:
    """Guards a long prompt that is lost because its answer was long enough: what was computed is kept."""
    file = tmp_path / "cache"
    command = [TFM, "generate", "--raw", "-m", endless_parrot, "-n", "900000", "--prompt-cache", file, "x" * 200 + "\n"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(40) == b"abcdefghij" * 4
        if end == "Ctrl-C":
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        else:
            process.stdout.close()
        assert process.wait(60) == (130 if end == "Ctrl-C" else 141)
        assert process.stderr.read() == b""
    assert os.listdir(tmp_path) == ["cache"]
    done = run("generate", "--json", "--raw", "-m", endless_parrot, "-n", "5", "--prompt-cache", file, "x" * 200 + "\n")
    assert json.loads(done.stdout)["cached_tokens"] == 192


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_run_that_fails_tells_of_that_alone(tiny: Path, tmp_path: Path, command: str) -> None:
    """Behind a note that nothing was saved, the error stood in a second line."""
    stdin = b'{"ids": [5, 6]}\n{"ids": [6]}\n' if command == "batch" else b"5 6"
    shape = () if command == "batch" else ("--ids", "--json")
    with open("/dev/full", "wb") as full:
        options = "-m", tiny, *shape, "-n", "4", "--prompt-cache", tmp_path / "cache"
        done = run(command, *options, stdin=stdin, stdout=full.fileno())
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"tfm: stdout: cannot be written")


# ------------------------------------------------------------------------------------------------ batch


def rows(count: int = 5, shared: int = 150) -> bytes:
    """Prompts that begin with the same ids, each with one of its own behind them."""
    return "".join(json.dumps({"ids": [*IDS[:shared], 5 + i]}) + "\n" for i in range(count)).encode()


def batch(model: Path, *options: str | Path, stdin: bytes = b"") -> tuple[bytes, str, list[str]]:
    """The answers, how many tokens of prompts there were and were run, and what else was told."""
    sampling = ("--temperature", "1.5", "-n", "20", "--logprobs", "1")
    done = run("batch", "-v", "-m", model, *sampling, *options, stdin=stdin)
    assert done.returncode == 0, done.stderr
    told = done.stderr.decode().splitlines()
    report = ("load", "rows", "prompt  ", "decode", "memory")
    prompt = next(line.removeprefix("tfm: prompt  ") for line in told if line.startswith("tfm: prompt  "))
    return done.stdout, prompt, [line for line in told if not line.startswith(tuple(f"tfm: {word}" for word in report))]


@pytest.mark.parametrize("kv_type", ["f32", "q8"])
def test_batch_takes_its_beginning_from_the_file(tiny: Path, tmp_path: Path, kv_type: str) -> None:
    """Guards rows that answer otherwise after a restored beginning, and a file that is kept and not used: of 755 tokens
    two blocks are run once, and none the second time; four rows have them from the first in any case."""
    file = tmp_path / "cache"
    plain, _, _ = batch(tiny, "--kv-type", kv_type, stdin=rows())
    for read in (755 - 4 * 128, 755 - 5 * 128):
        found = batch(tiny, "--kv-type", kv_type, "--prompt-cache", file, stdin=rows())
        assert found == (plain, f"755 tokens, {read} of them run", [])
    assert os.listdir(tmp_path) == ["cache"]


def test_generate_and_batch_use_the_same_file(tiny: Path, tmp_path: Path) -> None:
    """Guards a file that only the command that wrote it can read. What has more of the text is not replaced."""
    file = tmp_path / "cache"
    answer(tiny, "--prompt-cache", file)  # 192 positions, with the answer
    size = file.stat().st_size
    assert batch(tiny, "--prompt-cache", file, stdin=rows())[1] == f"755 tokens, {755 - 5 * 128} of them run"
    assert file.stat().st_size == size
    assert answer(tiny, "--prompt-cache", file)["cached_tokens"] == 128


def test_batch_tells_why_a_file_is_not_used(tiny: Path, tmp_path: Path) -> None:
    """Guards keys of another type under an answer, and a file that is not written without a word."""
    file = tmp_path / "cache"
    batch(tiny, "--kv-type", "q8", "--prompt-cache", file, stdin=rows())
    plain, read, _ = batch(tiny, stdin=rows())
    told = [f"tfm: prompt cache {file}: made with --kv-type q8, not f16; the prompt is computed anew"]
    assert batch(tiny, "--prompt-cache", file, stdin=rows()) == (plain, read, told)
    assert batch(tiny, "--prompt-cache", file, stdin=rows())[2] == []
    other = tmp_path / "other"
    told = [f"tfm: prompt cache {other}: not saved, not all prompts begin with the same block of 64 tokens"]
    assert batch(tiny, "--prompt-cache", other, stdin=rows(shared=63))[2] == told
    assert not other.exists()


def test_batch_usage(tmp_path: Path) -> None:
    """Guards an option that is ignored in silence: what is not shared cannot be kept. There is no model here."""
    options = ("--prompt-cache", tmp_path / "cache", "--no-prefix-sharing")
    done = run("batch", "-m", tmp_path / "none", *options, stdin=rows())
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--prompt-cache keeps what rows share: not with --no-prefix-sharing." in done.stderr
    (tmp_path / "text").write_text("mine")
    done = run("batch", "-m", tmp_path / "none", "--prompt-cache", tmp_path / "text", stdin=rows())
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert (tmp_path / "text").read_text() == "mine"


def test_batch_that_is_stopped_keeps_its_beginning(endless_parrot: Path, tmp_path: Path) -> None:
    """Guards a long shared beginning that is computed again after Ctrl-C."""
    file, out = tmp_path / "cache", tmp_path / "out"
    asked = [{"prompt": "x" * 200 + "\n", "raw": True, "max_tokens": most} for most in (2, 900_000)]
    data = "".join(json.dumps(row) + "\n" for row in asked).encode()
    (tmp_path / "rows").write_bytes(data)
    command = [TFM, "batch", "-q", "-m", endless_parrot, tmp_path / "rows", "--prompt-cache", file]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["text"] == "ab"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b""
        assert process.wait(60) == 130
        assert process.stderr.read() == b""
    assert sorted(os.listdir(tmp_path)) == ["cache", "rows"]
    first = data.splitlines(keepends=True)[0]
    assert batch(endless_parrot, "-o", out, "--prompt-cache", file, stdin=first)[1] == "201 tokens, 9 of them run"


def test_file_of_mktemp(tiny: Path, tmp_path: Path) -> None:
    """An empty file was told to be damaged, at every first run with `--prompt-cache "$(mktemp)"`."""
    file = tmp_path / "cache"
    file.touch()
    for cached in (0, 128):
        assert answer(tiny, "--prompt-cache", file)["cached_tokens"] == cached
    file.write_bytes(b"")
    assert batch(tiny, "--prompt-cache", file, stdin=rows())[2] == []
