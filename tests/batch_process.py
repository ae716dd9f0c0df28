"""Rows for tfm batch and processes that answer them, for tests."""

import json
import random
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cli_process import TFM, TIMEOUT_S, environment

ANSWER = "Hi é🙂!"  # of the parrot, to a line feed


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


def options(model: Path) -> list[str | Path]:
    return ["--raw", "-m", model, "--slots", "8", "--temperature", "0"]


def start(*arguments: str | Path, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([TFM, "batch", *arguments], stdin=subprocess.DEVNULL, env=environment(), **more)


def wait_for_size(path: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while process.poll() is None and not (path.exists() and path.stat().st_size >= size):
        assert time.monotonic() < end
        time.sleep(0.001)
