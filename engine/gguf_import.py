"""A GGUF file made into a checkpoint folder, without loss: the arrays, config.json, the tokenizer.

Each architecture has a plan: which GGUF tensor becomes which checkpoint tensor, with which rows in which order.
Matrices of block types become MLX affine ones (see quantized/gguf_blocks.py), float ones stay as they are. A llama
stays a llama for anyone who reads Hugging Face folders. A gpt2 becomes a tfm_plain: the hub's gpt2 keeps its matrices
transposed, and blocks lie along a row; tfm_plain says the same model with rows.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tfm.engine.checkpoint_writer import PendingTensor, write_safetensors
from tfm.engine.errors import TfmError
from tfm.engine.gguf_file import GgufFile
from tfm.engine.gguf_tokenizer import eos_token_ids, tokenizer_files
from tfm.engine.progress import Progress, silent
from tfm.engine.quantized.gguf_blocks import BLOCK_TYPES, GROUP_SIZE, Blocks

if TYPE_CHECKING:
    from gguf import ReaderTensor

FLOAT_TYPES = ("F32", "F16", "BF16")
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


def import_gguf(gguf: Path, out: Path, progress: Progress = silent) -> None:
    """Write the model in gguf to the new folder out, which appears whole or not at all."""
    progress(f"reading {gguf.name}", 0, None)
    file = GgufFile(gguf)
    plan = _plan(file)
    _check_tensors(file, plan)
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        quantization, tensors = _tensors(file, plan)
        config = plan.config | ({"quantization": quantization} if quantization else {})
        texts = tokenizer_files(file, vocab_size=config["vocab_size"])
        texts["config.json"] = _json(config)
        texts["generation_config.json"] = _json(_token_ids(file))
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        metadata = {"format": "mlx" if quantization else "pt"}
        write_safetensors(staging / "model.safetensors", tensors, metadata, progress, f"importing {gguf.name}")
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """The ids that config.json and generation_config.json both name."""
    ids: dict[str, Any] = {}
    if file.has("tokenizer.ggml.bos_token_id"):
        ids["bos_token_id"] = file.integer("tokenizer.ggml.bos_token_id")
    eos = eos_token_ids(file)
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return ids


# ---- plans ----


def _plan(file: GgufFile) -> Plan:
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


def _shape(file: GgufFile, tensor: str) -> tuple[int, ...]:
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
    return output.tensor_type != embedding.tensor_type or not np.array_equal(output.data, embedding.data)


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
    vocab_size = _shape(file, "token_embd.weight")[0]
    tied = not _has_own_output(file)
    attention_bias = _has_biases(file, layers, ("attn_q", "attn_k", "attn_v", "attn_output"))
    mlp_bias = _has_biases(file, layers, ("ffn_gate", "ffn_up", "ffn_down"))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "max_position_embeddings": file.size("llama.context_length"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": tied,
        **_token_ids(file),
    }
    moves = [
        Move("token_embd.weight", "model.embed_tokens.weight", (vocab_size, hidden)),
        Move("output_norm.weight", "model.norm.weight", (hidden,)),
    ]
    if not tied:
        moves.append(Move("output.weight", "lm_head.weight", (vocab_size, hidden)))
    query, key_value = heads * head_dim, kv_heads * head_dim
    modules: list[tuple[str, str, tuple[int, int], Rows, bool]] = [
        ("attn_q", "self_attn.q_proj", (query, hidden), unpermuted_rows(heads, head_dim), attention_bias),
        ("attn_k", "self_attn.k_proj", (key_value, hidden), unpermuted_rows(kv_heads, head_dim), attention_bias),
        ("attn_v", "self_attn.v_proj", (key_value, hidden), None, attention_bias),
        ("attn_output", "self_attn.o_proj", (hidden, query), None, attention_bias),
        ("ffn_gate", "mlp.gate_proj", (inner, hidden), None, mlp_bias),
        ("ffn_up", "mlp.up_proj", (inner, hidden), None, mlp_bias),
        ("ffn_down", "mlp.down_proj", (hidden, inner), None, mlp_bias),
    ]
    for layer in range(layers):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        moves.append(Move(f"{here}.attn_norm.weight", f"{there}.input_layernorm.weight", (hidden,)))
        moves.append(Move(f"{here}.ffn_norm.weight", f"{there}.post_attention_layernorm.weight", (hidden,)))
        for source, target, shape, rows, bias in modules:
            moves.append(Move(f"{here}.{source}.weight", f"{there}.{target}.weight", shape, rows))
            if bias:
                moves.append(Move(f"{here}.{source}.bias", f"{there}.{target}.bias", shape[:1], rows))
    return Plan(config, moves)


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
    wanted = np.asarray(file.tensors["rope_freqs.weight"].data, np.float32)
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
    vocab_size = _shape(file, "token_embd.weight")[0]
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
        **_token_ids(file),
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


# ---- tensors ----


def _check_tensors(file: GgufFile, plan: Plan) -> None:
    for move in plan.moves:
        shape = _shape(file, move.source)
        wanted = (move.source_rows or move.shape[0], *move.shape[1:])
        if shape != wanted:
            raise TfmError(f"{file.path}: tensor {move.source}: shape", list(shape), list(wanted))
        kind = file.tensors[move.source].tensor_type.name
        if kind not in BLOCK_TYPES and kind not in FLOAT_TYPES:
            allowed = ", ".join((*FLOAT_TYPES, *BLOCK_TYPES))
            raise TfmError(f"{file.path}: tensor {move.source}: type", kind, allowed, "use a file of another type")
    used = {move.source for move in plan.moves} | {"rope_freqs.weight", "output.weight"}
    for name in file.tensors:
        if name not in used:
            raise TfmError(f"{file.path}: tensor {name}", "a tensor that this architecture does not have")


def _tensors(file: GgufFile, plan: Plan) -> tuple[dict[str, Any], list[PendingTensor]]:
    """config.json's `quantization` (empty when no matrix is quantised) and all tensors, to be made when written."""
    bits: dict[str, int] = {}
    pending: list[PendingTensor] = []
    for move in plan.moves:
        tensor = file.tensors[move.source]
        kind = tensor.tensor_type.name
        if kind in BLOCK_TYPES and not move.table and len(move.shape) == 2:
            module = move.target.removesuffix(".weight")
            bits[module] = BLOCK_TYPES[kind].bits
            pending.extend(_affine(file.path, tensor, move, module))
        else:
            if len(move.shape) == 2 and not move.table:
                bits[move.target.removesuffix(".weight")] = 0
            dtype = kind if kind in FLOAT_TYPES else "F32"
            pending.append(PendingTensor(move.target, dtype, move.shape, partial(_floats, tensor, move)))
    return _quantization(bits), pending


def _floats(tensor: "ReaderTensor", move: Move) -> npt.NDArray[np.generic]:
    kind = tensor.tensor_type.name
    if kind in BLOCK_TYPES:
        from gguf.quants import dequantize

        data: npt.NDArray[np.generic] = dequantize(tensor.data, tensor.tensor_type)
    else:
        data = tensor.data.view("<u2") if kind == "BF16" else tensor.data
    return move.take(data)


def _affine(path: Path, tensor: "ReaderTensor", move: Move, module: str) -> Iterator[PendingTensor]:
    block_type = BLOCK_TYPES[tensor.tensor_type.name]
    rows, columns = move.shape
    whole = Blocks(block_type, tensor.data)
    if not whole.is_finite():
        raise TfmError(f"{path}: tensor {move.source}", "a scale that is not a number", "finite scales")
    dtype, numpy_dtype = ("F16", np.float16) if whole.fits_float16() else ("F32", np.float32)

    def blocks() -> Blocks:
        return Blocks(block_type, move.take(tensor.data))

    words, groups = columns * block_type.bits // 32, columns // GROUP_SIZE
    yield PendingTensor(f"{module}.weight", "U32", (rows, words), lambda: blocks().weight())
    yield PendingTensor(f"{module}.scales", dtype, (rows, groups), lambda: blocks().scales(numpy_dtype))
    yield PendingTensor(f"{module}.biases", dtype, (rows, groups), lambda: blocks().biases(numpy_dtype))


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """config.json's `quantization`: the commonest width, an entry for each module that differs, false for floats."""
    widths = [width for width in bits.values() if width]
    if not widths:
        return {}
    common = max(sorted(set(widths)), key=widths.count)
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, width in bits.items():
        if width == 0:
            quantization[module] = False
        elif width != common:
            quantization[module] = {"group_size": GROUP_SIZE, "bits": width, "mode": "affine"}
    return quantization
