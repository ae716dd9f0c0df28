"""A model folder -> the weights of a textbook transformer in float64, read without the engine.

Rows of the residual stream are multiplied from the left, x W, so a checkpoint's [out, in] matrices are turned. A map
that reads has its bias as a last row, and reads a stream with a last column of ones: [x, 1] W = x W + b. The row is
zero where there is no bias.

Shapes: C context, D hidden, E = D + 1, F feed-forward, V vocabulary, P positions, H head size.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Head:
    """W_Q, W_K, W_V [E, H] read the stream, W_O [H, D] writes to it. Heads may have W_K and W_V in common."""

    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array

    @property
    def size(self) -> int:
        return self.W_O.shape[0]

    @property
    def Y(self) -> Array:
        """Which stream looks at which: the QK circuit W_Q W_K^T / sqrt(head size), [E, E]."""
        return self.W_Q @ self.W_K.T / np.sqrt(self.size)

    @property
    def S(self) -> Array:
        """What is written for what is seen: the OV circuit W_V W_O, [E, D], of no higher rank than the head's size."""
        return self.W_V @ self.W_O


@dataclass(frozen=True)
class Norm:
    """kind is rms, layer or none; weight and bias [D]."""

    kind: str
    eps: float
    weight: Array | None
    bias: Array | None


@dataclass(frozen=True)
class Mlp:
    """up and gate [E, F] (gate None: there is none), down [F + 1, D]; act is silu, gelu, gelu_tanh or relu."""

    act: str
    gate: Array | None
    up: Array
    down: Array


@dataclass(frozen=True)
class Block:
    """heads_bias [D] is what the output projection adds once, whatever the heads say."""

    attn_norm: Norm
    heads: tuple[Head, ...]
    heads_bias: Array
    mlp_norm: Norm
    mlp: Mlp | None


@dataclass(frozen=True)
class Model:
    """embed [V, D], position [P, D] or None, unembed [E, V], turns [H / 2] (radians a position) or None."""

    embed: Array
    position: Array | None
    turns: Array | None
    blocks: tuple[Block, ...]
    norm: Norm
    unembed: Array


def read_model(folder: Path) -> Model:
    """The model in a checkpoint folder: llama, gpt2 or tfm_plain, in floats or MLX affine."""
    config = json.loads((folder / "config.json").read_text())
    tensors = read_tensors(folder)
    if config["model_type"] == "llama":
        config, tensors = _plain_from_llama(config, tensors)
    if config["model_type"] == "gpt2":
        config, tensors = _plain_from_gpt2(config, tensors)
    return _model({word: value for word, value in config.items() if value is not None}, tensors)


# ---------------------------------------------------------------------------------------------- tensors


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of all *.safetensors in folder, float64; what is quantised as the NAME.weight that it stands for."""
    stored: dict[str, npt.NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, last = (begin + offset for offset in entry["data_offsets"])
                array = np.frombuffer(data[first:last], DTYPES[entry["dtype"]])
                stored[name] = array.reshape(entry["shape"])
    quantization = json.loads((folder / "config.json").read_text()).get("quantization") or {}
    tensors = {}
    for name, array in stored.items():
        module, _, kind = name.rpartition(".")
        if array.dtype == np.uint32:
            bits = {**quantization, **(quantization.get(module) or {})}["bits"]
            tensors[name] = _dequantized(array, stored[f"{module}.scales"], stored[f"{module}.biases"], bits)
        elif kind in ("weight", "bias"):
            tensors[name] = _float64(array)
    return tensors


DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}


def _float64(array: npt.NDArray[Any]) -> Array:
    """uint16 is bfloat16, the upper half of a float32."""
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _dequantized(words: npt.NDArray[Any], scales: npt.NDArray[Any], biases: npt.NDArray[Any], bits: int) -> Array:
    """w = code * scale + bias; a word holds 32 / bits codes, the first in its lowest bits."""
    codes = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32(2**bits - 1)
    groups = codes.reshape(*scales.shape, -1)
    return (groups * _float64(scales)[..., None] + _float64(biases)[..., None]).reshape(len(words), -1)


# ---------------------------------------------------------------------------------------------- architectures

LLAMA_NAMES = {
    "model.layers.": "blocks.", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm",
    "self_attn.": "attn.", "_proj": "", "model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "unembed",
}  # fmt: skip
GPT2_NAMES = {
    "h.": "blocks.", "ln_1": "attn_norm", "ln_2": "mlp_norm", "attn.c_proj": "attn.o", "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down", "wte": "embed", "wpe": "position", "ln_f": "norm", "lm_head": "unembed",
}  # fmt: skip


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _plain_from_llama(config: Config, tensors: Mapping[str, Array]) -> tuple[Config, dict[str, Array]]:
    """The same model in the words of tfm_plain."""
    plain = {**config, "norm": "rms", "norm_eps": config["rms_norm_eps"], "position": "rope", "gated": True}
    return plain, {_renamed(name, LLAMA_NAMES): tensor for name, tensor in tensors.items()}


def _plain_from_gpt2(config: Config, tensors: Mapping[str, Array]) -> tuple[Config, dict[str, Array]]:
    """The same. The hub's gpt2 has its matrices [in, out], MLX's (`model.`) has them [out, in]."""
    plain = {
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "norm": "layer",
        "norm_eps": config["layer_norm_epsilon"],
        "position": "learned",
        "hidden_act": config["activation_function"],
    }
    renamed: dict[str, Array] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("transformer.").removeprefix("model.")
        turned = ".c_" in own and not name.startswith("model.")
        tensor = tensor.T if turned else tensor
        if ".c_attn." in own:
            for letter, part in zip("qkv", np.split(tensor, 3), strict=True):
                renamed[_renamed(own, GPT2_NAMES).replace("c_attn", letter)] = part
        else:
            renamed[_renamed(own, GPT2_NAMES)] = tensor
    return plain, renamed


def _model(config: Config, tensors: Mapping[str, Array]) -> Model:
    def norm(module: str) -> Norm:
        weight, bias = tensors.get(f"{module}.weight"), tensors.get(f"{module}.bias")
        return Norm(config["norm"], config.get("norm_eps", 1e-5), weight, bias)

    embed = tensors["embed.weight"]
    unembed = tensors.get("unembed.weight", embed)
    return Model(
        embed=embed,
        position=tensors.get("position.weight"),
        turns=_turns(config) if config["position"] == "rope" else None,
        blocks=tuple(
            Block(
                attn_norm=norm(f"blocks.{i}.attn_norm"),
                heads=_heads(config, tensors, f"blocks.{i}.attn"),
                heads_bias=tensors.get(f"blocks.{i}.attn.o.bias", np.zeros(embed.shape[1])),
                mlp_norm=norm(f"blocks.{i}.mlp_norm"),
                mlp=_mlp(config, tensors, f"blocks.{i}.mlp"),
            )
            for i in range(config["num_hidden_layers"])
        ),
        norm=norm("norm"),
        unembed=_reading(unembed, tensors.get("unembed.bias")),
    )


def _reading(weight: Array, bias: Array | None) -> Array:
    """[out, in] and a bias as one map [in + 1, out]."""
    return np.vstack([weight.T, np.zeros(len(weight)) if bias is None else bias])


def _heads(config: Config, tensors: Mapping[str, Array], module: str) -> tuple[Head, ...]:
    """Head n has the n-th share of q and of o; neighbours may have a share of k and v in common."""
    N = config["num_attention_heads"]
    K = config.get("num_key_value_heads", N)

    def shares(name: str, count: int) -> list[Array]:
        whole = _reading(tensors[f"{module}.{name}.weight"], tensors.get(f"{module}.{name}.bias"))
        return np.split(whole, count, axis=1)

    q, k, v = shares("q", N), shares("k", K), shares("v", K)
    o = np.split(tensors[f"{module}.o.weight"].T, N)
    return tuple(Head(q[n], k[n * K // N], v[n * K // N], o[n]) for n in range(N))


def _mlp(config: Config, tensors: Mapping[str, Array], module: str) -> Mlp | None:
    def reading(name: str) -> Array:
        return _reading(tensors[f"{module}.{name}.weight"], tensors.get(f"{module}.{name}.bias"))

    if f"{module}.up.weight" not in tensors:
        return None
    gate = reading("gate") if f"{module}.gate.weight" in tensors else None
    return Mlp(ACTIVATIONS[config["hidden_act"]], gate, reading("up"), reading("down"))


ACTIVATIONS = {
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _turns(config: Config) -> Array:
    """Radians a position: theta^(-2i / H), slowed down as `rope_parameters` or `rope_scaling` say."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    H = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    turns = theta ** (-np.arange(0, H, 2) / H)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        turns = turns / rope["factor"]
    if kind == "llama3":
        # Pairs that turn often within the first context stay, those that hardly turn are slowed, in between it fades.
        rounds = rope["original_max_position_embeddings"] * turns / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = np.clip((rounds - low) / (high - low), 0, 1)
        turns = kept * turns + (1 - kept) * turns / rope["factor"]
    return turns
