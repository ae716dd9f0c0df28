"""`tfm batch` beside a loop of llama-cpp-python calls: many rows, the same weights, whole processes, in one run.

    python benchmarks/rows_against_loop.py [--rows 1000] [--repetitions 1] [--llama-python PYTHON]

writes results/rows/DATE-CPU.json. Two files of rows, made of this repository's own documents, greedily continued:

    mixed     prompts of 16 to 512 tokens, answers of at most 8 to 128
    shared    the same 400 tokens before each prompt, of 8 to 64 tokens of its own, answers of at most 8 to 128
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import machine
from against_peers import commit, parsed, refuse_busy_machine, run_test, write_results
from asked import LOOP
from models import default_folder, model
from processes import HERE, TFM
from turns import Test
from worker_tfm import PACKAGES

CTX = 1024
SHARED_TOKENS = 400
SEED = 1
VERSION = "import importlib.metadata; print(importlib.metadata.version('llama-cpp-python'))"
TITLES = {
    "mixed": "{rows:,} mixed rows, `tfm batch`",
    "shared": "{rows:,} rows with 400 tokens in common, `tfm batch`",
}


def write_rows(path: Path, kind: str, count: int, ids: Sequence[int]) -> int:
    """Rows of token ids, so that both sides read the same; gives how many tokens there are in all."""
    dice = random.Random(SEED)
    beginning = list(ids[:SHARED_TOKENS]) if kind == "shared" else []
    least, most = (8, 64) if kind == "shared" else (16, 512)
    total = 0
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            length = dice.randint(least, most)
            begin = dice.randrange(len(ids) - length)
            row = {"ids": beginning + list(ids[begin : begin + length]), "max_tokens": dice.randint(8, 128)}
            total += len(row["ids"]) + row["max_tokens"]
            file.write(json.dumps(row) + "\n")
    return total


def document_ids() -> list[int]:
    """The documents of this repository as tokens of the default model."""
    from tfm.engine.tokenizer import Tokenizer

    paths = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").glob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return Tokenizer.load(default_folder()).encode(text, parse_special=False)


def seconds(command: Sequence[str], out: Path, rows: int) -> float:
    """Of a whole process, which must have answered all rows."""
    out.unlink(missing_ok=True)
    begin = time.perf_counter()
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
    taken = time.perf_counter() - begin
    answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    if len(answers) != rows or any("error" in answer for answer in answers):
        raise SystemExit(f"{command[0]}: {len(answers)} of {rows} rows answered")
    return taken


def row_test(kind: str, arguments: argparse.Namespace, ids: Sequence[int], folder: Path) -> Test:
    rows, out = folder / f"{kind}.jsonl", folder / "out.jsonl"
    tokens = write_rows(rows, kind, arguments.rows, ids)
    threads, ctx = str(arguments.threads), str(CTX)
    script = str(HERE / "worker_rows_llama_cpp.py")
    commands = {
        "tfm": [TFM, "batch", str(rows), "-o", str(out), "--threads", threads, "--ctx", ctx, "--temperature", "0"],
        LOOP: [
            arguments.llama_python, script, str(model("q4_1", "")), threads, ctx, str(rows), str(out),
        ],
    }  # fmt: skip
    runs = {side: lambda c=command: seconds(c, out, arguments.rows) for side, command in commands.items()}
    return Test(f"batch {kind}", TITLES[kind].format(rows=arguments.rows), runs, tokens=tokens, warm=False)


def versions(llama_python: str) -> dict[str, dict]:
    """Of both sides, as against_peers.py has them."""
    said = subprocess.run([llama_python, "-c", VERSION], stdout=subprocess.PIPE, text=True, check=True).stdout
    own = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    return {"tfm": own | {"commit": commit()}, "llama_cpp": {"llama-cpp-python": said.strip()}}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="tfm batch beside a loop of calls", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=1000, help="of each kind (default 1000)")
    parser.add_argument("--threads", type=int, default=2, help="for both sides (default 2)")
    parser.add_argument("--repetitions", type=int, default=1, help="of each kind and side (default 1: it takes long)")
    parser.add_argument("--llama-python", default=sys.executable, help="one that has llama-cpp-python (default: this)")
    parser.add_argument("--output", type=Path, help="file for the results (default: results/rows/DATE-CPU.json)")
    return parsed(parser)


def main() -> None:
    arguments = options()
    ids = document_ids()
    refuse_busy_machine(arguments.output is None)
    busy = machine.Busy()
    with tempfile.TemporaryDirectory() as folder:
        tests = [row_test(kind, arguments, ids, Path(folder)) for kind in TITLES]
        done = [run_test(test, arguments.repetitions) for test in tests]
    write_results(arguments, "rows", busy, versions(arguments.llama_python), done, rows=arguments.rows)


if __name__ == "__main__":
    main()
