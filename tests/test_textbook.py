"""The kernels' attention and output projection are the textbook's H(x), the sum over heads of A(x) x S.

Queries, keys and values are made here in float32; the kernels turn them by position, attend block by block with an
online softmax, and multiply with one output matrix. The textbook never sees a query: it has the circuits Y and S only.
"""

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import uniform
from reference import attention, error, with_ones
from reference_weights import Array, Head

from tfm.kernels import matmul, rope
from tfm.kernels.attention import attention as fused_attention
from tfm.kernels.weight import Weight

D = 40  # hidden
CLOSE = 2e-6  # of the spread of H(x)


def random_heads(heads: int, key_heads: int, size: int) -> list[Head]:
    """Heads in groups that share keys and values; weights as large as in the tiny checkpoints, and biases."""

    def some(label: str, rows: int, columns: int, scale: float) -> Array:
        return (scale * (3 / D) ** 0.5 * uniform(0, label, rows, columns)).astype(np.float32).astype(np.float64)

    group = heads // key_heads
    keys = [some(f"k{i}", D + 1, size, 2.0) for i in range(key_heads)]
    values = [some(f"v{i}", D + 1, size, 1.0) for i in range(key_heads)]
    return [
        Head(some(f"q{n}", D + 1, size, 2.0), keys[n // group], values[n // group], some(f"o{n}", size, D, 1.0))
        for n in range(heads)
    ]


def kernels_heads(
    heads: list[Head], x: npt.NDArray[np.float32], rows: int, turns: Array | None,
    window: int, softcap: float, by_segment: bool,
) -> npt.NDArray[np.float32]:  # fmt: skip
    """H(x) of the last rows, [rows, D], by the kernels."""

    def read(matrices: list[Array]) -> npt.NDArray[np.float32]:
        return np.stack([x @ matrix.astype(np.float32) for matrix in matrices], axis=1)

    group = len(heads) // len({id(head.W_K) for head in heads})
    q, k = read([head.W_Q for head in heads]), read([head.W_K for head in heads[::group]])
    v = read([head.W_V for head in heads[::group]])
    if turns is not None:
        positions = np.arange(len(x))
        q, k = (rope.rope(each, positions, turns, False) for each in (q, k))
    scale = heads[0].size ** -0.5
    seen = fused_attention(q[-rows:], k, v, scale, window=window, softcap=softcap, by_segment=by_segment)
    W_O = np.concatenate([head.W_O for head in heads]).astype(np.float32)
    return matmul.matmul(seen.reshape(rows, -1), Weight("f32", np.ascontiguousarray(W_O.T)))


CASES = {
    # context, rows, heads, key heads, head size, turned, window, softcap
    "one head, one position": (1, 1, 1, 1, 10, False, 0, 0.0),
    "two blocks": (130, 130, 4, 4, 10, False, 0, 0.0),
    "the last position alone": (130, 1, 4, 2, 16, False, 0, 0.0),
    "grouped queries": (100, 37, 6, 2, 17, False, 0, 0.0),
    "rope": (100, 100, 4, 1, 10, True, 0, 0.0),
    "window": (200, 200, 2, 2, 10, True, 70, 0.0),
    "soft-cap": (90, 90, 2, 1, 32, False, 0, 2.0),
    "two segments": (600, 600, 2, 1, 10, True, 0, 0.0),
    "window over two segments, soft-cap": (700, 5, 3, 1, 10, True, 300, 3.0),
}


@pytest.mark.parametrize("by_segment", [False, True], ids=["in turn", "by segment"])
@pytest.mark.parametrize("case", CASES)
def test_fused_attention_is_the_sum_over_heads(case: str, by_segment: bool) -> None:
    """Guards the whole of attention at once: masks, groups, scale and the layout between heads and output matrix."""
    context, rows, count, key_heads, size, turned, window, softcap = CASES[case]
    heads = random_heads(count, key_heads, size)
    turns = 100.0 ** (-np.arange(0, size, 2) / size) if turned else None
    x = with_ones(3**0.5 * uniform(0, "x", context, D)).astype(np.float32)
    exact = x.astype(np.float64)
    expected = sum(attention(head, exact, turns, window, softcap) @ exact @ head.S for head in heads)
    found = kernels_heads(heads, x, rows, turns, window, softcap, by_segment)
    assert isinstance(expected, np.ndarray)
    assert error(found, expected[-rows:]) < CLOSE


def test_tolerance_sees_one_key() -> None:
    """Guards the judge: a window that is one key narrower is far outside."""
    heads = random_heads(2, 2, 10)
    x = with_ones(3**0.5 * uniform(0, "x", 200, D)).astype(np.float32)
    narrower, right = (kernels_heads(heads, x, 200, None, window, 0.0, False) for window in (19, 20))
    assert error(narrower, right) > 1000 * CLOSE
