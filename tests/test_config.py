"""config.json becomes a ModelConfig, or is refused naming the field: never read as another model than it describes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tfm.engine.config import ModelConfig, check_vocabulary, read_config
from tfm.engine.errors import TfmError
from tfm.engine.hub import resolve

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
}
PLAIN: dict[str, Any] = {
    "model_type": "tfm_plain",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "norm": "none",
    "position": "none",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    """The config that base gives with changes; a change to ... drops the field."""
    values = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return read_config(folder)


def test_llama(tmp_path: Path) -> None:
    """The fields that a llama states arrive, and those that it leaves out are what transformers takes."""
    config = read(tmp_path, LLAMA)
    layer = config.layers[0]
    assert (config.model_type, config.vocab_size, config.hidden_size, config.num_hidden_layers) == ("llama", 100, 64, 3)
    assert (config.max_position_embeddings, config.position, config.final_norm) == (2048, "rope", "rms")
    assert (config.tie_word_embeddings, config.unembed_bias, config.quantization) == (False, False, None)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 4, 16)
    assert (layer.intermediate_size, layer.hidden_act, layer.gated) == (96, "silu", True)
    assert (layer.norm, layer.norm_eps, config.final_norm_eps) == ("rms", 1e-5, 1e-5)
    assert (layer.attention_bias, layer.mlp_bias, layer.attention_scale) == (False, False, 0.25)
    assert layer.rope is not None
    assert (layer.rope.rotary_dim, layer.rope.interleaved, layer.rope.attention_factor) == (16, False, 1.0)
    assert layer.rope.inv_freq == pytest.approx([10000 ** (-2 * pair / 16) for pair in range(8)], rel=1e-15)


def test_llama_options(tmp_path: Path) -> None:
    """head_dim stands on its own where it is given (hidden_size / heads would be 16), and so do the other options."""
    config = read(
        tmp_path, LLAMA, head_dim=24, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh", sliding_window=None, pretraining_tp=2,
    )  # fmt: skip
    layer = config.layers[0]
    assert (layer.head_dim, layer.num_key_value_heads, layer.attention_scale) == (24, 2, 24**-0.5)
    assert (layer.attention_bias, layer.mlp_bias, config.tie_word_embeddings) == (True, True, True)
    assert layer.hidden_act == "gelu_tanh"
    assert layer.rope is not None
    assert len(layer.rope.inv_freq) == 12


def test_gpt2(tmp_path: Path) -> None:
    """GPT-2 has words of its own; gelu_new is the tanh form; the MLP is four times as wide, the ends are tied."""
    config = read(tmp_path, GPT2, layer_norm_epsilon=1e-6, n_inner=None, activation_function="gelu_new")
    layer = config.layers[0]
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (64, 2, 32)
    assert (config.position, config.final_norm, config.tie_word_embeddings) == ("learned", "layer", True)
    assert (layer.num_key_value_heads, layer.head_dim, layer.intermediate_size) == (4, 16, 256)
    assert (layer.norm, layer.norm_eps, layer.hidden_act, layer.gated) == ("layer", 1e-6, "gelu_tanh", False)
    assert (layer.attention_bias, layer.mlp_bias, layer.rope) == (True, True, None)
    assert read(tmp_path, GPT2, n_inner=100).layers[0].intermediate_size == 100


@pytest.mark.parametrize("intermediate_size", [..., None, 0])
def test_attention_only(tmp_path: Path, intermediate_size: Any) -> None:
    """A textbook model may have neither MLP nor norm nor position, and then needs no activation either."""
    config = read(tmp_path, PLAIN, intermediate_size=intermediate_size)
    assert (config.layers[0].intermediate_size, config.final_norm, config.position) == (0, "none", "none")
    assert config.layers[0].rope is None


@pytest.mark.parametrize(("written", "read_as"), [("gelu", "gelu"), ("gelu_tanh", "gelu_tanh"), ("relu", "relu")])
def test_plain_mlp(tmp_path: Path, written: str, read_as: str) -> None:
    """The exact gelu and the tanh form are two activations."""
    layer = read(tmp_path, PLAIN, intermediate_size=8, hidden_act=written, gated=True).layers[0]
    assert (layer.hidden_act, layer.gated) == (read_as, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    ],
)
def test_rope_theta(tmp_path: Path, changes: dict[str, Any]) -> None:
    """transformers 5 keeps the base inside rope_parameters; older files beside rope_scaling."""
    rope = read(tmp_path, LLAMA, **changes).layers[0].rope
    assert rope is not None
    assert rope.inv_freq == pytest.approx([500 ** (-pair / 8) for pair in range(8)], rel=1e-15)


@pytest.mark.parametrize("word", ["type", "rope_type"])
def test_rope_linear(tmp_path: Path, word: str) -> None:
    """Linear scaling divides every position; old files call the kind `type`."""
    rope = read(tmp_path, LLAMA, rope_scaling={word: "linear", "factor": 4.0}).layers[0].rope
    assert rope is not None
    assert rope.inv_freq == pytest.approx([10000 ** (-pair / 8) / 4 for pair in range(8)], rel=1e-15)


def test_rope_llama3(tmp_path: Path) -> None:
    """The published rule of Llama 3.1, by wavelengths: short ones stay, long ones are divided, between it blends."""
    config = read(tmp_path, LLAMA, head_dim=64, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    expected = []
    for pair in range(32):
        frequency = 500000.0 ** (-pair / 32)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            frequency /= 8.0
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
        expected.append(frequency)
    rope = config.layers[0].rope
    assert rope is not None
    assert rope.inv_freq == pytest.approx(expected, rel=1e-12)
    assert len({round(frequency / 500000.0 ** (-pair / 32), 6) for pair, frequency in enumerate(rope.inv_freq)}) > 3


@pytest.mark.parametrize(("value", "ids"), [(..., ()), (None, ()), (7, (7,)), ([7, 0, 7], (7, 0))])
def test_eos(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    """One id, several, or none."""
    assert read(tmp_path, LLAMA, eos_token_id=value).eos_token_ids == ids


def test_quantization(tmp_path: Path) -> None:
    """mlx-lm says it twice, and modules may differ from the rest or stay in floating point."""
    quantization = {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.down_proj": {"bits": 8},
        "lm_head": False,
    }
    found = read(tmp_path, LLAMA, quantization=quantization, quantization_config=quantization).quantization
    assert found is not None
    assert (found.default.bits, found.default.group_size) == (4, 64)
    embed, down = found.modules["model.embed_tokens"], found.modules["model.layers.0.mlp.down_proj"]
    assert embed is not None
    assert down is not None
    assert (embed.bits, embed.group_size, down.bits, down.group_size) == (8, 32, 8, 64)
    assert found.modules["lm_head"] is None


REFUSED_LLAMA: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llamma"}, 'model_type | "llamma" | llama, gpt2, tfm_plain'),
    ({"model_type": ...}, "model_type | nothing"),
    ({"model_type": 3}, "model_type | found 3"),
    ({"vocab_size": ...}, "vocab_size | nothing"),
    ({"hidden_size": "64"}, 'hidden_size | "64"'),
    ({"hidden_size": 64.0}, "hidden_size | 64.0"),
    ({"hidden_size": True}, "hidden_size | true"),
    ({"hidden_size": 0}, "hidden_size | found 0"),
    ({"hidden_size": 66}, "hidden_size | 66 | num_attention_heads, 4"),
    ({"hidden_size": 60}, "hidden_size | even"),
    ({"head_dim": 15}, "head_dim | 15 | even"),
    ({"num_key_value_heads": 3}, "num_key_value_heads | 3 | num_attention_heads, 4"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers | 1000000000000"),
    ({"intermediate_size": 0}, "intermediate_size | found 0"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps | -1.0"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps | NaN"),
    ({"hidden_act": "quick_gelu"}, 'hidden_act | "quick_gelu" | silu'),
    ({"attention_bias": 1}, "attention_bias | found 1 | true, false"),
    ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings | "yes"'),
    ({"eos_token_id": 100}, "eos_token_id | 100 | 0 to 99"),
    ({"eos_token_id": [1, -1]}, "eos_token_id | [1, -1]"),
    ({"bos_token_id": "<s>"}, 'bos_token_id | "<s>"'),
    ({"sliding_window": 4096}, "sliding_window | 4096 | null"),
    ({"rope_interleaved": True}, "rope_interleaved | true | null, false"),
    ({"residual_multiplier": 0.5}, "residual_multiplier | 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor | 0.5"),
    ({"rope_theta": 0}, "rope_theta | found 0"),
    ({"rope_theta": 10**400}, "rope_theta | 1000"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta | rope_parameters.rope_theta"),
    ({"rope_scaling": "linear"}, 'rope_scaling | "linear" | object'),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.type | "dynamic" | llama3'),
    ({"rope_parameters": {"rope_type": "yarn"}}, 'rope_parameters.rope_type | "yarn"'),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor | nothing"),
    ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor | 0.5"),
    ({"rope_scaling": {**LLAMA3, "mscale": 1.0}}, "rope_scaling.mscale | llama3"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor | low_freq_factor"),
    ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling | rope_parameters"),
    ({"quantization": {"bits": 3, "group_size": 64}}, "quantization.bits | found 3 | 4, 8"),
    ({"quantization": {"bits": 4, "group_size": 16}}, "quantization.group_size | found 16 | 32, 64, 128"),
    ({"quantization": {"bits": 4}}, "quantization.group_size | nothing"),
    ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}, 'quantization.mode | "mxfp4" | affine'),
    ({"quantization": {"bits": 4, "group_size": 32, "lm_head": {"bits": 6}}}, "quantization.lm_head.bits | found 6"),
    ({"quantization_config": {"quant_method": "gptq"}}, 'quantization_config.quant_method | "gptq" | MLX'),
]
REFUSED_GPT2: list[tuple[dict[str, Any], str]] = [
    ({"n_embd": ...}, "n_embd | nothing"),
    ({"n_embd": 66}, "n_embd | 66 | n_head, 4"),
    ({"n_inner": -1}, "n_inner | -1"),
    ({"activation_function": "mish"}, 'activation_function | "mish"'),
    ({"layer_norm_epsilon": None, "n_positions": 0}, "n_positions | found 0"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx | true | false"),
    ({"scale_attn_weights": False}, "scale_attn_weights | false | true"),
    ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn | true"),
    ({"add_cross_attention": True}, "add_cross_attention | true"),
]
REFUSED_PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"norm": ...}, "norm | nothing | rms, layer, none"),
    ({"position": "alibi"}, 'position | "alibi" | rope, learned, none'),
    ({"intermediate_size": 8}, "hidden_act | nothing | silu"),
    ({"tie_word_embedings": True}, "tie_word_embedings | true | tie_word_embeddings"),
]
REFUSED = [
    (base, changes, words)
    for base, refused in ((LLAMA, REFUSED_LLAMA), (GPT2, REFUSED_GPT2), (PLAIN, REFUSED_PLAIN))
    for changes, words in refused
]
"""Changes to a config, and the field and what else the error must say of it."""


@pytest.mark.parametrize(("base", "changes", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """A field that is wrong, missing, or would change the arithmetic is named with what it holds and what it may."""
    with pytest.raises(TfmError) as error:
        read(tmp_path, base, **changes)
    for word in f"{tmp_path / 'config.json'}: field {words}".split(" | "):
        assert word in str(error.value)


def test_true_is_not_one(tmp_path: Path) -> None:
    """In Python true equals 1 and false equals 0; a factor of `true` is a fault all the same."""
    read(tmp_path, LLAMA, embedding_multiplier=1, rope_interleaved=False)
    with pytest.raises(TfmError, match="embedding_multiplier"):
        read(tmp_path, LLAMA, embedding_multiplier=True)
    with pytest.raises(TfmError, match="rope_interleaved"):
        read(tmp_path, LLAMA, rope_interleaved=0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b'{"model_type": "llama",}', "line 1, column"),
        (b"[]", "a JSON object"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "not JSON that can be read: found lists or objects in each other without end$"),
        (b'{"a": ' + b"1" * 5000 + b"}", "can be read: found a whole number of more than 4300 digits$"),
        (b'{"a": "\t"}', "found Invalid control character in line 1, column 8;"),
    ],
    ids=range(7),
)
def test_not_json(tmp_path: Path, content: bytes, words: str) -> None:
    """A damaged config.json is one line with the file and the place, not a traceback."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(TfmError, match=words) as error:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


def test_not_there(tmp_path: Path) -> None:
    """No folder, a file where a folder should be, and a folder without config.json are three faults."""
    with pytest.raises(TfmError, match=r"model folder .*nowhere: found nothing there"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(TfmError, match=r"model folder .*: found no config\.json in it"):
        read_config(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TfmError, match=r"model folder .*file: found a file"):
        read_config(tmp_path / "file")
    with pytest.raises(TfmError, match="model folder /dev/null: found a device"):
        read_config(Path("/dev/null"))
    with pytest.raises(TfmError, match="model /dev/null: found a device"):
        resolve("/dev/null")


def test_vocabulary(tmp_path: Path) -> None:
    """A tokenizer may be smaller than the embedding (padded rows); one id more would read beyond it."""
    config = read(tmp_path, LLAMA)
    check_vocabulary(config, 90, "tokenizer.json")
    check_vocabulary(config, 100, "tokenizer.json")
    with pytest.raises(TfmError, match=r"tokenizer\.json: largest token id: found 100; allowed: 0 to 99"):
        check_vocabulary(config, 101, "tokenizer.json")


@pytest.mark.parametrize("depth", [10, 300, 900, 960, 990, 1000, 100_000])
def test_json_in_json_without_end(tmp_path: Path, depth: int) -> None:
    """What could be read just so could not be shown, and that was called a bug in tfm."""
    (tmp_path / "config.json").write_text(f'{{"model_type": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(TfmError, match=r"config\.json: (field model_type|not JSON)"):
        read_config(tmp_path)
