"""How fast a model runs, and how far that is from what the machine can do. Measures, and prints nothing.

A test is a prompt of N tokens read at once (pp), or N tokens decoded one by one (tg), by B sequences side by side that
already have D positions. Its limit is the time that the machine takes at least:

    memory     bytes / bandwidth: all packed weights once for each forward pass, and the keys and values that are read
    multiply   multiply-adds / peak: the weights' for each row, at the peak of their format, and attention's in float32

The larger of the two is the limit and names it. Bandwidth and peaks are measured (roofline.py).
"""

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfm.engine.cache import Sequence as Text
from tfm.engine.config import LayerConfig, read_config_file
from tfm.engine.errors import TfmError
from tfm.engine.layers import padded
from tfm.engine.loading import load
from tfm.engine.machine import available_memory, available_threads, cpu_name
from tfm.engine.matrix import Format
from tfm.engine.model import MAX_ROWS, Model
from tfm.engine.progress import Progress, silent
from tfm.engine.roofline import Machine
from tfm.kernels.packing import read_bytes
from tfm.kernels.records import FORMATS, KV_BLOCK, KV_TYPES, head_bytes

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEAK_OF = {code: "bf16" if name == "bf12" else name for name, code in FORMATS.items()}


@dataclass(frozen=True)
class Test:
    """kind is pp or tg; `repetitions` times each of `batch` sequences with `depth` positions gets `tokens` more."""

    kind: str
    tokens: int
    batch: int = 1
    depth: int = 0
    repetitions: int = 1

    @property
    def name(self) -> str:
        """As the field writes it, with the batch where there is one: tg128 b16 @ d512."""
        batch = f" b{self.batch}" if self.batch > 1 else ""
        return f"{self.kind}{self.tokens}{batch}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Result:
    """Tokens a second of a test, of all sequences together, in each repetition; and the most that there could be."""

    model: str
    size_bytes: int
    params: int
    threads: int
    test: Test
    samples_ts: tuple[float, ...]
    limit_ts: float
    limit: str

    backend = "CPU"

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """0 for a single repetition."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def limit_share(self) -> float:
        return self.avg_ts / self.limit_ts

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "size_bytes": self.size_bytes,
            "params": self.params,
            "backend": self.backend,
            "cpu": cpu_name(),
            "threads": self.threads,
            "test": self.test.name,
            "batch": self.test.batch,
            "depth": self.test.depth,
            "avg_ts": self.avg_ts,
            "stddev_ts": self.stddev_ts,
            "samples_ts": list(self.samples_ts),
            "limit_ts": self.limit_ts,
            "limit_share": self.limit_share,
        }


@dataclass(frozen=True)
class Subject:
    """The model that is measured; name is what the results call it."""

    name: str
    params: int
    model: Model


def usable_threads(threads: Sequence[int]) -> list[int]:
    """The counts that the machine has, each once, with a warning for one that is too large; all when none is named."""
    most = available_threads()
    for count in threads:
        if count > most:
            warnings.warn(f"{count} threads asked for, {most} used: there are no more processors", stacklevel=2)
    return list(dict.fromkeys(min(count, most) for count in threads or [most]))


def open_checkpoint(ref: str, threads: int, kv_type: str, progress: Progress | None = None) -> Subject:
    """A model as `load` finds it."""
    from tfm.engine.checkpoint import Checkpoint
    from tfm.engine.weights import load_weights

    model = load(ref, threads=threads, kv_type=kv_type, progress=progress)
    model.take_weights()
    return Subject(ref, load_weights(Checkpoint(model.folder), model.config).parameters(), model)


def open_shape(path: Path, format: Format, threads: int, kv_type: str, progress: Progress | None = None) -> Subject:
    """A model of the shape that a config.json describes, with random weights in one format."""
    from tfm.engine.random_weights import random_image, random_weights
    from tfm.kernels.packing import PACK

    config = read_config_file(path)
    weights = random_weights(config, format)
    PACK.prepare(progress)
    image = random_image(weights, config, threads, progress)
    own = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = f"{own} {format}, random"
    model = Model(name, path.parent, config, image, threads, kv_type, config.max_position_embeddings, progress=progress)
    return Subject(name, weights.parameters(), model)


def with_threads(subject: Subject, threads: int) -> Subject:
    """The same weights, run by another number of threads."""
    old = subject.model
    if threads == old.threads:
        return subject
    image = old.table.image
    model = Model(old.name, old.folder, old.config, image, threads, old.kv_type, old.ctx)
    return Subject(subject.name, subject.params, model)


def check(tests: Sequence[Test], model: Model) -> None:
    """Raises TfmError for a test that does not fit the context or the memory."""
    free = available_memory()
    for test in tests:
        positions = test.depth + test.tokens
        if positions > model.ctx:
            found, allowed = f"{positions} positions", f"at most {model.ctx}, the model's context"
            raise TfmError(f"test {test.name}", found, allowed, "lower -p, -n or -d")
        logits = 4 * model.config.vocab_size  # of each sequence's last position
        needed = test.batch * (-(-positions // KV_BLOCK) * model.pool.block_bytes + logits)
        if free is not None and needed > free:
            found = f"{needed / 1e9:.1f} GB of keys, values and logits"
            allowed = f"at most {free / 1e9:.1f} GB, the memory that is free"
            raise TfmError(f"test {test.name}", found, allowed, "lower -b, -p, -n or -d, or use --kv-type q8")


def measure(subject: Subject, tests: Sequence[Test], machine: Machine, progress: Progress = silent) -> Iterator[Result]:
    """The tests in their order, each result as it is there. One run before the repetitions is not counted."""
    model = subject.model
    check(tests, model)
    rng = np.random.default_rng(0)
    with closing(model), ExitStack() as texts:
        sequences: list[Text] = []
        for test in tests:
            ids = rng.integers(0, model.config.vocab_size, test.depth + test.tokens).tolist()
            if len(sequences) != test.batch or sequences[0].length != test.depth:
                texts.close()
                sequences = [texts.enter_context(model.sequence()) for _ in range(test.batch)]
                _fill(model, sequences, ids[: test.depth], progress)
            samples_ts, runs = [], 1 + test.repetitions
            for i in range(runs):
                progress(test.name, i, runs)
                samples_ts.append(test.batch * test.tokens / _run(model, sequences, test, ids[test.depth :]))
            progress(test.name, runs, runs)
            limit_s, limit = limit_of(model, test, machine)
            yield Result(
                subject.name, model.memory()["weights_bytes"], subject.params, model.threads, test,
                tuple(samples_ts[1:]), test.batch * test.tokens / limit_s, limit,
            )  # fmt: skip


def _fill(model: Model, sequences: Sequence[Text], ids: list[int], progress: Progress) -> None:
    """Give all sequences the positions that they have before a test."""
    label = f"reading {len(ids)} tokens"
    for i, sequence in enumerate(sequences):
        for begin in range(0, len(ids), MAX_ROWS):
            progress(label, i * len(ids) + begin, len(sequences) * len(ids))
            model.step([(sequence, ids[begin : begin + MAX_ROWS])], "none")
    progress(label, 1, 1)


def _run(model: Model, sequences: Sequence[Text], test: Test, ids: list[int]) -> float:
    """Seconds of a test; afterwards the sequences are what they were."""
    begun_s = time.perf_counter()
    if test.kind == "pp":
        model.step([(sequence, ids) for sequence in sequences])
    else:
        for id_ in ids:
            model.step([(sequence, [id_]) for sequence in sequences])
    seconds = time.perf_counter() - begun_s
    for sequence in sequences:
        sequence.truncate(test.depth)
    return seconds


# ------------------------------------------------------------------------------------------------ the limit


def limit_of(model: Model, test: Test, machine: Machine) -> tuple[float, str]:
    """Seconds that a test takes at least, and what it waits for: memory or multiply."""
    memory_s, multiply_s = _bytes_of(model, test) / machine.bytes_s, _multiply_s(model, test, machine)
    return max((memory_s, "memory"), (multiply_s, "multiply"))


def _passes(test: Test) -> int:
    """Forward passes of a test."""
    if test.kind == "tg":
        return test.tokens * -(-test.batch // MAX_ROWS)
    return -(-test.batch * test.tokens // MAX_ROWS)


def _logit_rows(test: Test) -> int:
    return test.batch * (test.tokens if test.kind == "tg" else 1)


def _bytes_of(model: Model, test: Test) -> float:
    """Bytes that a test reads from memory; of a prompt each sequence's keys and values once."""
    lm_head = model.table.head[0]["lm_head"]
    lm_head_bytes = read_bytes(lm_head.reshape(1))
    unembeddings = _passes(test) if test.kind == "tg" else 1
    weights = _passes(test) * (model.memory()["decode_bytes"] - lm_head_bytes) + unembeddings * lm_head_bytes
    kind = KV_TYPES[model.kv_type]
    cached = 0.0
    for layer in model.config.layers:
        position_bytes = 2 * layer.num_key_value_heads * head_bytes(kind, padded(layer.head_dim)) / KV_BLOCK
        last = test.depth + test.tokens
        positions = _pairs(layer, test.depth, last) if test.kind == "tg" else _pairs(layer, last - 1, last)
        cached += test.batch * position_bytes * positions
    return weights + cached


def _pairs(layer: LayerConfig, first: int, last: int) -> int:
    """The positions that positions first .. last - 1 look at, added up."""
    lengths = np.arange(first + 1, last + 1)
    return int((np.minimum(lengths, layer.sliding_window) if layer.sliding_window else lengths).sum())


def _multiply_s(model: Model, test: Test, machine: Machine) -> float:
    """Seconds of a test's multiply-adds at the peaks of their formats."""
    rows, table = test.batch * test.tokens, model.table
    matrices = [(rows, layer[name]) for layer in table.layers for name in MATRICES if layer[name]["data"] != 0]
    matrices.append((_logit_rows(test), table.head[0]["lm_head"]))
    seconds = sum(
        count * int(matrix["rows"] * matrix["columns"]) / machine.macs_s[PEAK_OF[int(matrix["format"])]]
        for count, matrix in matrices
    )
    for layer in model.config.layers:
        pairs = test.batch * _pairs(layer, test.depth, test.depth + test.tokens)
        seconds += 2 * pairs * layer.num_attention_heads * layer.head_dim / machine.macs_s["f32"]
    return seconds
