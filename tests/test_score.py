"""Scores of given texts: against float64, against what generating reported, and whatever else is scored beside them."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import parrot as parrot_files
import pytest
from checkpoints import LLAMA, random_ids, write_checkpoint
from parrot import END, id_of, write_parrot
from raw_safetensors import write_tensors
from tokenizer_files import added, byte_level, puts_around, sentencepiece, write_tokenizer

import tfm.engine.score as scoring
from tfm.engine import TfmError, load
from tfm.engine.model import Model
from tfm.engine.perplexity import Window, perplexity
from tfm.engine.sampling_params import SamplingParams
from tfm.engine.score import Score, score
from tfm.engine.scored_text import Text, answer_text, ended, id_text, plain_text

CTX = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    model = load(folder, threads=2, ctx=CTX)
    yield model
    model.close()


def scores(model: Model, texts: Sequence[Text | TfmError | None]) -> list[Score]:
    """Of texts that can all be scored."""
    found = list(score(model, texts))
    assert all(isinstance(one, Score) for one in found)
    return found  # type: ignore[return-value]


def log_softmax(logits_TV: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """By its definition, in float64."""
    shifted = logits_TV.astype(np.float64) - logits_TV.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def mixed_texts(number: int, longest: int = CTX) -> list[Text]:
    """Texts of many lengths, some behind prompts."""
    draw = random.Random(1)
    lengths = [0, 1, 2, CTX + 1, *(draw.choice([3, 10, 63, 64, 65, longest]) for _ in range(number - 4))]
    return [
        Text(random_ids(LLAMA, length, seed), draw.randint(0, length), 7) for seed, length in enumerate(lengths)
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ one text


@pytest.mark.parametrize("begin", [0, 1, 30, 69, 70])
def test_log_probabilities_and_ranks(model: Model, begin: int) -> None:
    """Each token's logits were those of the row after it, or the prompt was scored too."""
    ids = random_ids(LLAMA, 70)
    [found] = scores(model, [Text(ids, begin, 100)])
    logits = model.logits(ids)
    logprobs, first = log_softmax(logits), max(1, begin)
    expected = [logprobs[i - 1, ids[i]] for i in range(first, len(ids))]
    np.testing.assert_allclose(found.logprobs, expected, rtol=0, atol=1e-5)
    assert [token.id for token in found.tokens] == ids[begin:]
    order = np.argsort(-logits, axis=1, kind="stable")
    ranks = [1 + list(order[i - 1]).index(ids[i]) for i in range(first, len(ids))]
    assert [token.rank for token in found.tokens if token.rank is not None] == ranks
    if begin == 0:
        assert (found.tokens[0].logprob, found.tokens[0].rank) == (None, None)


def test_figures_are_their_formulae() -> None:
    """Perplexity of a sum, bits of base e, an error bar of the log."""
    nlls = np.random.default_rng(0).exponential(2.0, 500)
    found = Score([-float(nll) for nll in nlls], 1234)
    assert found.logprob == pytest.approx(-nlls.sum())
    assert found.perplexity == pytest.approx(np.exp(nlls.mean()))
    assert found.bits_per_byte == pytest.approx(nlls.sum() / np.log(2) / 1234)
    assert found.standard_error == pytest.approx(np.exp(nlls.mean()) * nlls.std(ddof=1) / np.sqrt(500))


def test_figures_of_nothing_and_of_too_much() -> None:
    """Division by no tokens or no bytes; exp of more than a float holds was an exception."""
    nothing = Score((), 0)
    assert (nothing.logprob, nothing.perplexity, nothing.bits_per_byte, nothing.standard_error) == (None,) * 4
    assert Score((-1.0,), 0).bits_per_byte is None
    assert Score((-1.0,), 1).standard_error is None
    assert Score((-1000.0,), 1).perplexity == math.inf


def test_equal_logits(tmp_path: Path) -> None:
    """Among equal logits the lower id ranks first, as where the likeliest are listed: all but one are equal here."""
    parrot = load(write_parrot(tmp_path / "parrot", b"ab"), threads=1)
    line_feed, a, b = id_of(10), id_of(ord("a")), id_of(ord("b"))
    ids = [line_feed, a, END, END, line_feed, line_feed, b]
    [found] = scores(parrot, [Text(ids)])
    ranks = [None, 1, 2, 1, 1 + line_feed, 2 + line_feed, 1 + b]
    assert [token.rank for token in found.tokens] == ranks
    parrot.close()


# ------------------------------------------------------------------------------------------------ generated texts


@pytest.mark.parametrize("prompt_tokens", [1, 2, 64, 150])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.5, top_k=40, seed=3)])
def test_the_score_of_an_answer_is_what_generating_it_reported(
    model: Model, sampling: SamplingParams, prompt_tokens: int
) -> None:
    """Two ways to the same figure that differed in the last bits; until the very end of the context."""
    prompt = random_ids(LLAMA, prompt_tokens, seed=prompt_tokens)
    answer = list(model.generate(prompt, 500, sampling))
    assert len(answer) + prompt_tokens <= CTX + 1
    ids = [token.id for token in answer]
    [found] = scores(model, [answer_text(model.tokenizer, prompt, ids)])
    assert [token.logprob for token in found.tokens] == [token.logprob for token in answer]
    assert found.logprob == math.fsum(token.logprob for token in answer)


def test_penalties_are_not_part_of_a_score(model: Model) -> None:
    """A score is the model's own, also of an answer that was drawn with a bias."""
    prompt = random_ids(LLAMA, 9)
    answer = list(model.generate(prompt, 20, SamplingParams(repeat_penalty=3.0, logit_bias={40: 4.0}, seed=1)))
    [found] = scores(model, [Text([*prompt, *(token.id for token in answer)], len(prompt))])
    assert list(found.logprobs) == [token.logprob for token in answer]


# ------------------------------------------------------------------------------------------------ many texts


@pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (3, 32), (64, 2), (512, 32)])
def test_a_text_does_not_depend_on_its_neighbours(
    model: Model, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, at_once: int
) -> None:
    """Figures that changed in the last bits with what shared the step, where it was cut, and the threads."""
    texts = mixed_texts(20)
    alone = [scores(model, [text])[0] for text in texts]
    monkeypatch.setattr(scoring, "MOST_ROWS", rows)
    monkeypatch.setattr(scoring, "MOST_TEXTS", at_once)
    assert scores(model, texts) == alone
    assert scores(model, [part for text in texts for part in (text, None)]) == alone
    one_thread = load(folder, threads=1, ctx=CTX)
    assert scores(one_thread, texts) == alone
    assert one_thread.pool.blocks_in_use == 0
    one_thread.close()


def test_logits_of_a_step_are_bounded(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows of a vocabulary of 250,000 were half a gigabyte."""
    monkeypatch.setattr(scoring, "LOGITS_BYTES", 4 * 97 * 10)
    sizes = []
    step = model.step
    monkeypatch.setattr(model, "step", lambda *work: sizes.append(len(found := step(*work))) or found)
    scores(model, [Text(random_ids(LLAMA, 95)), Text(random_ids(LLAMA, 8), 7)])
    assert (max(sizes), sum(sizes)) == (10, 94 + 1)


def test_texts_are_read_as_they_are_needed(model: Model) -> None:
    """All of an endless stream was read before the first result, or a line waited for those that fill a step."""
    pulled = 0

    def endless() -> Iterator[Text]:
        nonlocal pulled
        for pulled in count(1):  # noqa: B007
            yield Text([1, 2, 3])

    assert len(list(islice(score(model, endless()), 1000))) == 1000
    assert pulled < 1100
    assert model.pool.blocks_in_use == 0

    seen: list[int] = []

    def slow() -> Iterator[Text | None]:
        for _ in range(3):
            yield Text([1, 2, 3])
            yield None
            seen.append(len(results))

    results: list[Score | TfmError] = []
    for result in score(model, slow()):
        results.append(result)
    assert seen == [1, 2, 3]


def test_many_that_need_no_step(model: Model) -> None:
    """Behind a text that waits for others to share its step, nothing piled up without end."""
    pulled = 0

    def texts() -> Iterator[Text]:
        nonlocal pulled
        yield Text([1, 2, 3])
        for pulled in range(1, 10_000):  # noqa: B007
            yield Text(())

    found = score(model, texts())
    assert isinstance(next(found), Score)
    assert pulled < 100
    assert sum(1 for _ in found) == 9_999


def test_within_the_memory_that_there_is(model: Model, folder: Path) -> None:
    """With --max-ram a batch of texts asked for more blocks than the cache may have, though each fits."""
    texts = mixed_texts(20)
    small = load(folder, threads=1, ctx=CTX)
    small.pool.limit = -(-CTX // 64)
    assert scores(small, texts) == scores(model, texts)
    small.close()


def test_faults_stay_where_they_are(model: Model) -> None:
    """One bad text ended all, or took the place of another."""
    good, too_long = Text(random_ids(LLAMA, CTX + 1)), Text(random_ids(LLAMA, CTX + 2))
    given = [good, too_long, Text([1, 97]), TfmError("line 4: unreadable"), Text([-1, 5]), good]
    found = list(score(model, given))
    assert isinstance(found[0], Score)
    assert found[0] == found[5]
    assert f"found {CTX + 2} tokens; allowed: at most {CTX + 1}" in str(found[1])
    assert str(found[2]) == "token ids: found 97; allowed: 0 to 96"
    assert found[3] is given[3]
    assert "found -1" in str(found[4])
    assert model.pool.blocks_in_use == 0


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """NaN in damaged weights became a score of nan; a text that does not meet them is scored all the same."""
    write_parrot(tmp_path, b"ab")
    tensors = parrot_files._tensors({})
    tensors["model.embed_tokens.weight"][id_of(ord("x"))] = np.nan
    write_tensors(tmp_path / "model.safetensors", tensors)
    damaged = load(tmp_path, threads=1)
    texts = [id_text(damaged.tokenizer, [id_of(byte) for byte in text]) for text in (b"abc", b"abxc", b"abc", b"abx")]
    found = list(score(damaged, texts))
    assert "logits for position 3: found 257 of 257 are NaN" in str(found[1])
    assert [isinstance(one, Score) for one in found] == [True, False, True, True]
    assert found[0] == found[2]
    assert damaged.pool.blocks_in_use == 0
    damaged.close()


def test_left_before_the_end(model: Model) -> None:
    """Keys and values of texts that nobody waits for any more stayed in use."""
    found = score(model, [Text(random_ids(LLAMA, CTX)) for _ in range(9)])
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert model.pool.blocks_in_use == 0


# ------------------------------------------------------------------------------------------------ windows


def naive_windows(model: Model, before: list[int], ids: list[int], ctx: int, stride: int) -> dict[int, float]:
    """Token's place -> float64 log-probability, one token after the other: the first window that has it counts it."""
    found: dict[int, float] = {}
    for start in range(0, len(ids), stride):
        window = [*before, *ids[start : start + ctx - len(before)]]
        logprobs = log_softmax(model.logits(window))
        for i in range(1, len(window)):
            place = start + i - len(before)
            if place >= start:
                found.setdefault(place, logprobs[i - 1, window[i]])
    return found


@pytest.mark.parametrize("before", [[], [5]])
@pytest.mark.parametrize(("tokens", "ctx", "stride"), [
    (150, 40, 20), (150, 40, 39), (150, 40, 1), (40, 40, 20), (41, 40, 20), (39, 40, 7), (60, 40, 20), (90, 3, 1),
    (90, 2, 1), (2, 40, 20), (1, 40, 20), (150, CTX, 100),
])  # fmt: skip
def test_every_token_is_counted_once(model: Model, before: list[int], tokens: int, ctx: int, stride: int) -> None:
    """Tokens at the edges of windows were counted twice or not at all, or the last window was left out."""
    ids = random_ids(LLAMA, tokens, seed=2)
    window = Window.of(before, model.ctx, ctx, stride)
    found = perplexity(model, Text([*before, *ids], len(before), 150), window)
    expected = naive_windows(model, before, ids, ctx, stride)
    assert list(expected) == list(range(0 if before else 1, tokens))
    np.testing.assert_allclose(found.logprobs, list(expected.values()), rtol=0, atol=1e-5)
    assert sum(1 for _ in window.over(ids)) == window.count(tokens)


def test_a_text_that_fits_its_window_has_its_score(model: Model) -> None:
    text = Text(random_ids(LLAMA, CTX), 1, 199)
    [whole] = scores(model, [text])
    found = perplexity(model, text, Window.of(text.ids[:1], model.ctx))
    assert list(found.logprobs) == list(whole.logprobs)
    assert found.perplexity == whole.perplexity


def test_progress_of_windows(model: Model) -> None:
    told: list[tuple[int, int | None]] = []
    window = Window.of([], model.ctx, 20, 10)
    perplexity(model, Text(random_ids(LLAMA, 95)), window, lambda label, done, total: told.append((done, total)))
    assert told == [(i, 9) for i in range(1, 10)]


@pytest.mark.parametrize(("before", "ctx", "stride", "what"), [
    ([], 1, None, "--ctx"), ([], CTX + 1, None, "--ctx"), ([1, 2], 2, None, "--ctx"), ([], 10, 10, "--stride"),
    ([1], 10, 10, "--stride"), ([], 10, 0, "--stride"),
])  # fmt: skip
def test_windows_that_leave_tokens_out(before: list[int], ctx: int, stride: int | None, what: str) -> None:
    """A stride that skips tokens, or a window in which a first token has nothing before it."""
    with pytest.raises(TfmError, match=what):
        Window.of(before, CTX, ctx, stride)


# ------------------------------------------------------------------------------------------------ texts to tokens

BOS, EOS = added(256, "<s>"), added(257, "</s>")


def test_bos_stands_before_a_text(tmp_path: Path) -> None:
    """BOS was counted, or missing, or twice; or the first token was counted though nothing stands before it."""
    steps = {"post_processor": puts_around([("<s>", 256)], [("</s>", 257)])}
    with_bos = write_tokenizer(tmp_path / "bos", byte_level([BOS, EOS], **steps), {"bos_token": "<s>"})
    assert plain_text(with_bos, "hé") == Text([256, *"hé".encode()], 1, 3)
    assert plain_text(with_bos, "") == Text([256], 1, 0)
    assert plain_text(with_bos, "<s>hé") == Text([256, *"hé".encode()], 0, 3)
    assert plain_text(with_bos, "<s>", parse_special=False) == Text([256, *b"<s>"], 1, 3)
    assert plain_text(with_bos, "a</s>") == Text([256, 97, 257], 1, 5)
    without = write_tokenizer(tmp_path / "none", byte_level([BOS, EOS]), {"bos_token": "<s>"})
    assert plain_text(without, "hé") == Text(list("hé".encode()), 0, 2)
    assert plain_text(without, "") == Text([], 0, 0)
    assert id_text(without, [256, 104, 105]) == Text([256, 104, 105], 0, 2)


def test_an_answer_stands_behind_its_prompt(tmp_path: Path) -> None:
    """BOS in the middle, and control tokens in what a person says that a model said."""
    steps = {"post_processor": puts_around([("<s>", 256)])}
    tokenizer = write_tokenizer(tmp_path, byte_level([BOS, EOS], **steps), {"bos_token": "<s>", "eos_token": "</s>"})
    assert answer_text(tokenizer, [256, 1], "a</s>") == Text([256, 1, *b"a</s>"], 2, 5)
    assert answer_text(tokenizer, [], "a") == Text([256, 97], 1, 1)
    assert answer_text(tokenizer, [1], [97, 257]) == Text([1, 97, 257], 1, 5)
    assert ended(tokenizer, answer_text(tokenizer, [1], "a")) == Text([1, 97, 257], 1, 1)


def test_an_answer_needs_something_before_it(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, byte_level())
    with pytest.raises(TfmError, match="no BOS"):
        answer_text(tokenizer, [], "a")


@pytest.mark.parametrize("answer", ["hello", " hello", "é hello", "xhello"])
def test_sentencepiece_puts_no_space_into_an_answer(tmp_path: Path, answer: str) -> None:
    """The space that SentencePiece puts before a text came between a prompt's last word and the answer."""
    tokenizer = write_tokenizer(tmp_path, sentencepiece([added(270, "<s>")]))
    behind_text = answer_text(tokenizer, tokenizer.encode("h"), answer)
    assert tokenizer.decode(behind_text.ids) == f"h{answer}"
    behind_mark = answer_text(tokenizer, [270], answer)
    assert tokenizer.decode(behind_mark.ids) == answer


@pytest.mark.parametrize(("config", "generation", "ids"), [
    ({"eos_token": "</s>"}, {"eos_token_id": [1, 2]}, [257]), ({}, {"eos_token_id": 9}, [9]), ({}, None, None),
    ({}, {"eos_token_id": [1, 2]}, None),
])  # fmt: skip
def test_the_token_that_ends_a_text(tmp_path: Path, config: dict, generation: dict | None, ids: list | None) -> None:
    """One of several ends was picked by chance."""
    tokenizer = write_tokenizer(tmp_path, byte_level([BOS, EOS]), config, generation_config=generation)
    if ids is None:
        with pytest.raises(TfmError, match="--end"):
            ended(tokenizer, Text([5]))
    else:
        assert ended(tokenizer, Text([5])).ids == [5, *ids]


def test_a_text_without_any_token(model: Model) -> None:
    """Letters that the vocabulary does not have were scored as an empty text."""
    with pytest.raises(TfmError, match="makes no token"):
        plain_text(model.tokenizer, "日本")
