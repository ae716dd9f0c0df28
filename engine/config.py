"""config.json -> ModelConfig: everything the forward pass needs to know of a model besides its weights.

The fields bear config.json's own words. What differs from layer to layer stands in LayerConfig, one a layer, so that an
architecture is data; which words an architecture uses for them stands in architectures.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfm.engine.architectures import ARCHITECTURES, OTHER_WORDS, PLAIN_WORDS, Architecture
from tfm.engine.errors import TfmError
from tfm.engine.fields import Fields, is_integer, read_json, shown
from tfm.engine.files import is_there, kind_of
from tfm.engine.quantized.mlx import Quantization, read_quantization
from tfm.engine.rope import read_inv_freq

Norm = Literal["rms", "layer", "none"]
Position = Literal["rope", "learned", "none"]
HiddenAct = Literal["silu", "gelu", "gelu_tanh", "relu"]

NORMS: dict[str, Norm] = {"rms": "rms", "layer": "layer", "none": "none"}
POSITIONS: dict[str, Position] = {"rope": "rope", "learned": "learned", "none": "none"}
HIDDEN_ACTS: dict[str, HiddenAct] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

MOST_LAYERS = 10_000
LARGEST_HEAD = 65_536


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
    found = None
    if not folder.is_dir():
        found = kind_of(folder)
    elif not is_there(folder / "config.json"):
        found = "no config.json in it"
    if found is not None:
        do = "name another folder, or download the model again"
        raise TfmError(f"model folder {folder}", found, "a folder with config.json and *.safetensors", do)
    return read_config_file(folder / "config.json")


def read_config_file(path: Path) -> ModelConfig:
    """The model that a file of config.json's kind describes. Raises TfmError as read_config does."""
    raw = Fields(str(path), read_json(path))
    model_type, architecture = raw.choice("model_type", {name: (name, entry) for name, entry in ARCHITECTURES.items()})
    _refuse_unsupported(raw, architecture)
    names = architecture.names
    written = {word: raw.value(names.get(word, word)) for word in PLAIN_WORDS if names.get(word, word) in raw}
    fields = Fields(str(path), {**architecture.defaults, **written, **architecture.fixed}, names)
    layer = _read_layer(fields, architecture)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        position=fields.choice("position", POSITIONS),
        final_norm=layer.norm,
        final_norm_eps=layer.norm_eps,
        layers=(layer,) * fields.integer("num_hidden_layers", most=MOST_LAYERS),
        eos_token_ids=_token_ids(fields, "eos_token_id", vocab_size),
        bos_token_id=fields.integer("bos_token_id", least=0, most=vocab_size - 1) if "bos_token_id" in fields else None,
        unembed_bias=fields.flag("unembed_bias"),
        quantization=read_quantization(raw),
    )


def check_vocabulary(config: ModelConfig, tokenizer_size: int, where: str | Path) -> None:
    """Refuse a tokenizer with ids that the embedding has no row for; where is its file, its ids are below its size."""
    if tokenizer_size > config.vocab_size:
        allowed = f"0 to {config.vocab_size - 1}, the rows of the embedding (vocab_size in config.json)"
        raise TfmError(f"{where}: largest token id", tokenizer_size - 1, allowed, "use the model's own tokenizer")


def _refuse_unsupported(raw: Fields, architecture: Architecture) -> None:
    """Refuse what would change the arithmetic, rather than run another model than the one described."""
    for word in raw.words():
        if word in architecture.only and not any(_same(raw.value(word), value) for value in architecture.only[word]):
            raise raw.fault(word, ", ".join(["null", *map(shown, architecture.only[word])]))
        if architecture.strict and word not in PLAIN_WORDS and word not in OTHER_WORDS:
            raise raw.fault(word, "only fields that tfm knows: " + ", ".join(PLAIN_WORDS))


def _same(found: object, allowed: object) -> bool:
    """Equality of JSON values, where true is not 1."""
    return found == allowed and isinstance(found, bool) == isinstance(allowed, bool)


def _read_layer(fields: Fields, architecture: Architecture) -> LayerConfig:
    """The block that all layers share."""
    hidden_size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    key_value_heads = fields.integer("num_key_value_heads", heads)
    if heads % key_value_heads:
        raise fields.fault("num_key_value_heads", f"a divisor of {fields.name('num_attention_heads')}, {heads}")
    if "head_dim" not in fields and hidden_size % heads:
        raise fields.fault("hidden_size", f"a multiple of {fields.name('num_attention_heads')}, {heads}")
    head_dim = fields.integer("head_dim", hidden_size // heads, most=LARGEST_HEAD)
    per_hidden = architecture.intermediate_per_hidden
    intermediate_size = fields.integer(
        "intermediate_size",
        None if per_hidden is None else per_hidden * hidden_size,
        least=0 if per_hidden == 0 else 1,
    )
    return LayerConfig(
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        norm=fields.choice("norm", NORMS),
        norm_eps=fields.number("norm_eps"),
        rope=_read_rope(fields, head_dim) if fields.choice("position", POSITIONS) == "rope" else None,
        sliding_window=0,
        attn_logit_softcapping=0.0,
        attention_scale=head_dim**-0.5,
        hidden_act=fields.choice("hidden_act", HIDDEN_ACTS, None if intermediate_size else "relu"),
        gated=fields.flag("gated"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    if head_dim % 2:
        word = "head_dim" if "head_dim" in fields else "hidden_size"
        raise fields.fault(word, f"what gives heads of even size, not {head_dim}: rope turns pairs")
    return RopeConfig(rotary_dim=head_dim, inv_freq=read_inv_freq(fields, head_dim))


def _token_ids(fields: Fields, word: str, vocab_size: int) -> tuple[int, ...]:
    """One id, several in a list, or none."""
    if word not in fields:
        return ()
    value = fields.value(word)
    ids = value if isinstance(value, list) else [value]
    if not all(is_integer(id_) and 0 <= id_ < vocab_size for id_ in ids):
        raise fields.fault(word, f"ids from 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(ids))
