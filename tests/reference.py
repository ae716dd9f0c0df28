"""A transformer in plain NumPy float64, as the textbook writes it. Slow, and meant to be read.

The residual stream x [C, D] has a row for every token of the context. Every block adds to it twice, and the logits are
read off it:

    x = embed[ids] (+ position)
    x = x + H(x)            H(x) = sum over the heads of A(x) x S
    x = x + MLP(x)
    logits = x W_U

A head looks with A = softmax(x Y x^T) over the positions up to each query's own, where Y = W_Q W_K^T / sqrt(head size),
and writes what it sees with S = W_V W_O. A norm, where there is one, stands between the stream and whatever reads it.

Shapes: C context, D hidden, E = D + 1 (a column of ones carries the biases), F feed-forward, V vocabulary, H head size.
"""

from collections.abc import Sequence
from math import erf
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference_weights import Array, Block, Head, Mlp, Model, Norm, read_model


def reference_logits(folder: Path, ids: Sequence[int]) -> Array:
    """[C, V]: the logits after each of ids, under the model in folder."""
    return logits(read_model(folder), ids)


def error(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """The largest difference of two models' logits, as a share of the spread of the expected ones."""
    return float(np.abs(found - expected).max() / (expected.max() - expected.min()))


def logits(model: Model, ids: Sequence[int]) -> Array:
    """[C, V]."""
    x = model.embed[list(ids)]
    if model.position is not None:
        x = x + model.position[: len(x)]
    for block in model.blocks:
        x = x + heads(block, normalized(block.attn_norm, x), model.turns)
        if block.mlp is not None:
            x = x + mlp(block.mlp, normalized(block.mlp_norm, x))
    return with_ones(normalized(model.norm, x)) @ model.unembed


def heads(block: Block, x: Array, turns: Array | None = None) -> Array:
    """H(x) [C, D], the sum over the heads of A(x) x S."""
    x = with_ones(x)
    return sum(attention(head, x, turns) @ x @ head.S for head in block.heads) + block.heads_bias


def attention(head: Head, x: Array, turns: Array | None = None, window: int = 0, softcap: float = 0.0) -> Array:
    """A(x) [C, C]: a row for each query, of weights on the keys that it sees; x is [C, E].

    turns makes Y depend on the distance of query and key: x_q W_Q R(q - k) W_K^T x_k^T. window hides keys that are so
    many positions or more before the query; softcap bounds the scores, softcap * tanh(score / softcap).
    """
    if turns is None:
        scores = x @ head.Y @ x.T
    else:
        scores = turned(x @ head.W_Q, turns) @ turned(x @ head.W_K, turns).T / np.sqrt(head.size)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    distance = np.arange(len(x))[:, None] - np.arange(len(x))
    seen = (distance >= 0) & (distance < window if window else True)
    return softmax(np.where(seen, scores, -np.inf))


def turned(v: Array, turns: Array) -> Array:
    """R(position) v for every row of v [C, H]: the pair (i, i + H / 2) turned by position * turns[i]."""
    angle = np.arange(len(v))[:, None] * turns
    first, second = np.split(v, 2, axis=1)
    return np.hstack([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)])


def mlp(weights: Mlp, x: Array) -> Array:
    """MLP(x) [C, D] = act(x W_up) W_down, or (act(x W_gate) * x W_up) W_down."""
    x = with_ones(x)
    act = ACTIVATIONS[weights.act]
    hidden = act(x @ weights.up) if weights.gate is None else act(x @ weights.gate) * (x @ weights.up)
    return with_ones(hidden) @ weights.down


def normalized(norm: Norm, x: Array) -> Array:
    """RMS norm x / rms(x) * weight, layer norm (x - mean) / std(x) * weight + bias, or x itself."""
    if norm.kind == "none":
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * norm.weight
    return x if norm.bias is None else x + norm.bias


def softmax(scores: Array) -> Array:
    """Of each row."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def with_ones(x: Array) -> Array:
    """[x, 1], the stream as maps with a bias read it."""
    return np.hstack([x, np.ones((len(x), 1))])


ACTIVATIONS = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * (1 + np.vectorize(erf)(z / np.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2,
    "relu": lambda z: np.maximum(z, 0),
}
