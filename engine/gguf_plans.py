"""Which checkpoint a GGUF file becomes: for each architecture its config.json, and which tensor goes where.

A llama stays a llama for anyone who reads Hugging Face folders. A gpt2 becomes a tfm_plain: the hub's gpt2 keeps its
matrices transposed, and blocks lie along a row; tfm_plain says the same model with rows.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tfm.engine.errors import TfmError
from tfm.engine.gguf_file import GgufFile
from tfm.engine.gguf_tokenizer import eos_token_ids

Rows = slice | npt.NDArray[np.intp] | None


@dataclass(frozen=True)
class Move:
    """One checkpoint tensor and where it comes from. shape is the checkpoint tensor's: [N, K], or [N] for a vector.

    rows are those of the source, in the target's order (None: all as they lie); source_rows says how many it has when
    that differs. A matrix is quantised when its source is; a table is stored as floats in any case.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    rows: Rows = None
    source_rows: int | None = None
    table: bool = False

    def take(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return data if self.rows is None else data[self.rows]


@dataclass(frozen=True)
class Plan:
    """What a GGUF file becomes: config.json without `quantization`, and the moves that make its tensors."""

    config: dict[str, Any]
    moves: list[Move]


def token_ids(file: GgufFile) -> dict[str, Any]:
    """The ids that config.json and generation_config.json both name."""
    ids: dict[str, Any] = {}
    if file.has("tokenizer.ggml.bos_token_id"):
        ids["bos_token_id"] = file.integer("tokenizer.ggml.bos_token_id")
    eos = eos_token_ids(file)
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return ids


def plan_of(file: GgufFile) -> Plan:
    """The plan of this file's architecture. Raises TfmError for fields that tfm cannot follow."""
    plans: dict[str, Callable[[GgufFile], Plan]] = {"llama": _plan_llama, "gpt2": _plan_gpt2}
    if file.integer("split.count", 1) > 1:
        raise TfmError(f"{file.path}: field split.count", file.integer("split.count"), "1", "merge the parts first")
    name = file.text("general.architecture")
    if name not in plans:
        raise TfmError(f"{file.path}: field general.architecture", repr(name), ", ".join(plans))
    return plans[name](file)


def _refuse_unknown_fields(file: GgufFile, architecture: str, known: set[str]) -> None:
    """A field nobody reads may change the arithmetic."""
    for name in file.names():
        if name.startswith(f"{architecture}.") and name.removeprefix(f"{architecture}.") not in known:
            raise TfmError(f"{file.path}: field {name}", "a field that tfm does not know", ", ".join(sorted(known)))


def shape_of(file: GgufFile, tensor: str) -> tuple[int, ...]:
    """A tensor's shape, rows first; raises TfmError when it is not there."""
    if tensor not in file.tensors:
        raise TfmError(f"{file.path}: tensor {tensor}", "nothing", "it must be there")
    return tuple(int(size) for size in reversed(file.tensors[tensor].shape.tolist()))


def _has_biases(file: GgufFile, layers: int, names: tuple[str, ...]) -> bool:
    """Whether these modules have biases: all of them in every layer or none anywhere (the moves check the former)."""
    return any(f"blk.{layer}.{name}.bias" in file.tensors for layer in range(layers) for name in names)


def _has_own_output(file: GgufFile) -> bool:
    """Whether output.weight is there and not the embedding once more."""
    output, embedding = file.tensors.get("output.weight"), file.tensors.get("token_embd.weight")
    if output is None or embedding is None:
        return output is not None
    is_alike = output.tensor_type == embedding.tensor_type
    return not is_alike or not np.array_equal(file.data(output.name), file.data(embedding.name))


def unpermuted_rows(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """For each row of a Hugging Face q or k projection, where GGUF's llama keeps it.

    GGUF turns pairs of neighbours (2i, 2i + 1) of a head; Hugging Face turns the halves (i, i + head_dim / 2).
    """
    order = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


LLAMA_FIELDS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "expert_count", "expert_used_count",
}  # fmt: skip


def _plan_llama(file: GgufFile) -> Plan:
    _refuse_unknown_fields(file, "llama", LLAMA_FIELDS)
    layers, hidden = file.size("llama.block_count"), file.size("llama.embedding_length")
    heads = file.size("llama.attention.head_count")
    kv_heads = file.size("llama.attention.head_count_kv", heads)
    head_dim = file.size("llama.attention.key_length", hidden // heads)
    if head_dim % 2:
        raise TfmError(f"{file.path}: field llama.attention.key_length", head_dim, "an even number")
    inner = file.size("llama.feed_forward_length")
    for field, needed in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("expert_count", 0),
        ("expert_used_count", 0),
    ):
        if file.integer(f"llama.{field}", needed) != needed:
            raise TfmError(f"{file.path}: field llama.{field}", file.integer(f"llama.{field}"), needed)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape_of(file, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": _has_biases(file, layers, ("attn_q", "attn_k", "attn_v", "attn_output")),
        "mlp_bias": _has_biases(file, layers, ("ffn_gate", "ffn_up", "ffn_down")),
        "max_position_embeddings": file.size("llama.context_length"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": not _has_own_output(file),
        **token_ids(file),
    }
    return Plan(config, list(_llama_moves(config)))


def _llama_moves(config: dict[str, Any]) -> Iterator[Move]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    query, key_value = heads * head_dim, kv_heads * head_dim
    vocabulary = (config["vocab_size"], hidden)
    yield Move("token_embd.weight", "model.embed_tokens.weight", vocabulary)
    yield Move("output_norm.weight", "model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield Move("output.weight", "lm_head.weight", vocabulary)
    modules: list[tuple[str, str, tuple[int, int], Rows]] = [
        ("attn_q", "self_attn.q_proj", (query, hidden), unpermuted_rows(heads, head_dim)),
        ("attn_k", "self_attn.k_proj", (key_value, hidden), unpermuted_rows(kv_heads, head_dim)),
        ("attn_v", "self_attn.v_proj", (key_value, hidden), None),
        ("attn_output", "self_attn.o_proj", (hidden, query), None),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), None),
        ("ffn_up", "mlp.up_proj", (inner, hidden), None),
        ("ffn_down", "mlp.down_proj", (hidden, inner), None),
    ]
    for layer in range(config["num_hidden_layers"]):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        yield Move(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", (hidden,))
        yield Move(f"{here}.ffn_norm.weight", f"{there}.post_attention_layernorm.weight", (hidden,))
        for source, target, shape, rows in modules:
            yield Move(f"{here}.{source}.weight", f"{there}.{target}.weight", shape, rows)
            if config["attention_bias" if source.startswith("attn") else "mlp_bias"]:
                yield Move(f"{here}.{source}.bias", f"{there}.{target}.bias", shape[:1], rows)


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    kind = file.text("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors and kind == "none":
        return _llama3_scaling(file, head_dim)
    if kind == "linear" or (kind == "none" and file.number("llama.rope.scale_linear", 1.0) != 1.0):
        factor = file.number("llama.rope.scaling.factor", file.number("llama.rope.scale_linear", 1.0))
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise TfmError(f"{file.path}: field llama.rope.scaling.type", repr(kind), "none, linear")
    if "rope_freqs.weight" in file.tensors:
        raise TfmError(f"{file.path}: tensor rope_freqs.weight", "beside linear scaling", "one of the two")
    return None


def _llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rope parameters behind rope_freqs.weight, which holds how many times slower each pair turns (Llama 3.1).

    The file keeps only the outcome; the parameters that all published models of this kind share are tried against it.
    """
    wanted = np.asarray(file.data("rope_freqs.weight"), np.float32)
    factor, low, high, original = float(wanted.max()), 1.0, 4.0, 8192
    theta = file.number("llama.rope.freq_base", 10000.0)
    turns = original / (2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    found = 1 / ((1 - smooth) / factor + smooth)
    if wanted.shape != found.shape or not np.allclose(wanted, found, rtol=1e-5):
        raise TfmError(f"{file.path}: tensor rope_freqs.weight", "other values", "those of rope type llama3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


GPT2_FIELDS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_epsilon",
}  # fmt: skip


def _plan_gpt2(file: GgufFile) -> Plan:
    _refuse_unknown_fields(file, "gpt2", GPT2_FIELDS)
    layers, hidden = file.size("gpt2.block_count"), file.size("gpt2.embedding_length")
    heads, inner = file.size("gpt2.attention.head_count"), file.size("gpt2.feed_forward_length")
    if file.integer("gpt2.attention.head_count_kv", heads) != heads:
        raise TfmError(f"{file.path}: field gpt2.attention.head_count_kv", "another number", f"{heads}")
    positions = file.size("gpt2.context_length")
    vocab_size = shape_of(file, "token_embd.weight")[0]
    tied = not _has_own_output(file)
    config: dict[str, Any] = {
        "model_type": "tfm_plain",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "max_position_embeddings": positions,
        "norm": "layer",
        "norm_eps": file.number("gpt2.attention.layer_norm_epsilon"),
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_tanh",
        "gated": False,
        "tie_word_embeddings": tied,
        **token_ids(file),
    }
    moves = [
        Move("token_embd.weight", "embed.weight", (vocab_size, hidden)),
        Move("position_embd.weight", "position.weight", (positions, hidden), table=True),
        Move("output_norm.weight", "norm.weight", (hidden,)),
        Move("output_norm.bias", "norm.bias", (hidden,)),
    ]
    if not tied:
        moves.append(Move("output.weight", "unembed.weight", (vocab_size, hidden)))
    for layer in range(layers):
        moves.extend(_gpt2_block(f"blk.{layer}", f"blocks.{layer}", hidden, inner))
    return Plan(config, moves)


def _gpt2_block(here: str, there: str, hidden: int, inner: int) -> Iterator[Move]:
    for source, target in (("attn_norm", "attn_norm"), ("ffn_norm", "mlp_norm")):
        yield Move(f"{here}.{source}.weight", f"{there}.{target}.weight", (hidden,))
        yield Move(f"{here}.{source}.bias", f"{there}.{target}.bias", (hidden,))
    for place, letter in enumerate("qkv"):
        rows = slice(place * hidden, (place + 1) * hidden)
        for kind, shape in (("weight", (hidden, hidden)), ("bias", (hidden,))):
            yield Move(f"{here}.attn_qkv.{kind}", f"{there}.attn.{letter}.{kind}", shape, rows, 3 * hidden)
    for source, target, rows_out, columns in (
        ("attn_output", "attn.o", hidden, hidden),
        ("ffn_up", "mlp.up", inner, hidden),
        ("ffn_down", "mlp.down", hidden, inner),
    ):
        yield Move(f"{here}.{source}.weight", f"{there}.{target}.weight", (rows_out, columns))
        yield Move(f"{here}.{source}.bias", f"{there}.{target}.bias", (rows_out,))
