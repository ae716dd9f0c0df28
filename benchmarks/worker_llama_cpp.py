"""llama.cpp's worker: python worker_llama_cpp.py GGUF THREADS CONTEXT. See serve.py.

It calls llama.cpp's C functions as llama-bench does, with the defaults of llama.cpp, so that nothing of Python is timed
but a loop: no sampling, and the logits stay where they are.
"""

import ctypes
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

import llama_cpp
from serve import serve

LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR


@llama_cpp.llama_log_callback
def log_errors(level: int, text: bytes, _data: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def open_context(gguf: str, threads: int, ctx: int) -> tuple[object, object]:
    """The model and a context for it."""
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = ctx
    params.n_threads = params.n_threads_batch = threads
    context = model and llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit(f"llama.cpp cannot load {gguf}")
    return model, context


def main(gguf: str, threads: int, ctx: int) -> None:
    llama_cpp.llama_log_set(log_errors, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model, context = open_context(gguf, threads, ctx)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    about = {
        "versions": {"llama-cpp-python": version("llama-cpp-python"), "python": platform.python_version()},
        "vocab_size": vocab_size,
        "parameters": llama_cpp.llama_model_n_params(model),
        "system_info": llama_cpp.llama_print_system_info().decode().strip(" |\n"),
    }

    def run(ids: Sequence[int], rows: int) -> tuple[float, int]:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        size = ctypes.sizeof(llama_cpp.llama_token)
        parts = [
            ctypes.cast(ctypes.byref(tokens, first * size), llama_cpp.llama_token_p)
            for first in range(0, len(ids), rows)
        ]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        left = len(ids)
        start = time.perf_counter()
        for part in parts:
            status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(part, min(rows, left)))
            llama_cpp.llama_synchronize(context)
            if status != 0:
                raise SystemExit(f"llama_decode ended with status {status}")
            left -= rows
        seconds = time.perf_counter() - start
        logits = llama_cpp.llama_get_logits_ith(context, -1)[:vocab_size]
        return seconds, max(range(vocab_size), key=logits.__getitem__)

    serve(about, run)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
