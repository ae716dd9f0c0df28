"""Attention beside the softmax op, and its invariance: chunks, cache types and segments (kernels/attention.py)."""

import numpy as np
import pytest

from tfm.kernels.attention import attention
from tfm.kernels.softmax import softmax


def inputs(queries: int, positions: int, heads: int, key_heads: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = (queries, heads, size), (positions, key_heads, size), (positions, key_heads, size)
    q_TNH, k_SKH, v_SKH = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return {"q_TNH": q_TNH, "k_SKH": k_SKH, "v_SKH": v_SKH}


def test_online_softmax_agrees_with_the_softmax_op() -> None:
    """Guards against two different softmaxes: values that are unit vectors show A itself."""
    size = 160  # three cache blocks, so that the running maximum changes between them
    arrays = inputs(size, size, 1, 1, size)
    arrays["v_SKH"] = np.eye(size, dtype=np.float32)[:, None, :]
    a_TS = attention(**arrays, scale=0.5)[:, 0]
    scores_TS = 0.5 * arrays["q_TNH"][:, 0].astype(np.float64) @ arrays["k_SKH"][:, 0].T.astype(np.float64)
    scores_TS[np.triu_indices(size, 1)] = -np.inf
    np.testing.assert_allclose(a_TS, softmax(scores_TS.astype(np.float32)), rtol=2e-5, atol=1e-7)
    assert np.array_equal(a_TS == 0, np.triu(np.ones((size, size), bool), 1))


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8"])
@pytest.mark.parametrize("window", [0, 70])
def test_a_query_does_not_depend_on_its_neighbours_or_segments(kv_type: str, window: int) -> None:
    """Guards against a tile, a chunk or the split by segments changing a sum's order: every path has the same bits."""
    arrays = inputs(21, 1100, 6, 2, 48)
    options = {"scale": 48**-0.5, "window": window, "kv_type": kv_type}
    together = attention(**arrays, **options)
    assert np.isfinite(together).all()
    assert np.array_equal(attention(**arrays, **options, by_segment=True), together)
    for t in (0, 1, 5, 20):
        seen = 1100 - 21 + t + 1
        alone = {"q_TNH": arrays["q_TNH"][t : t + 1], "k_SKH": arrays["k_SKH"][:seen], "v_SKH": arrays["v_SKH"][:seen]}
        assert np.array_equal(attention(**alone, **options)[0], together[t])
        assert np.array_equal(attention(**alone, **options, by_segment=True)[0], together[t])


def test_what_lies_beyond_a_query_is_not_read() -> None:
    """Guards against 0 times NaN: keys and values of later positions, whatever they hold, leave a query alone."""
    arrays = inputs(2, 130, 2, 1, 32)
    clean = attention(**arrays, scale=0.2)
    for name in ("k_SKH", "v_SKH"):
        arrays[name][-1] = np.nan
    assert np.array_equal(attention(**arrays, scale=0.2)[0], clean[0])
