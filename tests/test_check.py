"""`tfm check`: what it measures is right, what is wrong is found and named, and its shapes."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import reference
from cli_process import environment, run
from reference_weights import Array, Block, read_model
from safetensors.numpy import load_file, save_file

from tfm.engine import cache, check, load, machine
from tfm.engine.check import CACHES, CHUNKS, PLACES, Row, cases, check_kernels, check_model, thread_counts
from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import LayerConfig, ModelConfig, RopeConfig, read_config
from tfm.engine.reference import reference_logits
from tfm.engine.weights import Weights, load_weights
from tfm.kernels.ops import Op, find_ops

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


# ---------------------------------------------------------------------------------------------- kernels


def row_of(op: Op) -> Row:
    (row,) = check_kernels([op])
    return row


def test_wrong_kernels_are_caught() -> None:
    """Guards a check that everything passes: one wrong case among right ones must show, and be named."""
    small, large = {"x": np.float32([1, 2])}, {"x": np.float32([100, 200])}
    right = Op("op", lambda x: x + x, lambda x: x + x, lambda rng: [("small", small), ("large", large)])
    assert row_of(right) == Row("kernel op", 2, 0.0, row_of(right).allowed, True)
    wrong = replace(right, run=lambda x: x + x + (x > 1.5) * (x < 50) * np.float32(0.25))
    found = row_of(wrong)
    assert (found.cases, found.error, found.passed, found.fault) == (2, 0.25, False, "case small")
    nothing = replace(right, run=lambda x: x * np.float32("nan"))
    assert (row_of(nothing).error, row_of(nothing).passed) == (np.inf, False)


# ---------------------------------------------------------------------------------------------- a model


@pytest.fixture(autouse=True)
def _three_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_threads", lambda: 3)


def rows_of(folder: Path, threads: int = 1) -> list[Row]:
    model = load(folder, threads=threads)
    rows = list(check_model(model))
    model.close()
    return rows


@pytest.mark.parametrize(
    ("name", "quantization", "threads"),
    [("llama", None, 2), ("gpt2", None, 1), ("plain", None, 2), ("plain-grouped", {"bits": 8, "group_size": 32}, 1)],
)
def test_a_right_model(name: str, quantization: Any, threads: int, tmp_path: Path) -> None:
    """Guards a check that fails for nothing, and missing rows: each type of keys and values, each number of threads."""
    config = (checkpoints.FLOATS | checkpoints.GROUPED)[name]
    rows = rows_of(checkpoints.write_checkpoint(tmp_path, config, quantization=quantization), threads)
    assert [row.what for row in rows] == [
        f"model, KV {kv}: {what}"
        for kv in ("f32", "f16", "q8")
        for what in ("float64", *(f"same bits, threads {number}" for number in range(1, threads + 1)))
    ]
    assert all(row.passed and not row.fault for row in rows)
    assert [row.cases for row in rows[: 1 + threads]] == [1] + [13] * threads
    assert all(row.error == row.allowed == 0 for row in rows if row.cases > 1)
    assert [row.allowed for row in rows[:: 1 + threads]] == ([2e-4, 1e-3, 2e-2] if quantization is None else [3e-2] * 3)


def test_a_very_narrow_model(tmp_path: Path) -> None:
    """Guards a check that calls a right model wrong: one layer of 4 dimensions after the other makes more of rounded
    keys and values than is allowed elsewhere. What is wrong by more than that is found all the same."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    folder = checkpoints.write_checkpoint(tmp_path, {**checkpoints.LLAMA, **sizes}, seed=0)
    rows = {row.what: row for row in rows_of(folder, 1)}
    assert all(row.passed for row in rows.values())
    allowed = [rows[f"model, KV {kv}: float64"].allowed for kv in ("f32", "f16", "q8")]
    assert allowed[0] == 2e-4
    assert 1e-3 < allowed[1] < 0.1
    assert 2e-2 < allowed[2] < 0.5
    with closing(load(folder, threads=1)) as model:
        subject = check.Subject(model)
        exact = subject._exact[0]
        off = exact + 1.1 * allowed[1] * (exact.max() - exact.min())
        assert not subject.distance(off, "f16").passed


def test_logits_that_are_all_the_same(tmp_path: Path) -> None:
    """Guards a model whose logits have no spread, which was divided by: it was called too far from float64."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.PLAIN)
    for name in load_file(folder / "model.safetensors"):
        if name.startswith("unembed"):
            damage(folder, name, lambda values: values.fill(0))
    rows = rows_of(folder, 1)
    assert [row.error for row in rows] == [0] * len(rows)
    assert all(row.passed for row in rows)


def test_combinations() -> None:
    """Guards a cache that is tried with some chunks only: over the types of keys and values, all with all."""
    for threads in (1, 2, 8):
        found = {kv_type: cases(threads, kv_type) for kv_type in ("f32", "f16", "q8")}
        assert len({case for some in found.values() for case in some}) == len(CHUNKS) * len(PLACES) * len(CACHES)
        for some in found.values():
            for one, other in (("chunk", "place"), ("chunk", "cache"), ("place", "cache")):
                pairs = {(getattr(case, one), getattr(case, other)) for case in some}
                assert len(pairs) == len({a for a, _ in pairs}) * len({b for _, b in pairs})
    assert thread_counts(1) == [1]
    assert thread_counts(6) == [1, 2, 3, 4, 6]
    assert thread_counts(16) == [1, 2, 3, 4, 8, 16]


def test_a_short_context(tmp_path: Path) -> None:
    """Guards a text that does not fit: two tokens must do."""
    config = {**checkpoints.LLAMA, "max_position_embeddings": 2}
    assert all(row.passed for row in rows_of(checkpoints.write_checkpoint(tmp_path, config)))


DAMAGES = {
    "model.layers.1.mlp.up_proj.weight": "layer 1, MLP",
    "model.layers.2.input_layernorm.weight": "layer 2, keys",
    "model.layers.0.self_attn.o_proj.weight": "layer 0, heads",
    "model.layers.2.mlp.down_proj.bias": "layer 2, MLP",
    "model.norm.weight": "unembedding",
}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_tensor_is_named(name: str, value: float, tmp_path: Path) -> None:
    """Guards an answer such as "logits are NaN", after which the search begins: layer, half and tensor are told."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMAS["llama-biases"])
    damage(folder, name, lambda values: np.put(values, 3, value))
    row, *others = rows_of(folder)
    place = DAMAGES[name]
    assert row == Row("model, KV f32: float64", 1, np.inf, 2e-4, False, row.fault)
    assert row.fault == f"{place}: NaN or infinite values in {folder / 'model.safetensors'}: tensor {name}"
    assert all(other.passed for other in others if other.cases > 1), "one NaN is as good as another"


OVERFLOWS = {
    "layer 1, MLP": ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"),
    "layer 2, heads": ("model.layers.2.self_attn.v_proj.weight", "model.layers.2.self_attn.o_proj.weight"),
    "unembedding": ("model.norm.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("place", OVERFLOWS)
def test_logits_that_overflow(place: str, tmp_path: Path) -> None:
    """Guards infinite logits of weights of which none is infinite: no tensor can be blamed, but the layer is told."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA)
    for name in OVERFLOWS[place]:
        damage(folder, name, lambda values: np.multiply(values, 1e20, out=values))
    model = load(folder, threads=1)
    row = next(iter(check_model(model)))
    model.close()
    assert (row.passed, row.error) == (False, np.inf)
    assert re.fullmatch(rf"{place}: values up to [0-9.]+e\+[34][0-9], more than 3\.4e\+38", row.fault)


def test_scales_that_are_not_finite(tmp_path: Path) -> None:
    """Guards tensors that belong to a quantised matrix and bear another name than its weight."""
    config, quantization = checkpoints.GROUPED["gpt2-grouped"], {"bits": 4, "group_size": 64}
    folder = checkpoints.write_checkpoint(tmp_path, config, dtype="F16", quantization=quantization)
    damage(folder, "model.h.1.attn.c_attn.scales", lambda values: np.put(values, 0, np.inf))
    fault = rows_of(folder)[0].fault
    assert "layer 1, " in fault
    assert fault.endswith("tensor model.h.1.attn.c_attn.scales")


def test_values_too_large_for_the_cache(tmp_path: Path) -> None:
    """Guards a model whose values float16 does not hold being called damaged: float32 runs it."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.PLAIN)
    damage(folder, "blocks.1.attn.v.bias", lambda values: np.put(values, 0, 1e6))
    found = {row.what: row for row in rows_of(folder)}
    assert found["model, KV f32: float64"].passed
    fault = "layer 1, values: values up to 1e+06, more than 6.6e+04"
    assert found["model, KV f16: float64"].fault == fault


def damage(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change values of a tensor."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 7), ("place", "last of three"), ("cache", "truncated"), ("cache", "used before")]
)
def test_bits_that_differ(field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a comparison that sees nothing: a last bit, of one token, in one way of computing, must show."""
    exact = check._logits

    def off_by_a_bit(model: Any, ids: list[int], case: check.Case) -> Any:
        logits = exact(model, ids, case)
        if getattr(case, field) == value:
            logits.view(np.uint32)[61, 5] ^= 1
        return logits

    monkeypatch.setattr(check, "_logits", off_by_a_bit)
    rows = rows_of(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA))
    assert [row.passed for row in rows] == [True, False] * 3
    assert all(0 < row.error < 1e-6 and "from token 61 on" in row.fault for row in rows[1::2])
    assert all(str(value) in row.fault for row in rows[1::2])


def test_bits_that_differ_far_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what only a long text shows: states of segments that were not merged gave ok in every row."""
    right = check.Subject.last_logits

    def off_by_a_bit(self: Any, threads: int, kv_type: str, at_once: int) -> Any:
        logits = right(self, threads, kv_type, at_once)
        assert len(self.long_ids) == 600
        if (threads, kv_type, at_once) == (2, "f16", 1):
            logits.view(np.uint32)[-1, 3] ^= 1
        return logits

    monkeypatch.setattr(check.Subject, "last_logits", off_by_a_bit)
    wrong = [row for row in rows_of(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA), 2) if not row.passed]
    assert [row.what for row in wrong] == ["model, KV f16: same bits, threads 2"]
    assert wrong[0].error > 0
    assert wrong[0].fault == "the last tokens of 600, one by one"


def test_what_a_cache_held_before(tmp_path: Path) -> None:
    """Guards states of the cache that are none: keys from elsewhere must be there, and be seen if they are not cut."""
    model = load(checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA), threads=1)
    ids = check.Subject(model).ids
    expected = check._logits(model, ids, check.Case())
    truncated = check.Case(chunk=7, place="last of three", cache="truncated")
    forgetting = cache.Sequence.truncate
    lengths = []

    def notice(self: cache.Sequence, length: int) -> None:
        lengths.append((self.length, length))
        forgetting(self, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.Sequence, "truncate", notice)
        assert np.array_equal(check._logits(model, ids, truncated), expected)
    assert (len(ids), len(ids) // 2) in lengths
    used = check.Case(place="first of three", cache="used before")
    assert np.array_equal(check._logits(model, ids, used), expected)
    assert model.pool._made == len(model.pool._free) >= 3 * 2
    model.close()


# ---------------------------------------------------------------------------------------------- the command


def test_table(parrot: Path) -> None:
    """Guards columns that do not stand under each other, and anything on stderr that nobody asked for."""
    done = run("check", "-m", parrot, "--threads", "1")
    assert (done.returncode, done.stderr) == (0, b"")
    heading, *lines = done.stdout.decode().splitlines()
    ends = [heading.index(title) + len(title) for title in ("cases", "largest error", "allowed")]
    for line in lines:
        assert all(line[end - 1] != " " and line[end] == " " for end in ends), line
        assert line.endswith("  ok")
    names = [line.split("  ")[0] for line in lines]
    assert names[: len(find_ops())] == [f"kernel {op.name}" for op in find_ops()]
    assert names[-1] == "model, KV q8: same bits, threads 1"


def test_json_and_exit_status(tmp_path: Path, parrot: Path) -> None:
    """Guards JSON that is none because an error is infinite, and a failure that a script does not see."""
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    damage(folder, name, lambda values: np.put(values, 3, np.nan))
    done = run("check", "-m", folder, "--threads", "1", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert list(found) == ["model", "cpu", "threads", "passed", "rows"]
    assert (found["model"], found["threads"], found["passed"]) == (str(folder), 1, False)
    assert all(list(row) == ["what", "cases", "error", "allowed", "passed", "fault"] for row in found["rows"])
    row = next(row for row in found["rows"] if row["what"] == "model, KV f32: float64")
    assert (row["error"], row["passed"]) == (None, False)
    (line,) = done.stderr.decode().splitlines()
    count = len(found["rows"])
    assert line.startswith(f"tfm: check: 3 of {count} rows failed: found model, KV f32: float64: layer 1, ")
    assert name in line


def test_wrong_kernel_fails_the_command(parrot: Path) -> None:
    """Guards a table that says FAILED while the exit status says that all is well."""
    script = (
        "import dataclasses, sys; import tfm.kernels.norm as norm\n"
        "norm.OPS[:] = [dataclasses.replace(norm.OPS[0], run=lambda **inputs: norm.norm(**inputs) + 1)]\n"
        "from tfm.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script, "check", "-m", parrot, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.decode().splitlines() if line.startswith("kernel norm ")]
    assert "  FAILED: case " in line
    assert b"rows failed: found kernel norm: case " in done.stderr


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """It is told at once, not after the kernels."""
    done = run("check", "-m", tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"config.json" in done.stderr
