"""model_type -> how an architecture differs: its words in config.json, and the names of its tensors. One entry each.

The words on the left of `names`, `fixed` and `defaults` are those of tfm_plain, which says everything in config.json;
config.py reads an architecture by translating its fields into them. The words on the left of `modules` are the fields
of Weights and LayerWeights (weights.py); a module NAME has a tensor NAME.weight and, where there are biases, NAME.bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PLAIN_WORDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "norm", "norm_eps", "position", "rope_theta", "rope_scaling",
    "rope_parameters", "attention_bias", "mlp_bias", "hidden_act", "gated", "tie_word_embeddings", "unembed_bias",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
"""Every word that config.py asks for."""

OTHER_WORDS = (
    "model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "pad_token_id",
    "quantization", "quantization_config",
)  # fmt: skip
"""Words that may stand in any config.json."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "partial_rotary_factor": (1,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rotary_pct": (1,),
    "sliding_window": (),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Fields that change the arithmetic without a tensor that shows it, and the values (besides null) that do not."""


@dataclass(frozen=True)
class Architecture:
    """What is special about a model_type.

    names      our word -> config.json's, where they differ
    fixed      our word -> its value, whatever config.json says: no choice in this architecture (None: absent)
    defaults   our word -> its value where config.json says nothing
    intermediate_per_hidden   intermediate_size / hidden_size where config.json says nothing; 0 allows models without
               MLP; None means that it must be there
    only       fields of config.json -> the values (besides null) with which the model can be run
    strict     whether a field of config.json that nobody reads is refused
    prefixes   what may stand for {p} in the names of modules -> whether matrices in the layers are stored [in, out]
    modules    field -> module, {i} being the layer. Fields that share a module lie stacked in one tensor, in this order
    ignored    tensors that may be there and are not needed
    """

    modules: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    intermediate_per_hidden: int | None = None
    only: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: NEUTRAL)
    strict: bool = False
    prefixes: Mapping[str, bool] = field(default_factory=lambda: {"": False})
    ignored: tuple[str, ...] = ()


LLAMA = Architecture(
    names={"norm_eps": "rms_norm_eps"},
    fixed={"norm": "rms", "position": "rope", "gated": True, "unembed_bias": False},
    defaults={
        "max_position_embeddings": 2048,
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    prefixes={"model.": False},
    modules={
        "embed_tokens": "{p}embed_tokens",
        "attn_norm": "{p}layers.{i}.input_layernorm",
        "q_proj": "{p}layers.{i}.self_attn.q_proj",
        "k_proj": "{p}layers.{i}.self_attn.k_proj",
        "v_proj": "{p}layers.{i}.self_attn.v_proj",
        "o_proj": "{p}layers.{i}.self_attn.o_proj",
        "mlp_norm": "{p}layers.{i}.post_attention_layernorm",
        "gate_proj": "{p}layers.{i}.mlp.gate_proj",
        "up_proj": "{p}layers.{i}.mlp.up_proj",
        "down_proj": "{p}layers.{i}.mlp.down_proj",
        "norm": "{p}norm",
        "lm_head": "lm_head",
    },
    ignored=("{p}layers.{i}.self_attn.rotary_emb.inv_freq",),
)

GPT2 = Architecture(
    names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    fixed={
        "norm": "layer",
        "position": "learned",
        "gated": False,
        "attention_bias": True,
        "mlp_bias": True,
        "unembed_bias": False,
        "num_key_value_heads": None,
        "head_dim": None,
    },
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    intermediate_per_hidden=4,
    only={
        **NEUTRAL,
        "add_cross_attention": (False,),
        "reorder_and_upcast_attn": (False,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    },
    # The hub's own files keep matrices [in, out] (Conv1D); MLX, which writes model., turns them.
    prefixes={"transformer.": True, "": True, "model.": False},
    modules={
        "embed_tokens": "{p}wte",
        "position_embeddings": "{p}wpe",
        "attn_norm": "{p}h.{i}.ln_1",
        "q_proj": "{p}h.{i}.attn.c_attn",
        "k_proj": "{p}h.{i}.attn.c_attn",
        "v_proj": "{p}h.{i}.attn.c_attn",
        "o_proj": "{p}h.{i}.attn.c_proj",
        "mlp_norm": "{p}h.{i}.ln_2",
        "up_proj": "{p}h.{i}.mlp.c_fc",
        "down_proj": "{p}h.{i}.mlp.c_proj",
        "norm": "{p}ln_f",
        "lm_head": "lm_head",
    },
    ignored=("{p}h.{i}.attn.bias", "{p}h.{i}.attn.masked_bias"),
)

TFM_PLAIN = Architecture(
    defaults={
        "norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "gated": False,
        "unembed_bias": False,
        "tie_word_embeddings": False,
    },
    intermediate_per_hidden=0,
    only={},
    strict=True,
    modules={
        "embed_tokens": "embed",
        "position_embeddings": "position",
        "attn_norm": "blocks.{i}.attn_norm",
        "q_proj": "blocks.{i}.attn.q",
        "k_proj": "blocks.{i}.attn.k",
        "v_proj": "blocks.{i}.attn.v",
        "o_proj": "blocks.{i}.attn.o",
        "mlp_norm": "blocks.{i}.mlp_norm",
        "gate_proj": "blocks.{i}.mlp.gate",
        "up_proj": "blocks.{i}.mlp.up",
        "down_proj": "blocks.{i}.mlp.down",
        "norm": "norm",
        "lm_head": "unembed",
    },
)

ARCHITECTURES: Mapping[str, Architecture] = {"llama": LLAMA, "gpt2": GPT2, "tfm_plain": TFM_PLAIN}
