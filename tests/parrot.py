"""A model that says what it is told to: after token i always token next(i), so that any bytes can be had as an answer.

It is a llama whose embedding is the identity and whose blocks add nothing, so that the residual stream tells the last
token and the unembedding maps it to the next. Its tokens are the 256 bytes and, with id 0, the end of the text.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import LLAMA, shapes_of
from raw_safetensors import write_tensors
from tokenizer_files import SENTENCEPIECE_DECODER

from tfm.engine.pieces import byte_of_character

END = 0
TOKENS = 257
SIZES = {"vocab_size": TOKENS, "hidden_size": TOKENS, "num_hidden_layers": 1, "head_dim": 10}
CONFIG = {**LLAMA, **SIZES, "bos_token_id": None}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
BAD_TEMPLATES = {
    "{{ raise_exception('Only one turn, please') }}": "found Only one turn, please",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "chat template: found",
    "{{ 'a' * 10000000000 }}": "chat template: found",
    "{{ ''.__class__.__mro__ }}": "chat template: found",
    "{% if %}": "(line 1)",
}
"""Templates that cannot be used, and what an error says of them."""
FAMILY = "👩\u200d🚀e\u0301क्षि"
PIECES = [b"\xf0\x9f", b"\x91\xa9", b"\xe2\x80", b"\x8d\xf0\x9f", b"\x9a\x80e", b"\xcc\x81\xe0", "क्षि".encode()[1:]]
"""FAMILY in tokens whose edges are not those of its characters."""


def id_of(byte: int) -> int:
    return byte + 1


def ids_of(text: str) -> list[int]:
    """The tokens of a text where each is a byte."""
    return [id_of(byte) for byte in text.encode()]


def write_parrot(folder: Path, answer: bytes, *, loop: bool = False, chat: bool = False, context: int = 1024) -> Path:
    """A model that after a line feed says answer, whose bytes all differ, and then ends; or with loop begins again.

    chat gives it a chat template, at whose end a line feed stands. Returns folder.
    """
    assert len(set(answer)) == len(answer)
    assert b"\n" not in answer
    ids = [id_of(byte) for byte in answer]
    follows = dict(zip([id_of(ord("\n")), *ids], [*ids, ids[0] if loop else END], strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", _tensors(follows))
    config = {**CONFIG, "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()), encoding="utf-8")
    if chat:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _tensors(follows: Mapping[int, int]) -> dict[str, np.ndarray]:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes_of(CONFIG).items()}
    for name, values in tensors.items():
        if name.endswith("norm.weight"):
            values[:] = 1
    np.fill_diagonal(tensors["model.embed_tokens.weight"], 1)
    for id_ in range(TOKENS):
        tensors["lm_head.weight"][follows.get(id_, END), id_] = 1
    return tensors


def _tokenizer() -> dict:
    vocab = {"<|end|>": END} | {character: id_of(byte) for character, byte in byte_of_character().items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": END, "content": "<|end|>", **flags}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def with_pieces(folder: Path, pieces: Sequence[bytes], *, bytes_to_fall_back_to: bool = False, **options: Any) -> Path:
    """A parrot that says pieces, each one token; or, as SentencePiece has it, their bytes as <0x..>."""
    letters = b"".join(pieces) if bytes_to_fall_back_to else bytes(range(ord("A"), ord("A") + len(pieces)))
    write_parrot(folder, letters, **options)
    file = json.loads((folder / "tokenizer.json").read_text())
    if bytes_to_fall_back_to:
        vocab = {"<|end|>": END} | {f"<0x{byte:02X}>": id_of(byte) for byte in range(256)}
        file |= {"decoder": SENTENCEPIECE_DECODER, "pre_tokenizer": None}
        file["model"] |= {"vocab": vocab, "byte_fallback": True}
    else:
        alphabet = {byte: character for character, byte in byte_of_character().items()}
        names = {id_: name for name, id_ in file["model"]["vocab"].items()}
        names |= {id_of(a): "".join(alphabet[b] for b in piece) for a, piece in zip(letters, pieces, strict=True)}
        file["model"]["vocab"] = {name: id_ for id_, name in names.items()}
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


def set_ends(folder: Path, config: Any, generation: Any, tokenizer: Mapping[str, Any] | None) -> None:
    """What config.json has as eos_token_id; the same of generation_config.json, and tokenizer_config.json (None: no
    such file)."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
