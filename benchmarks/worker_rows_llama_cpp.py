"""Rows by llama-cpp-python, one call after the other: python worker_rows_llama_cpp.py GGUF THREADS CTX ROWS OUT

It is the loop that one writes without a batch: a model that is loaded once, `create_completion` for each row, a line
for each answer. llama-cpp-python keeps what a prompt has in common with the one before.
"""

import json
import sys
from pathlib import Path

from llama_cpp import Llama


def main(gguf: str, threads: int, ctx: int, rows: Path, out: Path) -> None:
    llama = Llama(gguf, n_ctx=ctx, n_threads=threads, n_threads_batch=threads, verbose=False)
    with rows.open(encoding="utf-8") as source, out.open("w", encoding="utf-8") as target:
        for line in source:
            row = json.loads(line)
            made = llama.create_completion(row["ids"], max_tokens=row["max_tokens"], temperature=0.0)
            answer = {"text": made["choices"][0]["text"], "completion_tokens": made["usage"]["completion_tokens"]}
            target.write(json.dumps(answer) + "\n")
            target.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
