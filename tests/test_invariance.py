"""The same bytes every time: logits do not depend on threads, on how a prompt was cut, or on what else was computed.

A prompt is computed once by one thread in one pass, and then in all other ways, which must give every bit of it again.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import numpy.typing as npt
import pytest

from tfm.engine import load, machine
from tfm.engine.model import Model

Logits = npt.NDArray[np.float32]

KV_TYPES = ("f32", "f16", "q8")
THREADS = (1, 2, 3)
CHUNKS = (1, 7, 64, None)
CONTEXT = 150  # tokens: more than two blocks of the cache
ONE_BY_ONE = 70  # of them when each is a step, or seven: more than one block
# So many steps take long where there are more threads than processors, which wait for each other at every barrier. Only
# one thread takes them all; more threads cut the text here: at its begin, and around the end of a block.
FEW_STEPS = (1, 2, 3, 62, 63, 64, 65, 66)
LONG = 1100  # more than two segments of attention, and than two full passes

# Architecture -> its checkpoint of odd sizes that are not too small, and that of whole groups for quantised matrices
ARCHITECTURES = {
    "llama": ("llama-wide", "llama-grouped"),
    "gpt2": ("gpt2-wide", "gpt2-grouped"),
    "tfm_plain": ("plain-wide", "plain-grouped"),
}
FORMATS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "F32"},
    "f16": {"dtype": "F16"},
    "bf16": {"dtype": "BF16"},
    "q4": {"dtype": "F16", "quantization": {"bits": 4, "group_size": 32}},
    "q8": {"dtype": "BF16", "quantization": {"bits": 8, "group_size": 64}},
}
# All formats, and all types of keys and values; not each with each, since only attention sees the latter
CASES = [(architecture, format, "f16") for architecture in ARCHITECTURES for format in FORMATS] + [
    (architecture, format, kv_type)
    for architecture, format in zip(ARCHITECTURES, ("bf16", "q4", "f32"), strict=True)
    for kv_type in ("f32", "q8")
]


@pytest.fixture(autouse=True)
def _three_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` takes no more threads than there are processors; here three must run wherever the tests do."""
    monkeypatch.setattr(machine, "available_threads", lambda: max(THREADS))


def models(folder: Path, kv_type: str, threads: Sequence[int] = THREADS, **options: Any) -> Iterator[Model]:
    """The model in folder with one thread, two, three: on a busy machine too, where it would go on alone."""
    for number in threads:
        model = load(folder, threads=number, kv_type=kv_type, **options)
        model._team._alone_when_busy = False
        yield model
        assert model._team._records[0]["threads"] == number, "the last step did not run on all threads"
        model.close()


def write(folder: Path, architecture: str, format: str) -> tuple[Path, dict[str, Any]]:
    """A tiny checkpoint with room for long texts, and its config.json."""
    floats, grouped = ARCHITECTURES[architecture]
    config = checkpoints.GROUPED[grouped] if "quantization" in FORMATS[format] else checkpoints.FLOATS[floats]
    config = {**config, "n_positions" if architecture == "gpt2" else "max_position_embeddings": LONG + 100}
    return checkpoints.write_checkpoint(folder, config, **FORMATS[format]), config


def together(model: Model, texts: Sequence[list[int]], cuts: Sequence[Sequence[int]]) -> list[Logits]:
    """Logits of several texts, computed in common steps: text i is cut at cuts[i], and a step takes a piece of each."""
    sequences = [model.sequence() for _ in texts]
    rows: list[list[Logits]] = [[] for _ in texts]
    pieces = [np.split(text, cut) for text, cut in zip(texts, cuts, strict=True)]
    for step in zip_longest(*pieces, fillvalue=np.empty(0, int)):
        work = [(sequence, piece.tolist()) for sequence, piece in zip(sequences, step, strict=True)]
        logits = model.step(work, "all")
        ends = np.cumsum([len(piece) for piece in step])
        for row, part in zip(rows, np.split(logits, ends[:-1]), strict=True):
            row.append(part)
    for sequence in sequences:
        sequence.close()
    return [np.concatenate(parts) for parts in rows]


def in_chunks(model: Model, ids: list[int], expected: Logits | None) -> Logits:
    """The logits of ids, which must be `expected` (where there are any), in whatever chunks they are computed."""
    expected = model.logits(ids) if expected is None else expected
    for chunk in CHUNKS:
        if chunk == 1 and model.threads > 1:
            (found,) = together(model, [ids[:ONE_BY_ONE]], [FEW_STEPS])
        else:
            is_short = chunk == 1 or (chunk == 7 and model.threads > 1)
            found = model.logits(ids[:ONE_BY_ONE] if is_short else ids, chunk)
        assert_same(found, expected[: len(found)], model.threads, "threads, chunk", chunk)
    return expected


def assert_same(found: Logits, expected: Logits, *what: object) -> None:
    """Every bit; and where they first differ, if they do."""
    different = np.flatnonzero((found.view(np.uint32) != expected.view(np.uint32)).any(-1))
    assert different.size == 0, f"{what}: {different.size} positions differ, the first is {different[0]}"


@pytest.mark.parametrize(("architecture", "format", "kv_type"), CASES)
def test_threads_and_chunks(architecture: str, format: str, kv_type: str, tmp_path: Path) -> None:
    """Guards sums that follow the slices of threads, or kernels of one row and of many that sum differently."""
    folder, config = write(tmp_path, architecture, format)
    ids = checkpoints.random_ids(config, CONTEXT)
    expected = None
    for model in models(folder, kv_type):
        expected = in_chunks(model, ids, expected)


@pytest.mark.parametrize(("architecture", "format", "kv_type"), CASES)
def test_alone_or_among_others(architecture: str, format: str, kv_type: str, tmp_path: Path) -> None:
    """Guards rows that share a tile, a block of rows or a scale with rows of another sequence."""
    folder, config = write(tmp_path, architecture, format)
    texts = [checkpoints.random_ids(config, length, seed) for seed, length in enumerate((CONTEXT, 70, 133, 9))]
    cuts = [(1, 8, 72, 74, 104), range(1, 7), (40, 41, 42, 92, 93, 94), (3, 6, 7)]
    for model in models(folder, kv_type):
        alone = [model.logits(ids) for ids in texts]
        for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
            found = together(model, [texts[i] for i in order], [cuts[i] for i in order])
            for i, logits in zip(order, found, strict=True):
                assert_same(logits, alone[i], model.threads, "threads, text", i, "in order", order)


@pytest.mark.parametrize(
    ("architecture", "format", "kv_type"), [("llama", "q4", "f16"), ("gpt2", "f32", "f32"), ("tfm_plain", "f16", "q8")]
)
def test_long_texts(architecture: str, format: str, kv_type: str, tmp_path: Path) -> None:
    """Guards the sharing of a long text by its segments, which only steps of few rows do: decoding against a prompt."""
    folder, config = write(tmp_path, architecture, format)
    long, other = checkpoints.random_ids(config, LONG), checkpoints.random_ids(config, 90, seed=1)
    expected = None
    for model in models(folder, kv_type):
        whole = model.logits(long)
        expected = whole if expected is None else expected
        assert_same(whole, expected, model.threads, "threads, all at once")
        for cuts in (range(LONG - 20, LONG), (500, 508, 1080, 1083, 1090, 1098)):
            (found, _) = together(model, [long, other], [cuts, (50, 52, 55)])
            assert_same(found, expected, model.threads, "threads, cut at", cuts)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_memory_used_before(kv_type: str, tmp_path: Path) -> None:
    """Guards against what an earlier text left in cache blocks and buffers: given back, taken again, never cleared."""
    folder, config = write(tmp_path, "llama", "f32")
    ids, other = checkpoints.random_ids(config, CONTEXT), checkpoints.random_ids(config, 2 * CONTEXT, seed=1)
    for model in models(folder, kv_type, threads=(2,)):
        fresh = model.logits(ids)
        model.logits(other)
        assert_same(model.logits(ids), fresh, "after another text")


@pytest.mark.parametrize("kv_type", ["f16", "q8"])  # with those of f32, the small models do the same
def test_default_model(kv_type: str, default_model_folder: Path) -> None:
    """The same for a real model, whose matrices are large enough for every tile and whose activations have outliers."""
    text = (Path(__file__).parent / "golden/text.txt").read_text(encoding="utf-8")
    expected = None
    for model in models(default_model_folder, kv_type, THREADS if kv_type == "f16" else (1, 3)):
        ids = model.tokenizer.encode(text)[:CONTEXT]
        expected = in_chunks(model, ids, expected)
        other = ids[::-1][:70]
        (found, _) = together(model, [ids, other], [(1, 8, 72, 74, 104), range(1, 6)])
        assert_same(found, expected, model.threads, "threads, among others")
