"""Many requests at once: each gets what it would get alone, whatever is beside it."""

import random
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import pytest

from tfm.engine import SamplingParams, TfmError, load
from tfm.engine.batch import Batch, Finished
from tfm.engine.cache import Sequence
from tfm.engine.generate import Request
from tfm.engine.model import Model
from tfm.engine.speculation import PromptLookup
from tfm.kernels.records import KV_BLOCK

PREFIX = [3 + i * i % 40 for i in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("llama"), next(iter(checkpoints.FLOATS.values())))


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    model = load(folder, threads=2)
    yield model
    model.close()


def requests(count: int = 40) -> list[Request]:
    """Requests of all kinds, many with the same beginning."""
    dice = random.Random(7)
    made = []
    for seed in range(count):
        sampling = SamplingParams(
            temperature=dice.choice([0.0, 0.7, 1.3]), top_k=dice.choice([0, 5]), top_p=dice.choice([1.0, 0.9]),
            repeat_penalty=dice.choice([1.0, 1.2]), seed=seed,
        )  # fmt: skip
        begin = PREFIX[: dice.choice([0, 0, 70, 150, 200])]
        own = [dice.randrange(3, 50) for _ in range(dice.choice([1, 5, 64, 90]))]
        made.append(Request([*begin, *own], dice.choice([1, 3, 20, 50]), sampling, logprobs=dice.choice([0, 2])))
    return made


def alone(model: Model, request: Request) -> list[object]:
    return list(
        model.generate(request.ids, request.max_tokens, request.sampling, request.stop, request.logprobs, chunk=64)
    )


def answers(batch: Batch, asked: list[Request]) -> dict[int, Finished]:
    found = {finished.index: finished for finished in batch.run(asked)}
    batch.close()
    return found


@pytest.mark.parametrize(
    ("slots", "share", "speculate"),
    [(1, True, 0), (4, False, 0), (4, True, 0), (32, True, 0), (32, False, 3), (7, True, 5)],
)
def test_each_as_alone(model: Model, slots: int, share: bool, speculate: int) -> None:
    """Guards against answers that change with the neighbours, with shared beginnings or with what was proposed."""
    asked = requests()
    found = answers(Batch(model, slots, share, speculate), asked)
    assert sorted(found) == list(range(len(asked)))
    for index, request in enumerate(asked):
        assert found[index].error is None
        assert found[index].tokens == alone(model, request), index
        assert found[index].prompt_tokens == len(request.ids)
    assert model.pool.blocks_in_use == 0


def test_shared_beginnings_are_computed_once(model: Model) -> None:
    """Guards against rows that compute what a row beside them is just computing."""
    asked = [Request([*PREFIX, id_], 4) for id_ in range(3, 23)]
    batch = Batch(model, slots=20)
    answers(batch, asked)
    shared = len(PREFIX) // KV_BLOCK * KV_BLOCK
    assert batch.read == shared + len(asked) * (len(PREFIX) + 1 - shared)


def test_a_beginning_from_before(model: Model) -> None:
    """What a sequence holds already is not computed, and what the prompts had in common can be taken out."""
    with model.sequence() as sequence:
        model.step([(sequence, PREFIX[:150])], "none")
        batch = Batch(model)
        batch.start_from(sequence)
    asked = [Request([*PREFIX, id_], 4) for id_ in range(3, 6)]
    found = {finished.index: finished for finished in batch.run(asked)}
    assert [found[i].tokens for i in range(3)] == [alone(model, request) for request in asked]
    assert batch.read == 3 * (len(PREFIX) + 1) - 3 * 128 - 2 * 64
    with batch.common_beginning() as common:
        assert common.ids == PREFIX[:192]
    batch.close()
    assert model.pool.blocks_in_use == 0


def test_a_request_that_fails_leaves_the_others_alone(model: Model) -> None:
    """One bad row in the middle: it is told of, and the rest is answered."""
    good = Request([5, 6, 7], 3)
    bad = [
        Request([5] * (model.ctx + 1)),
        Request([5], max_tokens=-1),
        Request([5], sampling=SamplingParams(logit_bias={10**6: 1.0})),
        Request([10**6], 3),
        Request([5], stop=[""]),
    ]
    found = answers(Batch(model, slots=3), [good, *bad, good])
    assert all(found[i].error is not None and not found[i].tokens for i in range(1, 6))
    assert found[0].tokens == found[6].tokens == alone(model, good)
    assert model.pool.blocks_in_use == 0


def test_requests_of_no_tokens(model: Model) -> None:
    assert answers(Batch(model), [Request([5], 0)]) == {0: Finished(0, 1, [])}
    assert answers(Batch(model), []) == {}


def test_requests_are_taken_as_slots_become_free(model: Model) -> None:
    """Guards against reading ten thousand rows into memory before the first is answered."""
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        for seed in range(10**9):
            taken += 1
            yield Request([5, 6], 2 + seed % 5)

    run = Batch(model, slots=4).run(endless())
    for done in range(1, 30):
        next(run)
        assert taken <= done + 4 + 1
    run.close()
    assert model.pool.blocks_in_use == 0


def test_requests_that_come_later(model: Model) -> None:
    """Guards against a row of a slow pipe that waits until all that came before is answered."""
    order: list[int] = []

    def slow() -> Iterator[Request | None]:
        yield Request([5, 6], 60)
        yield None
        yield None
        yield Request([5], 2)
        while 1 not in order:
            yield None
        yield Request([6], 1)

    steps = 0

    def tick() -> None:
        nonlocal steps
        steps += 1

    for finished in Batch(model, slots=4).run(slow(), tick):
        order.append(finished.index)
    assert order == [1, 2, 0]
    assert steps == len(finished.tokens)


def test_logits_that_are_no_numbers_fail_their_row_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the path of an error in the middle of an answer: its memory comes back, the others go on."""
    step = Model.step

    def damaged(self: Model, work: list, *how: object) -> object:
        logits = step(self, work, *how)
        for i, (_, ids) in enumerate(work):
            if ids == [13]:
                logits[i] = float("nan")
        return logits

    monkeypatch.setattr(Model, "step", damaged)
    found = answers(Batch(model, slots=3, share_prefixes=False), [Request([5], 3), Request([13], 3), Request([6], 3)])
    assert "NaN or infinite" in str(found[1].error)
    assert [found[i].error for i in (0, 2)] == [None, None]
    assert model.pool.blocks_in_use == 0


def test_rows_wait_for_memory(folder: Path) -> None:
    """Guards against a row that fails because its neighbours took the memory: it waits until there is room."""
    model = load(folder, threads=1, ctx=300)
    model.pool.limit = 6  # one row of 300 positions has room, or two of 150
    asked = [Request([*PREFIX[:80], id_], 60) for id_ in range(3, 9)]
    most = 0
    found = []
    batch = Batch(model, slots=6)
    for finished in batch.run(asked):
        most = max(most, model.pool.blocks_in_use)
        found.append(finished)
    batch.close()
    assert [finished.error for finished in found] == [None] * 6
    assert {finished.index: finished.tokens for finished in found} == {
        i: alone(model, request) for i, request in enumerate(asked)
    }
    assert most <= 6
    model.close()


def test_slots_out_of_range(model: Model) -> None:
    for slots in (0, 513):
        with pytest.raises(TfmError, match="slots: found"):
            Batch(model, slots)


def test_a_text_that_is_stopped_in_the_middle_gives_its_memory_back(model: Model) -> None:
    """Ctrl-C in a batch: nothing stays behind in the model, which may be used again."""
    run = Batch(model, slots=4, share_prefixes=False).run(requests())
    next(run)
    run.close()
    assert model.pool.blocks_in_use == 0


class TestPromptLookup:
    def test_what_followed_before(self) -> None:
        """The latest place counts, and the longer n-gram before the shorter."""
        lookup = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 1, 2, 3], 4)
        assert lookup.propose(9) == [4, 5]
        lookup.push([4, 5, 9])
        assert lookup.propose(9) == [2, 3, 7, 7]
        lookup.push([8])
        assert PromptLookup([8, 2, 3, 4, 9, 2, 3, 7, 7, 1, 2, 3], 4).propose(9) == [7, 7]

    def test_nothing_known(self) -> None:
        for ids in ([], [1], [1, 2], [1, 2, 3], [1, 1]):
            assert PromptLookup(ids, 4).propose(4) == []
        assert PromptLookup([1, 2, 3, 1, 2], 4).propose(0) == []

    def test_a_text_that_repeats_one_token(self) -> None:
        assert PromptLookup([6] * 5, 4).propose(4) == [6]

    def test_size_follows_success(self) -> None:
        """Guards against many proposals where none comes true, each of which costs time."""
        lookup = PromptLookup([*range(30), 1, 2], 8)
        sizes = []
        for new in ([3, 4, 5], [6, 7, 8, 9, 10], [*range(11, 20)], [50, 1, 2], [51, 1, 2], [52, 1, 2], [53, 1, 2]):
            sizes.append(len(lookup.propose(99)))
            lookup.push(new)
        assert sizes == [2, 4, 8, 8, 4, 2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculate", [1, 4, 16])
def test_speculation_changes_nothing(model: Model, temperature: float, speculate: int) -> None:
    """Guards against a text that depends on what was proposed. The sampled one repeats itself as well."""
    params = SamplingParams(temperature=temperature, top_k=3, seed=11, repeat_penalty=0.8)
    ids = [5, 6, 7, 5, 6, 7, 5, 6]
    for length in (1, 2, 40):
        plain = list(model.generate(ids, length, params, logprobs=3))
        assert list(model.generate(ids, length, params, logprobs=3, speculate=speculate)) == plain


def test_speculation_takes_fewer_steps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against proposals that are never kept: a text that repeats itself must need fewer passes."""
    params = SamplingParams(logit_bias={9: 1000.0})
    steps = 0
    step = Model.step

    def counted(*arguments: object) -> object:
        nonlocal steps
        steps += 1
        return step(*arguments)

    monkeypatch.setattr(Model, "step", counted)
    assert len(list(model.generate([5], 41, params, speculate=4))) == 41
    assert steps <= 25


def test_a_sequence_that_is_given_keeps_the_text(model: Model) -> None:
    """A conversation's next turn runs its new tokens only, and has the same answer as if all were run."""
    sequence = Sequence(model.pool, model.ctx)
    first = [token.id for token in model.generate([5, 6, 7], 6, sequence=sequence, speculate=3)]
    assert sequence.ids == [5, 6, 7, *first[:-1]]
    turn = [5, 6, 7, *first, 8, 9]
    kept = sequence.fork(sequence.length)
    assert kept.keep(turn) == len(turn) - 3
    kept.close()
    assert list(model.generate(turn, 6, sequence=sequence)) == list(model.generate(turn, 6))
    sequence.close()
    assert model.pool.blocks_in_use == 0


def test_options_out_of_range(model: Model) -> None:
    with pytest.raises(TfmError, match="speculate: found -1; allowed: a whole number from 0"):
        model.generate([5], speculate=-1)
