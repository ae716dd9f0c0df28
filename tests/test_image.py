"""The image of packed weights: bfloat16 in 12 bits where exponents allow it, and matrices that are read in parts."""

from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest

from tfm.engine import image, load, packed
from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import ModelConfig, read_config
from tfm.engine.image import Plan
from tfm.engine.weights import Weights, load_weights
from tfm.kernels.packing import aligned_empty
from tfm.kernels.records import BF12, BF16

NAMES = ("llama-wide", "gpt2", "plain")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def weights_of(folder: Path, name: str, dtype: str = "BF16") -> tuple[ModelConfig, Weights]:
    checkpoints.write_checkpoint(folder, checkpoints.FLOATS[name], dtype=dtype)
    config = read_config(folder)
    return config, load_weights(Checkpoint(folder), config)


def written(plan: Plan) -> bytes:
    memory = aligned_empty(plan.size)
    memory[:] = 0
    plan.write(memory, 2)
    return memory.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_bf16_takes_12_bits_and_keeps_every_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the memory that bf16 takes, and the promise that it is exact: logits are those of 16 bits a weight."""
    config, weights = weights_of(tmp_path, name)
    ids = checkpoints.random_ids(checkpoints.FLOATS[name], 20)
    plan = Plan(config, weights)
    narrow = plan.narrowed(2)
    assert 0.98 * narrow.size < plan.least_size <= narrow.size < plan.size
    # Norms and the like are in size; a band of so few columns has a head of one line in 50.
    assert narrow._image["decode_bytes"][0] < 0.78 * plan._image["decode_bytes"][0]
    logits = []
    for most, format in ((image.MOST_STRAYS, BF12), (-1.0, BF16)):
        monkeypatch.setattr(image, "MOST_STRAYS", most)
        model = load(tmp_path, threads=2)
        assert {int(layer[matrix]["format"]) for layer in model.table.layers for matrix in MATRICES} == {format}
        logits.append(model.logits(ids).tobytes() + model.logits(ids[:1]).tobytes())
        model.close()
    assert logits[0] == logits[1]


def test_bf16_of_all_exponents_stays_as_it_is(tmp_path: Path) -> None:
    """Guards speed: weights of many sizes would mostly be kept apart, one by one. Other matrices are not affected."""
    config, weights = weights_of(tmp_path, "llama-wide")
    first = weights.layers[0]
    bits = np.random.default_rng(0).integers(0, 0x7F00, (first.up_proj.rows, first.up_proj.columns), np.uint16)
    layers = replace(first, up_proj=replace(first.up_proj, weight=bits)), *weights.layers[1:]
    plan = Plan(config, replace(weights, layers=layers)).narrowed(2)
    assert [int(plan._layers[i]["up_proj"]["format"]) for i in range(2)] == [BF16, BF12]
    assert int(plan._layers[0]["gate_proj"]["format"]) == BF12


def test_few_strays_in_one_band_are_too_many(tmp_path: Path) -> None:
    """Guards memory: each band has room for the strays of the worst one, so one odd band made the image larger."""
    config, weights = weights_of(tmp_path, "llama-wide")
    bits = np.full((64 * 500, config.hidden_size), 0x3C80, np.uint16)
    bits[:32] = np.random.default_rng(0).integers(0, 0x7F00, bits[:32].shape, np.uint16)
    tall = replace(weights.layers[0].up_proj, rows=len(bits), weight=bits)
    plan = Plan(config, replace(weights, layers=(replace(weights.layers[0], up_proj=tall), *weights.layers[1:])))
    narrow = plan.narrowed(2)
    assert int(narrow._layers[0]["up_proj"]["format"]) == BF16
    assert narrow.size < plan.size  # the others are in bf12


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_formats_are_not_read_for_it(dtype: str, tmp_path: Path) -> None:
    """Guards the start: the weights of other models are read once."""
    config, weights = weights_of(tmp_path, "llama-wide", dtype)
    plan = Plan(config, weights)
    (tmp_path / "model.safetensors").unlink()
    assert plan.narrowed(2) is plan
    assert plan.least_size == plan.size


def test_size_is_checked_before_weights_are_read_and_once_it_is_known(tmp_path: Path) -> None:
    """Guards who has too little memory from waiting until a large model has been read."""
    config, weights = weights_of(tmp_path, "llama-wide")
    plan, sizes = Plan(config, weights), list[int]()
    made = packed.make_image(tmp_path, config, 2, sizes.append, None)
    assert sizes == [plan.least_size, len(made)]
    assert len(made) < plan.size


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_make_the_same_image(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards large matrices, which are read some rows at a time: a part in a wrong place, or counted twice."""
    config, weights = weights_of(tmp_path, name, dtype)
    whole = written(Plan(config, weights).narrowed(2))
    monkeypatch.setattr(image, "READ_AT_ONCE", 1)
    assert written(Plan(config, weights).narrowed(1)) == whole
