"""`tfm check`: what it measures is right, what is wrong is found and named, and its shapes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import reference
from reference_weights import Array, Block, read_model

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import LayerConfig, ModelConfig, RopeConfig, read_config
from tfm.engine.reference import reference_logits
from tfm.engine.weights import Weights, load_weights

SAME = 1e-12  # of the logits' spread: two orders of the same sums in float64
CONTEXT = 70


def opened(folder: Path) -> tuple[ModelConfig, Weights]:
    config = read_config(folder)
    return config, load_weights(Checkpoint(folder), config)


# ---------------------------------------------------------------------------------------------- the float64 pass


@pytest.mark.parametrize("name", checkpoints.FLOATS)
def test_two_references_agree(name: str, tmp_path: Path) -> None:
    """Guards a judge that is wrong: the tests' own reference was written apart, and agrees with transformers."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.FLOATS[name], dtype="BF16")
    ids = checkpoints.random_ids(checkpoints.FLOATS[name], CONTEXT)
    assert reference.error(reference_logits(*opened(folder), ids), reference.reference_logits(folder, ids)) < SAME


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", checkpoints.GROUPED)
def test_two_references_agree_on_few_bits(name: str, bits: int, tmp_path: Path) -> None:
    """Guards weights that are rounded to float32 on their way, or taken from the wrong group when cut into parts."""
    config, quantization = checkpoints.GROUPED[name], {"bits": bits, "group_size": 64}
    folder = checkpoints.write_checkpoint(tmp_path, config, dtype="F16", quantization=quantization)
    ids = checkpoints.random_ids(config, CONTEXT)
    assert reference.error(reference_logits(*opened(folder), ids), reference.reference_logits(folder, ids)) < SAME


def test_matrices_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the seams of a matrix that is too large to be float64 at once."""
    config = checkpoints.LLAMA
    model = opened(checkpoints.write_checkpoint(tmp_path, config))
    ids = checkpoints.random_ids(config, CONTEXT)
    whole = reference_logits(*model, ids)
    monkeypatch.setattr("tfm.engine.reference.PART_SIZE", 17 * 40)
    assert reference.error(reference_logits(*model, ids), whole) < SAME


def with_layers(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    return replace(config, layers=tuple(change(layer) for layer in config.layers))


@pytest.mark.parametrize(("window", "softcap"), [(5, 0.0), (0, 2.0), (9, 3.0)])
def test_windows_and_softcaps(window: int, softcap: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what no checkpoint of the tests can say: windows that hide what is far back, scores that are bounded."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA)
    ids = checkpoints.random_ids(checkpoints.LLAMA, CONTEXT)
    config, weights = opened(folder)
    config = with_layers(config, lambda n: replace(n, sliding_window=window, attn_logit_softcapping=softcap))

    def heads(block: Block, x: Array, turns: Array | None = None) -> Array:
        x = reference.with_ones(x)
        looks = [reference.attention(head, x, turns, window, softcap) for head in block.heads]
        return sum(A @ x @ head.S for A, head in zip(looks, block.heads, strict=True)) + block.heads_bias

    monkeypatch.setattr(reference, "heads", heads)
    expected = reference.logits(read_model(folder), ids)
    assert reference.error(reference_logits(config, weights, ids), expected) < SAME


def in_another_order(weights: Weights, order: Array) -> Weights:
    """The same model, with the rows of q and k that make a head in another order."""

    def turned(matrix: Any) -> Any:
        return matrix.part(np.arange(matrix.rows).reshape(-1, len(order))[:, order].ravel().tolist())

    layers = (replace(n, q_proj=turned(n.q_proj), k_proj=turned(n.k_proj)) for n in weights.layers)
    return replace(weights, layers=tuple(layers))


@pytest.mark.parametrize("kept", [1, 3, 5])
def test_interleaved_and_partial_rope(kept: int, tmp_path: Path) -> None:
    """Guards pairs that are taken from the wrong places, and dimensions that turn though they should stay.

    Half-split pairs of a whole head are interleaved ones, or those of a part of a head, in another order of rows, when
    all but the first `kept` pairs stand still.
    """
    config, weights = opened(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA))
    ids = checkpoints.random_ids(checkpoints.LLAMA, CONTEXT)
    (rope,) = {layer.rope for layer in config.layers}
    assert rope is not None
    pairs = np.arange(rope.rotary_dim).reshape(2, -1)
    side_by_side = in_another_order(weights, pairs.T.ravel())
    first = in_another_order(weights, np.concatenate([pairs[:, :kept].ravel(), pairs[:, kept:].ravel()]))
    slow = rope.inv_freq[:kept] + (0.0,) * (len(rope.inv_freq) - kept)
    ropes = {
        "half-split": (replace(rope, inv_freq=slow), weights),
        "half-split, partial": (RopeConfig(2 * kept, slow[:kept]), first),
        "interleaved": (replace(rope, inv_freq=slow, interleaved=True), side_by_side),
        "interleaved, partial": (RopeConfig(2 * kept, slow[:kept], interleaved=True), side_by_side),
    }
    expected, *others = (
        reference_logits(with_layers(config, lambda n, rope=own: replace(n, rope=rope)), tensors, ids)
        for own, tensors in ropes.values()
    )
    for found in others:
        assert reference.error(found, expected) < SAME


def test_attention_factor_and_scale(tmp_path: Path) -> None:
    """Guards a factor that is applied to queries only, or once too often: scores have its square."""
    config, weights = opened(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA))
    ids = checkpoints.random_ids(checkpoints.LLAMA, CONTEXT)

    def longer(layer: LayerConfig) -> LayerConfig:
        assert layer.rope is not None
        return replace(layer, rope=replace(layer.rope, attention_factor=1.5))

    scaled = with_layers(config, lambda n: replace(n, attention_scale=2.25 * n.attention_scale))
    expected = reference_logits(scaled, weights, ids)
    assert reference.error(reference_logits(with_layers(config, longer), weights, ids), expected) < SAME
