"""What the default model says: in float weights what transformers says, in its own few bits nearly that.

golden/default_model.json holds what transformers computed in float32 on the weights that the GGUF file stands for.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_weights import read_tensors
from safetensors.numpy import save_file

from tfm.engine import load
from tfm.engine.default_model import SMOLLM2_135M
from tfm.engine.model import Model

GOLDEN = Path(__file__).parent / "golden"
RECORD: dict[str, Any] = json.loads((GOLDEN / "default_model.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def float_model(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The default model with every matrix written out in float32 (540 MB, removed at the end)."""
    folder = tmp_path_factory.mktemp("float32")
    config = json.loads((default_model_folder / "config.json").read_text(encoding="utf-8"))
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for path in default_model_folder.glob("*token*.json"):
        shutil.copy(path, folder)
    tensors = {name: values.astype(np.float32) for name, values in read_tensors(default_model_folder).items()}
    save_file(tensors, folder / "model.safetensors")
    del tensors
    model = load(folder, kv_type="f32")
    yield model
    model.close()
    shutil.rmtree(folder)


def greedy(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest token so many times after each of prompts, past any end of text: a step for all of them."""
    sequences, new = [model.sequence() for _ in prompts], prompts
    continuations: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        new = [[int(row.argmax())] for row in model.step(list(zip(sequences, new, strict=True)))]
        for continuation, token in zip(continuations, new, strict=True):
            continuation += token
    for sequence in sequences:
        sequence.close()
    return continuations


@pytest.fixture(scope="session")
def continuations(float_model: Model) -> dict[str, list[int]]:
    """What the float model makes of each recorded text."""
    recorded = RECORD["greedy"]
    longest = max(len(each["continuation"]) for each in recorded)
    found = greedy(float_model, [each["prompt"] for each in recorded], longest)
    return dict(zip((each["text"] for each in recorded), found, strict=True))


def perplexity(model: Model, ids: list[int]) -> float:
    """exp of the mean of -log p of every token but the first."""
    nlls = []
    for row, id_ in zip(model.logits(ids)[:-1], ids[1:], strict=True):  # all rows in float64 would be 800 MB
        logits = row.astype(np.float64)
        largest = logits.max()
        nlls.append(np.log(np.exp(logits - largest).sum()) - (logits[id_] - largest))
    return float(np.exp(np.mean(nlls)))


def text_ids(model: Model) -> list[int]:
    return model.tokenizer.encode((GOLDEN / "text.txt").read_text(encoding="utf-8"))


def test_recorded_for_these_weights() -> None:
    """Guards against a record of another file than the one that is downloaded."""
    assert RECORD["gguf_sha256"] == SMOLLM2_135M.gguf_sha256


@pytest.mark.parametrize("recorded", RECORD["greedy"], ids=lambda recorded: recorded["text"].split("\n")[0])
def test_float_weights_say_what_transformers_says(
    float_model: Model, continuations: dict[str, list[int]], recorded: dict[str, Any]
) -> None:
    """Guards the whole way from the GGUF file to a token: import, tokenizer, weights, cache, a prompt and 64 steps."""
    assert float_model.tokenizer.encode(recorded["text"]) == recorded["prompt"]
    assert continuations[recorded["text"]][: len(recorded["continuation"])] == recorded["continuation"]


def test_float_weights_have_the_perplexity_that_transformers_has(float_model: Model) -> None:
    """Guards a long prompt: keys far back, rope far out, every pass after the first."""
    ids = text_ids(float_model)
    assert len(ids) == RECORD["perplexity"]["tokens"]
    assert perplexity(float_model, ids) == pytest.approx(RECORD["perplexity"]["perplexity"], rel=1e-4)


@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_few_bits_cost_little(default_model_folder: Path, kv_type: str) -> None:
    """Guards the rounding of activations to 8 bits: with the model as it is used the perplexity stays within 1 %."""
    model = load(default_model_folder, kv_type=kv_type)
    found = perplexity(model, text_ids(model))
    model.close()
    assert found == pytest.approx(RECORD["perplexity"]["perplexity"], rel=0.01)
