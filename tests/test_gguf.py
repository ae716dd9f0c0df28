"""GGUF files become checkpoint folders without loss, and anything that cannot is refused by name."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import (
    CHAT_TEMPLATE,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    POSITIONS,
    TOKENS,
    tokenizer_fields,
    write_gguf,
)
from tokenizers import Tokenizer

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import read_config
from tfm.engine.errors import TfmError
from tfm.engine.gguf_import import import_gguf
from tfm.engine.weights import load_weights

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}
LLAMA_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of model.safetensors, BF16 widened to float32."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        assert begin % np.dtype(NUMPY_TYPES[entry["dtype"]]).itemsize == 0, f"{name} is not aligned"
        array = np.frombuffer(content[begin:end], NUMPY_TYPES[entry["dtype"]]).reshape(entry["shape"])
        found[name] = (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array
    return found


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """All tensors as float32: MLX affine modules by w = q * scale + bias, one rounding after the exact product."""
    tensors = read_tensors(folder)
    quantization = json.loads((folder / "config.json").read_text()).get("quantization", {})
    found = {}
    for name, array in tensors.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in tensors and name.endswith(".weight"):
            bits = (quantization.get(module) or quantization)["bits"]
            codes = (array[:, :, None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
            scales, biases = (tensors[f"{module}.{part}"].astype(np.float32) for part in ("scales", "biases"))
            codes = codes.reshape(*scales.shape, 32).astype(np.float32)
            found[name] = (codes * scales[:, :, None] + biases[:, :, None]).reshape(len(array), -1)
        elif not name.endswith((".scales", ".biases")):
            found[name] = array.astype(np.float32)
    return found


def gguf_values(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a GGUF file as float32, by GGUF's own library."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        for tensor in gguf.GGUFReader(path).tensors
    }


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a Hugging Face q or k projection as the writers of GGUF files reorder them."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def expected_llama(values: dict[str, np.ndarray], ours: dict[str, np.ndarray], heads: int, kv_heads: int) -> int:
    """Hold every llama tensor against the GGUF's own, bit for bit; returns how many there were."""
    pairs = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    pairs["output.weight"] = "lm_head.weight"
    compared = 0
    for name, value in values.items():
        if name in pairs:
            mine = ours[pairs[name]]
        else:
            _, layer, module, part = name.split(".")
            norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
            mine = ours[f"model.layers.{layer}.{(norms | LLAMA_MODULES)[module]}.{part}"]
            if module in ("attn_q", "attn_k"):
                mine = permuted(mine, heads if module == "attn_q" else kv_heads)
        # Adding zero makes -0 and 0 one: q = 8 of a negative Q4_0 scale is -0 in GGUF's arithmetic.
        np.testing.assert_array_equal((mine + 0.0).view(np.uint32), (value + 0.0).view(np.uint32), err_msg=name)
        compared += 1
    return compared


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_llama_is_lossless(tmp_path: Path, kind: str, biases: bool) -> None:
    """Nibble order, sign offset, row permutation of q and k (and of their biases): each gives wrong weights alone."""
    source = write_gguf(tmp_path / "m.gguf", "llama", kind, tied=False, biases=biases)
    import_gguf(source, tmp_path / "out")
    ours, values = dequantized(tmp_path / "out"), gguf_values(source)
    assert expected_llama(values, ours, HEADS, KV_HEADS) == len(ours) == len(values)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["attention_bias"], config["mlp_bias"]) == (biases, biases)


@pytest.mark.parametrize("kind", KINDS)
def test_gpt2_is_lossless(tmp_path: Path, kind: str) -> None:
    """The fused projection is cut into q, k, v by rows, no matrix is transposed, and positions are never in blocks."""
    source = write_gguf(tmp_path / "m.gguf", "gpt2", kind)
    import_gguf(source, tmp_path / "out")
    ours, values = dequantized(tmp_path / "out"), gguf_values(source)
    for name in ("weight", "bias"):
        for layer in range(LAYERS):
            cut = [ours.pop(f"blocks.{layer}.attn.{letter}.{name}") for letter in "qkv"]
            ours[f"blocks.{layer}.attn.qkv.{name}"] = np.concatenate(cut)
    pairs = {"token_embd": "embed", "position_embd": "position", "output_norm": "norm"}
    modules = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm", "attn_qkv": "attn.qkv", "attn_output": "attn.o"}
    modules |= {"ffn_up": "mlp.up", "ffn_down": "mlp.down"}
    assert len(ours) == len(values)
    for name, value in values.items():
        parts = name.split(".")
        target = f"blocks.{parts[1]}.{modules[parts[2]]}" if parts[0] == "blk" else pairs[parts[0]]
        np.testing.assert_array_equal(ours[f"{target}.{parts[-1]}"], value, err_msg=name)
    config = json.loads((tmp_path / "out/config.json").read_text())
    wanted = {"model_type": "tfm_plain", "norm": "layer", "norm_eps": 1e-05, "position": "learned", "gated": False}
    wanted |= {"hidden_act": "gelu_tanh", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    assert wanted.items() <= config.items()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_imports_load(tmp_path: Path, architecture: str, kind: str) -> None:
    """What the import writes is what the loader reads: the same names, formats and values."""
    import_gguf(write_gguf(tmp_path / "m.gguf", architecture, kind, tied=False), tmp_path / "out")
    config = read_config(tmp_path / "out")
    weights = load_weights(Checkpoint(tmp_path / "out"), config)
    ours = dequantized(tmp_path / "out")
    prefix, query, unembedding = "model.layers.1.self_attn.q_proj", weights.layers[1].q_proj, "lm_head"
    if architecture == "gpt2":
        prefix, unembedding = "blocks.1.attn.q", "unembed"
        assert weights.position_embeddings is not None
        np.testing.assert_array_equal(weights.position_embeddings, ours["position.weight"])
    formats = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4"}
    assert query.format == formats.get(kind, kind.lower())
    assert weights.lm_head is not None
    np.testing.assert_array_equal(query.dequantize(), ours[f"{prefix}.weight"])
    np.testing.assert_array_equal(weights.lm_head.dequantize(), ours[f"{unembedding}.weight"])
    assert config.eos_token_ids == (0,)
    assert config.layers[1].num_key_value_heads == (KV_HEADS if architecture == "llama" else HEADS)


def test_the_default_model_is_lossless(default_model_folder: Path, default_model_gguf: Path) -> None:
    """Every matrix of the real thing, dequantised, has the bits that GGUF's own library gives."""
    values, ours = gguf_values(default_model_gguf), dequantized(default_model_folder)
    assert expected_llama(values, ours, 9, 3) == len(ours) == 272


@pytest.mark.parametrize(("kind", "scale"), [("Q4_0", 9000.0), ("Q8_0", 600.0), ("Q4_0", 6e-8), ("Q8_0", -6e-8)])
def test_scales_at_the_ends_of_float16(tmp_path: Path, kind: str, scale: float) -> None:
    """-8 d and -128 d overflow float16 for the largest scales: then float32 is kept, and the smallest stay exact."""
    path = write_gguf(tmp_path / "m.gguf", "llama", kind)
    content = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = np.float16(scale).tobytes()
    path.write_bytes(content)
    import_gguf(path, tmp_path / "out")
    expected_llama(gguf_values(path), dequantized(tmp_path / "out"), HEADS, KV_HEADS)
    dtype = read_tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.biases"].dtype
    assert dtype == (np.float32 if abs(scale) > 1 else np.float16)


def test_mixed_types_get_overrides(tmp_path: Path) -> None:
    """A module of another width than most must say so, or a reader unpacks it with the wrong one."""
    kinds = {"token_embd.weight": "Q8_0", "blk.1.ffn_up.weight": "F16"}
    source = write_gguf(tmp_path / "m.gguf", "llama", "Q4_1", kinds=kinds)
    import_gguf(source, tmp_path / "out")
    quantization = json.loads((tmp_path / "out/config.json").read_text())["quantization"]
    assert quantization == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8, "mode": "affine"},
        "model.layers.1.mlp.up_proj": False,
    }
    expected_llama(gguf_values(source), dequantized(tmp_path / "out"), HEADS, KV_HEADS)


def test_an_output_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    """Some writers store the tied matrix twice, which would double what decoding reads for it."""
    embedding = np.random.default_rng(0).normal(0, 0.1, (len(TOKENS), HIDDEN)).astype(np.float32)
    for name, output, tied in (("same", embedding, True), ("other", embedding + 0.1, False)):
        tensors = {"token_embd.weight": embedding, "output.weight": output}
        import_gguf(write_gguf(tmp_path / f"{name}.gguf", tensors=tensors), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is tied
        assert ("lm_head.weight" in read_tensors(tmp_path / name)) is not tied


def test_llama_config(tmp_path: Path) -> None:
    """float32 metadata comes back as the decimals it was written from, not as 9.999999974752427e-07."""
    import_gguf(write_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rms_norm_eps"] == 1e-06
    assert config["rope_theta"] == 50000.0
    assert config["max_position_embeddings"] == POSITIONS
    assert (config["num_key_value_heads"], config["head_dim"]) == (KV_HEADS, HEAD_DIM)
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 0)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 0}


def test_rope_scaling_of_llama_3_is_found_again(tmp_path: Path) -> None:
    """The file keeps only the factors; ignoring them gives a model that is right for short texts only."""
    wavelength = 2 * np.pi * 50000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    assert factors.min() == 1
    assert factors.max() == 8
    import_gguf(write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}), tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = write_gguf(tmp_path / "n.gguf", tensors={"rope_freqs.weight": factors * 1.5})
    with pytest.raises(TfmError, match=r"tensor rope_freqs\.weight"):
        import_gguf(path, tmp_path / "n")


def test_linear_rope_scaling(tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    import_gguf(write_gguf(tmp_path / "m.gguf", fields=fields), tmp_path / "out")
    scaling = json.loads((tmp_path / "out/config.json").read_text())["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


# ---- tokenizers ----


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    """Merges, special tokens and words come out as the file has them; a user-defined token is no control token."""
    import_gguf(write_gguf(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.encode("hello w<|end|><tool>").tokens == ["hello", "Ġw", "<|end|>", "<tool>"]
    assert tokenizer.encode("hello").ids == [TOKENS.index("hello")]
    text = "naïve 日本 \r\n 123"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode("a<|end|><tool>").ids) == "a<tool>"
    assert (tmp_path / "out/chat_template.jinja").read_text() == CHAT_TEMPLATE
    config = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<|start|>", "<|end|>", False)


def test_begin_of_sequence_is_added_when_the_file_says_so(tmp_path: Path) -> None:
    """llama-bpe adds it also when the file is silent, as its models need it."""
    for name, fields in (
        ("said", {"tokenizer.ggml.add_bos_token": True}),
        ("silent", {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}),
    ):
        import_gguf(write_gguf(tmp_path / f"{name}.gguf", fields=fields), tmp_path / name)
        tokenizer = Tokenizer.from_file(str(tmp_path / name / "tokenizer.json"))
        assert tokenizer.encode("hello").tokens == ["<|start|>", "hello"]
        assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", "Ġ1234", "'", "S", "ĊĊ", "Ġb"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "'", "S", "ĊĊ", "Ġb"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "'S", "ĊĊ", "Ġb"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "'S", "ĊĊ", "Ġb"]),
    ],
)
def test_words_before_merging(tmp_path: Path, pre: str, words: list[str]) -> None:
    """How text is cut first changes the tokens of numbers, contractions and line ends without any error showing."""
    import_gguf(write_gguf(tmp_path / "m.gguf", fields={"tokenizer.ggml.pre": pre}), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 1234'S\n\n b")] == words


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Better scores merge first (ab before bc), spaces become ▁, what no token covers falls back to bytes."""
    import_gguf(write_gguf(tmp_path / "m.gguf", tokenizer="sentencepiece"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.encode("abc abc").tokens == ["<s>", "▁abc", "▁abc"]
    assert tokenizer.encode("bcab").tokens == ["<s>", "▁", "bc", "ab"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("abc é", " two  spaces", "日本"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("word", "text"), [("#version1", "#version1"), ("x y", "x")])
def test_merges_that_cannot_be_lines(tmp_path: Path, word: str, text: str) -> None:
    """Guards merges written as lines: the library skips a line that begins with #version, and refuses two spaces."""
    fields = tokenizer_fields("sentencepiece")
    pieces = list(dict.fromkeys([*word, *(word[:end] for end in range(2, len(word) + 1))]))
    for name, more in (("tokens", pieces), ("token_type", [1] * len(pieces)), ("scores", [-1.0] * len(pieces))):
        fields[f"tokenizer.ggml.{name}"] = [*fields[f"tokenizer.ggml.{name}"], *more]
    tensors = {"token_embd.weight": np.zeros((len(fields["tokenizer.ggml.tokens"]), HIDDEN), np.float32)}
    file = write_gguf(tmp_path / "m.gguf", tokenizer="sentencepiece", fields=fields, tensors=tensors)
    import_gguf(file, tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode(text).tokens[-1] == text


def test_the_default_tokenizer(default_model_folder: Path) -> None:
    """Recorded from llama.cpp reading the same GGUF file."""
    tokenizer = Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    for text, ids in DEFAULT_IDS.items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


DEFAULT_IDS: dict[str, list[int]] = {
    "Once upon a time": [6403, 1980, 253, 655],
    "Hello, World! 12345 67": [19556, 28, 2260, 17, 216, 33, 34, 35, 36, 37, 216, 38, 39],
    "  leading   spaces\n\n\ttabs\r\n": [216, 2899, 256, 5600, 1116, 197, 100, 7366, 2738],
    "it's we're I'll DON'T": [269, 506, 392, 2316, 339, 3060, 422, 2154, 23, 68],
    "naïve café 日本語 русский 🙂👍🏽": [
        3546,
        46494,
        37366,
        17097,
        241,
        115,
        40993,
        179,
        120,
        248,
        216,
        9175,
        14714,
        9382,
        39511,
        7872,
        24958,
        47526,
        10813,
        235,
        231,
        10813,
        233,
        138,
    ],
    "x=3.14e-10; foo_bar(baz[0])": [
        104,
        45,
        35,
        30,
        33,
        36,
        85,
        29,
        33,
        32,
        43,
        29856,
        79,
        6299,
        24,
        45511,
        75,
        32,
        2255,
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "١٢٣ ½ Ⅷ": [164, 111, 164, 112, 164, 113, 216, 16738, 216, 173, 223, 117],
    "é ‍ zero": [85, 151, 219, 459, 231, 6708],
}


# ---- faults ----


def refused(path: Path, pattern: str) -> None:
    """import_gguf raises one line that matches and names the file, and leaves nothing behind."""
    with pytest.raises(TfmError, match=pattern) as caught:
        import_gguf(path, path.with_name("out"))
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in path.parent.iterdir() if "out" in entry.name] == []


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 something else", b"GGUF", b"GGUF\x03\0\0\0"])
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", "GGUF")


def test_missing_file(tmp_path: Path) -> None:
    refused(tmp_path / "m.gguf", "nothing there")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.1, 0.3, 0.7, 0.999])
def test_truncated_file(tmp_path: Path, share: float) -> None:
    """Cut in the header, the tokens, the tensor table or the data: always our error, never the library's."""
    path = write_gguf(tmp_path / "m.gguf", "llama", "F32")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "truncated or damaged")


def test_damaged_sizes(tmp_path: Path) -> None:
    """A length field of rubbish must not make the reader allocate, loop or fail with its own exception."""
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    for at in range(8, 64, 4):
        path.write_bytes(content[:at] + b"\xff\xff\xff\x7f" + content[at + 4 :])
        refused(path, "GGUF|field|tensor")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"general.architecture": "bert"}, r"general\.architecture: found 'bert'; allowed: llama, gpt2"),
        ({"llama.block_count": None}, r"llama\.block_count: found nothing"),
        ({"llama.block_count": 0}, r"llama\.block_count: found 0"),
        ({"llama.block_count": 3}, r"tensor blk\.2\.\S+: found nothing"),
        ({"llama.block_count": "two"}, r"llama\.block_count: found 'two'; allowed: int"),
        ({"llama.expert_count": 8}, r"llama\.expert_count: found 8"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type: found 'yarn'"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count: found 8; allowed: 16"),
        ({"llama.attention.new_trick": 2}, r"llama\.attention\.new_trick"),
        ({"llama.feed_forward_length": 64}, r"tensor blk\.0\.ffn_\S+: shape: found \[96, 64\]"),
        ({"split.count": 2}, r"split\.count: found 2"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model: found 'bert'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, r"tokenizer\.ggml\.pre: found 'unheard-of'; allowed: .*smollm"),
        ({"tokenizer.ggml.pre": None}, r"tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.merges": ["h x"]}, r"tokenizer\.ggml\.merges: found 'h x'"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, r"found 'a' more than once"),
        ({"tokenizer.ggml.token_type": [1]}, r"tokenizer\.ggml\.token_type: found 1 entries"),
        ({"tokenizer.ggml.tokens": [*TOKENS, "x" * 9]}, r"tokenizer\.ggml\.tokens: found 265 tokens; allowed: 264"),
        ({"tokenizer.ggml.bos_token_id": 999}, r"tokenizer\.ggml\.bos_token_id: found 999"),
    ],
)
def test_fields_that_are_refused(tmp_path: Path, fields: dict[str, object], pattern: str) -> None:
    refused(write_gguf(tmp_path / "m.gguf", fields=fields), pattern)


def test_unsupported_type(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", kinds={"blk.1.attn_v.weight": "Q5_0"})
    refused(path, r"tensor blk\.1\.attn_v\.weight: type: found Q5_0; allowed: F32, F16, BF16, Q4_0, Q4_1, Q8_0")


@pytest.mark.parametrize(
    ("tensors", "pattern"),
    [
        ({"blk.0.attn_q.weight": None}, r"tensor blk\.0\.attn_q\.weight: found nothing"),
        ({"token_embd.weight": None}, r"tensor token_embd\.weight: found nothing"),
        ({"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, r"tensor blk\.0\.attn_q_norm\.weight"),
        ({"blk.0.attn_q.bias": np.ones(HIDDEN, np.float32)}, r"tensor blk\.\d\.attn_\w+\.bias: found nothing"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray | None], pattern: str) -> None:
    """A tensor nobody reads may be part of the arithmetic, so an extra one is refused like a missing one."""
    refused(write_gguf(tmp_path / "m.gguf", tensors=tensors), pattern)


def test_a_scale_that_is_no_number(tmp_path: Path) -> None:
    """-128 times infinity plus infinity is no number where the file says infinity."""
    path = write_gguf(tmp_path / "m.gguf", "llama", "Q8_0")
    content = bytearray(path.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    content[tensor.data_offset : tensor.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    refused(path, r"tensor blk\.0\.ffn_up\.weight: found a scale that is not a number")


def test_interrupted_import_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while writing: no folder, no temporary folder, and the next import goes through."""
    path = write_gguf(tmp_path / "m.gguf")

    def interrupt(label: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "out", interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
    import_gguf(path, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()
