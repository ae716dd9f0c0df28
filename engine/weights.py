"""Checkpoint names -> fields: the weights of a model in the places where the forward pass looks for them.

Shapes: D hidden, F feed-forward, P positions, V vocabulary. Every Matrix is [outputs, inputs].
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tfm.engine.matrix import Matrix

__all__ = ["LayerWeights", "Matrix", "Vector", "Weights"]

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerWeights:
    """One block. A part that the model does not have is None; norms and biases are float32 copies."""

    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    gate_proj: Matrix | None = None
    up_proj: Matrix | None = None
    down_proj: Matrix | None = None
    q_bias: Vector | None = None
    k_bias: Vector | None = None
    v_bias: Vector | None = None
    o_bias: Vector | None = None
    gate_bias: Vector | None = None
    up_bias: Vector | None = None
    down_bias: Vector | None = None
    attn_norm: Vector | None = None
    attn_norm_bias: Vector | None = None
    mlp_norm: Vector | None = None
    mlp_norm_bias: Vector | None = None


@dataclass(frozen=True)
class Weights:
    """A whole model. position_embeddings is [P, D]; lm_head None means that embed_tokens unembeds as well."""

    embed_tokens: Matrix
    layers: tuple[LayerWeights, ...]
    position_embeddings: npt.NDArray[np.float32] | None = None
    norm: Vector | None = None
    norm_bias: Vector | None = None
    lm_head: Matrix | None = None
    lm_head_bias: Vector | None = None
