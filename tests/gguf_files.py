"""Tiny GGUF files with random weights, written by GGUF's own library."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, POSITIONS = 64, 96, 2, 4, 2, 48
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|end|>", "<|start|>", "<tool>"]
CHAT_TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
SPM_PIECES = {
    "▁": -9.0,
    "a": -10.0,
    "b": -11.0,
    "c": -12.0,
    "ab": -1.0,
    "abc": -2.0,
    "bc": -3.0,
    "▁a": -4.0,
    "▁abc": -5.0,
}


def byte_characters() -> list[str]:
    """The 256 characters that byte-level BPE writes bytes with, in order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]
TOKEN_TYPES = [3, 3, 4, *([1] * (len(TOKENS) - 3))]


def shapes(architecture: str, tied: bool, biases: bool, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, rows first."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        found["output.weight"] = (vocab_size, HIDDEN)
    if architecture == "gpt2":
        found |= {"position_embd.weight": (POSITIONS, HIDDEN), "output_norm.bias": (HIDDEN,)}
        modules = {"attn_qkv": (3 * HIDDEN, HIDDEN)}
    else:
        key_value = KV_HEADS * HEAD_DIM
        modules = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (key_value, HIDDEN), "attn_v": (key_value, HIDDEN)}
        modules["ffn_gate"] = (INNER, HIDDEN)
    modules |= {"attn_output": (HIDDEN, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            found[f"blk.{layer}.{norm}.weight"] = (HIDDEN,)
            if architecture == "gpt2":
                found[f"blk.{layer}.{norm}.bias"] = (HIDDEN,)
        for name, shape in modules.items():
            found[f"blk.{layer}.{name}.weight"] = shape
            if biases or architecture == "gpt2":
                found[f"blk.{layer}.{name}.bias"] = shape[:1]
    return found


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: str = "Q4_0",
    *,
    tied: bool = True,
    biases: bool = False,
    tokenizer: str = "byte-level",
    kinds: dict[str, str] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    fields: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Write a model whose matrices are of type kind (kinds: others by name) and whose vectors are F32.

    tensors replaces one by float32 values or drops it (None); fields adds to the metadata or drops (None).
    """
    metadata = model_fields(architecture) | tokenizer_fields(tokenizer)
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    metadata |= fields or {}
    random = np.random.default_rng(seed)
    values: dict[str, np.ndarray | None] = {
        name: random.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes(architecture, tied, biases, vocab_size).items()
    }
    values |= tensors or {}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", architecture))
    for name, value in metadata.items():
        if value is not None:
            add_field(writer, name, value)
    for name, array in values.items():
        if array is not None:
            add_tensor(writer, name, array, (kinds or {}).get(name, kind if array.ndim == 2 else "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_fields(architecture: str) -> dict[str, Any]:
    sizes = {"context_length": POSITIONS, "embedding_length": HIDDEN, "block_count": LAYERS}
    sizes |= {"feed_forward_length": INNER, "attention.head_count": HEADS}
    found: dict[str, Any] = {f"{architecture}.{name}": size for name, size in sizes.items()}
    if architecture == "gpt2":
        return found | {"gpt2.attention.layer_norm_epsilon": 1e-5}
    found |= {"llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": HEAD_DIM}
    return found | {"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 50000.0}


def tokenizer_fields(tokenizer: str) -> dict[str, Any]:
    ids = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.bos_token_id": 1}
    if tokenizer == "byte-level":
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": TOKEN_TYPES,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT_TEMPLATE,
            **ids,
        }
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *SPM_PIECES],
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(SPM_PIECES))],
        "tokenizer.ggml.scores": [0.0] * 259 + [*SPM_PIECES.values()],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(name, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
