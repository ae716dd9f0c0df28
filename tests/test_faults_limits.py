"""Values at their limits and beyond: prompts beside the context, numbers that no machine has, texts without an end."""

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cli_process import TIMEOUT_S, environment, run
from parrot import id_of, write_parrot
from safetensors.numpy import load_file, save_file
from tokenizer_files import byte_level, sentencepiece, write_tokenizer

from tfm.engine import TfmError, load
from tfm.engine.sampling import sample
from tfm.engine.sampling_params import SamplingParams
from tfm.engine.tokenizer import Tokenizer

ANSWER = "Hi é🙂!"
HUGE = "1" + "0" * 30
START = id_of(ord("\n"))


# ------------------------------------------------------------------------------------------------ the context


@pytest.mark.parametrize("ctx", [1, 2, 63, 64, 65, 128, 129])
def test_prompts_beside_the_context(endless_parrot: Path, ctx: int) -> None:
    """One position too few or too many, also where the context ends a block of the cache, or begins one."""
    with closing(load(endless_parrot, threads=1, ctx=ctx)) as model:
        for length in range(max(ctx - 2, 1), ctx + 1):
            for chunk in (1, 64, 512):
                tokens = list(model.generate([START] * length, 10**30, chunk=chunk))
                assert "".join(token.text for token in tokens) == "abc"[: ctx - length + 1]
                assert tokens[-1].finish_reason == "length"
        for length in (ctx + 1, ctx + 2, 10 * ctx):
            with pytest.raises(TfmError, match=f"prompt: found {length} tokens; allowed: at most {ctx}, the context"):
                model.generate([START] * length)


def test_conversations_beside_the_context(chatty_parrot: Path) -> None:
    """The template's own tokens count; a conversation that does not fit lost its system prompt in other tools."""
    whole = len("<system>be brief</system>\n<user>hello</user>\n<assistant>\n")
    options = "--json", "-m", chatty_parrot, "-s", "be brief", "hello"
    for ctx, status in ((whole + 1, 0), (whole, 0), (whole - 1, 1)):
        done = run("generate", "--ctx", str(ctx), *options)
        assert done.returncode == status
        if status == 0:
            answer = json.loads(done.stdout)
            found = answer["text"], answer["finish_reason"], answer["prompt_tokens"]
            assert found == (ANSWER[: ctx - whole + 1], "length", whole)
        else:
            assert done.stdout == b""
            assert f"found {whole} tokens; allowed: at most {ctx}, the context".encode() in done.stderr


# ------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "options",
    [
        ["-n", HUGE],
        ["-n", "9223372036854775808"],
        ["--json", "--logprobs", HUGE],
        ["-q", "--threads", HUGE],
        ["--presence-penalty", "1e308"],
        ["--repeat-penalty", "1e308"],
        ["--logit-bias", "5=-1e308"],
        ["--temperature", "1", "--top-p", "1e-8"],
        ["--temperature", "1e-9"],
        ["--temperature", "1", "--top-k", "1", "-q"],
    ],
)
def test_numbers_that_are_allowed(parrot: Path, options: list[str]) -> None:
    """A number beyond 64 bits, or one whose powers overflow, ended in a traceback or another answer."""
    done = run("generate", "--raw", "-m", parrot, *options, "\n")
    assert (done.returncode, done.stderr) == (0, b"")
    text = json.loads(done.stdout)["text"] if "--json" in options else done.stdout.decode()
    assert text == ANSWER


@pytest.mark.parametrize(
    ("options", "status", "word"),
    [
        (["--ctx", HUGE], 1, f"context: found {HUGE}; allowed: 1 to 1024"),
        (["--top-k", HUGE], 2, f"--top-k: found {HUGE}; allowed: a whole number from 0"),
        (["--seed", HUGE], 2, "--seed: found"),
        (["--logit-bias", f"{HUGE}=1"], 1, f"logit_bias: found token id {HUGE}; allowed: 0 to 256"),
        (["--logit-bias=-1=1"], 2, "--logit-bias: found '-1=1'; allowed: a token id and a number, such as 42=-5"),
        (["--logit-bias", "5=1e308"], 1, "penalties and logit_bias: found inf as the largest logit"),
    ],
)
def test_numbers_that_are_not(parrot: Path, options: list[str], status: int, word: str) -> None:
    """They are named; none is clamped or taken for another."""
    done = run("generate", "--raw", "-m", parrot, *options, "\n")
    assert (done.returncode, done.stdout) == (status, b"")
    assert word in done.stderr.decode()


@pytest.mark.parametrize("command", ["chat", "batch"])
def test_bias_on_a_token_that_is_not_there(chatty_parrot: Path, command: str) -> None:
    """It was told of the first line, as if that were wrong, or of every row anew; and never where no line came."""
    done = run(command, "-m", chatty_parrot, "--logit-bias", "257=1", stdin=b"")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"tfm: logit_bias: found token id 257; allowed: 0 to 256\n"


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 257}, {"top_k": 258}, {"top_k": 256}, {"top_p": 1.0}])
def test_vocabulary_and_one_more(settings: dict[str, float]) -> None:
    """top-k of V, or one beyond, chose among V - 1, or read behind the logits; V - 1 leaves out one."""
    logits = np.linspace(-2, 2, 257, dtype=np.float32)
    params = [SamplingParams(temperature=100.0, **given) for given in ({}, settings)]
    plain, wide = ([sample(logits, one, 3, place).id for place in range(4000)] for one in params)
    assert set(plain) == set(range(257))
    assert (plain == wide) == (settings != {"top_k": 256})
    assert settings != {"top_k": 256} or set(wide) == set(range(1, 257))


# ------------------------------------------------------------------------------------------------ damaged weights


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    """A token of NaN logits is one at random. What came before the damage stays printed; check names the tensor."""
    folder = write_parrot(tmp_path, ANSWER.encode())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][id_of(ord(" ")), 7] = value
    save_file(tensors, folder / "model.safetensors")
    for options, out in (([], b"Hi "), (["--no-stream"], b"Hi "), (["--json"], b""), (["--temperature", "1"], b"Hi ")):
        done = run("generate", "-q", "--raw", "-m", folder, *options, "\n")
        assert (done.returncode, done.stdout) == (1, out)
        assert done.stderr.startswith(b"tfm: logits for position 4: found 257 of 257 are NaN or infinite")
        assert len(done.stderr.splitlines()) == 1
    if np.isnan(value):
        assert b"tensor model.embed_tokens.weight" in run("check", "-m", folder, "--threads", "1").stdout


# ------------------------------------------------------------------------------------------------ long texts

LONG = {
    "letters": "a" * 50_000,
    "spaces": " " * 200_000,
    "characters": "漢字仮名交" * 5_000,
    "line ends": "\r\n" * 50_000,
    "starts of a control token": "<|im_start" * 5_000,
    "combining marks": "e" + "\u0301" * 25_000,
}


NEAR_LINEAR = 3.3


def growth(work: Callable[[str], object], text: str) -> float:
    """How many times as much processor time work takes for text twice."""

    def seconds(given: str) -> float:
        begin = time.process_time()
        work(given)
        return time.process_time() - begin

    work(text[:10])
    grown = float("inf")
    for _ in range(5):
        if grown > NEAR_LINEAR:  # at first; then something else was in the way, or it is so
            # Both anew: the processor may have been faster a second ago.
            grown = min(grown, seconds(text * 2) / max(min(seconds(text) for _ in range(2)), 0.05))
    return grown


@pytest.mark.parametrize("name", LONG)
def test_conversations_grow_in_near_linear_time(default_model_folder: Path, name: str) -> None:
    """The way through the template and past control tokens; also when one is typed, which is a way of its own."""
    tokenizer = Tokenizer.load(default_model_folder)
    for end in ("", "<|im_end|>"):
        grown = growth(lambda text, end=end: tokenizer.chat_ids([{"role": "user", "content": text + end}]), LONG[name])
        assert grown < NEAR_LINEAR


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
@pytest.mark.parametrize("name", LONG)
def test_texts_of_bytes_grow_in_near_linear_time(tmp_path: Path, kind: Callable[..., dict], name: str) -> None:
    """Text that falls back to bytes is one word as long as the text, there and back."""
    tokenizer = write_tokenizer(tmp_path, kind())
    text = LONG[name][:50_000]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert growth(tokenizer.encode, text) < NEAR_LINEAR
    assert growth(lambda given: tokenizer.decode(ids * (len(given) // len(text) or 1)), text) < NEAR_LINEAR


# ------------------------------------------------------------------------------------------------ limits of a process

SCARCE = (
    b"tfm: open files: this process may have no more; raise the limit (ulimit -n)\n",
    b"tfm: threads: this process may start no more; allow it more processes or memory (ulimit -u, ulimit -v)\n",
    b"tfm: memory: a library cannot be loaded; allow this process more (ulimit -v)\n",
    b"tfm: memory: not enough; use a smaller model or a shorter context, or allow this process more (ulimit -v)\n",
)
LIMITED = """
import resource, sys
def limit(number, spare):
    used = {resource.RLIMIT_NOFILE: 3, resource.RLIMIT_AS: 1024 * int(open("/proc/self/statm").read().split()[0]) * 4}
    resource.setrlimit(number, (used[number] + spare, used[number] + spare))
import tfm.cli.main
limit(*map(int, sys.argv.pop(1).split(",")))
sys.exit(tfm.cli.main.main())
"""


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_few_open_files(parrot: Path, spare: int) -> None:
    """It was "a bug in tfm: OSError", at times behind a line that named stdout or a file of Python's."""
    limited(parrot, resource.RLIMIT_NOFILE, spare)


@pytest.mark.parametrize("spare", [0, 1 << 20])
def test_little_memory(parrot: Path, spare: int) -> None:
    """It was "a bug in tfm: RuntimeError: can't start new thread"."""
    limited(parrot, resource.RLIMIT_AS, spare)


@pytest.mark.parametrize("megabytes", [200, 250, 300])
def test_little_memory_to_measure(megabytes: int) -> None:
    """It was "stdout: None" where llvmlite's library did not find room: llvmlite tells of that in words of its own."""
    done = run_limited(resource.RLIMIT_AS, megabytes << 20, "bench", "--kernels", "norm", "-o", "jsonl")
    if done.returncode == 0:
        assert (done.stdout.count(b"\n") > 1, done.stderr) == (True, b"")
    elif done.returncode == -signal.SIGABRT:  # LLVM's own end
        assert done.stderr.startswith(b"LLVM ERROR: out of memory")
    else:
        assert done.returncode == 1
        assert done.stderr in SCARCE


def run_limited(number: int, spare: int, *arguments: object) -> "subprocess.CompletedProcess[bytes]":
    """tfm with so much more than Python and tfm's first modules have."""
    command = [sys.executable, "-c", LIMITED, f"{number},{spare}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, env=environment(), timeout=TIMEOUT_S)


def limited(model: Path, number: int, spare: int) -> None:
    """A run with so much more than Python and tfm's first modules have; it does its work, or tells what is scarce."""
    done = run_limited(number, spare, "generate", "--raw", "--no-stdin", "-m", model, "\n")
    if done.returncode == 0:
        assert (done.stdout.decode(), done.stderr) == (ANSWER, b"")
    else:
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr in SCARCE or (done.stderr.count(b"\n") == 1 and b"found Too many open files" in done.stderr)
