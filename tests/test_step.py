"""`Model.step`: what may stand in one step, and what is refused."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import checkpoints
import numpy as np
import pytest

from tfm.engine import TfmError, load
from tfm.engine.model import Model

IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name, config = next(iter(checkpoints.FLOATS.items()))
    model = load(checkpoints.write_checkpoint(tmp_path_factory.mktemp(name), config), threads=2, ctx=64)
    yield model
    model.close()


def test_a_sequence_twice_in_one_step(model: Model) -> None:
    """Guards against both pieces starting at the same position, which gave wrong logits without a word."""
    with model.sequence() as sequence:
        logits_TV = model.step([(sequence, IDS[:2]), (sequence, IDS[2:])], "all")
        assert sequence.length == len(IDS)
    assert np.array_equal(logits_TV, model.logits(IDS))


@pytest.mark.parametrize("threads", [1, 2])
def test_long_sequences_of_different_lengths(threads: int, tmp_path: Path) -> None:
    """Guards pieces of attention that a thread claims ahead: a piece done twice, left out, or of the wrong sequence.

    Each text alone, run in chunks of many rows, which are not shared out by segments, gives the same bits.
    """
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.LLAMA | {"max_position_embeddings": 2048})
    lengths = 1200, 530, 3, 1024
    with closing(load(folder, threads=threads)) as model:
        texts = [[(7 * i + length) % model.config.vocab_size for i in range(length)] for length in lengths]
        alone = [model.logits(text)[-2:] for text in texts]
        sequences = [model.sequence() for _ in texts]
        model.step([(sequence, text[:-2]) for sequence, text in zip(sequences, texts, strict=True)], "none")
        for i in (-2, -1):
            together = model.step([(sequence, [text[i]]) for sequence, text in zip(sequences, texts, strict=True)])
            assert np.array_equal(together, [logits[i] for logits in alone])


def test_work_of_no_tokens(model: Model) -> None:
    """Guards against rows of logits for sequences that got no tokens, and against a step of nothing."""
    with model.sequence() as first, model.sequence() as second:
        assert model.step([(first, IDS), (second, [])]).shape == (1, model.config.vocab_size)
        assert model.step([(second, [])]).shape == (0, model.config.vocab_size)
        assert model.step([]).shape == (0, model.config.vocab_size)
        assert second.length == 0
        # Far more of them than a step has room for sequences.
        logits_NV = model.step([(second, [])] * 5000 + [(first, IDS[:1])])
        assert np.array_equal(logits_NV[0], model.logits([*IDS, IDS[0]])[-1])


def test_threads_that_go_on_with_one_sequence(model: Model) -> None:
    """Guards a position that is read before the turn comes: both threads would write keys and values to it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            with model.sequence() as sequence:
                threads = [
                    threading.Thread(target=lambda k=k: [model.step([(sequence, [k])], "none") for _ in range(25)])
                    for k in (3, 4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert sorted(sequence.ids) == [3] * 25 + [4] * 25
                logits_V = model.step([(sequence, [7])])[0]
                assert np.array_equal(logits_V, model.logits(sequence.ids)[-1])
    finally:
        sys.setswitchinterval(interval)


def test_a_text_that_outgrows_the_context_changes_nothing(model: Model) -> None:
    """Guards against a step that is refused in the middle: some sequences longer, others not."""
    with model.sequence() as first, model.sequence() as second:
        with pytest.raises(TfmError, match="prompt: found 65 tokens; allowed: at most 64, the context"):
            model.step([(first, IDS), (second, [1] * 60), (second, [1] * 5)])
        assert (first.length, second.length) == (0, 0)
        assert len(model.step([(second, [1] * 64)])) == 1


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_a_token_that_the_model_does_not_have(model: Model, wrong: int) -> None:
    """Guards against reading the embedding outside its memory."""
    with model.sequence() as sequence, pytest.raises(TfmError, match=f"token ids: found {wrong}"):
        model.step([(sequence, [1, wrong])])


def test_forgetting_positions(model: Model) -> None:
    """Guards against keys of forgotten positions that are still seen."""
    with model.sequence() as sequence:
        model.step([(sequence, IDS)])
        sequence.truncate(3)
        again = model.step([(sequence, [1, 2])], "all")
    assert np.array_equal(again, model.logits([*IDS[:3], 1, 2])[3:])


def test_steps_follow_each_other_at_once(model: Model) -> None:
    """Guards against a helper that still reads a step when the next one is prepared: with other processes busy, prompts
    whose logits nobody wanted gave wrong answers afterwards."""
    texts = [[*IDS, i] for i in range(4)]
    expected = [model.logits(ids)[-1] for ids in texts]
    with busy_processors():
        for _ in range(40):
            sequences = [model.sequence() for _ in texts]
            for sequence, ids in zip(sequences, texts, strict=True):
                model.step([(sequence, ids[:3])], "none")
                model.step([(sequence, ids[3:-1])], "none")
            found = model.step([(sequence, ids[-1:]) for sequence, ids in zip(sequences, texts, strict=True)])
            assert np.array_equal(found, expected)
            for sequence in sequences:
                sequence.close()


@contextmanager
def busy_processors() -> Iterator[None]:
    """Other processes that keep every processor busy."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_max_ram_shortens_the_context_with_a_word(tmp_path: Path) -> None:
    """Guards against an answer that breaks off in the middle because keys and values no longer fit."""
    folder = checkpoints.write_checkpoint(tmp_path, {**checkpoints.LLAMA, "max_position_embeddings": 4096})
    whole = load(folder, threads=1)
    needed = whole.memory()
    block = whole.pool.block_bytes
    whole.close()
    with pytest.warns(UserWarning, match=r"--max-ram leaves room for 128 of 4096 tokens"):
        model = load(folder, threads=1, max_ram=needed["weights_bytes"] + needed["scratch_bytes"] + 2 * block)
    assert model.ctx == 128
    tokens = list(model.generate([1] * 120, max_tokens=50))
    assert tokens[-1].finish_reason == "length"
    with pytest.raises(TfmError, match=r"prompt: found 129 tokens; allowed: at most 128, the context; .*--max-ram"):
        model.logits([1] * 129)
    model.close()


def test_ids_as_numpy_gives_them_and_no_others(model: Model) -> None:
    """Guards against ids that are an array being an error, and against a text or fractions being taken for ids."""
    assert np.array_equal(model.logits(np.array(IDS)), model.logits(IDS))
    for wrong in ("hello", "", [1.5], [None]):
        with pytest.raises(TfmError, match="token ids"), model.sequence() as sequence:
            model.step([(sequence, wrong)])
