"""tfm's worker. See serve.py.

model is what -m takes, or a config.json: then the weights are random, in q4. The answer to a request that comes with
the machine's limits says what it takes at least (limit_s) and what that is bounded by (limit).
"""

import platform
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm
from serve import Request, serve, settings

from tfm.engine import load
from tfm.engine.bench import Test, limit_of, open_shape
from tfm.engine.cache import Sequence
from tfm.engine.model import MAX_ROWS, Model
from tfm.engine.roofline import Machine

PACKAGES = ("tfm-cli", "numba", "llvmlite", "numpy")
CHECK_TEXT = "The capital of France is the city of"


class Texts:
    """The sequences of the last request, kept: what is in them already need not be run again."""

    def __init__(self, model: Model) -> None:
        self._model, self._stack = model, ExitStack()
        self._sequences: list[Sequence] = []
        self._ids: list[int] = []

    def at(self, request: Request) -> list[Sequence]:
        """`batch` sequences that hold the first `depth` ids and nothing else."""
        before = request.ids[: request.depth]
        if len(self._sequences) != request.batch or self._ids[: request.depth] != before:
            self._stack.close()
            self._sequences = [self._stack.enter_context(self._model.sequence()) for _ in range(request.batch)]
            for sequence in self._sequences:
                for first in range(0, request.depth, MAX_ROWS):
                    self._model.step([(sequence, before[first : first + MAX_ROWS])], "none")
        for sequence in self._sequences:
            sequence.truncate(request.depth)
        self._ids = request.ids
        return self._sequences


def main(model: str, threads: int, ctx: int) -> None:
    is_shape = model.endswith(".json")
    loaded = open_shape(Path(model), "q4", threads, "f16").model if is_shape else load(model, threads=threads, ctx=ctx)
    loaded.take_weights()  # as a run of many steps does by itself
    about = {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "vocab_size": loaded.config.vocab_size,
        "memory": loaded.memory(),
        "kv_type": loaded.kv_type,
        "llvm_cpu": llvm.get_host_cpu_name(),
        "check_ids": None if is_shape else loaded.tokenizer.encode(CHECK_TEXT),
    }
    texts = Texts(loaded)

    def run(request: Request) -> dict[str, object]:
        sequences, parts = texts.at(request), request.parts()
        start = time.perf_counter()
        for part in parts:
            logits = loaded.step([(sequence, part) for sequence in sequences])
        answer: dict[str, object] = {"seconds": time.perf_counter() - start, "top": int(logits[0].argmax())}
        if request.limits is not None:
            kind = "tg" if request.rows == 1 else "pp"
            test = Test(kind, len(request.new), request.batch, request.depth)
            answer["limit_s"], answer["limit"] = limit_of(loaded, test, Machine(**request.limits))
        return answer

    serve(about, run)


if __name__ == "__main__":
    main(**settings())
