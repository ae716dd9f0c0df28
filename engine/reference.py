"""A whole model in NumPy float64, as the textbook writes it: what `tfm check` holds the compiled forward pass against.

    x = embed[ids] (+ position)
    x = x + heads(norm(x))      sum over the heads of A v W_O, A = softmax(scale q k^T) up to each query's own position
    x = x + mlp(norm(x))        act(x W_up) W_down, or (act(x W_gate) * x W_up) W_down
    logits = norm(x) W_U

No kernel takes part. Weights are made float64 a part of a matrix at a time, so that memory stays small. Slow, and meant
to be read.

Shapes: T tokens, D hidden, V vocabulary, N query heads, K key heads, H head size, M inputs, O outputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import erf

import numpy as np
import numpy.typing as npt

from tfm.engine.config import LayerConfig, ModelConfig, RopeConfig
from tfm.engine.matrix import Matrix
from tfm.engine.weights import LayerWeights, Vector, Weights

Array = npt.NDArray[np.float64]
Observe = Callable[[int | None, str, Array], object]
"""Called as observe(layer, part, values), in the order of the pass; layer is None outside of the layers."""

PART_SIZE = 2**24  # elements of a matrix that are float64 at the same time


def reference_logits(
    config: ModelConfig, weights: Weights, ids: Sequence[int], observe: Observe = lambda layer, part, values: None
) -> Array:
    """[T, V]: the logits after each of ids.

    observe is told the keys and the values of each layer before they are used, and may round them in place; and the
    stream after "embedding", "heads" and "MLP".
    """
    x_TD = weights.embed_tokens.part(list(ids)).dequantize(np.float64)
    if weights.position_embeddings is not None:
        x_TD = x_TD + weights.position_embeddings[: len(ids)]
    observe(None, "embedding", x_TD)
    for i, (layer, tensors) in enumerate(zip(config.layers, weights.layers, strict=True)):
        reads = normalized(layer.norm, x_TD, tensors.attn_norm, tensors.attn_norm_bias, layer.norm_eps)
        x_TD = x_TD + heads(layer, tensors, reads, partial(observe, i))
        observe(i, "heads", x_TD)
        if layer.intermediate_size:
            reads = normalized(layer.norm, x_TD, tensors.mlp_norm, tensors.mlp_norm_bias, layer.norm_eps)
            x_TD = x_TD + mlp(layer, tensors, reads)
            observe(i, "MLP", x_TD)
    x_TD = normalized(config.final_norm, x_TD, weights.norm, weights.norm_bias, config.final_norm_eps)
    logits_TV = linear(x_TD, weights.lm_head or weights.embed_tokens, weights.lm_head_bias)
    observe(None, "unembedding", logits_TV)
    return logits_TV


def heads(layer: LayerConfig, tensors: LayerWeights, x_TD: Array, observe: Callable[[str, Array], object]) -> Array:
    """What all heads write to the stream [T, D]; N / K neighbours have their keys and values in common."""
    T, N, K, H = len(x_TD), layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    q_NTH = linear(x_TD, tensors.q_proj, tensors.q_bias).reshape(T, N, H).swapaxes(0, 1)
    k_KTH = linear(x_TD, tensors.k_proj, tensors.k_bias).reshape(T, K, H).swapaxes(0, 1)
    v_KTH = linear(x_TD, tensors.v_proj, tensors.v_bias).reshape(T, K, H).swapaxes(0, 1)
    if layer.rope is not None:
        q_NTH, k_KTH = turned(q_NTH, layer.rope), turned(k_KTH, layer.rope)
    observe("keys", k_KTH)
    observe("values", v_KTH)
    scores_NTT = q_NTH @ np.repeat(k_KTH, N // K, axis=0).swapaxes(1, 2) * layer.attention_scale
    if layer.attn_logit_softcapping:
        scores_NTT = layer.attn_logit_softcapping * np.tanh(scores_NTT / layer.attn_logit_softcapping)
    distance_TT = np.arange(T)[:, None] - np.arange(T)
    seen_TT = (distance_TT >= 0) & (distance_TT < (layer.sliding_window or T))
    A_NTT = softmax(np.where(seen_TT, scores_NTT, -np.inf))
    read_NTH = A_NTT @ np.repeat(v_KTH, N // K, axis=0)
    return linear(read_NTH.swapaxes(0, 1).reshape(T, N * H), tensors.o_proj, tensors.o_bias)


def turned(v_NTH: Array, rope: RopeConfig) -> Array:
    """Each vector with its pairs turned by position * inv_freq; dimensions from rotary_dim on stay."""
    R, end = rope.rotary_dim // 2, rope.rotary_dim
    angle_TR = np.arange(v_NTH.shape[1])[:, None] * np.array(rope.inv_freq)
    cos, sin = rope.attention_factor * np.cos(angle_TR), rope.attention_factor * np.sin(angle_TR)
    first, second = (slice(0, end, 2), slice(1, end, 2)) if rope.interleaved else (slice(R), slice(R, end))
    out, a, b = v_NTH.copy(), v_NTH[..., first], v_NTH[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def mlp(layer: LayerConfig, tensors: LayerWeights, x_TD: Array) -> Array:
    """What the MLP writes to the stream [T, D]."""
    assert tensors.up_proj is not None
    assert tensors.down_proj is not None
    act = ACTIVATIONS[layer.hidden_act]
    up = linear(x_TD, tensors.up_proj, tensors.up_bias)
    inner = act(up) if tensors.gate_proj is None else act(linear(x_TD, tensors.gate_proj, tensors.gate_bias)) * up
    return linear(inner, tensors.down_proj, tensors.down_bias)


def linear(x_TM: Array, matrix: Matrix, bias: Vector | None) -> Array:
    """x W + b, [T, O]."""
    size = max(1, PART_SIZE // matrix.columns)
    parts = (matrix.part(slice(begin, begin + size)) for begin in range(0, matrix.rows, size))
    y_TO = np.concatenate([x_TM @ part.dequantize(np.float64).T for part in parts], axis=1)
    return y_TO if bias is None else y_TO + bias


def normalized(kind: str, x_TD: Array, weight: Vector | None, bias: Vector | None, eps: float) -> Array:
    """RMS norm x / rms(x) * weight, layer norm (x - mean) / std(x) * weight + bias, or x itself."""
    if kind == "none":
        return x_TD
    assert weight is not None
    if kind == "layer":
        x_TD = x_TD - x_TD.mean(-1, keepdims=True)
    x_TD = x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + eps) * weight
    return x_TD if bias is None else x_TD + bias


def softmax(scores: Array) -> Array:
    """Of each row."""
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z * (1 + np.vectorize(erf, otypes=[np.float64])(z / np.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) / 2,
    "relu": lambda z: np.maximum(z, 0),
}
