"""Two hundred rows that differ in all that a row may say, run in every way that tfm batch has: always the same bytes.

The model has random weights, so that an answer depends on all of its context, and 97 tokens, each one character.
"""

import json
import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import TFM, TIMEOUT_S, environment, run
from parrot import TEMPLATE

ROWS = 200
SHARED = "Read the note below with care, and say in a word or two what it is about. Be kind, be brief, and no more. "
WORDS = ["the", "bus", "stops", "at the", "old mill", "bridge", "over", "river", "until", "May", "rain again", "tea"]
EVERY = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
DEFAULTS = ("-n", "24", "--temperature", "1.2", "--top-p", "0.97")
PLAINEST = ("--slots", "1", "--threads", "1", "--speculate", "0", "--no-prefix-sharing")


def sampling(draw: random.Random) -> dict[str, Any]:
    """Some of the fields that decide which token is taken; in one row of six greedy."""
    if draw.random() < 1 / 6:
        return {"temperature": 0}
    values = [0.4 + draw.random(), draw.randrange(1, 60), 0.8 + draw.random() / 5, draw.random() / 20]
    values += [1 + draw.random(), draw.random() * 2 - 1, draw.random()]
    chosen = dict(zip(EVERY, values, strict=True))
    fields: dict[str, Any] = {name: chosen[name] for name in EVERY if draw.random() < 0.3}
    if draw.random() < 0.2:
        fields["logit_bias"] = {str(draw.randrange(97)): draw.choice([-100, -2.5, 3, 6]) for _ in range(3)}
    if draw.random() < 0.3:
        fields["seed"] = draw.randrange(1 << 40)
    return fields


def prompt(draw: random.Random, shared: bool) -> dict[str, Any]:
    """A prompt of 2 to 400 tokens: a message, a conversation, a text as it is, or ids."""
    text = " ".join(draw.choices(WORDS, k=draw.choice([1, 3, 9, 30, 70])))
    kind = draw.choice(["prompt", "system", "messages", "turns", "raw", "ids"])
    begin = SHARED if shared else ""
    match kind:
        case "system":
            return {"prompt": text, "system": f"{begin}In English.", "prefill": draw.choice(["", "It "])}
        case "messages":
            system = {"role": "system", "content": f"{begin}In English."}
            return {"messages": [system, {"role": "user", "content": text}]}
        case "turns":
            said = [f"{begin}A note.", "Which?", text]
            return {"messages": [{"role": ["user", "assistant"][i % 2], "content": said[i]} for i in range(3)]}
        case "raw":
            return {"prompt": begin + text, "raw": True}
        case "ids":
            return {"ids": [(ord(c) - 33) % 90 + 3 for c in begin + text]}
    return {"prompt": begin + text}


def rows(shared_always: bool = False) -> list[dict[str, Any]]:
    """The same rows each time. Two have faults, the others an answer of 0 to 90 tokens."""
    draw, made = random.Random(4), []
    for i in range(ROWS):
        row = {"id": draw.choice([i, f"row {i}", None]), **prompt(draw, shared_always or draw.random() < 0.6)}
        row |= sampling(draw)
        if draw.random() < 0.8:
            row["max_tokens"] = draw.choice([0, 1, 2, 7, 30, 90])
        if draw.random() < 0.2:
            row["logprobs"] = draw.randrange(4)
        if draw.random() < 0.25:
            row["stop"] = draw.choice(["e", ["qq", "a"], ["z1", "z12", "M"]])
        if draw.random() < 0.1:
            row["regex"] = draw.choice(["[0-9]{2,30}", "(yes|no|perhaps)", "[a-f ]*!"])
        made.append(row)
    made[50] |= {"top_p": 7}
    made[120] |= {"max_tokens": -1}
    return made


def jsonl(values: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()


@pytest.fixture(scope="module")
def model(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("matrix"), LLAMA)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(jsonl(rows()))
    return path


def out_of(model: Path, file: Path, out: Path, *how: str | Path) -> bytes:
    """OUT of a run to its end; two rows of each file have faults."""
    done = run("batch", "-q", "-m", model, *DEFAULTS, *how, file, "-o", out)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"tfm: 2 of 200 rows have no answer but an error; the first: line 51: row: field top")
    return out.read_bytes()


@pytest.fixture(scope="module")
def expected(model: Path, file: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """One row after the other, each by itself from its first token on."""
    found = out_of(model, file, tmp_path_factory.mktemp("expected") / "out", *PLAINEST)
    answers = [json.loads(line) for line in found.splitlines()]
    assert [answer["line"] for answer in answers] == list(range(1, ROWS + 1))
    texts = [answer["text"] for answer in answers if answer.get("text")]
    assert len(set(texts)) > 0.8 * len(texts) > 120  # answers that vary, else equal ones would say little
    assert {answer.get("finish_reason") for answer in answers} == {"stop", "length", None}
    return found


@pytest.mark.parametrize(
    "how",
    [
        "--slots 1", "--slots 4", "--slots 32", "--slots 32 --threads 1", "--slots 32 --no-prefix-sharing",
        "--slots 4 --speculate 0", "--slots 32 --speculate 7 --threads 2", "--slots 7 --speculate 3 --max-ram 1700K",
    ],
)  # fmt: skip
def test_how_rows_are_run_changes_no_byte(model: Path, file: Path, expected: bytes, tmp_path: Path, how: str) -> None:
    """An answer depended on its neighbours, on shared blocks, on what was proposed, on memory or on threads."""
    assert out_of(model, file, tmp_path / "out", *how.split()) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("ways", [["--slots 4"], ["--slots 32", "--slots 1 --threads 1", "--no-prefix-sharing"]])
def test_killed_and_gone_on_with(model: Path, file: Path, expected: bytes, tmp_path: Path, ways: list[str]) -> None:
    """kill -9 in the middle, and on with the same command or in another way: rows lost, doubled, or answered otherwise
    because others stood beside them."""
    out, draw, kills = tmp_path / "out", random.Random(len(ways)), 0
    command = [TFM, "batch", "-q", "-m", model, *DEFAULTS, file, "-o", out]
    for kill in range(3):
        way = ways[kill % len(ways)].split()
        with subprocess.Popen([*command, *way], stdin=-3, stderr=-1, env=environment()) as process:
            most = len(expected) * (kill + 1) // 4 + draw.randrange(2000)
            while process.poll() is None and not (out.exists() and out.stat().st_size >= most):
                time.sleep(0.001)
            process.kill()
            kills += process.wait(TIMEOUT_S) == -9
        there = out.read_bytes()
        assert expected.startswith(there[: there.rfind(b"\n") + 1])
    assert kills
    assert out_of(model, file, out, *ways[0].split()) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_prompt_cache_changes_no_byte(model: Path, file: Path, expected: bytes, tmp_path: Path) -> None:
    """An answer depended on whether its beginning was computed, restored, or computed by other rows."""
    alike, cache = tmp_path / "alike.jsonl", tmp_path / "cache"
    same = [{**row, "raw": True, "prompt": f"{SHARED}{i}"} for i, row in enumerate(rows())]
    drop = ("messages", "ids", "system", "prefill")
    alike.write_bytes(jsonl([{name: row[name] for name in row if name not in drop} for row in same]))
    plain = out_of(model, alike, tmp_path / "plain", *PLAINEST)
    for turn in ("first", "second"):
        assert out_of(model, alike, tmp_path / turn, "--prompt-cache", cache, "--slots", "8") == plain
        assert cache.exists()
    made = cache.read_bytes()
    assert out_of(model, file, tmp_path / "mixed", "--prompt-cache", cache) == expected
    assert cache.read_bytes() == made


def test_rows_equal_generate(model: Path, expected: bytes) -> None:
    """An answer of the batch was another than that of the command that answers one prompt."""
    tried = 0
    answers = map(json.loads, expected.splitlines())
    for row, answer in list(zip(rows(), answers, strict=True))[::9]:
        if "error" in answer or len(row.get("messages", ())) == 3:
            continue
        tried += 1
        alone = json.loads(run("generate", "-m", model, *DEFAULTS, *options(row, answer["line"])).stdout)
        del alone["timings"], answer["id"], answer["line"], answer["key"]
        assert alone == answer
    assert tried >= 15


def options(row: Mapping[str, Any], line: int) -> list[str]:
    """A row as arguments of generate; without a seed its line is one."""
    words = ["--json", "--no-stdin", f"--seed={row.get('seed', line)}"]
    text = row.get("prompt", "")
    for name, value in row.items():
        option = f"--{name.replace('_', '-')}"
        match name, value:
            case (("id" | "prompt" | "seed"), _):
                pass
            case "messages", [system, user]:
                words.append(f"--system={system['content']}")
                text = user["content"]
            case "ids", _:
                words.append("--ids")
                text = " ".join(map(str, value))
            case "logit_bias", _:
                words += [f"--logit-bias={id_}={bias}" for id_, bias in value.items()]
            case _, True:
                words.append(option)
            case _, list():
                words += [f"{option}={one}" for one in value]
            case _:
                words.append(f"{option}={value}")
    return [*words, "--", text]
