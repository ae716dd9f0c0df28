"""Text to token ids and back, with the special tokens that a model's files name.

Encoding is done by the tokenizers library, exactly as the model's authors have it in tokenizer.json. Decoding is done
here, from the bytes of each piece, so that a text that is streamed equals the same text decoded at once.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfm.engine.errors import TfmError
from tfm.engine.fields import is_integer, read_json, shown
from tfm.engine.files import is_there
from tfm.engine.pieces import StreamDecoder, read_decoder
from tfm.engine.tokenizer_file import library_faults, read_backend

if TYPE_CHECKING:
    import tokenizers

    from tfm.engine.chat import ChatTemplate

LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EOS_FILES = ("config.json", "generation_config.json")
Message = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a checkpoint folder; see `load`.

    eos_ids are all ids that end a text: those of config.json and generation_config.json and the eos_token of
    tokenizer_config.json. bos_id is the id of bos_token, None when the model has none.
    """

    def __init__(self, folder: Path, backend: "tokenizers.Tokenizer") -> None:
        self.folder = folder
        self._backend = backend
        decoder = backend.decoder
        self._pieces = read_decoder(None if decoder is None else decoder.__getstate__(), str(folder / "tokenizer.json"))
        self._added = {id_: (token.content, token.special) for id_, token in backend.get_added_tokens_decoder().items()}
        self._hidden = {id_ for id_, (text, special) in self._added.items() if special or _looks_like_control(text)}
        self._config = _read_optional(folder / "special_tokens_map.json") | _read_optional(
            folder / "tokenizer_config.json"
        )
        self.special_tokens = self._named_tokens()
        self.bos_id = self._id_of("bos_token")
        self.eos_ids = self._read_eos_ids()
        self.vocab_size = max(backend.get_vocab_size(), 1 + max(self._added, default=-1))

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer in folder. Raises TfmError naming the file and field that is missing or not understood."""
        backend = read_backend(folder / "tokenizer.json")
        backend.no_truncation()  # some files keep a length that they were trained with: text would be cut in silence
        backend.no_padding()
        return cls(folder, backend)

    # ---- what the files say ----

    def _named_tokens(self) -> dict[str, str]:
        """bos_token and its like as text, when they are there: each a string, or an object with its content."""
        found: dict[str, str] = {}
        for name in NAMED_TOKENS:
            match self._config.get(name):
                case None:
                    continue
                case str(text) | {"content": str(text)}:
                    found[name] = text
                case other:
                    where = f"{self.folder / 'tokenizer_config.json'}: field {name}"
                    raise TfmError(where, shown(other), "a string, an object with content, null")
        return found

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _read_eos_ids(self) -> frozenset[int]:
        ids: set[int] = set()
        for file in EOS_FILES:
            value = _read_optional(self.folder / file).get("eos_token_id")
            for id_ in value if isinstance(value, list) else [] if value is None else [value]:
                if not is_integer(id_):
                    where = f"{self.folder / file}: field eos_token_id"
                    raise TfmError(where, shown(value), "an id, a list of ids, null")
                ids.add(id_)
        named = self._id_of("eos_token")
        return frozenset(ids if named is None else ids | {named})

    # ---- text to ids ----

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """The ids of text.

        add_special puts before and after it what the model's authors put there (one BOS at most, also when the text
        brings its own). Without parse_special a control token's name in the text is text like any other.
        """
        ids = _encode(self._backend, text) if parse_special else self.encode_pieces([text])
        if not add_special:
            return ids
        before, after = self._around
        if before and ids[: len(before)] == before:
            before = []
        return [*before, *ids, *after]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that stand before and after a text, by tokenizer.json's post_processor or by add_bos_token."""
        before: list[int] = []
        after: list[int] = []
        if self._backend.post_processor is not None:
            bare = _encode(self._backend, "a")
            with library_faults(f"file {self.folder / 'tokenizer.json'}: field post_processor"):
                full = self._backend.encode("a").ids
            starts = (i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare)
            start = next(starts, 0)
            before, after = full[:start], full[start + len(bare) :]
        if self._config.get("add_bos_token") is True and self.bos_id is not None and self.bos_id not in before:
            before = [self.bos_id, *before]
        return before, after

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """The ids of a text given in pieces: an int is that token, a str is text in which no control token is seen.

        All pieces go through the tokenizer as one text. Nothing is put before or after it.
        """
        wanted = [piece for piece in pieces if isinstance(piece, int)]
        texts = [piece for piece in pieces if isinstance(piece, str)]
        if not any(name in text for text in texts for name in self.control):
            ids = _encode(self._backend, "".join(self._added[p][0] if isinstance(p, int) else p for p in pieces))
            marks = set(self.control.values())
            if [id_ for id_ in ids if id_ in marks] == wanted:  # a normalizer may have made a name out of other letters
                return ids
        return self._guard.encode(pieces)

    @cached_property
    def control(self) -> dict[str, int]:
        """Text -> id of the tokens that a person's text must not become: those that are hidden in generated text, and
        the added ones that the chat template writes (a model may use one as a mark without calling it special)."""
        template = self.chat_template.source if self.chat_template else ""
        return {
            text: id_
            for id_, (text, _) in self._added.items()
            if text and (id_ in self._hidden or (not text.isspace() and not text.isalnum() and text in template))
        }

    @cached_property
    def hidden(self) -> dict[str, int]:
        """Text -> id of the control tokens proper, which generated text does not show."""
        return {self._added[id_][0]: id_ for id_ in self._hidden if self._added[id_][0]}

    @cached_property
    def _guard(self) -> "_Guard":
        return _Guard(self._backend, self.control)

    # ---- chat ----

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The model's chat template; None when it has none."""
        from tfm.engine.chat import read_chat_template

        return read_chat_template(self.folder, self._config, self.special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def chat_ids(
        self, messages: Sequence[Message], prefill: str | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation as the chat template writes it; see `chat.py`.

        messages are mappings with `role` and `content`; prefill is the start of the answer.
        """
        from tfm.engine.chat import chat_ids

        return chat_ids(self, messages, prefill, add_generation_prompt)

    @property
    def chat_starts_with_bos(self) -> bool:
        """Whether a conversation starts with BOS: it does when there is one, unless add_bos_token says false."""
        return self.bos_id is not None and (self._config.get("add_bos_token") is not False or bool(self._around[0]))

    # ---- ids to text ----

    def token_bytes(self, id_: int) -> bytes:
        """The bytes that a token stands for, special ones included; none for an id that is no token."""
        if id_ in self._added:
            return self._added[id_][0].encode()
        piece = self._backend.id_to_token(id_) if 0 <= id_ < self.vocab_size else None
        return b"" if piece is None else self._pieces(piece)

    def _visible_bytes(self, id_: int) -> bytes:
        return b"" if id_ in self._hidden else self.token_bytes(id_)

    def stream(self, show_special: bool = False, continues: bool = False) -> StreamDecoder:
        """A decoder for tokens that come one by one. continues: they go on in a text that has begun before."""
        return StreamDecoder(self.token_bytes if show_special else self._visible_bytes, self._pieces, continues)

    def decode(self, ids: Iterable[int], show_special: bool = False, continues: bool = False) -> str:
        """The text of ids: what `stream` gives for them, put together."""
        stream = self.stream(show_special, continues)
        return "".join([*map(stream.push, ids), stream.flush()])

    @property
    def leading(self) -> str:
        """What stands before the first word of a text and is not shown: SentencePiece's space, or nothing."""
        return self._pieces.leading

    @property
    def joiner(self) -> bytes:
        """What stands between tokens beside their own bytes: nothing, unless the tokenizer has no decoder."""
        return self._pieces.joiner

    def is_special(self, id_: int) -> bool:
        """Whether a token is one that generated text does not show."""
        return id_ in self._hidden

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so in tokenizer.json."""
        return self._backend.token_to_id(text)


class _Guard:
    """A second tokenizer, in which control tokens have names that no text can hold, so that text is only text.

    It gives the very ids that the first would give if the control tokens' names did not look like text.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", control: Mapping[str, int]) -> None:
        import tokenizers

        nonce = os.urandom(8).hex()
        names = {text: f"\U0010fffd{nonce}:{id_}\U0010fffc" for text, id_ in control.items()}
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocab = state["model"]["vocab"]
        if isinstance(vocab, dict):
            state["model"]["vocab"] = {names.get(text, text): id_ for text, id_ in vocab.items()}
        else:
            state["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocab]
        if state["model"].get("unk_token") in names:
            state["model"]["unk_token"] = names[state["model"]["unk_token"]]
        state["post_processor"] = None
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(state))
        self._names = {id_: names[text] for text, id_ in control.items()}
        self._ids = {self._backend.token_to_id(names[text]): id_ for text, id_ in control.items()}

    def encode(self, pieces: Sequence[str | int]) -> list[int]:
        text = "".join(self._names[piece] if isinstance(piece, int) else piece for piece in pieces)
        return [self._ids.get(id_, id_) for id_ in _encode(self._backend, text)]


def _encode(backend: "tokenizers.Tokenizer", text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}"
        raise TfmError("text", found, "text that UTF-8 can hold") from None
    with library_faults("tokenizer.json: the text cannot be encoded with it"):
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def _looks_like_control(text: str) -> bool:
    """Some models call their turn marks not special; nobody writes <|so|> by chance."""
    return LOOKS_LIKE_CONTROL.fullmatch(text) is not None


def _read_optional(path: Path) -> dict[str, object]:
    return read_json(path) if is_there(path) else {}
