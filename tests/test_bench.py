"""What is measured, the limits that it is held against, and random weights. No time is asserted."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import GROUPED, LLAMA, write_checkpoint
from safetensors.numpy import load_file

from tfm.engine import TfmError, bench, load, roofline
from tfm.engine.bench import limit_of, measure, open_checkpoint, open_shape, with_threads
from tfm.engine.bench_kernels import choose_ops, measure_kernels
from tfm.engine.config import ModelConfig, read_config, read_config_file
from tfm.engine.random_weights import random_weights
from tfm.engine.roofline import Machine
from tfm.kernels import ops, records

FORMATS = ("f32", "bf16", "f16", "q8", "q4")
SLOW_MEMORY = Machine(1, 1.0, dict.fromkeys(FORMATS, float("inf")))
SLOW_MULTIPLIERS = Machine(1, float("inf"), dict.fromkeys(FORMATS, 1.0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), LLAMA)


def up(value: int) -> int:
    return -(-value // 16) * 16


def test_names() -> None:
    """The field's names; a name that does not tell batch or depth makes two rows look the same."""
    assert bench.Test("pp", 512).name == "pp512"
    assert bench.Test("tg", 128, depth=512).name == "tg128 @ d512"
    assert bench.Test("tg", 128, 16, 512).name == "tg128 b16 @ d512"


def test_limit_of_memory(tiny: Path) -> None:
    """At one byte a second a step takes as many seconds as it reads bytes: all panels but the embedding's, and keys."""
    D, F, V, heads, kv_heads, layers = 40, 56, 97, 4, 2, 3
    block = (heads + 2 * kv_heads) * 16 * D + up(D) * heads * 10 + 2 * up(F) * D + up(D) * F
    weights, position = 4 * (layers * block + up(V) * D), 2 * layers * 2 * kv_heads * 16
    model = load(tiny, threads=1)
    assert limit_of(model, bench.Test("tg", 1), SLOW_MEMORY) == (weights + position, "memory")
    assert limit_of(model, bench.Test("tg", 3, depth=100), SLOW_MEMORY)[0] == 3 * weights + (101 + 102 + 103) * position
    assert limit_of(model, bench.Test("tg", 1, batch=5, depth=9), SLOW_MEMORY)[0] == weights + 5 * 10 * position
    assert limit_of(model, bench.Test("pp", 100), SLOW_MEMORY)[0] == weights + 100 * position
    # A prompt of two passes unembeds once.
    assert limit_of(model, bench.Test("pp", 600), SLOW_MEMORY)[0] == 2 * weights - 4 * up(V) * D + 600 * position
    model.close()


def test_limit_of_multipliers(tmp_path: Path) -> None:
    """Every weight is multiplied once for a row, the unembedding's for the last row of a prompt, pairs twice a head."""
    folder = write_checkpoint(tmp_path, {**LLAMA, "head_dim": 16})
    D, F, V, heads, kv_heads, layers = 40, 56, 97, 4, 2, 3
    block, unembedding = (heads + 2 * kv_heads) * 16 * D + D * heads * 16 + 3 * F * D, V * D
    pair = 2 * layers * heads * 16
    model = load(folder, threads=1)
    assert limit_of(model, bench.Test("tg", 1), SLOW_MULTIPLIERS) == (layers * block + unembedding + pair, "multiply")
    expected = 2 * (10 * layers * block + unembedding + pair * sum(range(6, 16)))
    assert limit_of(model, bench.Test("pp", 10, batch=2, depth=5), SLOW_MULTIPLIERS)[0] == expected
    model.close()


def test_measure(tiny: Path) -> None:
    """Each combination once, in order, with all repetitions; the positions that a test added are gone afterwards."""
    subject = open_checkpoint(str(tiny), 1, "f32")
    tests = [
        bench.Test("pp", 9, repetitions=2),
        bench.Test("tg", 2, repetitions=3),
        bench.Test("pp", 9, 2, 70, 3),
        bench.Test("tg", 2, 2, 70, 3),
        bench.Test("tg", 1, 1, 70, 3),
    ]
    results = list(measure(subject, tests, Machine(1, 1e9, dict.fromkeys(FORMATS, 1e9))))
    assert [result.test for result in results] == tests
    assert [len(result.samples_ts) for result in results] == [2, 3, 3, 3, 3]
    assert all(min(result.samples_ts) > 0 for result in results)
    assert subject.params == sum(array.size for array in _tensors(tiny).values())
    assert subject.model.pool._free  # closed sequences gave their blocks back
    assert len(subject.model.pool._free) == subject.model.pool._made


def test_too_long_for_the_context(tiny: Path) -> None:
    """Before anything is measured: half an hour later would be too late."""
    subject = open_checkpoint(str(tiny), 1, "f16")
    with pytest.raises(TfmError, match=r"pp1000 @ d25: found 1025 positions; allowed: at most 1024"):
        next(measure(subject, [bench.Test("tg", 1), bench.Test("pp", 1000, depth=25)], SLOW_MEMORY))


def test_too_many_sequences_for_the_memory(tiny: Path) -> None:
    """Guards against a machine that swaps for minutes, until the system ends what is the largest."""
    subject = open_checkpoint(str(tiny), 1, "f16")
    expected = r"tg1 b1000000000: found \d+\.\d GB of keys.*; allowed: at most .* that is free; (do: )?lower -b"
    with pytest.raises(TfmError, match=expected):
        next(measure(subject, [bench.Test("tg", 1), bench.Test("tg", 1, batch=10**9)], SLOW_MEMORY))
    assert subject.model.pool.blocks_in_use == 0


def test_other_threads_share_the_weights(tiny: Path) -> None:
    """A large model would be packed again for every number of threads."""
    subject = open_checkpoint(str(tiny), 1, "f32")
    other = with_threads(subject, 2)
    assert other.model.threads == 2
    assert other.model.table.image is subject.model.table.image
    assert with_threads(subject, 1) is subject
    ids = [1, 2, 3]
    assert np.array_equal(other.model.logits(ids), subject.model.logits(ids))
    other.model.close()


# ---------------------------------------------------------------------------------------------- random weights


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", sorted(GROUPED))
def test_random_weights(tmp_path: Path, name: str, format: Any) -> None:
    """A format or an architecture that cannot be made, or values that overflow: then a run measures infinities."""
    folder = write_checkpoint(tmp_path, GROUPED[name])
    config = read_config(folder)
    weights = random_weights(config, format)
    assert weights.parameters() == sum(array.size for array in _tensors(folder).values())
    assert weights.layers[0].q_proj.format == format
    path = folder / "config.json"
    model = open_shape(path, format, 1, "f32").model
    # As in a model of that format: bf16 is packed in 12 bits.
    assert model.table.layers[0]["q_proj"]["format"] == records.FORMATS["bf12" if format == "bf16" else format]
    logits = model.logits([1, 2, 3, 4])
    assert np.isfinite(logits).all()
    assert logits.std() > 0
    assert not np.array_equal(logits[0], logits[1])


def test_random_weights_take_no_memory(tmp_path: Path) -> None:
    """Random weights of a large shape, all there before they are packed, would need more memory than the panels."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 8}
    config = config_of(tmp_path, {**LLAMA, **sizes})
    tracemalloc.start()
    weights = random_weights(config, "q4")
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert weights.parameters() > 1.5e9
    assert taken < 100e6


def test_random_weights_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(TfmError, match="found 40 columns; allowed: a multiple of 32 columns for q4"):
        random_weights(config_of(tmp_path, LLAMA), "q4")
    huge = config_of(tmp_path, {**LLAMA, "hidden_size": 3200, "vocab_size": 2**31 - 1})
    with pytest.raises(
        TfmError, match=r"memory: found 343\d+\.\d MB of weights; allowed: .* MB free; use a smaller shape"
    ):
        random_weights(huge, "q4")  # not after a minute, and by name


def test_random_weights_for_a_long_context(tmp_path: Path) -> None:
    """A model without learned positions has no matrix of them; a run of random numbers was made for one."""
    config = config_of(tmp_path, {**LLAMA, "max_position_embeddings": 2**31 - 1})
    assert random_weights(config, "f32").embed_tokens.columns == config.hidden_size


# ---------------------------------------------------------------------------------------------- the machine


def test_loops_do_their_work() -> None:
    """A loop that the compiler has shortened measures a machine that does not exist."""
    rng = np.random.default_rng(0)
    memory, out = rng.random((64, 16), np.float32), rng.random((12, 16), np.float32)
    addresses = memory.ctypes.data, out.ctypes.data
    for read in roofline.READS:
        out[:] = 0
        read(addresses[0], 64, addresses[1])
        assert np.allclose(out[:8], memory.reshape(8, 8, 16).sum(0))
    out[:] = start = rng.random((12, 16), np.float32)
    rows = roofline.FLOATS(addresses[0], 128, addresses[1]) // (128 * 16)
    assert np.allclose(out[:rows], start[:rows] + 2 * memory.sum(0) * start[0, 0], rtol=1e-4)
    assert np.array_equal(out[rows:], start[rows:])
    for entry in (roofline.OCTETS, roofline.NIBBLES):
        out[:] = start
        assert entry(addresses[0], 128, addresses[1]) == 128 * rows * 64
        assert np.all((out.view(np.uint32) != start.view(np.uint32)).any(1)[:rows])


@pytest.mark.parametrize("threads", [1, 2])
def test_machine(threads: int) -> None:
    machine = roofline.measure_machine(threads)
    assert machine.threads == threads
    assert machine.bytes_s > 0
    assert set(machine.macs_s) == set(FORMATS)
    assert min(machine.macs_s.values()) > 0


def test_reading_takes_as_long_as_it_reads() -> None:
    """Guards the memory limit of benchmarks: three times the memory is read three times, not once."""
    loops = roofline.Loops(1)
    size = 3 * roofline.READ_BYTES
    assert loops.read_seconds(size) > size / 3 / loops.measure(3).bytes_s


def test_kernels_are_verified() -> None:
    """A kernel that is fast and wrong."""
    (norm,) = choose_ops("norm")
    assert all(result.passed for result in measure_kernels([norm]))
    wrong = ops.Op("wrong", lambda x: x + 1, lambda x: x, lambda rng: [("a case", {"x": np.float32([1, 2])})])
    (result,) = measure_kernels([wrong])
    assert not result.passed
    assert result.error == 1


def config_of(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "shape.json").write_text(json.dumps(values))
    return read_config_file(folder / "shape.json")


def _tensors(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")
