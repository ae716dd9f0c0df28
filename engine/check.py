"""Whether this machine calculates as it should: every kernel, and a model as a whole. Measures, and prints nothing.

A kernel is held against its NumPy reference. A model is held against float64 (reference.py), and then against itself:
the logits of a text must have the same bits in whatever way they are computed:

    threads   1, 2, 3, 4, 8 ... all
    chunk     tokens of a pass: 1 (at the beginning, and across the end of a cache block), 7, 64, all at once
    batch     alone, or before or behind two other texts
    cache     fresh, or blocks that held other texts, or a sequence that went elsewhere and was truncated

Every number of threads meets every chunk in every batch, with each type of keys and values; the states of the cache
take turns, so that each meets each of the others, and all combinations have been there after three types.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.architectures import ARCHITECTURES
from tfm.engine.bench_kernels import verified
from tfm.engine.cache import BlockPool
from tfm.engine.checkpoint import Checkpoint
from tfm.engine.loading import KV_TYPE_NAMES
from tfm.engine.matrix import to_float32
from tfm.engine.model import MAX_ROWS, Model
from tfm.engine.progress import Progress, silent
from tfm.engine.reference import Array, reference_logits
from tfm.engine.weights import FLOAT_FORMATS, load_weights
from tfm.kernels.ops import Op, Verdict

Logits = npt.NDArray[np.float32]

TEXT = (
    "The lamp in the old lighthouse had burned every night for ninety years. When the last keeper left, in the autumn "
    "of 1987, nobody climbed the 214 steps any more, and the gulls took over the gallery. Then, one evening in March, "
    "a fisherman who was late saw a light turning slowly above the rocks. He counted: four seconds dark, two seconds "
    "bright. That had never been its rhythm. He told his sister, who laughed; but the next night she stood at the "
    "window, too, and by the end of the week the whole village was watching."
)
TOKENS = 100  # of it: more than a block of the cache
LONG_TOKENS = MAX_ROWS + 88  # more than one pass, and more than a segment, which threads share out when they decode
LAST_TOKENS = 12  # of the long text, whose logits are compared
FLOAT_ERRORS = {"f32": 2e-4, "f16": 1e-3, "q8": 2e-2}  # of the logits' spread, by the type of keys and values
ROUNDINGS = 3  # times what rounding keys and values does in float64 may be more than that, as in very narrow models
QUANTIZED_ERROR = 3e-2  # where weights of few bits are multiplied with activations of 8 bits
CHUNKS = (1, 7, 64, TOKENS)
ONE_BY_ONE = (*range(1, 5), *range(58, 75))  # where a text is cut for chunks of 1: every token as a step takes long
PLACES = ("alone", "first of three", "last of three")
CACHES = ("fresh", "used before", "truncated")
ROUNDED: Mapping[str, Callable[[Array], Array]] = {
    "f16": lambda values_KTH: values_KTH.astype(np.float16).astype(np.float64),
    "q8": lambda values_KTH: _on_a_grid(values_KTH, np.abs(values_KTH).max(-1, keepdims=True) / 127),
}
"""As keys and values are held: q8 has a scale for each position of a head."""
LARGEST = {"f32": 3.4028235e38, "f16": 65504.0, "q8": 3.4028235e38}  # that a type can hold
FIELDS = {
    "embedding": ("embed_tokens", "position_embeddings"),
    "heads": ("attn_norm", "q_proj", "k_proj", "v_proj", "o_proj"),
    "MLP": ("mlp_norm", "gate_proj", "up_proj", "down_proj"),
    "unembedding": ("norm", "lm_head", "embed_tokens"),
}
"""The fields of the weights that a part of the model reads."""


@dataclass(frozen=True)
class Row:
    """What was checked in how many cases; the error of the worst and what is allowed there; what is wrong, if it is."""

    what: str
    cases: int
    error: float
    allowed: float
    passed: bool
    fault: str = ""

    def as_json(self) -> dict[str, object]:
        """An error that is no finite number is null."""
        error = self.error if np.isfinite(self.error) else None
        return {
            "what": self.what, "cases": self.cases, "error": error, "allowed": self.allowed, "passed": self.passed,
            "fault": self.fault or None,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------------ kernels


def _on_a_grid(values: Array, step: Array) -> Array:
    return np.rint(values / np.where(step == 0, 1, step)) * step


def check_kernels(ops: Sequence[Op], progress: Progress = silent) -> Iterator[Row]:
    """A row an op, with the error of the case that comes nearest to what is allowed, or goes beyond it."""
    for op in ops:
        declared = op.cases(np.random.default_rng(0))
        verdicts = [(label, verdict) for label, _, verdict in verified(op, declared, progress)]
        label, worst = max(verdicts, key=lambda case: _share(case[1]))
        fault = "" if worst.passed else f"case {label}"
        yield Row(f"kernel {op.name}", len(verdicts), worst.error, worst.allowed, worst.passed, fault)


def _share(verdict: Verdict) -> tuple[bool, float]:
    return not verdict.passed, verdict.error / verdict.allowed if verdict.allowed else verdict.error


# ------------------------------------------------------------------------------------------------ a model


def check_model(model: Model, progress: Progress = silent) -> Iterator[Row]:
    """For each type of keys and values: the distance from float64, and the same bits with every number of threads."""
    subject = Subject(model)
    for kv_type in KV_TYPE_NAMES:
        with closing(subject.run_by(1, kv_type)) as alone:
            expected = _logits(alone, subject.ids, Case())
        expected_last = subject.last_logits(1, kv_type, LAST_TOKENS)
        progress("float64", 0, 1)
        yield subject.distance(expected, kv_type)
        progress("float64", 1, 1)
        for threads in thread_counts(model.threads):
            yield _same_bits(subject, threads, kv_type, expected, expected_last, progress)


def thread_counts(most: int) -> list[int]:
    """1, 2, 3, then powers of two, and all."""
    return sorted({*range(1, min(most, 3) + 1), *(2**i for i in range(most.bit_length())), most})


class Subject:
    """A model, the text that it reads, and what float64 makes of it. `model` itself is not run."""

    def __init__(self, model: Model) -> None:
        self.model, self.config = model, model.config
        self.checkpoint = Checkpoint(model.folder)
        ids = model.tokenizer.encode(TEXT) or list(range(self.config.vocab_size))
        self.ids = list(itertools.islice(itertools.cycle(ids), min(TOKENS, model.ctx)))
        self.long_ids = list(itertools.islice(itertools.cycle(ids), min(LONG_TOKENS, model.ctx)))

    def last_logits(self, threads: int, kv_type: str, at_once: int) -> Logits:
        """Those of the last tokens of a long text, so many of them in one pass. Few if the context is not long."""
        rows: list[Logits] = []
        with closing(self.run_by(threads, kv_type)) as model, closing(model.sequence()) as text:
            begin = max(0, len(self.long_ids) - LAST_TOKENS)
            if begin:
                model.step([(text, self.long_ids[:begin])], "none")
            for part in _pieces(self.long_ids[begin:], at_once):
                rows.append(model.step([(text, part)], "all"))
        return np.concatenate(rows)

    def run_by(self, threads: int, kv_type: str) -> Model:
        """The same weights, run by so many threads, however busy the machine is."""
        old = self.model
        model = Model(old.name, old.folder, old.config, old.table.image, threads, kv_type, len(self.long_ids))
        model._team._alone_when_busy = False
        return model

    @cached_property
    def _exact(self) -> tuple[Array, list[tuple[int | None, str, float]]]:
        """The logits in float64, and the largest magnitude (NaN, if there is one) of every part on the way."""
        largest: list[tuple[int | None, str, float]] = []
        weights = load_weights(self.checkpoint, self.config)
        with np.errstate(all="ignore"):
            logits = reference_logits(
                self.config, weights, self.ids,
                lambda layer, part, values: largest.append((layer, part, float(np.abs(values).max()))),
            )  # fmt: skip
        return logits, largest

    def distance(self, found: Logits, kv_type: str) -> Row:
        """How far logits are from float64, as a share of their spread."""
        exact, _ = self._exact
        allowed = FLOAT_ERRORS[kv_type] if self.config.quantization is None else QUANTIZED_ERROR
        error = self._error(found)
        if error > allowed and kv_type != "f32" and self.config.quantization is None:
            allowed = max(allowed, ROUNDINGS * self._rounding_error(kv_type))
        fault = "" if error <= allowed else "too far from float64"
        if not np.isfinite(found).all() or not np.isfinite(exact).all():
            error, fault = float("inf"), self.first_fault(kv_type)
        return Row(f"model, KV {kv_type}: float64", 1, error, allowed, not fault, fault)

    def _error(self, found: Logits | Array) -> float:
        exact, _ = self._exact
        with np.errstate(all="ignore"):
            return float(np.abs(found - exact).max() / ((exact.max() - exact.min()) or 1.0))

    def _rounding_error(self, kv_type: str) -> float:
        """What rounding keys and values does to the logits where all else is float64; 0 where they overflow."""

        def round_keys_and_values(layer: int | None, part: str, values_KTH: Array) -> None:
            if part in ("keys", "values"):
                values_KTH[:] = ROUNDED[kv_type](values_KTH)

        with np.errstate(all="ignore"):
            weights = load_weights(self.checkpoint, self.config)
            error = self._error(reference_logits(self.config, weights, self.ids, round_keys_and_values))
        return error if np.isfinite(error) else 0.0

    def first_fault(self, kv_type: str) -> str:
        """Where values first are not finite, or too large for what holds them."""
        for layer, part, largest in self._exact[1]:
            where = part if layer is None else f"layer {layer}, {part}"
            if not np.isfinite(largest):
                fields = FIELDS.get(part, FIELDS["heads"])
                tensor = self._damaged(fields, layer)
                return f"{where}: " + (f"NaN or infinite values in {tensor}" if tensor else "values overflow")
            limit = LARGEST[kv_type if part in ("keys", "values") else "f32"]
            if largest > limit:
                return f"{where}: values up to {largest:.2g}, more than {limit:.2g}"
        return "logits that are not finite, while float64's are"

    def _damaged(self, fields: Sequence[str], layer: int | None) -> str | None:
        """The first tensor of the checkpoint, among those of these fields, with values that are not finite."""
        architecture = ARCHITECTURES[self.config.model_type]
        names = [architecture.modules[field] for field in fields if field in architecture.modules]
        modules = {name.format(p=prefix, i=layer) for name in names for prefix in architecture.prefixes}
        for name, info in self.checkpoint.tensors.items():
            is_read = info.dtype in FLOAT_FORMATS and name.rpartition(".")[0] in modules
            if is_read and not np.isfinite(to_float32(self.checkpoint.array(name))).all():
                return f"{info.file}: tensor {name}"
        return None


# ------------------------------------------------------------------------------------------------ the same bits


@dataclass(frozen=True)
class Case:
    """A way of computing the logits of a text."""

    chunk: int = TOKENS
    place: str = "alone"
    cache: str = "fresh"

    def __str__(self) -> str:
        return f"chunks of {self.chunk}, {self.place}, cache {self.cache}"


def cases(threads: int, kv_type: str) -> list[Case]:
    """Every chunk in every batch, the states of the cache in turn."""
    turn = threads + KV_TYPE_NAMES.index(kv_type)
    return [
        Case(chunk, place, CACHES[(i + j + turn) % len(CACHES)])
        for i, chunk in enumerate(CHUNKS)
        for j, place in enumerate(PLACES)
    ]


def _same_bits(
    subject: Subject, threads: int, kv_type: str, expected: Logits, expected_last: Logits, progress: Progress
) -> Row:
    """All cases, and a long text's last tokens one by one, with so many threads.

    The error is the largest difference, as a share of the logits' spread.
    """
    what = f"model, KV {kv_type}: same bits, threads {threads}"
    ways, worst, fault = cases(threads, kv_type), 0.0, ""
    with closing(subject.run_by(threads, kv_type)) as model:
        for i, case in enumerate(ways):
            progress(what, i, len(ways) + 1)
            found = _logits(model, subject.ids, case)
            different = _different(found, expected)
            if different.size:
                worst = max(worst, _difference(found, expected))
                fault = fault or f"{case}: from token {different[0]} on"
    progress(what, len(ways), len(ways) + 1)
    last = subject.last_logits(threads, kv_type, 1)
    if _different(last, expected_last).size:
        worst = max(worst, _difference(last, expected_last))
        fault = fault or f"the last tokens of {len(subject.long_ids)}, one by one"
    progress(what, 1, 1)
    return Row(what, len(ways) + 1, worst, 0.0, not fault, fault)


def _different(found: Logits, expected: Logits) -> npt.NDArray[np.intp]:
    """The rows that differ in any bit; one NaN is as good as another."""
    bits = found.view(np.uint32) != expected.view(np.uint32)
    return np.flatnonzero((bits & ~(np.isnan(found) & np.isnan(expected))).any(-1))


def _difference(found: Logits, expected: Logits) -> float:
    """As a share of the spread; never 0, for 0 and -0 differ too."""
    with np.errstate(all="ignore"):
        share = np.abs(found - expected).max() / (expected.max() - expected.min())
    return float(max(share, np.finfo(np.float32).smallest_subnormal)) if np.isfinite(share) else float("inf")


def _logits(model: Model, ids: list[int], case: Case) -> Logits:
    """The logits of ids [T, V], computed in the way of a case."""
    model.pool = BlockPool(model.pool.block_bytes)
    backwards = ids[::-1]
    rows: list[Logits] = []
    with ExitStack() as stack:

        def sequence() -> Any:
            return stack.enter_context(closing(model.sequence()))

        if case.cache == "used before":
            with ExitStack() as before:
                texts = [before.enter_context(model.sequence()) for _ in range(1 if case.place == "alone" else 3)]
                model.step([(other, backwards) for other in texts], "none")
        text, others = sequence(), [(sequence(), _pieces(backwards, 5)), (sequence(), _pieces(ids[3:], 13))]
        half = len(ids) // 2 if case.cache == "truncated" else 0
        for begin, end in itertools.pairwise(_cuts(len(ids), case.chunk, half)):
            if half and begin == half:
                model.step([(text, backwards[:half])], "none")
                text.truncate(half)
            work = [] if case.place == "alone" else [(other, next(pieces, [])) for other, pieces in others]
            first = sum(len(part) for _, part in work) if case.place == "last of three" else 0
            work.insert(len(work) if first else 0, (text, ids[begin:end]))
            rows.append(model.step(work, "all")[first : first + end - begin])
    return np.concatenate(rows)


def _cuts(count: int, chunk: int, half: int) -> list[int]:
    """Where a text of `count` tokens is cut, both ends included; at half in any case."""
    ends = ONE_BY_ONE if chunk == 1 else range(chunk, count, chunk)
    return sorted({0, half, count, *(end for end in ends if end < count)})


def _pieces(ids: list[int], size: int) -> Iterator[list[int]]:
    return (ids[begin : begin + size] for begin in range(0, len(ids), size))
