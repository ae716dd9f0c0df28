"""From logits to a token: each setting against its definition, at its limits and beyond them."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tfm.engine.errors import TfmError
from tfm.engine.sampling import likeliest, sample, uniform
from tfm.engine.sampling_params import SamplingParams
from tfm.kernels.logits import log_sum_exp

VOCAB = 997


@pytest.fixture(scope="module")
def logits_V() -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)


def drawn(logits_V: npt.NDArray[np.float32], draws: int = 400, **settings: Any) -> set[int]:
    """All tokens that come in so many draws."""
    params = SamplingParams(**{"temperature": 1.0, **settings})
    return {sample(logits_V, params, 5, position).id for position in range(draws)}


def softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


# ---- the draw ----


def test_hash_is_splitmix64() -> None:
    """The first outputs of SplitMix64 for the seed 0, from its authors' program, are what the rounds are made of."""
    from tfm.engine.sampling import GOLDEN, _mix

    assert [_mix(GOLDEN * i) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_draw_depends_on_seed_and_position_alone(logits_V: npt.NDArray[np.float32]) -> None:
    """A generator that is shared or goes on from draw to draw gives a row other tokens in a batch than alone."""
    params = SamplingParams(temperature=1.5)
    forwards = [sample(logits_V, params, 7, position).id for position in range(50)]
    backwards = [sample(logits_V, params, 7, position).id for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [sample(logits_V, params, 8, position).id for position in range(50)]
    assert uniform(7, 3) == 0.6042348053683145  # a seed that was noted gives the same text in every version


def test_draws_are_uniform_and_independent() -> None:
    """Neighbouring seeds and positions gave like numbers."""
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert 0 <= numbers.min() < numbers.max() < 1
    counts, _ = np.histogram(numbers, 100, (0, 1))
    assert ((counts - 400) ** 2 / 400).sum() < 160  # chi-squared with 99 degrees: 148 is beyond 0.999
    for a, b in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:]), (numbers[:-1, 1:], numbers[1:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert uniform(2**64 - 1, 2**31) < 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_distribution(temperature: float) -> None:
    """Tokens come as often as softmax(logits / temperature) says."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5], np.float32)
    params = SamplingParams(temperature=temperature)
    counts = Counter(sample(logits, params, 11, position).id for position in range(20_000))
    shares = np.array([counts[i] for i in range(5)]) / 20_000
    assert np.abs(shares - softmax(logits / temperature)).max() < 0.012


# ---- settings ----


def test_greedy(logits_V: npt.NDArray[np.float32]) -> None:
    """Temperature 0 takes the likeliest, of equal ones the lowest id, whatever is cut and whatever the seed."""
    assert sample(logits_V, SamplingParams(), 1, 0).id == logits_V.argmax()
    equal = np.array([1, 3, 3, 2], np.float32)
    assert {sample(equal, SamplingParams(top_k=2, top_p=0.1), seed, 0).id for seed in range(20)} == {1}


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-8}, {"min_p": 1.0}])
def test_only_the_likeliest(logits_V: npt.NDArray[np.float32], settings: dict[str, Any]) -> None:
    """A setting at its narrowest leaves one token, not none, which was an error or a token at random."""
    temperature = 1.0 if settings else 1e-9
    assert drawn(logits_V, temperature=temperature, **settings) == {int(logits_V.argmax())}


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-9, 1e9, 1e300])
def test_extreme_temperatures(logits_V: npt.NDArray[np.float32], temperature: float) -> None:
    """Dividing by almost nothing overflowed to NaN."""
    tokens = drawn(logits_V, temperature=temperature)
    assert (tokens == {int(logits_V.argmax())}) == (temperature < 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 1e-300}])
@pytest.mark.parametrize("temperature", [5e-324, 1.0, 1e38, 1e39, 1e308])
@pytest.mark.parametrize("largest", [5.0, 3e38])
def test_settings_at_the_end_of_all_numbers(settings: dict[str, Any], temperature: float, largest: float) -> None:
    """Temperatures that float32 has not drew a banned token, and with a warning of NumPy, as far logits did."""
    logits = np.array([largest, -largest, largest, -largest, largest], np.float32)
    params = SamplingParams(temperature=temperature, logit_bias={1: -math.inf, 2: -math.inf}, **settings)
    is_out = "top_p" in settings or largest > 5  # float32 has no number for such a distance: its share is 0
    shares = np.array([1.0, 0.0, 0.0, 0.0 if is_out else math.exp(max(-2 * largest / temperature, -700.0)), 1.0])
    counts = Counter(sample(logits, params, 3, position).id for position in range(600))
    assert np.abs(np.array([counts[i] for i in range(5)]) / 600 - shares / shares.sum()).max() < 0.08
    assert math.isfinite(sample(logits, params, 3, 0).logprob)


@pytest.mark.filterwarnings("error")
def test_penalties_at_the_end_of_all_numbers() -> None:
    """What overflowed, and what was then taken from it, was NaN with a warning; a ban did not hold any more."""
    logits = np.array([2.0, -1.0, 1.0], np.float32)
    far = {"presence_penalty": 1e308, "frequency_penalty": 1e308}
    for temperature in (0.0, 1e308):
        params = SamplingParams(temperature=temperature, **far)
        found = {sample(logits, params, 0, position, [], [0, 0, 0]).id for position in range(50)}
        assert found == ({2} if temperature == 0 else {1, 2})
        banned = SamplingParams(temperature, repeat_penalty=1e-320, logit_bias={0: -math.inf})
        assert {sample(logits, banned, 0, i, [0], []).id for i in range(50)} <= {1, 2}
    for settings in (
        {"repeat_penalty": 1e-320, **far},
        {"repeat_penalty": 1e-320},
        {"frequency_penalty": -1e308},
        {"presence_penalty": -1e308, "logit_bias": {0: 1e308}},
    ):
        with pytest.raises(TfmError, match=r"penalties and logit_bias: found (nan|inf) as the largest logit"):
            sample(logits, SamplingParams(**settings), 0, 0, [], [0, 0, 0])


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": VOCAB}, {"top_k": 2**31 - 1}, {"top_p": 1}, {"min_p": 0}])
def test_widest_settings_change_nothing(logits_V: npt.NDArray[np.float32], settings: dict[str, Any]) -> None:
    """A setting at its widest is the same as none."""
    plain = SamplingParams(temperature=1.0)
    wide = SamplingParams(temperature=1.0, **settings)
    for position in range(100):
        assert sample(logits_V, wide, 2, position) == sample(logits_V, plain, 2, position)


@pytest.mark.parametrize("top_k", [1, 2, 5, 40])
def test_top_k(logits_V: npt.NDArray[np.float32], top_k: int) -> None:
    """Exactly the k likeliest may come."""
    wanted = set(np.argsort(-logits_V, kind="stable")[:top_k].tolist())
    assert drawn(logits_V, 4000, top_k=top_k, temperature=30.0) == wanted


def test_top_k_among_equals() -> None:
    """Where equal logits stand at the edge the lower ids stay, and not all of them."""
    logits = np.array([0, 1, 1, 1, 2, 1], np.float32)
    assert drawn(logits, top_k=3) == {4, 1, 2}


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("top_k", [0, 20])
def test_top_p(logits_V: npt.NDArray[np.float32], top_p: float, top_k: int) -> None:
    """The fewest likeliest tokens that reach top_p, of what top-k has left."""
    order = np.argsort(-logits_V, kind="stable")[: top_k or None]
    shares = np.cumsum(softmax(logits_V[order]))
    wanted = set(order[: int(np.argmax(shares >= top_p)) + 1].tolist())
    assert drawn(logits_V, 8000, top_p=top_p, top_k=top_k, temperature=30.0) == wanted


def test_top_p_at_its_edge() -> None:
    """A probability that is reached exactly needs no further token."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    assert drawn(logits, top_p=0.5) == {0}
    assert drawn(logits, top_p=0.51) == {0, 1}
    assert drawn(logits, top_p=0.7501) == {0, 1, 2}


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5])
def test_min_p(logits_V: npt.NDArray[np.float32], min_p: float) -> None:
    """Tokens with at least min_p of the likeliest one's probability."""
    shares = softmax(logits_V)
    wanted = set(np.flatnonzero(shares >= min_p * shares.max()).tolist())
    assert drawn(logits_V, 4000, min_p=min_p, temperature=30.0) == wanted


def test_order_of_the_settings() -> None:
    """Temperature comes last: the cuts look at the model's own distribution. Bias comes before the cuts."""
    logits = np.log(np.array([0.6, 0.3, 0.1], np.float32))
    assert drawn(logits, top_p=0.5, temperature=100.0) == {0}
    assert drawn(logits, min_p=0.4, temperature=0.01) == {0}
    assert drawn(logits, min_p=0.4, temperature=100.0) == {0, 1}
    assert drawn(logits, top_k=1, logit_bias={2: 5.0}) == {2}
    shares = np.array([0.5, 0.3, 0.2])
    assert drawn(np.log(shares).astype(np.float32), top_k=2, top_p=0.6, temperature=100.0) == {0}


class Only:
    """A constraint that allows these ids alone."""

    def __init__(self, *ids: int) -> None:
        self._ids = ids

    def allowed(self) -> npt.NDArray[np.bool_]:
        return np.isin(np.arange(VOCAB), self._ids)

    def allows(self, id_: int) -> bool:
        return id_ in self._ids


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.7}, {"top_k": 3, "min_p": 0.6}],
)
def test_cuts_are_among_what_the_constraint_allows(settings: dict[str, Any]) -> None:
    """A cut before the constraint left none of its tokens, or one where several were to stay.

    The reference takes the allowed logits out as a vocabulary of their own, and cuts these by the definitions.
    """
    logits = np.random.default_rng(4).normal(0, 0.3, VOCAB).astype(np.float32)
    allowed = np.array([3, 200, 201, 500, 996])
    logits[allowed] = np.log(np.array([0.1, 0.4, 0.05, 0.2, 0.25], np.float32)) - 20
    order = allowed[np.argsort(-logits[allowed], kind="stable")][: settings.get("top_k")]
    shares = softmax(logits[order])
    order = order[: int(np.argmax(np.cumsum(shares) >= settings.get("top_p", 1.0) - 1e-6)) + 1]
    wanted = set(order[np.exp(logits[order] - logits[order].max()) >= settings.get("min_p", 0.0)].tolist())
    params = SamplingParams(temperature=1.0, **settings)
    constraint: Any = Only(*allowed.tolist())
    assert {sample(logits, params, 6, position, constraint=constraint).id for position in range(400)} == wanted
    assert 1 < len(wanted) < len(allowed)


def test_repeat_penalty() -> None:
    """Positive logits are divided and negative ones multiplied, once a token, of the prompt and of the answer."""
    logits = np.array([4.0, -1.0, 3.0, -1.5], np.float32)
    params = SamplingParams(repeat_penalty=2.0)
    assert sample(logits, params, 0, 0, [0], []).id == 2
    assert sample(logits, params, 0, 0, [], [0, 0, 0]).id == 2
    assert sample(logits, params, 0, 0, [0], [2]).id == 0
    negative = np.array([-1.0, -1.5], np.float32)
    assert sample(negative, params, 0, 0, [0], []).id == 1
    assert sample(negative, params, 0, 0, [0], [1]).id == 0
    assert sample(logits, SamplingParams(repeat_penalty=0.5), 0, 0, [2]).id == 2


def test_presence_and_frequency_penalty() -> None:
    """Of tokens of the answer only; one once, the other for each time. A negative one favours what was there."""
    logits = np.array([3.0, 2.0, 1.0], np.float32)
    presence, frequency = SamplingParams(presence_penalty=1.5), SamplingParams(frequency_penalty=0.6)
    assert sample(logits, presence, 0, 0, [0, 0], []).id == 0
    assert sample(logits, presence, 0, 0, [], [0]).id == 1
    assert sample(logits, presence, 0, 0, [], [0, 0, 0, 1]).id == 0
    assert sample(logits, frequency, 0, 0, [0, 0, 0], [0]).id == 0
    assert sample(logits, frequency, 0, 0, [], [0, 0]).id == 1
    assert sample(logits, SamplingParams(presence_penalty=-2.5), 0, 0, [], [2]).id == 2


def test_logit_bias(logits_V: npt.NDArray[np.float32]) -> None:
    """Added to its id alone, and minus infinity bans it."""
    first, second = likeliest(logits_V, 2).tolist()
    assert sample(logits_V, SamplingParams(logit_bias={first: -math.inf}), 0, 0).id == second
    assert sample(logits_V, SamplingParams(logit_bias={11: 100.0, 12: 99.0}), 0, 0).id == 11
    assert first not in drawn(logits_V, logit_bias={first: -math.inf})


def test_nothing_is_left() -> None:
    """All tokens banned, or a penalty that overflows, is an error and no token at random."""
    logits = np.array([1.0, 2.0], np.float32)
    for params in (
        SamplingParams(logit_bias={0: -math.inf, 1: -math.inf}),
        SamplingParams(logit_bias={0: -math.inf, 1: -math.inf}, temperature=1.0, top_p=0.5, min_p=0.1),
        SamplingParams(repeat_penalty=1e-300),
    ):
        with pytest.raises(TfmError, match=r"penalties and logit_bias: found .*inf as the largest logit"):
            sample(logits, params, 0, 0, [0, 1])


def test_logits_are_left_as_they_are(logits_V: npt.NDArray[np.float32]) -> None:
    """Penalties were written into the logits, from which the log-probability was then taken."""
    before = logits_V.copy()
    params = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, repeat_penalty=3.0, logit_bias={1: 9.0})
    sample(logits_V, params, 0, 0, [1, 2], [3], 5)
    assert np.array_equal(before, logits_V)


# ---- log-probabilities ----


def test_logprob_is_of_the_models_own_logits(logits_V: npt.NDArray[np.float32]) -> None:
    """The log-softmax before penalties, cuts and temperature, to seven digits, and the likeliest in their order."""
    exact = np.log(softmax(logits_V))
    params = SamplingParams(temperature=2.0, top_k=3, repeat_penalty=2.0)
    chosen = sample(logits_V, params, 0, 0, [5], [], 10)
    assert chosen.logprob == pytest.approx(exact[chosen.id], abs=1e-6)
    order = np.argsort(-exact, kind="stable")[:10]
    assert [id_ for id_, _ in chosen.top] == order.tolist()
    assert [logprob for _, logprob in chosen.top] == pytest.approx(exact[order], abs=1e-6)
    assert sample(logits_V, params, 0, 0).top == ()


@pytest.mark.parametrize("shift", [-1e5, -200.0, 200.0, 1e5])
def test_logprob_of_large_logits(logits_V: npt.NDArray[np.float32], shift: float) -> None:
    """Exponentials of large logits overflowed."""
    moved = (logits_V.astype(np.float64) + shift).astype(np.float32)
    exact = np.log(softmax(moved))
    assert sample(moved, SamplingParams(), 0, 0).logprob == pytest.approx(exact.max(), abs=1e-5)


def test_more_logprobs_than_tokens() -> None:
    """All of them are reported, among equal ones the lower id first."""
    chosen = sample(np.array([1, 2, 1], np.float32), SamplingParams(), 0, 0, logprobs=99)
    assert [id_ for id_, _ in chosen.top] == [1, 0, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.5}])
def test_logits_that_are_not_finite(bad: float, settings: dict[str, Any]) -> None:
    """NaN made the choice the first token, or one at random, without a word."""
    logits = np.array([1.0, 2.0, bad, 0.0], np.float32)
    with pytest.raises(TfmError, match="logits for position 17: found 1 of 4 are NaN or infinite"):
        sample(logits, SamplingParams(**settings), 0, 17)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 48, 300])
def test_one_logit_that_is_not_finite(size: int) -> None:
    """Guards against a place that the kernel does not look at: the last one, or one beside what pads the row."""
    for place in {0, size // 2, size - 1}:
        logits = np.ones(size, np.float32)
        logits[place] = -math.inf
        with pytest.raises(TfmError, match=f"found 1 of {size} are NaN or infinite"):
            sample(logits, SamplingParams(), 0, 0)


def test_logits_of_any_layout(logits_V: npt.NDArray[np.float32]) -> None:
    """Guards against reading beside logits that are not contiguous, may not be written, or are of another type."""
    wide = np.full((len(logits_V), 3), np.nan, np.float32)
    wide[:, 1] = logits_V
    fixed = logits_V.copy()
    fixed.setflags(write=False)
    found = [log_sum_exp(logits) for logits in (logits_V, wide[:, 1], fixed, logits_V.astype(np.float64))]
    assert found == [pytest.approx(np.log(np.exp(logits_V.astype(np.float64)).sum()), abs=1e-6)] * 4


# ---- options ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature: found -0.1; allowed: a number from 0"),
        ({"temperature": math.nan}, "temperature: found nan; allowed: a number from 0"),
        ({"temperature": math.inf}, "temperature: found inf"),
        ({"temperature": "1"}, "temperature: found 1"),
        ({"temperature": 10**400}, "temperature: found 1000"),
        ({"logit_bias": {3: 10**400}}, "logit_bias: found 3=1000"),
        ({"top_p": -0.01}, "top_p: found -0.01; allowed: a number from 0 to 1"),
        ({"top_p": 1.01}, "top_p: found 1.01; allowed: a number from 0 to 1"),
        ({"top_p": math.nan}, "top_p: found nan"),
        ({"min_p": 2}, "min_p: found 2; allowed: a number from 0 to 1"),
        ({"top_k": -1}, r"top_k: found -1; allowed: a whole number from 0 \(all tokens\)"),
        ({"top_k": 2.5}, "top_k: found 2.5"),
        ({"top_k": True}, "top_k: found True"),
        ({"repeat_penalty": 0}, "repeat_penalty: found 0; allowed: a number above 0"),
        ({"repeat_penalty": -1}, "repeat_penalty: found -1"),
        ({"presence_penalty": math.nan}, "presence_penalty: found nan; allowed: a number"),
        ({"frequency_penalty": math.inf}, "frequency_penalty: found inf"),
        ({"logit_bias": {3: math.nan}}, "logit_bias: found 3=nan"),
        ({"logit_bias": {3: math.inf}}, "logit_bias: found 3=inf"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias: found 3=1.0"),
        ({"seed": -1}, "seed: found -1; allowed: a whole number from 0 to 18446744073709551615"),
        ({"seed": 2**64}, "seed: found 18446744073709551616"),
        ({"seed": 1.5}, "seed: found 1.5"),
    ],
)  # fmt: skip
def test_values_out_of_range(settings: dict[str, Any], message: str) -> None:
    """The option is named, with what was given and what may be given, and never clamped or ignored."""
    with pytest.raises(TfmError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize("id_", [-1, VOCAB, 10**9])
def test_bias_on_an_id_that_does_not_exist(id_: int) -> None:
    """A bias on no token was ignored; a negative id reached the tokens at the end."""
    params = SamplingParams(logit_bias={5: 1.0, id_: 1.0})
    with pytest.raises(TfmError, match=f"logit_bias: found token id {id_}; allowed: 0 to {VOCAB - 1}"):
        params.check_ids(VOCAB)
    SamplingParams(logit_bias={0: 1.0, VOCAB - 1: 1.0}).check_ids(VOCAB)


def test_seed_that_is_drawn() -> None:
    """Without a seed one is drawn, which is then known and can be given again."""
    assert SamplingParams(seed=5).seeded() == SamplingParams(seed=5)
    seeds = {SamplingParams().seeded().seed for _ in range(20)}
    assert None not in seeds
    assert len(seeds) > 15


# ---- the model's own settings ----


@pytest.mark.parametrize(
    ("content", "given", "wanted"),
    [
        (None, {}, {}),
        (None, {"temperature": 0.7, "top_k": None}, {"temperature": 0.7}),
        ({}, {}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {}, {"top_p": 0.9}),
        ({"temperature": 0.6}, {}, {}),
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
         {}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repeat_penalty": 1.1}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 1.0, "seed": 3},
         {"temperature": 0.0, "top_p": 1.0, "seed": 3}),
        ({"do_sample": True, "top_k": 50}, {"top_k": 0, "logit_bias": {1: 2.0}},
         {"temperature": 1.0, "top_k": 0, "logit_bias": {1: 2.0}}),
        ({"bos_token_id": 1, "max_length": 20, "_from_model_config": True}, {}, {}),
    ],
)  # fmt: skip
def test_from_folder(tmp_path: Path, content: Any, given: dict[str, Any], wanted: dict[str, Any]) -> None:
    """generation_config.json gives the defaults, greedy unless it asks for sampling; what is given goes before it."""
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert SamplingParams.from_folder(tmp_path, **given) == SamplingParams(**wanted)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_sample": 1}, "field do_sample: found 1; allowed: true, false"),
        ({"do_sample": True, "temperature": -1}, "field temperature: .*found -1"),
        ({"do_sample": True, "temperature": "hot"}, "field temperature: .*found hot"),
        ({"top_p": 2}, "field top_p: found 2"),
        ({"top_k": -1}, "field top_k: found -1"),
        ({"repetition_penalty": 0}, "field repetition_penalty: found 0"),
    ],
)  # fmt: skip
def test_faults_of_generation_config(tmp_path: Path, content: Any, message: str) -> None:
    """The file and the field are named."""
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(TfmError, match=rf"generation_config\.json: {message}"):
        SamplingParams.from_folder(tmp_path)


def test_quick_for_a_large_vocabulary() -> None:
    """A choice must cost little beside a token of the model, also among 150,000."""
    logits = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    for settings, most_s in (({}, 0.01), ({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05}, 0.03)):
        params = SamplingParams(**settings)
        times = []
        for position in range(9):
            begin = time.perf_counter()
            sample(logits, params, 0, position)
            times.append(time.perf_counter() - begin)
        assert min(times) < most_s
