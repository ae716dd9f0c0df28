"""Tiny random checkpoints of every architecture, the same bytes from the same seed on every machine.

They have sizes that are no multiples of anything (40 hidden, heads of 10, 97 tokens) and weights large enough that
attention looks somewhere in particular. Shapes: D hidden, F feed-forward, V vocabulary, P positions, H head size; of a
matrix to be quantised N rows, K columns.
"""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from raw_safetensors import write_tensors

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, npt.NDArray[Any]]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 40,
    "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "rope_theta": 500.0},
    "llama-rope-llama3": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
    "llama-rope-linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-head-dim": {**LLAMA, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 26},
    "llama-tied": {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
}

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 40, "n_layer": 3,
    "n_head": 4, "n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2S: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-inner": {**GPT2, "n_inner": 72, "activation_function": "gelu"},
    "gpt2-untied": {**GPT2, "n_head": 5, "activation_function": "relu", "tie_word_embeddings": False},
}

PLAIN: dict[str, Any] = {
    "model_type": "tfm_plain", "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 56, "max_position_embeddings": 1024, "norm": "layer", "norm_eps": 1e-5, "position": "learned",
    "attention_bias": True, "mlp_bias": True, "hidden_act": "relu", "gated": False, "tie_word_embeddings": False,
    "unembed_bias": True,
}  # fmt: skip
ALONE: dict[str, Any] = {
    **PLAIN, "norm": "none", "position": "none", "intermediate_size": 0, "attention_bias": False, "mlp_bias": False,
    "unembed_bias": False,
}  # fmt: skip
PLAINS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "plain-no-norm": {**PLAIN, "norm": "none"},
    "plain-no-position": {**PLAIN, "position": "none"},
    "plain-no-bias": {**PLAIN, "attention_bias": False, "mlp_bias": False, "unembed_bias": False},
    "plain-no-mlp": {**PLAIN, "intermediate_size": None, "mlp_bias": False},
    "plain-attention-only": ALONE,
    "plain-attention-only-tied": {**ALONE, "tie_word_embeddings": True, "position": "learned", "num_hidden_layers": 2},
    "plain-rope": {**PLAIN, "position": "rope", "rope_theta": 500.0, "norm": "rms", "hidden_act": "gelu"},
    "plain-rope-llama3": {**PLAIN, "position": "rope", "rope_parameters": LLAMA3_ROPE, "attention_bias": False},
    "plain-gated": {**PLAIN, "gated": True, "hidden_act": "silu", "num_key_value_heads": 1, "norm": "rms"},
    "plain-head-dim": {**PLAIN, "head_dim": 7, "num_key_value_heads": 2, "mlp_bias": False},
    "plain-tied-bias": {**PLAIN, "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "gelu_tanh"},
}

# More columns than a kernel sums in one piece, and panels enough for the kernels that take several at once
WIDE: dict[str, dict[str, Any]] = {
    "llama-wide": {**LLAMA, "vocab_size": 331, "hidden_size": 200, "intermediate_size": 290, "num_hidden_layers": 2},
    "gpt2-wide": {**GPT2, "vocab_size": 331, "n_embd": 200, "n_inner": 290, "n_layer": 2},
    "plain-wide": {**PLAIN, "vocab_size": 331, "hidden_size": 200, "intermediate_size": 290, "num_hidden_layers": 2},
}

FLOATS = {**LLAMAS, **GPT2S, **PLAINS, **WIDE}
"""Name -> config.json of models whose sizes suit float formats only."""

# Every matrix has a multiple of 128 columns, the largest group; rows stay odd.
GROUPED: dict[str, dict[str, Any]] = {
    "llama-grouped": {
        **LLAMA, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 48,
    },
    "llama-grouped-tied": {**LLAMA, "hidden_size": 256, "intermediate_size": 128, "tie_word_embeddings": True},
    "gpt2-grouped": {**GPT2, "n_embd": 128, "n_head": 2, "n_inner": 256, "activation_function": "gelu"},
    "plain-grouped": {**PLAIN, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 1},
}  # fmt: skip
"""Name -> config.json of models that can be quantised in groups."""


# ---------------------------------------------------------------------------------------------- names and shapes


def shapes_of(config: Mapping[str, Any], rows_first: bool = False) -> Shapes:
    """All tensors of a model. gpt2's matrices are [in, out] as on the hub; with rows_first [out, in], as in MLX."""
    if config["model_type"] == "gpt2":
        return dict(_gpt2_shapes(config, rows_first))
    return dict({"llama": _llama_shapes, "tfm_plain": _plain_shapes}[config["model_type"]](config))


def _linear(module: str, rows: int, columns: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{module}.weight", (rows, columns)
    if bias:
        yield f"{module}.bias", (rows,)


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of queries, and of keys or values."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return heads * size, (config.get("num_key_value_heads") or heads) * size


def _llama_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = _heads(config)
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    yield from _linear("model.embed_tokens", V, D)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (D,)
        yield from _linear(f"{layer}.self_attn.q_proj", queries, D, attention_bias)
        yield from _linear(f"{layer}.self_attn.k_proj", keys, D, attention_bias)
        yield from _linear(f"{layer}.self_attn.v_proj", keys, D, attention_bias)
        yield from _linear(f"{layer}.self_attn.o_proj", D, queries, attention_bias)
        yield f"{layer}.post_attention_layernorm.weight", (D,)
        yield from _linear(f"{layer}.mlp.gate_proj", F, D, mlp_bias)
        yield from _linear(f"{layer}.mlp.up_proj", F, D, mlp_bias)
        yield from _linear(f"{layer}.mlp.down_proj", D, F, mlp_bias)
    yield "model.norm.weight", (D,)
    if not config["tie_word_embeddings"]:
        yield from _linear("lm_head", V, D)


def _gpt2_shapes(config: Mapping[str, Any], rows_first: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, V, P = config["n_embd"], config["vocab_size"], config["n_positions"]
    F = config.get("n_inner") or 4 * D
    prefix = "model" if rows_first else "transformer"
    yield f"{prefix}.wte.weight", (V, D)
    yield f"{prefix}.wpe.weight", (P, D)
    for i in range(config["n_layer"]):
        layer = f"{prefix}.h.{i}"
        for module, rows, columns in (
            ("attn.c_attn", 3 * D, D), ("attn.c_proj", D, D), ("mlp.c_fc", F, D), ("mlp.c_proj", D, F)
        ):  # fmt: skip
            yield f"{layer}.{module}.weight", (rows, columns) if rows_first else (columns, rows)
            yield f"{layer}.{module}.bias", (rows,)
        for module in ("ln_1", "ln_2"):
            yield f"{layer}.{module}.weight", (D,)
            yield f"{layer}.{module}.bias", (D,)
    yield f"{prefix}.ln_f.weight", (D,)
    yield f"{prefix}.ln_f.bias", (D,)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (V, D)


def _plain_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    D, V, F = config["hidden_size"], config["vocab_size"], config["intermediate_size"] or 0
    queries, keys = _heads(config)
    yield from _linear("embed", V, D)
    if config["position"] == "learned":
        yield "position.weight", (config["max_position_embeddings"], D)
    for i in range(config["num_hidden_layers"]):
        block = f"blocks.{i}"
        yield from _plain_norm(f"{block}.attn_norm", config)
        for name, rows, columns in (("q", queries, D), ("k", keys, D), ("v", keys, D), ("o", D, queries)):
            yield from _linear(f"{block}.attn.{name}", rows, columns, config["attention_bias"])
        if F:
            yield from _plain_norm(f"{block}.mlp_norm", config)
            for name, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
                if name != "gate" or config["gated"]:
                    yield from _linear(f"{block}.mlp.{name}", rows, columns, config["mlp_bias"])
    yield from _plain_norm("norm", config)
    if not config["tie_word_embeddings"]:
        yield from _linear("unembed", V, D)
    if config["unembed_bias"]:
        yield "unembed.bias", (V,)


def _plain_norm(module: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config["norm"] != "none":
        yield f"{module}.weight", (config["hidden_size"],)
    if config["norm"] == "layer":
        yield f"{module}.bias", (config["hidden_size"],)


# ---------------------------------------------------------------------------------------------- values


def uniform(seed: int, label: str, *shape: int) -> npt.NDArray[np.float64]:
    """Values from -1 to 1, of a bit generator's raw words: NumPy keeps their stream, not that of its distributions."""
    words = np.random.PCG64([seed, zlib.crc32(label.encode())]).random_raw(int(np.prod(shape)))
    return ((words >> 11) / 2.0**52 - 1).reshape(shape)


def random_ids(config: Mapping[str, Any], count: int, seed: int = 0) -> list[int]:
    """Token ids, anywhere in the vocabulary."""
    return [int(id_) for id_ in (uniform(seed, "ids", count) + 1) / 2 * config["vocab_size"]]


def random_tensors(shapes: Shapes, seed: int) -> Tensors:
    """Embeddings of variance 1, matrices that keep it or grow it a little, norms about 1, biases that show."""
    tensors: Tensors = {}
    for name, shape in shapes.items():
        own = name.removeprefix("transformer.").removeprefix("model.")
        turned = name.startswith("transformer.") and ".c_" in name and len(shape) == 2
        values = _random_tensor(own, shape[::-1] if turned else shape, seed)
        tensors[name] = np.ascontiguousarray(values.T) if turned else values
    return tensors


READS = ("c_attn.weight", "q_proj.weight", "k_proj.weight", "attn.q.weight", "attn.k.weight")


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Matrices are [out, in]. Those that look get larger values, so that attention is not spread evenly."""
    values = uniform(seed, name, *shape)
    if name.endswith(".bias"):
        values = 0.4 * values
    elif len(shape) == 1:
        values = 1 + 0.4 * values
    elif name in ("wte.weight", "embed.weight", "embed_tokens.weight"):
        values = 3**0.5 * values
    elif name not in ("wpe.weight", "position.weight"):
        values = (1.5 if name.endswith(READS) else 0.8) * (3 / shape[1]) ** 0.5 * values
    return values.astype(np.float32)


def to_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """Rounded to nearest, ties to even; BF16 as its bits in uint16."""
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def from_dtype(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The inverse of to_dtype."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values.astype(np.float32)


def quantize(values: npt.NDArray[np.float32], bits: int, group_size: int, dtype: str) -> Tensors:
    """weight, scales and biases of a matrix [N, K] as MLX keeps it, w = code * scale + bias, over a group's range."""
    rows, columns = values.shape
    groups = values.reshape(rows, columns // group_size, group_size)
    low, high = groups.min(-1), groups.max(-1)
    scales, biases = to_dtype((high - low) / np.float32(2**bits - 1), dtype), to_dtype(low, dtype)
    codes = np.rint((groups - from_dtype(biases)[..., None]) / from_dtype(scales)[..., None])
    codes = np.clip(codes, 0, 2**bits - 1).astype(np.uint8).reshape(rows, columns)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return {"weight": codes.view("<u4"), "scales": scales, "biases": biases}


# ---------------------------------------------------------------------------------------------- files


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    *,
    dtype: str = "F32",
    quantization: Mapping[str, Any] | None = None,
    shards: int = 1,
    seed: int = 0,
) -> Path:
    """A whole model folder, tokenizer included; gives folder back.

    dtype is that of all tensors, F32, F16 or BF16. quantization, as it stands in config.json (bits, group_size, modules
    that differ or are false), has matrices quantised, with scales and biases of dtype. shards > 1 writes so many files
    and an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: Tensors = {}
    for name, values in random_tensors(shapes_of(config, rows_first=quantization is not None), seed).items():
        module, _, kind = name.rpartition(".")
        how = _quantized_as(module, quantization) if kind == "weight" and values.ndim == 2 else None
        if how:
            parts = quantize(values, how["bits"], how["group_size"], dtype)
            tensors |= {f"{module}.{part}": array for part, array in parts.items()}
        else:
            tensors[name] = to_dtype(values, dtype)
    written = {**config, "quantization": quantization} if quantization else dict(config)
    (folder / "config.json").write_text(json.dumps(written, indent=2))
    write_tokenizer(folder, config["vocab_size"])
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        write_tensors(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _quantized_as(module: str, quantization: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if quantization is None or quantization.get(module) is False:
        return None
    how: Mapping[str, Any] = quantization.get(module, quantization)
    return how


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """tokenizer.json: byte-level BPE without merges. Id 0 ends a text; then come printable characters."""
    characters = ["Ċ", "Ġ", *(chr(code) for code in range(33, 127))]
    vocab = {"<|end|>": 0, **{character: 1 + i for i, character in enumerate(characters[: vocab_size - 1])}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<|end|>", **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def digest_of(folder: Path) -> str:
    """sha256 of the weights' file of a model folder: that a recorded result belongs to these very weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
