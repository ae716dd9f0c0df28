"""What a checkpoint is and what it would take to run it, without running it."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import ModelConfig, check_vocabulary, read_config
from tfm.engine.errors import TfmError
from tfm.engine.fields import read_json
from tfm.engine.matrix import QUANTIZED_BITS, Matrix
from tfm.engine.tokenizer import Tokenizer
from tfm.engine.weights import LayerWeights, Weights, load_weights

T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes when it runs; of keys and values for 1,000 tokens of context, held as f16.

    weights_bytes is that of the packed image where one is kept; else it counts bf16 with 16 bits, and up to a quarter
    less will do.
    """

    weights_bytes: int
    kv_bytes_per_1000_tokens: int
    scratch_bytes: int


@dataclass(frozen=True)
class Summary:
    """A checkpoint folder. What cannot be known is None; unsupported is why tfm does not run it, None when it does.

    formats has the bytes of tensors by the format they are stored in, the largest first.
    """

    folder: Path
    model_type: str | None
    config: ModelConfig | None
    parameters: int | None
    formats: dict[str, int]
    has_chat_template: bool | None
    memory: Memory | None
    unsupported: str | None


def summarize(folder: Path) -> Summary:
    """Read all that a folder says of itself. A fault in it is a part of the answer and not raised."""
    faults: list[str] = []
    config = _or_fault(faults, lambda: read_config(folder))
    checkpoint = _or_fault(faults, lambda: Checkpoint(folder))
    weights = _or_fault(faults, lambda: load_weights(checkpoint, config)) if checkpoint and config else None
    tokenizer = _or_fault(faults, lambda: Tokenizer.load(folder))
    if config and tokenizer:
        _or_fault(faults, lambda: check_vocabulary(config, tokenizer.vocab_size, folder / "tokenizer.json"))
    return Summary(
        folder=folder,
        model_type=config.model_type if config else _model_type(folder),
        config=config,
        parameters=None if weights is None else sum(_sizes(weights)),
        formats=_formats(checkpoint, weights) if checkpoint else {},
        has_chat_template=_or_fault(faults, lambda: tokenizer.has_chat_template) if tokenizer else None,
        memory=_memory(folder, config, weights) if config and weights else None,
        unsupported=faults[0] if faults else None,
    )


def _or_fault(faults: list[str], read: Callable[[], T]) -> T | None:
    try:
        return read()
    except TfmError as error:
        faults.append(str(error))
        return None


def _model_type(folder: Path) -> str | None:
    """What config.json says, also of a model that is not supported."""
    try:
        found = read_json(folder / "config.json").get("model_type")
    except TfmError:
        return None
    return found if isinstance(found, str) else None


def _parts(weights: Weights) -> Iterator[Matrix | npt.NDArray[np.float32]]:
    parts: tuple[Weights | LayerWeights, ...] = (weights, *weights.layers)
    for part in parts:
        values = (getattr(part, field.name) for field in fields(part))
        yield from (value for value in values if isinstance(value, Matrix | np.ndarray))


def _sizes(weights: Weights) -> Iterator[int]:
    for part in _parts(weights):
        yield part.rows * part.columns if isinstance(part, Matrix) else part.size


def _formats(checkpoint: Checkpoint, weights: Weights | None) -> dict[str, int]:
    """A quantised matrix counts with its scales and biases; without weights only dtypes are known."""
    count: Counter[str] = Counter()
    quantised: set[str] = set()
    for part in _parts(weights) if weights else ():
        if isinstance(part, Matrix) and part.format in QUANTIZED_BITS:
            module = part.name.partition("[")[0].removesuffix(".weight")
            quantised |= {f"{module}.{kind}" for kind in ("weight", "scales", "biases")}
            count[f"{part.format}, groups of {part.group_size}, {part.scale_type} scales"] += part.nbytes
    for tensor in checkpoint.tensors.values():
        if tensor.name not in quantised:
            count[tensor.dtype.lower()] += tensor.nbytes
    return dict(count.most_common())


def _memory(folder: Path, config: ModelConfig, weights: Weights) -> Memory:
    """weights_bytes of an image that is kept; else the most that packing may make."""
    from tfm.engine.image import Plan
    from tfm.engine.layers import cache_block_bytes
    from tfm.engine.model import Buffers
    from tfm.engine.packed import find_image
    from tfm.kernels.records import KV_BLOCK, KV_TYPES

    image = find_image(folder)
    return Memory(
        weights_bytes=Plan(config, weights).size if image is None else len(image),
        kv_bytes_per_1000_tokens=cache_block_bytes(config, KV_TYPES["f16"]) * 1000 // KV_BLOCK,
        scratch_bytes=Buffers.size(config, config.max_position_embeddings),
    )
