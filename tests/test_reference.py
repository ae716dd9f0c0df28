"""The reference itself: it agrees with transformers, and its sum over heads is the attention that everyone writes."""

from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import reference
from reference_weights import Array, Block, Model, read_model, read_tensors

GOLDEN = Path(__file__).parent / "golden"
RECORDED = {**checkpoints.LLAMAS, **checkpoints.GPT2S}
FLOAT32_ERROR = 1e-6  # of the logits' spread: what transformers loses by computing in float32


@pytest.mark.parametrize("name", RECORDED)
def test_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """Guards a reference that is wrong in the same way as the engine: these logits were computed by neither.

    The digest tells apart a wrong reference and weights that are not those of the recording.
    """
    folder = checkpoints.write_checkpoint(tmp_path, RECORDED[name])
    with np.load(GOLDEN / "logits.npz") as golden:
        assert checkpoints.digest_of(folder) == golden[f"{name}/digest"], "run tests/golden/record.py again"
        ids, positions, expected = (golden[f"{name}/{part}"] for part in ("ids", "positions", "logits"))
    found = reference.reference_logits(folder, ids.tolist())[positions]
    assert reference.error(found, expected) < FLOAT32_ERROR


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reads_what_transformers_saves(name: str) -> None:
    """The other direction: names, fields, dtypes and shards as save_pretrained leaves them, not as our own writer."""
    folder = GOLDEN / "saved" / name
    with np.load(folder / "logits.npz") as golden:
        ids, expected = golden["ids"].tolist(), golden["logits"]
    assert reference.error(reference.reference_logits(folder, ids), expected) < FLOAT32_ERROR


def usual_heads(block: Block, x: Array, turns: Array | None) -> Array:
    """H(x) as it is mostly written: the outputs of all heads side by side, and one output matrix."""
    one = reference.with_ones(x)
    outputs = []
    for head in block.heads:
        q, k, v = one @ head.W_Q, one @ head.W_K, one @ head.W_V
        if turns is not None:
            q, k = reference.turned(q, turns), reference.turned(k, turns)
        hidden = np.triu(np.full((len(x), len(x)), -np.inf), 1)
        outputs.append(reference.softmax(q @ k.T / np.sqrt(head.size) + hidden) @ v)
    return np.concatenate(outputs, axis=1) @ np.concatenate([head.W_O for head in block.heads]) + block.heads_bias


@pytest.mark.parametrize("name", checkpoints.FLOATS)
def test_sum_over_heads_is_the_usual_attention(name: str, tmp_path: Path) -> None:
    """Guards the textbook form: A from the QK circuit Y, and S from the OV circuit, biases included."""
    model = read_model(checkpoints.write_checkpoint(tmp_path, checkpoints.FLOATS[name]))
    x = checkpoints.uniform(1, "stream", 30, model.embed.shape[1])
    for block in model.blocks:
        np.testing.assert_allclose(
            reference.heads(block, x, model.turns), usual_heads(block, x, model.turns), rtol=1e-10, atol=1e-12
        )


def test_a_head_is_a_weighted_mean(tmp_path: Path) -> None:
    """Guards the rows of A: they sum to 1, nobody looks ahead, and a window hides what is far back."""
    model = read_model(checkpoints.write_checkpoint(tmp_path, checkpoints.PLAIN))
    x = reference.with_ones(checkpoints.uniform(2, "stream", 20, 40))
    for window in (0, 3):
        A = reference.attention(model.blocks[0].heads[1], x, window=window)
        np.testing.assert_allclose(A.sum(-1), 1)
        seen = np.tril(np.ones((20, 20))) - (np.tril(np.ones((20, 20)), -window) if window else 0)
        assert np.array_equal(A > 0, seen > 0)


def without_turns(model: Model) -> Model:
    return replace(model, turns=None)


def without_biases(model: Model) -> Model:
    blocks = tuple(replace(block, heads_bias=np.zeros_like(block.heads_bias)) for block in model.blocks)
    return replace(model, blocks=blocks)


def with_heads_swapped(model: Model) -> Model:
    """Two query heads that share keys change places: a wrong grouping, with the same shapes."""
    blocks = []
    for block in model.blocks:
        (a, b, *others) = block.heads
        swapped = (replace(a, W_O=b.W_O), replace(b, W_O=a.W_O), *others)
        blocks.append(replace(block, heads=swapped))
    return replace(model, blocks=tuple(blocks))


@pytest.mark.parametrize("change", [without_turns, without_biases, with_heads_swapped])
def test_the_comparison_sees_a_wrong_model(change: object, tmp_path: Path) -> None:
    """Guards the judge: a model that is a little wrong is far outside of the tolerance for float formats, 2e-4."""
    assert callable(change)
    model = read_model(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMAS["llama-biases"]))
    ids = checkpoints.random_ids(checkpoints.LLAMA, 40)
    right, wrong = reference.logits(model, ids), reference.logits(change(model), ids)
    assert reference.error(wrong, right) > 1e-2


@pytest.mark.parametrize("bits", [4, 8])
def test_quantiser_stays_within_half_a_step(bits: int, tmp_path: Path) -> None:
    """Guards the builder of quantised checkpoints and the reader of them: packed wrongly, weights would be anywhere."""
    config = checkpoints.GROUPED["plain-grouped"]
    quantization = {"bits": bits, "group_size": 64, "blocks.1.attn.q": False}
    floats = read_tensors(checkpoints.write_checkpoint(tmp_path / "floats", config))
    few = read_tensors(checkpoints.write_checkpoint(tmp_path / "few", config, quantization=quantization))
    assert few.keys() == floats.keys()
    for name, values in floats.items():
        if values.ndim == 1 or name == "blocks.1.attn.q.weight":
            assert np.array_equal(few[name], values)
        else:
            step = np.ptp(values.reshape(len(values), -1, 64), axis=-1).max() / (2**bits - 1)
            assert 0.3 * step < np.abs(few[name] - values).max() < 0.51 * step
