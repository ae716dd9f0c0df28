"""tfm's worker: python worker_tfm.py MODEL THREADS CONTEXT. See serve.py."""

import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

import llvmlite.binding as llvm
from serve import serve

from tfm.engine import load

PACKAGES = ("tfm-cli", "numba", "llvmlite", "numpy")
CHECK_TEXT = "The capital of France is the city of"


def main(ref: str, threads: int, ctx: int) -> None:
    model = load(ref, threads=threads, ctx=ctx)
    about = {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "vocab_size": model.config.vocab_size,
        "weights_bytes": model.memory()["weights_bytes"],
        "kv_type": model.kv_type,
        "llvm_cpu": llvm.get_host_cpu_name(),
        "check_ids": model.tokenizer.encode(CHECK_TEXT),
    }

    def run(ids: Sequence[int], rows: int) -> tuple[float, int]:
        parts = [ids[first : first + rows] for first in range(0, len(ids), rows)]
        with model.sequence() as sequence:
            start = time.perf_counter()
            for part in parts:
                logits = model.step([(sequence, part)])
            seconds = time.perf_counter() - start
        return seconds, int(logits[0].argmax())

    serve(about, run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
