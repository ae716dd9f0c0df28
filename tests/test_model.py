"""`model.logits` against the textbook's transformer in float64 and against what transformers recorded."""

import shutil
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import numpy.typing as npt
import pytest
from reference import error, reference_logits
from test_reference import GOLDEN, RECORDED

from tfm.engine import load

FLOAT_ERROR = 2e-4  # of the logits' spread, allowed for float formats
CLOSE = 5e-6  # what float32 arithmetic gives with float32 keys and values
QUANTIZED_ERROR = 3e-2  # q4 and q8 round what they multiply to 8 bits
CONTEXT = 150  # tokens: more than two blocks of the cache
LONG = 600  # more than a segment of attention, and more rows than one pass takes

FLOATS = [(name, dtype) for name in checkpoints.FLOATS for dtype in ("F32", "F16", "BF16")]
QUANTIZED = [
    (name, bits, group_size, dtype)
    for name in checkpoints.GROUPED
    for bits in (4, 8)
    for group_size in (32, 64, 128)
    for dtype in ("F16", "BF16", "F32")
]
MORE_BITS = {"bits": 8, "group_size": 32}
FEW_BITS: dict[str, Any] = {"bits": 4, "group_size": 64}
MIXED: dict[str, dict[str, Any]] = {
    "llama-grouped": {**FEW_BITS, "model.embed_tokens": MORE_BITS, "model.layers.1.mlp.up_proj": False},
    "gpt2-grouped": {**FEW_BITS, "model.wpe": False, "model.h.0.attn.c_attn": MORE_BITS},
    "plain-grouped": {**FEW_BITS, "unembed": False, "blocks.2.attn.v": False, "blocks.2.attn.q": MORE_BITS},
}


def engine_logits(folder: Path, ids: list[int], **options: Any) -> npt.NDArray[np.float32]:
    options = {"threads": 2, "kv_type": "f32"} | options
    model = load(folder, **options)
    try:
        return model.logits(ids)
    finally:
        model.close()


@pytest.mark.parametrize(("name", "dtype"), FLOATS)
def test_floats(name: str, dtype: str, tmp_path: Path) -> None:
    """Guards every choice of architecture: with weights in floating point nothing but the order of sums may differ."""
    config = checkpoints.FLOATS[name]
    folder = checkpoints.write_checkpoint(tmp_path, config, dtype=dtype)
    ids = checkpoints.random_ids(config, CONTEXT)
    assert error(engine_logits(folder, ids), reference_logits(folder, ids)) < min(CLOSE, FLOAT_ERROR)


@pytest.mark.parametrize(("name", "bits", "group_size", "dtype"), QUANTIZED)
def test_quantized(name: str, bits: int, group_size: int, dtype: str, tmp_path: Path) -> None:
    """Guards codes, scales and biases of every group size and type, against the very weights that they stand for."""
    config, quantization = checkpoints.GROUPED[name], {"bits": bits, "group_size": group_size}
    folder = checkpoints.write_checkpoint(tmp_path, config, dtype=dtype, quantization=quantization)
    ids = checkpoints.random_ids(config, CONTEXT)
    assert error(engine_logits(folder, ids), reference_logits(folder, ids)) < QUANTIZED_ERROR


@pytest.mark.parametrize("name", MIXED)
def test_formats_mixed_in_one_layer(name: str, tmp_path: Path) -> None:
    """Guards matrices of one block that read the same rows in different formats, in shards."""
    config = checkpoints.GROUPED[name]
    folder = checkpoints.write_checkpoint(tmp_path, config, dtype="BF16", quantization=MIXED[name], shards=3)
    ids = checkpoints.random_ids(config, CONTEXT)
    assert error(engine_logits(folder, ids), reference_logits(folder, ids)) < QUANTIZED_ERROR


@pytest.mark.parametrize("name", ["llama-rope-llama3", "gpt2", "plain-attention-only"])
def test_long(name: str, tmp_path: Path) -> None:
    """Guards what begins late: the second segment of attention, the second pass, rope far out."""
    config = checkpoints.FLOATS[name]
    folder = checkpoints.write_checkpoint(tmp_path, config)
    ids = checkpoints.random_ids(config, LONG)
    assert error(engine_logits(folder, ids), reference_logits(folder, ids)) < min(CLOSE, FLOAT_ERROR)


@pytest.mark.parametrize(("kv_type", "allowed"), [("f16", 1e-3), ("q8", 2e-2)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "plain", "plain-no-norm"])
def test_few_bits_of_keys_and_values(name: str, kv_type: str, allowed: float, tmp_path: Path) -> None:
    """Guards a wrong scale or slot in the cache: rounded keys and values cost accuracy, but no more than their bits."""
    config = checkpoints.FLOATS[name]
    folder = checkpoints.write_checkpoint(tmp_path, config)
    ids = checkpoints.random_ids(config, CONTEXT)
    found = error(engine_logits(folder, ids, kv_type=kv_type), reference_logits(folder, ids))
    assert CLOSE < found < allowed


@pytest.mark.parametrize("name", RECORDED)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """Guards the reading of config.json and weights: what transformers makes of the same folder was recorded."""
    folder = checkpoints.write_checkpoint(tmp_path, RECORDED[name])
    with np.load(GOLDEN / "logits.npz") as golden:
        ids, positions, expected = (golden[f"{name}/{part}"] for part in ("ids", "positions", "logits"))
    found = engine_logits(folder, ids.tolist())[positions]
    assert error(found, expected) < min(CLOSE, FLOAT_ERROR)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loads_what_transformers_saves(name: str, tmp_path: Path) -> None:
    """Guards a folder as save_pretrained leaves it: its fields, names, bfloat16, index and shards."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / "saved" / name, folder)
    checkpoints.write_tokenizer(folder, 61)
    with np.load(folder / "logits.npz") as golden:
        ids, expected = golden["ids"].tolist(), golden["logits"]
    assert error(engine_logits(folder, ids), expected) < min(CLOSE, FLOAT_ERROR)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_last_and_no_logits(rows: int, tmp_path: Path) -> None:
    """Guards which rows are unembedded: the last of each sequence in order, not those of work without tokens."""
    config = checkpoints.LLAMA
    model = load(checkpoints.write_checkpoint(tmp_path, config), threads=2)
    texts = [checkpoints.random_ids(config, 3 + 7 * i, seed=i) for i in range(rows)]
    whole = [model.logits(ids)[-1] for ids in texts]
    sequences = [model.sequence() for _ in range(rows + 1)]
    assert model.step([(sequence, ids[:-1]) for sequence, ids in zip(sequences, texts, strict=False)], "none").size == 0
    work: list[tuple[Any, list[int]]] = [(sequence, ids[-1:]) for sequence, ids in zip(sequences, texts, strict=False)]
    found = model.step([*work[:1], (sequences[-1], []), *work[1:]])
    model.close()
    assert np.array_equal(found, whole)
