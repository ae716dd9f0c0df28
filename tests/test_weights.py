"""Tensors arrive in the fields that the forward pass reads: the right ones, the right way round, and none left over."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_safetensors import to_bf16, write_tensors

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import read_config
from tfm.engine.errors import TfmError
from tfm.engine.matrix import Matrix
from tfm.engine.weights import Weights, load_weights

V, D, P, F, N, K, H = 40, 32, 16, 64, 4, 2, 16
"""Vocabulary, hidden, positions, feed-forward, query heads, key/value heads, head size (not D / N)."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
}
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": N, "n_positions": P}
PLAIN: dict[str, Any] = {
    "model_type": "tfm_plain",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": 1,
    "num_attention_heads": N,
    "head_dim": H,
    "max_position_embeddings": P,
    "norm": "none",
    "position": "none",
}
Tensors = dict[str, np.ndarray]


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors(biases: bool = False, tied: bool = False) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    modules = {"self_attn.q_proj": (N * H, D), "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D)}
    modules |= {"self_attn.o_proj": (D, N * H)}
    modules |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    for layer in range(2):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (D,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (D,)
        for name, shape in modules.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if biases:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return random_tensors(shapes)


def gpt2_tensors(prefix: str, turned: bool = True) -> Tensors:
    """GPT-2 as the hub has it, matrices [in, out]; or not turned, as MLX has it."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (V, D), "wpe.weight": (P, D)}
    shapes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
    modules = {"attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
    for layer in range(2):
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{norm}.weight": (D,), f"h.{layer}.{norm}.bias": (D,)}
        for name, (outputs, inputs) in modules.items():
            shapes[f"h.{layer}.{name}.weight"] = (inputs, outputs) if turned else (outputs, inputs)
            shapes[f"h.{layer}.{name}.bias"] = (outputs,)
    return random_tensors({prefix + name: shape for name, shape in shapes.items()})


def load(folder: Path, config: dict[str, Any], tensors: Tensors) -> Weights:
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors)
    return load_weights(Checkpoint(folder), read_config(folder))


def refusal(folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    """The error that loading gives; it names the file, or the folder when the tensor is in none."""
    with pytest.raises(TfmError) as error:
        load(folder, config, tensors)
    assert str(folder) in str(error.value)
    return str(error.value)


def quantize(tensors: Tensors, module: str, bits: int, group_size: int, scale_type: str = "float16") -> np.ndarray:
    """Replace a module's weight by random codes, scales and biases; returns the weights that they stand for."""
    rows, columns = tensors[f"{module}.weight"].shape
    random = np.random.default_rng(len(module))
    codes = random.integers(0, 2**bits, (rows, columns), dtype=np.uint32)
    words = codes.reshape(rows, -1, 32 // bits)
    packed = np.zeros(words.shape[:2], np.uint32)
    for place in range(32 // bits):
        packed |= words[:, :, place] << np.uint32(bits * place)
    scales, biases = random.normal(size=(2, rows, columns // group_size)).astype(np.float32)
    if scale_type == "bfloat16":
        stored = [to_bf16(scales), to_bf16(biases)]
        scales, biases = ((bits_.astype(np.uint32) << 16).view(np.float32) for bits_ in stored)
    else:
        stored = [scales.astype(scale_type), biases.astype(scale_type)]
        scales, biases = (values.astype(np.float32) for values in stored)
    tensors |= {f"{module}.weight": packed, f"{module}.scales": stored[0], f"{module}.biases": stored[1]}
    return codes.astype(np.float32) * scales.repeat(group_size, 1) + biases.repeat(group_size, 1)


def test_llama(tmp_path: Path) -> None:
    """Every matrix is the tensor as it is stored, [outputs, inputs]; norms are there, biases are not."""
    tensors = llama_tensors()
    weights = load(tmp_path, LLAMA, tensors)
    assert len(weights.layers) == 2
    assert weights.lm_head is not None
    np.testing.assert_array_equal(weights.embed_tokens.weight[:], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.lm_head.weight[:], tensors["lm_head.weight"])
    np.testing.assert_array_equal(weights.norm, tensors["model.norm.weight"])
    assert weights.position_embeddings is weights.norm_bias is weights.lm_head_bias is None
    for place, layer in enumerate(weights.layers):
        for module in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
            matrix = getattr(layer, f"{module.split('.')[1]}_proj")
            expected = tensors[f"model.layers.{place}.{module}_proj.weight"]
            assert (matrix.format, matrix.rows, matrix.columns) == ("f32", *expected.shape)
            np.testing.assert_array_equal(matrix.weight[:], expected)
        np.testing.assert_array_equal(layer.attn_norm, tensors[f"model.layers.{place}.input_layernorm.weight"])
        np.testing.assert_array_equal(layer.mlp_norm, tensors[f"model.layers.{place}.post_attention_layernorm.weight"])
        assert layer.q_bias is layer.o_bias is layer.up_bias is layer.attn_norm_bias is None


def test_llama_biases(tmp_path: Path) -> None:
    """attention_bias is q, k, v and o; mlp_bias is gate, up and down."""
    tensors = llama_tensors(biases=True)
    layer = load(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True}, tensors).layers[1]
    for field, module in (("k", "self_attn.k_proj"), ("o", "self_attn.o_proj"), ("gate", "mlp.gate_proj")):
        np.testing.assert_array_equal(getattr(layer, f"{field}_bias"), tensors[f"model.layers.1.{module}.bias"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_floats(tmp_path: Path, dtype: str) -> None:
    """Matrices keep their format; what is added or multiplied once a row is float32."""
    tensors = llama_tensors()
    tensors = {name: to_bf16(value) if dtype == "bfloat16" else value.astype(dtype) for name, value in tensors.items()}
    weights = load(tmp_path, LLAMA, tensors)
    matrix = weights.layers[0].down_proj
    assert matrix is not None
    assert matrix.format == ("bf16" if dtype == "bfloat16" else "f16")
    assert weights.norm is not None
    assert weights.norm.dtype == matrix.dequantize().dtype == np.float32
    stored = tensors["model.layers.0.mlp.down_proj.weight"]
    expected = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else stored.astype(np.float32)
    np.testing.assert_array_equal(matrix.dequantize(), expected)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2(tmp_path: Path, prefix: str) -> None:
    """The hub's GPT-2 keeps matrices [in, out] and q, k, v in one; the masks some files hold are no weights."""
    tensors = gpt2_tensors(prefix)
    tensors[f"{prefix}h.0.attn.bias"] = np.ones((1, 1, P, P), np.uint8)
    tensors[f"{prefix}h.1.attn.masked_bias"] = np.zeros((), np.float32)
    weights = load(tmp_path, GPT2, tensors)
    assert weights.lm_head is None
    np.testing.assert_array_equal(weights.position_embeddings, tensors[f"{prefix}wpe.weight"])
    layer = weights.layers[1]
    fused, bias = tensors[f"{prefix}h.1.attn.c_attn.weight"], tensors[f"{prefix}h.1.attn.c_attn.bias"]
    for place, letter in enumerate("qkv"):
        part = slice(place * D, (place + 1) * D)
        np.testing.assert_array_equal(getattr(layer, f"{letter}_proj").dequantize(), fused.T[part])
        np.testing.assert_array_equal(getattr(layer, f"{letter}_bias"), bias[part])
    assert layer.down_proj is not None
    assert (layer.down_proj.rows, layer.down_proj.columns) == (D, 4 * D)
    np.testing.assert_array_equal(layer.down_proj.weight[:], tensors[f"{prefix}h.1.mlp.c_proj.weight"].T)
    np.testing.assert_array_equal(layer.down_proj.weight[3:5], tensors[f"{prefix}h.1.mlp.c_proj.weight"].T[3:5])
    np.testing.assert_array_equal(layer.mlp_norm_bias, tensors[f"{prefix}h.1.ln_2.bias"])


def test_gpt2_of_mlx(tmp_path: Path) -> None:
    """MLX turns GPT-2's matrices to [out, in], so they may be quantised; the rows of q, k and v are still in one."""
    tensors = gpt2_tensors("model.", turned=False)
    expected = quantize(tensors, "model.h.1.attn.c_attn", 4, 32)
    positions = quantize(tensors, "model.wpe", 8, 32)
    config = {**GPT2, "quantization": {"bits": 4, "group_size": 32, "model.wpe": {"bits": 8}}}
    weights = load(tmp_path, config, tensors)
    assert weights.layers[1].v_proj.name == "model.h.1.attn.c_attn.weight[64:96]"
    np.testing.assert_array_equal(weights.layers[1].v_proj.dequantize(), expected[2 * D :])
    np.testing.assert_array_equal(weights.layers[0].o_proj.weight[:], tensors["model.h.0.attn.c_proj.weight"])
    np.testing.assert_array_equal(weights.position_embeddings, positions)


def test_gpt2_quantized_across(tmp_path: Path) -> None:
    """Groups along the outputs cannot be run as groups along the inputs: the tensor is named."""
    tensors = gpt2_tensors("transformer.")
    quantize(tensors, "transformer.h.0.mlp.c_fc", 4, 32)
    message = refusal(tmp_path, {**GPT2, "quantization": {"bits": 4, "group_size": 32}}, tensors)
    assert "tensor transformer.h.0.mlp.c_fc.weight: found 4-bit groups along the outputs" in message


def test_plain_smallest(tmp_path: Path) -> None:
    """Attention only: embedding, four matrices a block, unembedding."""
    shapes = {"embed.weight": (V, D), "unembed.weight": (V, D), "blocks.0.attn.o.weight": (D, N * H)}
    shapes |= {f"blocks.0.attn.{letter}.weight": (N * H, D) for letter in "qkv"}
    tensors = random_tensors(shapes)
    weights = load(tmp_path, PLAIN, tensors)
    assert weights.norm is weights.layers[0].attn_norm is weights.layers[0].up_proj is None
    np.testing.assert_array_equal(weights.layers[0].o_proj.weight[:], tensors["blocks.0.attn.o.weight"])


def test_plain_largest(tmp_path: Path) -> None:
    """All that a textbook model may have, tied and yet with a bias of the unembedding."""
    config = {
        **PLAIN, "norm": "layer", "position": "learned", "attention_bias": True, "mlp_bias": True, "gated": True,
        "intermediate_size": F, "hidden_act": "silu", "tie_word_embeddings": True, "unembed_bias": True,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (V, D), "position.weight": (P, D), "unembed.bias": (V,)}
    for norm in ("blocks.0.attn_norm", "blocks.0.mlp_norm", "norm"):
        shapes |= {f"{norm}.weight": (D,), f"{norm}.bias": (D,)}
    modules = {f"attn.{letter}": (N * H, D) for letter in "qkv"} | {"attn.o": (D, N * H)}
    modules |= {"mlp.gate": (F, D), "mlp.up": (F, D), "mlp.down": (D, F)}
    for name, shape in modules.items():
        shapes |= {f"blocks.0.{name}.weight": shape, f"blocks.0.{name}.bias": shape[:1]}
    tensors = random_tensors(shapes)
    weights = load(tmp_path, config, tensors)
    assert weights.lm_head is None
    np.testing.assert_array_equal(weights.lm_head_bias, tensors["unembed.bias"])
    np.testing.assert_array_equal(weights.layers[0].gate_bias, tensors["blocks.0.mlp.gate.bias"])
    np.testing.assert_array_equal(weights.layers[0].mlp_norm_bias, tensors["blocks.0.mlp_norm.bias"])


@pytest.mark.parametrize("scale_type", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 32), (8, 64)])
def test_quantized(tmp_path: Path, bits: int, group_size: int, scale_type: str) -> None:
    """Codes, scales and biases stand for q * scale + bias, whatever scales are stored as; other modules stay floats."""
    tensors = llama_tensors()
    module = "model.layers.1.mlp.down_proj"
    expected = quantize(tensors, module, bits, group_size, scale_type)
    weights = load(tmp_path, {**LLAMA, "quantization": {"bits": bits, "group_size": group_size}}, tensors)
    matrix = weights.layers[1].down_proj
    assert matrix is not None
    assert (matrix.format, matrix.group_size, matrix.rows, matrix.columns) == (f"q{bits}", group_size, D, F)
    assert matrix.scale_type == {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[scale_type]
    np.testing.assert_array_equal(matrix.dequantize(), expected)
    np.testing.assert_array_equal(matrix.part([5, 2]).dequantize(), expected[[5, 2]])
    assert matrix.nbytes == sum(tensors[f"{module}.{kind}"].nbytes for kind in ("weight", "scales", "biases"))
    assert weights.embed_tokens.format == "f32"


def test_quantized_embedding(tmp_path: Path) -> None:
    """A module may have bits of its own, and the tied embedding may be quantised."""
    tensors = llama_tensors(tied=True)
    expected = quantize(tensors, "model.embed_tokens", 8, 32)
    quantization = {"bits": 4, "group_size": 64, "model.embed_tokens": {"bits": 8, "group_size": 32}}
    weights = load(tmp_path, {**LLAMA, "tie_word_embeddings": True, "quantization": quantization}, tensors)
    np.testing.assert_array_equal(weights.embed_tokens.dequantize(), expected)
    assert weights.lm_head is None


QUANTIZED_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"scales": np.ones((D, 4), np.float16)}, "down_proj.scales: shape: found [32, 4]; allowed: [32, 2]"),
    ({"scales": np.ones((D, 2), np.float64)}, "down_proj.scales: dtype: found F64; allowed: F16, BF16, F32"),
    ({"scales": None}, "down_proj.weight: dtype: found U32; allowed: F32, F16, BF16"),
    ({"biases": None}, "down_proj.biases: found nothing"),
    ({"biases": np.ones((D, 2), np.float32)}, "down_proj.biases: dtype: found F32; allowed: F16"),
    ({"weight": np.ones((D, 4), np.uint32)}, "down_proj.weight: shape: found [32, 4]; allowed: [32, 8]"),
    ({"weight": np.ones((D, F), np.float32)}, "down_proj.weight: dtype: found F32; allowed: U32"),
]


@pytest.mark.parametrize(("changes", "words"), QUANTIZED_FAULTS, ids=[words for _, words in QUANTIZED_FAULTS])
def test_quantized_faults(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    """Codes, scales and biases that do not fit each other are never read past their end."""
    tensors = llama_tensors()
    quantize(tensors, "model.layers.0.mlp.down_proj", 4, 32)
    tensors |= {f"model.layers.0.mlp.down_proj.{kind}": value for kind, value in changes.items()}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    message = refusal(tmp_path, {**LLAMA, "quantization": {"bits": 4, "group_size": 32}}, tensors)
    assert f"tensor model.layers.0.mlp.{words}" in message


def test_quantized_columns(tmp_path: Path) -> None:
    """Columns that are no multiple of the group would leave a part of a row without scale."""
    tensors = llama_tensors()
    quantize(tensors, "model.layers.0.self_attn.q_proj", 4, 32)
    message = refusal(tmp_path, {**LLAMA, "quantization": {"bits": 4, "group_size": 64}}, tensors)
    assert "q_proj.weight: columns: found 32; allowed: a multiple of group_size, 64" in message


def test_kept_in_float(tmp_path: Path) -> None:
    """A module that config.json excepts is in floating point; scales beside it contradict that."""
    tensors = llama_tensors()
    config = {**LLAMA, "quantization": {"bits": 4, "group_size": 32, "lm_head": False}}
    load(tmp_path, config, tensors)
    tensors["lm_head.scales"] = np.ones((V, 1), np.float16)
    assert "tensor lm_head.scales: found a tensor that a llama" in refusal(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "found nothing; allowed: F32 or F16 or BF16 [64, 32]; download"),
        ("model.embed_tokens.weight", None, "found nothing"),
        ("model.norm.weight", None, "found nothing"),
        ("lm_head.weight", None, "found nothing"),
        ("model.embed_tokens.weight", np.zeros((V - 1, D), np.float32), "shape: found [39, 32]; allowed: [40, 32]"),
        ("model.layers.0.self_attn.k_proj.weight", np.zeros((D, K * H), np.float64), "dtype: found F64; allowed: F32"),
        ("model.norm.weight", np.zeros((D, 1), np.float32), "shape: found [32, 1]; allowed: [32]"),
        ("model.norm.weight", np.zeros(D, np.uint8), "dtype: found U8"),
        ("model.layers.2.mlp.up_proj.weight", np.zeros((F, D), np.float32), "found a tensor that a llama"),
        ("model.layers.0.self_attn.q_proj.bias", np.zeros(N * H, np.float32), "found a tensor that a llama"),
        ("model.layers.0.self_attn.q_norm.weight", np.zeros(H, np.float32), "found a tensor that a llama"),
    ],
)
def test_missing_extra_wrong(tmp_path: Path, name: str, value: np.ndarray | None, words: str) -> None:
    """A tensor missing, extra, of wrong shape or dtype is named: never broadcast, converted silently or left out."""
    tensors = {other: tensor for other, tensor in llama_tensors().items() if other != name}
    if value is not None:
        tensors[name] = value
    assert f"tensor {name}: {words}" in refusal(tmp_path, LLAMA, tensors)


def test_harmless_extra(tmp_path: Path) -> None:
    """Old checkpoints hold the frequencies of rope, which are computed."""
    tensors = llama_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(H // 2, np.float32)
    load(tmp_path, LLAMA, tensors)


def test_tied_with_own_head(tmp_path: Path) -> None:
    """A tied model may hold the embedding twice; if the two differ, neither is taken for the other."""
    config = {**LLAMA, "tie_word_embeddings": True}
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    assert load(tmp_path, config, tensors).lm_head is None
    tensors["lm_head.weight"][V - 1, D - 1] += 1
    message = refusal(tmp_path, config, tensors)
    assert "tensor lm_head.weight: found other values than model.embed_tokens.weight" in message


def test_first_code_in_lowest_bits() -> None:
    """MLX packs little-end first; the other way round gives fluent-looking shapes and noise."""
    words = np.array([[0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]], np.uint32)
    ones, zeros = np.ones((1, 1), np.float16), np.zeros((1, 1), np.float16)
    matrix = Matrix("w", "q4", 1, 32, words, ones, zeros, "f16", 32)
    np.testing.assert_array_equal(matrix.dequantize(), [[*range(16), *range(16)]])
