"""llama.cpp's worker, on a GGUF file. See serve.py.

It calls llama.cpp's C functions as llama-bench does, with the defaults of llama.cpp, so that nothing of Python is timed
but a loop: no sampling, and the logits stay where they are. flash is None for llama.cpp's own choice of attention.
"""

import ctypes
import platform
import sys
import time
from importlib.metadata import version
from itertools import islice

import llama_cpp
from serve import Request, serve, settings

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
FLASH = {None: -1, False: 0, True: 1}  # LLAMA_FLASH_ATTN_TYPE_AUTO, _DISABLED, _ENABLED
SLACK = 64
"""Positions more than asked for, so that llama.cpp's rounding of them takes none away."""


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _data: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


class Context:
    """A model and a context for `sequences` sequences of `ctx` positions each; held are the ids in all of them."""

    def __init__(self, gguf: str, threads: int, ctx: int, sequences: int, flash: bool | None) -> None:
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * (ctx + SLACK), sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH[flash]
        self.context = self.model and llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.rows = params.n_batch
        self.held: list[int] = []
        self.batch = 0

    def decode(self, batch: "llama_cpp.llama_batch") -> None:
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_synchronize(self.context)
        if status != 0:
            raise SystemExit(f"llama_decode ended with status {status}")

    def go_to(self, request: Request) -> None:
        """Every sequence holds the first `depth` ids and nothing else."""
        memory, before = llama_cpp.llama_get_memory(self.context), request.ids[: request.depth]
        if self.batch == request.batch and self.held[: request.depth] == before:
            for sequence in range(request.batch):
                if not llama_cpp.llama_memory_seq_rm(memory, sequence, request.depth, -1):
                    raise SystemExit("llama.cpp cannot cut a sequence")
        else:
            llama_cpp.llama_memory_clear(memory, False)
            for sequence in range(request.batch):
                for first in range(0, request.depth, self.rows):
                    self.decode(batch_of(before[first : first + self.rows], first, [sequence]))
        self.held, self.batch = request.ids, request.batch

    def top(self) -> int:
        """The likeliest token after the last one."""
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return max(range(self.vocab_size), key=list(islice(logits, self.vocab_size)).__getitem__)


def batch_of(ids: list[int], position: int, sequences: list[int]) -> "llama_cpp.llama_batch":
    """The ids for each of the sequences, from a position on; logits of the last."""
    batch = llama_cpp.llama_batch_init(len(ids) * len(sequences), 0, 1)
    batch.n_tokens = 0
    for sequence in sequences:
        for i, id_ in enumerate(ids):
            row = batch.n_tokens
            batch.token[row], batch.pos[row] = id_, position + i
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = i == len(ids) - 1
            batch.n_tokens += 1
    return batch


def main(model: str, threads: int, ctx: int, sequences: int = 1, flash: bool | None = None) -> None:
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    context = Context(model, threads, ctx, sequences, flash)
    about = {
        "versions": {
            "llama-cpp-python": version("llama-cpp-python"),
            "python": platform.python_version(),
            "system_info": llama_cpp.llama_print_system_info().decode().strip(" |\n"),
        },
        "vocab_size": context.vocab_size,
        "parameters": llama_cpp.llama_model_n_params(context.model),
    }

    def run(request: Request) -> dict[str, object]:
        context.go_to(request)
        batches, position = [], request.depth
        for part in request.parts():
            for first in range(0, len(part), context.rows):  # llama.cpp takes so many at most
                ids = part[first : first + context.rows]
                batches.append(batch_of(ids, position, list(range(request.batch))))
                position += len(ids)
        start = time.perf_counter()
        for batch in batches:
            context.decode(batch)
        seconds = time.perf_counter() - start
        for batch in batches:
            llama_cpp.llama_batch_free(batch)
        return {"seconds": seconds, "top": context.top()}

    serve(about, run)


if __name__ == "__main__":
    main(**settings())
