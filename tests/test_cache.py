"""Sequences that begin alike: blocks that are shared, copied when they are written, and given back."""

from collections.abc import Iterator

import checkpoints
import numpy as np
import pytest

from tfm.engine import TfmError, load
from tfm.engine.cache import BlockPool, Sequence, common_prefix
from tfm.engine.model import Model
from tfm.engine.prefixes import PrefixCache, block_keys
from tfm.kernels.records import KV_BLOCK

IDS = [3 + i * 7 % 50 for i in range(150)]  # two full blocks and a part of one
OTHER = [5, 9, 4, 8]


@pytest.fixture(scope="module", params=["f32", "f16", "q8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name, config = next(iter(checkpoints.FLOATS.items()))
    folder = checkpoints.write_checkpoint(tmp_path_factory.mktemp(name), config)
    model = load(folder, threads=2, kv_type=request.param)
    yield model
    assert model.pool.blocks_in_use == 0
    model.close()


def after(model: Model, sequence: Sequence, ids: list[int]) -> np.ndarray:
    return model.step([(sequence, ids)])[0]


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 150])
def test_forks_do_not_see_each_other(model: Model, length: int) -> None:
    """Guards against a fork that writes into a block of the other, in either direction."""
    wanted = [model.logits([*IDS[:length], *OTHER, 1])[-1], model.logits([*IDS, 2])[-1]]
    with model.sequence() as first:
        model.step([(first, IDS)], "none")
        with first.fork(length) as second:
            after(model, second, OTHER)
            got = [after(model, second, [1]), after(model, first, [2])]
            assert second.ids == [*IDS[:length], *OTHER, 1]
    assert np.array_equal(got, wanted)


def test_a_truncated_sequence_leaves_its_fork_alone(model: Model) -> None:
    """Guards against a shared block that is written again after one of its users went back."""
    with model.sequence() as first:
        model.step([(first, IDS[:100])], "none")
        with first.fork(100) as second:
            first.truncate(70)
            after(model, first, OTHER)
            assert np.array_equal(after(model, second, [1]), model.logits([*IDS[:100], 1])[-1])


@pytest.mark.parametrize(
    ("there", "asked", "kept"),
    [
        ([], [1, 2], 0),
        ([1, 2, 3], [1, 2, 4, 5], 2),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1], 0),
        ([1, 2, 3], [2, 2, 3], 0),
    ],
)
def test_keep(model: Model, there: list[int], asked: list[int], kept: int) -> None:
    """A text that goes on from another: the last token is left to be run, or there were no logits to go on from."""
    with model.sequence() as sequence:
        model.step([(sequence, there)], "none")
        assert sequence.keep(asked) == kept
        assert sequence.ids == there[:kept]
        assert np.array_equal(after(model, sequence, asked[kept:]), model.logits(asked)[-1])


def test_logits_for_each_piece_of_work(model: Model) -> None:
    """Guards against rows of logits that belong to another sequence, when some want all, some one and some none."""
    texts = [IDS[:5], IDS[5:8], IDS[8:20], IDS[20:21]]
    sequences = [model.sequence() for _ in texts]
    got = model.step(list(zip(sequences, texts, strict=True)), ["all", "none", "last", "all"])
    wanted = [*model.logits(texts[0]), model.logits(texts[2])[-1], *model.logits(texts[3])]
    assert np.array_equal(got, wanted)
    for sequence in sequences:
        sequence.close()


def test_logits_of_a_long_text_among_others(model: Model) -> None:
    """The same where a piece of work is cut into several passes."""
    with model.sequence() as first, model.sequence() as second:
        long = (IDS * 5)[:600]
        got = model.step([(first, IDS[:5]), (second, long)], ["none", "all"])
    assert np.array_equal(got, model.logits(long))


def test_blocks_have_counts() -> None:
    """Guards against a block that is free while somebody reads it, and against one that is never free again."""
    pool = BlockPool(4096, limit=2)
    first, second = pool.take(), pool.take()
    with pytest.raises(TfmError, match="no room for more keys and values"):
        pool.take()
    pool.share(first)
    pool.give(first)
    assert pool.blocks_in_use == 2
    pool.give(first)
    assert (pool.take(), pool.blocks_in_use) == (first, 2)
    pool.give(second)
    assert not pool.is_shared(first)
    pool.share(first)
    assert pool.copy(first) == second


def test_prefixes_are_found_by_all_their_tokens() -> None:
    """Guards against a block that is taken for another with the same tokens behind other ones."""
    keys = block_keys([*IDS, 1])
    assert len(keys) == 2
    assert block_keys(IDS[:KV_BLOCK]) == []  # its last token is to be run
    assert block_keys([*IDS[:KV_BLOCK], 1]) == keys[:1]
    moved = [*OTHER, *IDS[4:]]
    assert common_prefix(block_keys([*moved, 1]), keys) == 0
    changed = [*IDS[:KV_BLOCK], *OTHER, *IDS[KV_BLOCK + 4 :]]
    assert common_prefix(block_keys([*changed, 1]), keys) == 1


def test_prefixes_that_were_used_last_stay() -> None:
    """Guards against a cache that grows without end, and against one that drops what running texts read."""
    pool = BlockPool(4096)
    cache = PrefixCache(pool)
    texts = [[i] * 129 for i in range(3)]
    for ids in texts:
        sequence = Sequence(pool, 256)
        sequence.reserve(128)
        cache.add(block_keys(ids), sequence.blocks)
        sequence.close()
    assert pool.blocks_in_use == 6
    running = Sequence(pool, 256)
    running.adopt(cache.find(block_keys(texts[0])), texts[0][:128])
    cache.shrink(1)
    assert [len(cache.find(block_keys(ids))) for ids in texts] == [2, 0, 1]
    running.close()
    cache.close()
    assert pool.blocks_in_use == 0
