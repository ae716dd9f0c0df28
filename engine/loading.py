"""From a reference to a running model: find the folder, read it, see that it fits, pack it."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress

if TYPE_CHECKING:
    from tfm.engine.config import ModelConfig
    from tfm.engine.model import Model
    from tfm.engine.weights import Weights

KV_TYPE_NAMES = ("f32", "f16", "q8")


def load(
    ref: str | Path | None = None,
    threads: int | None = None,
    kv_type: str = "f16",
    ctx: int | None = None,
    max_ram: int | None = None,
    progress: Progress | None = None,
) -> "Model":
    """A model ready to run.

    ref is a folder, a .gguf file, org/name[@revision] on the hub or the default model's name (None: that one). threads
    is the number of processors to use (None: all that this process may use), kv_type how keys and values are held (f32,
    f16, q8), ctx the most positions of a sequence (None: the model's own), max_ram the most bytes to take. Raises
    TfmError for what is missing, damaged, not supported or too large.
    """
    from tfm.engine.checkpoint import Checkpoint
    from tfm.engine.config import check_vocabulary, read_config
    from tfm.engine.hub import resolve
    from tfm.engine.machine import available_threads
    from tfm.engine.model import Model
    from tfm.engine.store import DEFAULT_MODEL
    from tfm.engine.tokenizer import Tokenizer
    from tfm.engine.weights import load_weights

    if kv_type not in KV_TYPE_NAMES:
        raise TfmError("kv_type", kv_type, ", ".join(KV_TYPE_NAMES))
    most = available_threads()
    if threads is not None and threads < 1:
        raise TfmError("threads", threads, f"1 to {most}")
    if threads is not None and threads > most:
        warnings.warn(f"{threads} threads asked for, {most} used: there are no more processors", stacklevel=2)
    folder = resolve(ref or DEFAULT_MODEL, progress)
    config = read_config(folder)
    ctx = _context(config, ctx)
    with ThreadPoolExecutor(1) as beside:  # the tokenizer is read while the weights are packed
        reading = beside.submit(Tokenizer.load, folder)
        weights = load_weights(Checkpoint(folder), config)
        cache_bytes = _refuse_too_large(config, weights, kv_type, ctx, max_ram)
        if cache_bytes is not None:
            ctx = _context_within(cache_bytes, config, kv_type, ctx)
        model = Model(
            str(ref or DEFAULT_MODEL), folder, config, weights,
            min(threads or most, most), kv_type, ctx, cache_bytes, progress,
        )  # fmt: skip
        model.tokenizer = reading.result()
    check_vocabulary(config, model.tokenizer.vocab_size, folder / "tokenizer.json")
    return model


def _context(config: "ModelConfig", ctx: int | None) -> int:
    """The most positions of a sequence: what was asked for, within what the model can do."""
    own = config.max_position_embeddings
    if ctx is None:
        return own
    if not 1 <= ctx <= own:
        raise TfmError("context", ctx, f"1 to {own}, the model's own (max_position_embeddings in config.json)")
    return ctx


def _context_within(cache_bytes: int, config: "ModelConfig", kv_type: str, ctx: int) -> int:
    """The positions for which there is room, with a warning where they are fewer than ctx."""
    from tfm.engine.layers import cache_block_bytes
    from tfm.kernels.records import KV_BLOCK, KV_TYPES

    room = cache_bytes // cache_block_bytes(config, KV_TYPES[kv_type]) * KV_BLOCK
    if room < ctx:
        warnings.warn(f"--max-ram leaves room for {room} of {ctx} tokens of context", stacklevel=3)
    return min(ctx, room)


def _refuse_too_large(
    config: "ModelConfig", weights: "Weights", kv_type: str, ctx: int, max_ram: int | None
) -> int | None:
    """The bytes left for keys and values under max_ram; TfmError where the model does not fit: what it would take."""
    from tfm.engine.layers import cache_block_bytes, packed_size
    from tfm.engine.machine import available_memory
    from tfm.engine.model import Buffers
    from tfm.kernels.records import KV_BLOCK, KV_TYPES

    size = packed_size(weights)
    block = cache_block_bytes(config, KV_TYPES[kv_type])
    scratch = Buffers.size(config, ctx)
    parts = (
        f"weights {size / 1e6:.1f} MB, keys and values {block * 1000 / KV_BLOCK / 1e6:.1f} MB per 1,000 tokens, "
        f"scratch {scratch / 1e6:.1f} MB"
    )
    least = size + scratch + block
    remedy = "use a smaller model or fewer bits"
    if max_ram is not None and least > max_ram:
        needed = f"{least:,} bytes needed ({parts})"
        raise TfmError("--max-ram", needed, f"{max_ram:,} bytes", f"raise it or {remedy}")
    free = available_memory()
    if free is not None and least > free:
        raise TfmError("memory", f"{least:,} bytes needed ({parts})", f"{free:,} bytes free", remedy)
    return None if max_ram is None else max_ram - size - scratch
