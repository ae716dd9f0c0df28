"""Logits to the next token. V is the vocabulary.

The order is penalties, bias, constraint, top-k, top-p, min-p, temperature: the cuts look at the tokens that the
constraint allows, and at their shares among themselves. The draw takes its one random number from a hash of the seed
and the position, so a token depends on its own logits, settings and place and on nothing that ran before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.sampling_params import SamplingParams
from tfm.kernels.logits import log_sum_exp

if TYPE_CHECKING:
    from tfm.engine.constraint import Constraint

Logits = npt.NDArray[np.float32]

BITS_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: the step of SplitMix64
RUN = 256
TRIES = 8  # of the likeliest tokens under a constraint
# Temperatures below the first take the likeliest token, and those above the second any token alike: so do these two.
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Sampled:
    """A chosen token and its log-probability; top are the likeliest tokens with theirs, the likeliest first.

    Log-probabilities are the log-softmax of the model's own logits, before penalties, bias, cuts and temperature:
    right to about 1e-7.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits_V: Logits,
    params: SamplingParams,
    seed: int,
    position: int,
    prompt_ids: Sequence[int] = (),
    answer_ids: Sequence[int] = (),
    logprobs: int = 0,
    constraint: "Constraint | None" = None,
) -> Sampled:
    """The token for a position. logits_V is not changed; logprobs is how many of the likeliest tokens to report.

    Only a token that the constraint allows is chosen. Equal logits go to the lower id. Raises TfmError for logits that
    are not finite, and where nothing is left to choose from.
    """
    total = log_sum_exp(logits_V)
    if math.isnan(total):
        raise not_finite(logits_V, position)
    changed_V = logits_V
    if params.changes_logits:
        changed_V = _change(logits_V, params, prompt_ids, answer_ids)
        _check_choice(changed_V, "penalties and logit_bias")
    is_greedy = params.temperature == 0.0
    id_ = _likeliest_allowed(changed_V, constraint) if is_greedy and constraint is not None else None
    if id_ is None:
        if constraint is not None:
            changed_V = np.where(constraint.allowed(), changed_V, np.float32(-np.inf))
            _check_choice(changed_V, "penalties, logit_bias and constraint")
        id_ = int(changed_V.argmax()) if is_greedy else _draw(changed_V, params, uniform(seed, position))
    top = tuple((int(i), float(logits_V[i]) - total) for i in likeliest(logits_V, logprobs)) if logprobs else ()
    return Sampled(id_, float(logits_V[id_]) - total, top)


def _check_choice(logits_V: Logits, names: str) -> None:
    """Raises TfmError where the options of these names leave no token, or one beyond all numbers."""
    largest = logits_V.max()
    if not math.isfinite(largest):
        found = f"{largest:g} as the largest logit after them"
        raise TfmError(names, found, "values that leave a finite number")


def _likeliest_allowed(logits_V: Logits, constraint: "Constraint") -> int | None:
    """The likeliest token that may follow, if it is among the likeliest TRIES.

    To hold these against the constraint, one after the other, is quicker than to find all that may follow. Those that
    may not are taken out of logits_V and put back in the end: a copy took 0.1 ms, as much as all else here.
    """
    passed: dict[int, np.float32] = {}
    try:
        for _ in range(TRIES):
            id_ = int(logits_V.argmax())
            if constraint.allows(id_):
                return id_
            passed[id_], logits_V[id_] = logits_V[id_], -np.inf
    finally:
        for id_, logit in passed.items():
            logits_V[id_] = logit
    return None


def not_finite(logits_V: Logits, position: int) -> TfmError:
    """The error of logits that are no numbers."""
    found = f"{int(np.count_nonzero(~np.isfinite(logits_V)))} of {len(logits_V)} are NaN or infinite"
    do = "the weights may be damaged: tfm check tells where"
    return TfmError(f"logits for position {position}", found, "finite numbers", do)


def likeliest(logits_V: Logits, count: int) -> npt.NDArray[np.intp]:
    """The ids of the count largest logits, the largest first; among equal ones the lower ids."""
    count = min(count, len(logits_V))
    if count == 0:
        return np.empty(0, np.intp)
    ids = np.flatnonzero(_largest(logits_V, count))
    return ids[np.argsort(-logits_V[ids], kind="stable")]


def _largest(logits_V: Logits, count: int) -> npt.NDArray[np.bool_]:
    """Which are the count largest; among those equal to the least of them the lower ids."""
    least = np.partition(logits_V, len(logits_V) - count)[len(logits_V) - count]
    kept_V: npt.NDArray[np.bool_] = logits_V > least
    equal = np.flatnonzero(logits_V == least)
    kept_V[equal[: count - np.count_nonzero(kept_V)]] = True
    return kept_V


def _change(logits_V: Logits, params: SamplingParams, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Logits:
    """A copy with penalties and bias. What overflows is infinite, or NaN, which `_check_choice` tells of.

    A bias of -inf bans its token whatever the penalties made of it.
    """
    changed_V = logits_V.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if params.repeat_penalty != 1.0:
            seen = np.unique(np.array([*prompt_ids, *answer_ids], np.int64))
            values = changed_V[seen]
            changed_V[seen] = np.where(values > 0, values / params.repeat_penalty, values * params.repeat_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            seen, counts = np.unique(np.array(answer_ids, np.int64), return_counts=True)
            changed_V[seen] -= params.presence_penalty + params.frequency_penalty * counts
        for id_, bias in params.logit_bias.items():
            changed_V[id_] = changed_V[id_] + bias if bias > -math.inf else bias
        return changed_V.astype(np.float32)


def _draw(logits_V: Logits, params: SamplingParams, u: float) -> int:
    """The token at the share u of the distribution that top-k, top-p, min-p and temperature leave, in order of ids."""
    ids: npt.NDArray[np.intp] | None = None
    with np.errstate(over="ignore", under="ignore"):
        if 0 < params.top_k < len(logits_V):
            ids = np.flatnonzero(_largest(logits_V, params.top_k))
        if params.top_p < 1.0:
            ids = _nucleus(logits_V, ids, params.top_p)
        kept = logits_V if ids is None else logits_V[ids]
        below = kept - kept.max()
        if params.min_p > 0.0:
            likely = np.flatnonzero(below >= math.log(params.min_p))
            ids, below = likely if ids is None else ids[likely], below[likely]
        # In place: each array of this size more cost 0.1 ms, which the system took to find memory for it.
        np.divide(below, np.float32(min(max(params.temperature, SMALLEST), LARGEST)), out=below)
        weights = np.exp(below, out=below)
    place = _place(weights, u)
    return place if ids is None else int(ids[place])


def _place(weights: npt.NDArray[np.float32], u: float) -> int:
    """The first index up to which the weights have more than the share u of their sum; one whose weight is not 0.

    Weights are summed in float64, in runs of RUN: one chain of 49,152 took 0.27 ms, this takes 0.03.
    """
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), RUN), dtype=np.float64))
    wanted = u * float(ends[-1])
    run = int(min(np.searchsorted(ends, wanted, side="right"), np.searchsorted(ends, ends[-1])))  # u * sum may round up
    part = weights[run * RUN : (run + 1) * RUN]
    before = float(ends[run - 1]) if run else 0.0
    place = int(np.searchsorted(before + np.cumsum(part, dtype=np.float64), wanted, side="right"))
    return run * RUN + min(place, int(np.flatnonzero(part)[-1]))


def _nucleus(logits_V: Logits, ids: npt.NDArray[np.intp] | None, top_p: float) -> npt.NDArray[np.intp]:
    """The fewest likeliest of ids (None: all) that together have the probability top_p, at least one; in order of ids.

    Tokens so rare that all of them have less than 1 - top_p cannot be among them and are not sorted.
    """
    kept = logits_V if ids is None else logits_V[ids]
    weights = kept - kept.max()
    np.exp(weights, out=weights)
    total = float(weights.sum(dtype=np.float64))
    common = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights) * 0.999)
    order = common[np.argsort(-weights[common], kind="stable")]
    reached = np.cumsum(weights[order], dtype=np.float64)
    count = int(np.searchsorted(reached, top_p * total)) + 1
    chosen = np.sort(order[:count])
    return chosen if ids is None else ids[chosen]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: two rounds of SplitMix64 (Steele et al. 2014)."""
    return (_mix(_mix(seed + GOLDEN) + (position + 1) * GOLDEN) >> 11) / 2.0**53


def _mix(z: int) -> int:
    z &= BITS_64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & BITS_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & BITS_64
    return z ^ (z >> 31)
