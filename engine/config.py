"""config.json -> ModelConfig: everything the forward pass needs to know of a model besides its weights.

The fields bear config.json's own words. What differs from layer to layer stands in LayerConfig, one a layer, so that an
architecture is data; which words an architecture uses for them stands in architectures.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfm.engine.quantized.mlx import Quantization

Norm = Literal["rms", "layer", "none"]
Position = Literal["rope", "learned", "none"]
HiddenAct = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: pair i of a head turns by position * inv_freq[i], and is scaled by attention_factor.

    The pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) when interleaved. Any scaling is in inv_freq already.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    interleaved: bool = False
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """One block. intermediate_size 0 means no MLP, sliding_window 0 and attn_logit_softcapping 0 mean none.

    The MLP is down(act(gate(x)) * up(x)) when gated, else down(act(up(x))).
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    norm: Norm
    norm_eps: float
    rope: RopeConfig | None
    sliding_window: int
    attn_logit_softcapping: float
    attention_scale: float
    hidden_act: HiddenAct
    gated: bool
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A model. vocab_size is the rows of the embedding; quantization says which matrices are stored in few bits."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    position: Position
    final_norm: Norm
    final_norm_eps: float
    layers: tuple[LayerConfig, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    unembed_bias: bool = False
    quantization: Quantization | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)


def read_config(folder: Path) -> ModelConfig:
    """The model in folder, from its config.json. Raises TfmError naming the field that is missing or not supported."""
    raise NotImplementedError
