"""What the bits of an answer depend on, as digests: for what is kept of one run and may be used by another."""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np

from tfm.engine import layers
from tfm.engine.files import is_there, read_text_bytes
from tfm.engine.packed import content_of, layout_digest
from tfm.engine.team import RUN

TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip


def weights_digest(folder: Path) -> str:
    """Of config.json and the weights in folder, wherever it is. Raises TfmError for what is wrong with them.

    It costs nothing where packed weights are kept in the cache, else all files are read.
    """
    return content_of(folder)


def text_digest(folder: Path) -> str:
    """Of what makes a text of ids and ids of a text in folder, and of how tokens are chosen when nothing is said."""
    digest = hashlib.sha256()
    for name in TEXT_FILES:
        data = read_text_bytes(folder / name) if is_there(folder / name) else b""
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\n".encode())
    return digest.hexdigest()[:24]


@cache
def kernels_digest() -> str:
    """Of the machine code (its sources, the versions of what compiles it, the CPU), and of what prepares its tables."""
    parts = [RUN.digest, layout_digest(), Path(layers.__file__).read_text(encoding="utf-8"), np.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
