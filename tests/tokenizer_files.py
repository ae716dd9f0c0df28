"""Small tokenizers of both kinds, byte-level BPE and SentencePiece with bytes to fall back to, as the hub's files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm.engine.pieces import byte_of_character
from tfm.engine.tokenizer import Tokenizer

Json = dict[str, Any]

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACE = "▁"
PUT_SPACE_FIRST = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
SENTENCEPIECE_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def added(id_: int, content: str, special: bool = True, **flags: bool) -> Json:
    """An entry of added_tokens."""
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, **rest, "special": special, **flags}


def _tokenizer(vocab: Mapping[str, int], extra: Sequence[Json], model: Json, **steps: Json | None) -> Json:
    return {
        "version": "1.0",
        "added_tokens": list(extra),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        **steps,
        "model": {"type": "BPE", "merges": [], **model, "vocab": dict(vocab)},
    }


def byte_level(extra: Sequence[Json] = (), pieces: Sequence[bytes] = (), **steps: Json | None) -> Json:
    """Ids 0 to 255 are the bytes, then come pieces (which no text becomes: there are no merges), then extra."""
    alphabet = {byte: character for character, byte in byte_of_character().items()}
    vocab = {alphabet[byte]: byte for byte in range(256)}
    vocab |= {"".join(alphabet[byte] for byte in piece): 256 + i for i, piece in enumerate(pieces)}
    return _tokenizer(vocab, extra, {}, **{"pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL, **steps})


SENTENCEPIECE_PIECES = [SPACE, "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", SPACE + "hello", "é", "🙂"]
SENTENCEPIECE_SIZE = 257 + len(SENTENCEPIECE_PIECES)
MERGES = ["h e", "l l", "he ll", "hell o", SPACE + " hello"]


def sentencepiece(extra: Sequence[Json] = (), **steps: Json | None) -> Json:
    """Ids 0 to 255 are <0x00> to <0xFF>, then <unk>, then a few letters and "hello"; the rest falls back to bytes."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", *SENTENCEPIECE_PIECES]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model: Json = {"merges": MERGES, "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    defaults: dict[str, Json | None] = {"normalizer": PUT_SPACE_FIRST, "decoder": SENTENCEPIECE_DECODER}
    return _tokenizer(vocab, [added(256, "<unk>"), *extra], model, **{**defaults, **steps})


def puts_around(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]] = ()) -> Json:
    """A post_processor that puts tokens before and after every text."""
    single: list[Json] = [{"SpecialToken": {"id": text, "type_id": 0}} for text, _ in before]
    single.append({"Sequence": {"id": "A", "type_id": 0}})
    single += [{"SpecialToken": {"id": text, "type_id": 0}} for text, _ in after]
    tokens = {text: {"id": text, "ids": [id_], "tokens": [text]} for text, id_ in (*before, *after)}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}


def write_tokenizer(
    folder: Path, tokenizer: Json, tokenizer_config: Json | None = None, **others: Json | str | None
) -> Tokenizer:
    """Write tokenizer.json, tokenizer_config.json and others (generation_config={...}, template="..."), and load it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    for name, content in {"tokenizer_config": tokenizer_config, **others}.items():
        if content is None:
            continue
        if name == "template":
            (folder / "chat_template.jinja").write_text(str(content), encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.load(folder)
