"""From a reference to a running model: find the folder, read it, see that it fits, pack it."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tfm.engine.errors import TfmError
from tfm.engine.progress import Progress
from tfm.kernels.forks import loading

if TYPE_CHECKING:
    from tfm.engine.config import ModelConfig
    from tfm.engine.layers import Memory
    from tfm.engine.model import Model
    from tfm.engine.tokenizer import Tokenizer

LEAST_PLAUSIBLE_BYTES = 1_000_000  # who asks for less may have left out the unit
KV_TYPE_NAMES = ("f32", "f16", "q8")


@loading()
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
    TfmError for what is missing, damaged, not supported or too large; RuntimeError in a process that was forked while
    another thread was at it.
    """
    from tfm.engine.config import check_vocabulary, read_config
    from tfm.engine.hub import resolve
    from tfm.engine.machine import available_threads
    from tfm.engine.model import Model
    from tfm.engine.packed import find_image
    from tfm.engine.store import DEFAULT_MODEL, explaining_damage
    from tfm.engine.team import RUN
    from tfm.kernels.jit import begun
    from tfm.kernels.packing import PACK

    if kv_type not in KV_TYPE_NAMES:
        raise TfmError("kv_type", kv_type, ", ".join(KV_TYPE_NAMES))
    most = available_threads()
    if threads is not None and threads < 1:
        raise TfmError("threads", threads, f"1 to {most}")
    if threads is not None and threads > most:
        warnings.warn(f"{threads} threads asked for, {most} used: there are no more processors", stacklevel=2)
    folder = resolve(ref or DEFAULT_MODEL, progress)
    with explaining_damage(folder):
        config = read_config(folder)
        positions = _context(config, ctx)
        threads = min(threads or most, most)
        image = find_image(folder)
        with begun(*((PACK, RUN) if image is None else ())):
            image, tokenizer = _image_and_tokenizer(
                image, folder, config, threads,
                lambda size: _Needed.by(config, kv_type, positions, size).check(max_ram), progress,
            )  # fmt: skip
            cache_bytes = None
            if max_ram is not None:
                needed = _Needed.by(config, kv_type, positions, len(image))
                cache_bytes = max_ram - needed.weights - needed.scratch
                positions = needed.positions(max_ram, positions)
            name = str(ref or DEFAULT_MODEL)
            model = Model(name, folder, config, image, threads, kv_type, positions, cache_bytes, progress)
        model.tokenizer = tokenizer
        check_vocabulary(config, model.tokenizer.vocab_size, folder / "tokenizer.json")
    return model


def _image_and_tokenizer(
    image: "Memory | None", folder: Path, config: "ModelConfig", threads: int, check_size: Callable[[int], None],
    progress: Progress | None,
) -> "tuple[Memory, Tokenizer]":  # fmt: skip
    """Both side by side where weights have to be packed. A kept image costs nothing, and what is left to load does not
    go on meanwhile: the library holds the GIL, and library and loader wait for each other's pages of memory."""
    from tfm.engine.packed import make_image
    from tfm.engine.tokenizer import Tokenizer

    if image is not None:
        check_size(len(image))
        return image, Tokenizer.load(folder)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(Tokenizer.load, folder)
        return make_image(folder, config, threads, check_size, progress), reading.result()


def _context(config: "ModelConfig", ctx: int | None) -> int:
    """The most positions of a sequence: what was asked for, within what the model can do."""
    own = config.max_position_embeddings
    if ctx is None:
        return own
    if not 1 <= ctx <= own:
        raise TfmError("context", ctx, f"1 to {own}, the model's own (max_position_embeddings in config.json)")
    return ctx


@dataclass(frozen=True)
class _Needed:
    """Bytes that a model takes: weights, a block of keys and values, scratch space."""

    weights: int
    block: int
    scratch: int

    @classmethod
    def by(cls, config: "ModelConfig", kv_type: str, ctx: int, weights: int) -> Self:
        from tfm.engine.layers import cache_block_bytes
        from tfm.engine.model import Buffers
        from tfm.kernels.records import KV_TYPES

        return cls(weights, cache_block_bytes(config, KV_TYPES[kv_type]), Buffers.size(config, ctx))

    @property
    def least(self) -> int:
        return self.weights + self.scratch + self.block

    def __str__(self) -> str:
        from tfm.kernels.records import KV_BLOCK

        return (
            f"{self.least:,} bytes needed (weights {self.weights / 1e6:.1f} MB, keys and values "
            f"{self.block * 1000 / KV_BLOCK / 1e6:.1f} MB per 1,000 tokens, scratch {self.scratch / 1e6:.1f} MB)"
        )

    def check(self, max_ram: int | None) -> None:
        """Raises TfmError where there is no room for the model: what it would take."""
        from tfm.engine.machine import available_memory

        remedy = "use a smaller model or fewer bits"
        if max_ram is not None and self.least > max_ram:
            raising = "give it a unit, such as 2G," if max_ram < LEAST_PLAUSIBLE_BYTES else "raise it"
            raise TfmError("--max-ram", self, f"{max_ram:,} bytes", f"{raising} or {remedy}")
        free = available_memory()
        if free is not None and self.least > free:
            raise TfmError("memory", self, f"{free:,} bytes free", remedy)

    def positions(self, max_ram: int, ctx: int) -> int:
        """The positions for which there is room under max_ram, with a warning where they are fewer than ctx."""
        from tfm.kernels.records import KV_BLOCK

        room = (max_ram - self.weights - self.scratch) // self.block * KV_BLOCK
        if room < ctx:
            warnings.warn(f"--max-ram leaves room for {room} of {ctx} tokens of context", stacklevel=3)
        return min(ctx, room)
