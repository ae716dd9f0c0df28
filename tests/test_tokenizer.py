"""Text to ids as the model's authors have it, and back without a character lost, split or made up."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizer_files import (
    BYTE_LEVEL,
    SENTENCEPIECE_SIZE,
    added,
    byte_level,
    puts_around,
    sentencepiece,
    write_tokenizer,
)

from tfm.engine.errors import TfmError
from tfm.engine.tokenizer import Tokenizer

TEXTS = [
    "Hello, world!", "  two  spaces ", "línea única\r\n\ttab", "漢字かな交じり文", "Привет, мир",
    "🙂👩\u200d👩\u200d👧🇩🇪",
    "e\u0301 a\u0308\u0323 क्षि", "x = 10**12 # 3.14", "\x00nul\x7f", "a\ufffdb", "\u2028\u0085", "ﷺ½㎏", "",
]  # fmt: skip
USER_MARK = "<\uff5cUser\uff5c>"
BYTE_KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(params=BYTE_KINDS)
def of_bytes(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """A tokenizer whose ids 0 to 255 are the bytes, of either kind."""
    return write_tokenizer(tmp_path, BYTE_KINDS[request.param]())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.flush()]


# ---- decoding ----


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(default_model_folder: Path, text: str) -> None:
    """Decoding that cleans up spaces, normalises or drops control characters gives another text than was encoded."""
    tokenizer = Tokenizer.load(default_model_folder)
    ids = tokenizer.encode(text)
    library = tokenizers.Tokenizer.from_file(str(default_model_folder / "tokenizer.json"))
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == text == library.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert "".join(streamed(tokenizer, ids)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back_through_bytes(of_bytes: Tokenizer, text: str) -> None:
    """Characters without a token of their own are several tokens; streamed one by one they must come out whole."""
    ids = of_bytes.encode(text)
    assert of_bytes.decode(ids) == text
    pieces = streamed(of_bytes, ids)
    assert "".join(pieces) == text
    assert all(piece.encode().decode() == piece for piece in pieces)


@pytest.mark.parametrize("character", ["é", "漢", "🙂", "\u0301", "\U0010ffff", "\ufffd", "\x00"])
def test_character_comes_with_its_last_byte(of_bytes: Tokenizer, character: str) -> None:
    """Half a character was printed as U+FFFD, or a whole one was held back until the next token."""
    stream = of_bytes.stream()
    *first, last = character.encode()
    assert [stream.push(byte) for byte in first] == [""] * len(first)
    assert stream.push(last) == character
    assert stream.flush() == ""


@pytest.mark.parametrize("bad", [b"\xff", b"\xff\xfe\xfd", b"\xe2\x82", b"\x80\x80", b"\xed\xa0\x80", b"\xf0\x9f\x99"])
def test_bad_bytes_are_one_mark_and_the_text_goes_on(of_bytes: Tokenizer, bad: bytes) -> None:
    """A stream waited for bytes that never came and was silent from then on, or printed a mark for each byte."""
    pieces = streamed(of_bytes, list(b"a" + bad + b"b" + "é".encode()))
    assert "".join(pieces) == "a\ufffdbé"
    assert pieces[1 + len(bad)].endswith("b")


@pytest.mark.parametrize("character", ["é", "漢", "🙂"])
def test_cut_in_mid_character(of_bytes: Tokenizer, character: str) -> None:
    """An answer that ends by its length in mid-character raised an error, or showed a mark for every byte."""
    pieces = streamed(of_bytes, list(b"a" + character.encode()[:-1]))
    assert "".join(pieces) == "a\ufffd"
    assert pieces[-1] == "\ufffd"


def test_stream_is_decode_for_any_bytes(of_bytes: Tokenizer) -> None:
    """Streaming and decoding at once were two pieces of code, which differ where the bytes are not a text."""
    rng = random.Random(1)
    parts = [b"a", b" ", "é".encode(), "漢".encode(), "🙂".encode(), b"\xe2", b"\x82", b"\xff", b"\xf0\x9f", b"\xc3"]
    for _ in range(300):
        data = b"x" + b"".join(rng.choices(parts, k=12))
        whole = of_bytes.decode(list(data))
        assert "".join(streamed(of_bytes, list(data))) == whole
        marks = data.decode(errors="replace")
        while "\ufffd\ufffd" in marks:
            marks = marks.replace("\ufffd\ufffd", "\ufffd")
        assert whole == marks


def test_stream_is_decode_for_any_ids(default_model_folder: Path) -> None:
    """The same for ids drawn from a real vocabulary, with control tokens and ids that are no tokens among them."""
    tokenizer = Tokenizer.load(default_model_folder)
    rng = random.Random(2)
    for _ in range(50):
        ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(60)]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_space_put_first_is_taken_away_once(tmp_path: Path) -> None:
    """SentencePiece puts a space before a text. It is none of the text; but a continuation's first space is."""
    tokenizer = write_tokenizer(tmp_path, sentencepiece())
    ids = tokenizer.encode("hello hello")
    assert [tokenizer.token_bytes(id_) for id_ in ids] == [b" hello", b" hello"]
    assert tokenizer.decode(ids) == "hello hello"
    assert tokenizer.decode(ids, continues=True) == " hello hello"
    assert tokenizer.decode(tokenizer.encode("  hello")) == "  hello"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace(tmp_path: Path, scheme: str) -> None:
    """The other way to write the same; the space is only taken away where one was put."""
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    file = sentencepiece(normalizer=None, pre_tokenizer=metaspace, decoder=metaspace)
    tokenizer = write_tokenizer(tmp_path, file)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hello hello", "hello", " hello"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == library.decode(ids)
        assert text.startswith(" ") or tokenizer.decode(ids) == text  # one that is there counts as put


def test_words_without_decoder(tmp_path: Path) -> None:
    """A toy vocabulary of words has no decoder; its words are put together with spaces."""
    words = {"zero": 0, "one": 1, "plus": 2}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "zero"}
    file = {**byte_level(), "pre_tokenizer": {"type": "Whitespace"}, "decoder": None, "model": model}
    tokenizer = write_tokenizer(tmp_path, file)
    ids = tokenizer.encode("one plus one")
    assert ids == [1, 2, 1]
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == "one plus one"
    assert tokenizer.token_bytes(2) == b"plus"


def test_added_token_is_its_own_text(tmp_path: Path) -> None:
    """An added token is written as it is; read by the alphabet of bytes, é was the byte E9."""
    extra = [added(256, "éé", special=False), added(257, "a b", special=False)]
    tokenizer = write_tokenizer(tmp_path, byte_level(extra))
    assert tokenizer.encode("éé, a b") == [256, *b", ", 257]
    assert tokenizer.decode([256, 257]) == "ééa b"
    assert tokenizer.token_bytes(256) == "éé".encode()


def test_special_tokens_are_not_shown(tmp_path: Path) -> None:
    """End marks were printed after the answer. Some models do not call their turn marks special; thoughts are shown."""
    extra = [added(256, "<|end|>"), added(257, USER_MARK, special=False), added(258, "<think>", special=False)]
    tokenizer = write_tokenizer(tmp_path, byte_level(extra))
    ids = [*b"a", 256, *b"\xc3", 257, *b"\xa9", 258]
    assert tokenizer.decode(ids) == "aé<think>"
    assert tokenizer.decode([97, 256, 257], show_special=True) == f"a<|end|>{USER_MARK}"
    assert tokenizer.token_bytes(256) == b"<|end|>"
    assert [tokenizer.is_special(id_) for id_ in (97, 256, 257, 258)] == [False, True, True, False]


def test_ids_that_are_no_tokens(of_bytes: Tokenizer) -> None:
    """An embedding has more rows than the tokenizer has tokens; a model may well choose one of them."""
    assert of_bytes.token_bytes(10**6) == of_bytes.token_bytes(-1) == b""
    assert of_bytes.decode([104, 10**6, 105]) == "hi"


# ---- encoding ----


def test_no_truncation_and_no_padding(tmp_path: Path) -> None:
    """A tokenizer.json keeps the length it was trained with: long prompts were cut without a word."""
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    tokenizer = write_tokenizer(tmp_path, {**byte_level(), "truncation": truncation, "padding": padding})
    assert tokenizer.encode("a" * 100) == [97] * 100
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("by", ["post_processor", "add_bos_token", "both", "neither"])
@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_one_bos(tmp_path: Path, by: str, kind: Any) -> None:
    """BOS stood twice when two files asked for it, or when the text brought its own."""
    first = SENTENCEPIECE_SIZE if kind is sentencepiece else 256
    processor = puts_around([("<s>", first)]) if by in ("post_processor", "both") else None
    file = kind([added(first, "<s>")], post_processor=processor)
    config = {"bos_token": "<s>", "add_bos_token": True} if by in ("add_bos_token", "both") else {"bos_token": "<s>"}
    tokenizer = write_tokenizer(tmp_path, file, config)
    wanted = 0 if by == "neither" else 1
    for text in ("a", "", "hello"):
        assert tokenizer.encode(text).count(first) == wanted
        assert first not in tokenizer.encode(text, add_special=False)
    assert tokenizer.encode("<s>a").count(first) == 1
    assert tokenizer.encode("<s>a")[0] == first
    assert tokenizer.bos_id == first


def test_what_stands_after_a_text(tmp_path: Path) -> None:
    """What the authors put after a text stays there."""
    extra = [added(256, "<s>"), added(257, "</s>")]
    processor = puts_around([("<s>", 256)], [("</s>", 257)])
    tokenizer = write_tokenizer(tmp_path, byte_level(extra, post_processor=processor))
    assert tokenizer.encode("ab") == [256, 97, 98, 257]
    assert tokenizer.encode("ab", add_special=False) == [97, 98]


@pytest.mark.parametrize(
    ("config", "bos_id"),
    [
        ({"bos_token": "<s>"}, 256),
        ({"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}}, 256),
        ({"bos_token": None}, None),
        ({}, None),
        (None, None),
        ({"bos_token": "<no token>"}, None),
    ],
)  # fmt: skip
def test_forms_of_bos_token(tmp_path: Path, config: Any, bos_id: int | None) -> None:
    """Each of these stands in files on the hub."""
    assert write_tokenizer(tmp_path, byte_level([added(256, "<s>")]), config).bos_id == bos_id


def test_bos_token_of_another_type(tmp_path: Path) -> None:
    """A fault in the file is named."""
    with pytest.raises(TfmError, match=r"tokenizer_config\.json: field bos_token: found 7; allowed: a string"):
        write_tokenizer(tmp_path, byte_level(), {"bos_token": 7})


def test_special_tokens_map(tmp_path: Path) -> None:
    """Older models name their tokens in a file of their own; tokenizer_config.json comes first."""
    extra = [added(256, "<s>"), added(257, "</s>")]
    names = {"bos_token": {"content": "<s>"}, "eos_token": "<s>"}
    tokenizer = write_tokenizer(tmp_path, byte_level(extra), {"eos_token": "</s>"}, special_tokens_map=names)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (256, {257})


@pytest.mark.parametrize(
    ("config", "generation", "tokens", "eos_ids"),
    [
        ({"eos_token_id": 5}, None, None, {5}),
        ({"eos_token_id": [5, 6]}, None, None, {5, 6}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, None, {7}),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, {"eos_token": "</s>"}, {5, 6, 7, 256}),
        (None, None, {"eos_token": {"content": "</s>"}}, {256}),
        (None, None, {"eos_token": None}, set()),
        ({}, {}, {}, set()),
        (None, {"eos_token_id": [7, 7]}, None, {7}),
    ],
)  # fmt: skip
def test_eos_is_the_union(tmp_path: Path, config: Any, generation: Any, tokens: Any, eos_ids: set[int]) -> None:
    """A model did not stop because its end was named in the file that was not read."""
    file = byte_level([added(256, "</s>")])
    assert write_tokenizer(tmp_path, file, tokens, config=config, generation_config=generation).eos_ids == eos_ids


@pytest.mark.parametrize("wrong", ["2", 2.0, True, [1, "2"], {"id": 2}])
def test_eos_of_another_type(tmp_path: Path, wrong: Any) -> None:
    """A fault in the file is named."""
    with pytest.raises(TfmError, match=r"generation_config\.json: field eos_token_id"):
        write_tokenizer(tmp_path, byte_level(), generation_config={"eos_token_id": wrong})


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_control_tokens_as_text(tmp_path: Path, kind: Any) -> None:
    """Without parse_special the name of a control token is letters; with it a token."""
    first = SENTENCEPIECE_SIZE if kind is sentencepiece else 256
    extra = [added(first, "<|end|>"), added(first + 1, USER_MARK, special=False)]
    tokenizer = write_tokenizer(tmp_path, kind(extra))
    without = write_tokenizer(tmp_path / "without", kind())
    for text in ("<|end|>", f"a<|end|> b{USER_MARK}", "<|end", "no token"):
        assert tokenizer.encode(text, parse_special=False) == without.encode(text)
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text
    assert tokenizer.encode("a<|end|>")[-1] == first
    assert tokenizer.encode(f"a{USER_MARK}")[-1] == first + 1


def test_control_token_that_a_normalizer_makes(tmp_path: Path) -> None:
    """NFKC makes < of a wide one: what had no control token in it has one afterwards."""
    file = byte_level([added(256, "<|end|>", normalized=True)], normalizer={"type": "NFKC"})
    tokenizer = write_tokenizer(tmp_path, file)
    text = "\uff1c|end|\uff1e"
    assert tokenizer.encode(text) == [256]
    assert tokenizer.encode(text, parse_special=False) == list(b"<|end|>")


def test_vocab_size_is_above_every_id(tmp_path: Path) -> None:
    """Whether ids are beyond the embedding was seen by the number of tokens; the largest id is what counts."""
    assert write_tokenizer(tmp_path, byte_level()).vocab_size == 256
    vocab = {"a": 0, "<|far|>": 999}
    file = {**byte_level([added(999, "<|far|>")]), "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    assert write_tokenizer(tmp_path / "far", file).vocab_size == 1000


@pytest.mark.parametrize("text", ["a" * 25_000, " " * 250_000, "漢字仮名交" * 2_500, "<|im_end|>" * 5_000])
def test_long_words_take_near_linear_time(default_model_folder: Path, text: str) -> None:
    """Text without a word's end took a time that grows with its square."""
    tokenizer = Tokenizer.load(default_model_folder)
    for special in (True, False):
        tokenizer.encode("<|im_end|>", parse_special=special)

        def seconds(times: int, special: bool = special) -> float:
            begin = time.perf_counter()
            ids = tokenizer.encode(text * times, parse_special=special)
            end = time.perf_counter()
            assert tokenizer.decode(ids, show_special=True) == text * times
            return end - begin

        assert seconds(4) < 10 * max(seconds(1), 0.02)


# ---- faults ----


def test_no_tokenizer(tmp_path: Path) -> None:
    """The file is named, and what is needed."""
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TfmError, match=r"tokenizer\.json: found nothing there; tfm needs the tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "None"}}'])
def test_tokenizer_that_is_none(tmp_path: Path, content: bytes) -> None:
    """A damaged download is one line with the file's name."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TfmError, match=r"tokenizer\.json: not a tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("decoder", [{"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC"}])
def test_decoder_that_is_not_known(tmp_path: Path, decoder: Any) -> None:
    """Refused by name rather than decoded to something else."""
    full = {"pad_token": "-", "word_delimiter_token": "|", "cleanup": True, **decoder}
    named = rf"tokenizer\.json: field decoder: found .*{decoder['type']}.*allowed: .*ByteLevel"
    with pytest.raises(TfmError, match=named):
        write_tokenizer(tmp_path, byte_level(decoder=full))


def test_decoder_in_steps(tmp_path: Path) -> None:
    """A sequence of one step is that step."""
    tokenizer = write_tokenizer(tmp_path, byte_level(decoder={"type": "Sequence", "decoders": [BYTE_LEVEL]}))
    assert tokenizer.decode(list("é".encode())) == "é"


def test_half_of_a_surrogate_pair(of_bytes: Tokenizer) -> None:
    """JSON may hold what UTF-8 cannot; the library's own error names neither the text nor the place."""
    with pytest.raises(TfmError, match=r"text: found half of a surrogate pair, U\+D83D, at character 2"):
        of_bytes.encode("ab\ud83d")
