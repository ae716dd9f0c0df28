"""The tokenizer of a GGUF file as Hugging Face files: tokenizer.json, tokenizer_config.json, chat_template.jinja.

GGUF names two kinds of tokenizer here. `gpt2` is byte-level BPE: the merges are in the file, how text is cut into words
first is only named (tokenizer.ggml.pre), so the cutting of each name is written down below. `llama` is SentencePiece
BPE: the file has scores and no merges; every way of cutting a token into two others is a merge, as good as the score of
what it makes, and bytes that no token covers fall back to the tokens <0x00> to <0xFF>.
"""

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from tfm.engine.errors import TfmError
from tfm.engine.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "\u2581"

BYTE_LEVEL_ALONE = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_LEVEL_AFTER_SPLIT = BYTE_LEVEL_ALONE | {"use_regex": False}
SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


GPT2_WORDS: dict[str, Any] = {"pre_tokenizer": BYTE_LEVEL_ALONE}
DIGIT_WORDS: dict[str, Any] = {"pre_tokenizer": _sequence(SINGLE_DIGITS, BYTE_LEVEL_ALONE)}
LLAMA3_WORDS: dict[str, Any] = {
    "pre_tokenizer": _sequence(_split(_WORDS + r"\p{N}{1,3}" + _REST), BYTE_LEVEL_AFTER_SPLIT),
    "ignore_merges": True,
    "add_bos": True,
}
QWEN2_WORDS: dict[str, Any] = {
    "pre_tokenizer": _sequence(_split(_WORDS + r"\p{N}" + _REST), BYTE_LEVEL_AFTER_SPLIT),
    "normalizer": {"type": "NFC"},
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": GPT2_WORDS,
    "phi-2": GPT2_WORDS,
    "olmo": GPT2_WORDS,
    "smollm": DIGIT_WORDS,
    "starcoder": DIGIT_WORDS,
    "refact": DIGIT_WORDS,
    "codeshell": DIGIT_WORDS,
    "llama-bpe": LLAMA3_WORDS,
    "llama3": LLAMA3_WORDS,
    "llama-v3": LLAMA3_WORDS,
    "qwen2": QWEN2_WORDS,
}
"""tokenizer.ggml.pre -> how text becomes words; keys that are absent are None or false."""


def eos_token_ids(file: GgufFile) -> list[int]:
    """The ids that end an answer: end of sequence, of turn, of message, as far as the file names them."""
    fields = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(file.integer(field) for field in fields if file.has(field)))


def _vocabulary(file: GgufFile, vocab_size: int) -> tuple[list[str], list[int]]:
    """Each token and its type, in the order of their ids."""
    field = f"{file.path}: field tokenizer.ggml"
    tokens = [str(token) for token in file.sequence("tokenizer.ggml.tokens")]
    types = [NORMAL] * len(tokens)
    if file.has("tokenizer.ggml.token_type"):
        types = file.sequence("tokenizer.ggml.token_type")
    if len(tokens) > vocab_size:
        raise TfmError(f"{field}.tokens", f"{len(tokens)} tokens", f"{vocab_size}, the rows of token_embd.weight")
    if len(types) != len(tokens):
        raise TfmError(f"{field}.token_type", f"{len(types)} entries", f"{len(tokens)}, as many as tokens")
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise TfmError(f"{field}.tokens", f"{twice!r} more than once", "each token once")
    return tokens, types


def tokenizer_files(file: GgufFile, vocab_size: int) -> dict[str, str]:
    """File name -> text, for every tokenizer file of the checkpoint folder."""
    tokens, types = _vocabulary(file, vocab_size)
    ids = {token: id for id, token in enumerate(tokens)}
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    kind = file.text("tokenizer.ggml.model")
    if kind not in builders:
        raise TfmError(f"{file.path}: field tokenizer.ggml.model", repr(kind), ", ".join(builders))
    tokenizer, add_bos = builders[kind](file, ids, types)
    named = {name: _named_token(file, field, tokens) for name, field in NAMED_TOKENS.items()}
    add_bos = file.flag("tokenizer.ggml.add_bos_token", add_bos) and named["bos_token"] is not None
    add_eos = file.flag("tokenizer.ggml.add_eos_token", False) and named["eos_token"] is not None
    before = [named["bos_token"]] if add_bos else []
    after = [named["eos_token"]] if add_eos else []
    if before or after:
        tokenizer["post_processor"] = _template([str(t) for t in before], [str(t) for t in after], ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name: token for name, token in named.items() if token is not None}
    config |= {"add_bos_token": add_bos, "add_eos_token": add_eos}
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    compact = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))  # with spaces it takes longer to read
    texts = {name: f"{compact(content)}\n" for name, content in files.items()}
    if file.has("tokenizer.chat_template"):
        texts["chat_template.jinja"] = file.text("tokenizer.chat_template")
    return texts


NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _named_token(file: GgufFile, field: str, tokens: list[str]) -> str | None:
    field = f"tokenizer.ggml.{field}"
    if not file.has(field):
        return None
    id = file.integer(field)
    if not 0 <= id < len(tokens):
        raise TfmError(f"{file.path}: field {field}", id, f"0 to {len(tokens) - 1}")
    return tokens[id]


def _added_tokens(ids: dict[str, int], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": id, "content": token, **flags, "special": types[id] != USER_DEFINED}
        for token, id in ids.items()
        if types[id] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _template(before: list[str], after: list[str], ids: dict[str, int]) -> dict[str, Any]:
    def step(token: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": 0}}

    def around(*texts: str) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for text in texts:
            steps += [step(t) for t in before] + [{"Sequence": {"id": text, "type_id": 0}}] + [step(t) for t in after]
        return steps

    special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (*before, *after)}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


def _tokenizer(
    ids: dict[str, int], types: list[int], merges: Iterable[tuple[str, str]], model: dict[str, Any], **steps: Any
) -> dict[str, Any]:
    bpe: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(ids, types),
        "normalizer": steps["normalizer"],
        "pre_tokenizer": steps["pre_tokenizer"],
        "post_processor": None,
        "decoder": steps["decoder"],
        "model": bpe | model | {"vocab": ids, "merges": _as_written(list(merges))},
    }


def _as_written(merges: list[tuple[str, str]]) -> list[str] | list[list[str]]:
    """Each as "left right", which the library reads in 53 ms where pairs of 49,000 take it 68, if it can be read so.

    The library takes a line that begins with #version for a comment.
    """
    if any(" " in left or " " in right or left.startswith("#version") for left, right in merges):
        return [list(pair) for pair in merges]
    return [f"{left} {right}" for left, right in merges]


def _byte_level(file: GgufFile, ids: dict[str, int], types: list[int]) -> tuple[dict[str, Any], bool]:
    """tokenizer.json, and whether a text starts with BOS when the file does not say."""
    field = "tokenizer.ggml.pre"
    name = file.text(field, "gpt-2" if file.text("general.architecture") == "gpt2" else "default")
    if name not in PRE_TOKENIZERS:
        raise TfmError(f"{file.path}: field {field}", repr(name), ", ".join(PRE_TOKENIZERS))
    words = PRE_TOKENIZERS[name]
    merges: list[tuple[str, str]] = []
    for merge in file.sequence("tokenizer.ggml.merges"):
        left, space, right = str(merge).partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise TfmError(f"{file.path}: field tokenizer.ggml.merges", repr(merge), "two tokens that make a third")
        merges.append((left, right))
    tokenizer = _tokenizer(
        ids,
        types,
        merges,
        {"ignore_merges": words.get("ignore_merges", False)},
        normalizer=words.get("normalizer"),
        pre_tokenizer=words["pre_tokenizer"],
        decoder=BYTE_LEVEL_ALONE,
    )
    return tokenizer, bool(words.get("add_bos", False))


def _sentencepiece(file: GgufFile, ids: dict[str, int], types: list[int]) -> tuple[dict[str, Any], bool]:
    """tokenizer.json, and whether a text starts with BOS when the file does not say."""
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    scores = file.sequence("tokenizer.ggml.scores")
    if len(scores) != len(ids):
        raise TfmError(f"{file.path}: field tokenizer.ggml.scores", f"{len(scores)} entries", f"{len(ids)}")
    unknown = _named_token(file, "unknown_token_id", list(ids))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    tokenizer = _tokenizer(
        ids,
        types,
        _merges_from_scores(ids, types, scores),
        {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
        normalizer={"type": "Sequence", "normalizers": [*before, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )
    return tokenizer, True


def _merges_from_scores(ids: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that make a normal token, the best score first; of equal ones the longer left part first."""
    normal = {token for token, id in ids.items() if types[id] == NORMAL}
    merges = [
        (scores[ids[token]], token[:cut], token[cut:])
        for token in ids
        if token in normal
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort(key=lambda merge: -merge[0])
    return [(left, right) for _, left, right in merges]
