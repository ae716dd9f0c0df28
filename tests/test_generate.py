"""Generation on a real checkpoint that says what it is told to: how texts end, and that nothing of them is lost.

The model is the parrot (see parrot.py), some of whose tokens are given longer texts here.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, write_checkpoint
from parrot import END, id_of, write_parrot
from tokenizer_files import SENTENCEPIECE_DECODER, added

from tfm.engine import TfmError, load
from tfm.engine.generate import StopFinder, Token
from tfm.engine.model import Model
from tfm.engine.pieces import byte_of_character
from tfm.engine.sampling import uniform
from tfm.engine.sampling_params import SamplingParams

START = [id_of(ord("\n"))]


@pytest.fixture(scope="module")
def say(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Models by what they say: a text of bytes that differ, or texts that are one token each."""
    models: dict[str, Model] = {}

    def model_of(pieces: bytes | Sequence[bytes], kind: str = "byte-level", **options: Any) -> Model:
        key = repr((pieces, kind, options))
        if key not in models:
            models[key] = load(_write(tmp_path_factory.mktemp("says"), pieces, kind, **options), threads=1)
        return models[key]

    yield model_of
    for model in models.values():
        model.close()


def _write(folder: Path, pieces: bytes | Sequence[bytes], kind: str, **options: Any) -> Path:
    """A parrot whose tokens for the letters A, B, C ... stand for pieces, when those are several."""
    letters = pieces if isinstance(pieces, bytes) else bytes(range(ord("A"), ord("A") + len(pieces)))
    write_parrot(folder, letters, **options)
    texts = {} if isinstance(pieces, bytes) else dict(zip(map(id_of, letters), pieces, strict=True))
    file = json.loads((folder / "tokenizer.json").read_text())
    if kind == "byte-level":
        alphabet = {byte: character for character, byte in byte_of_character().items()}
        named = {id_: "".join(alphabet[byte] for byte in text) for id_, text in texts.items()}
    else:
        named = {id_: text.decode().replace(" ", "▁") for id_, text in texts.items()}
        vocab = {"<|end|>": END} | {f"<0x{byte:02X}>": id_of(byte) for byte in range(256)}
        file |= {"decoder": SENTENCEPIECE_DECODER, "pre_tokenizer": None}
        file["model"] |= {"vocab": vocab, "byte_fallback": True}
    by_id = {id_: piece for piece, id_ in file["model"]["vocab"].items()} | named
    file["model"]["vocab"] = {piece: id_ for id_, piece in by_id.items()}
    assert len(file["model"]["vocab"]) == 257
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    return folder


Answer = tuple[str, str | None, int]


def answer(model: Model, prompt: Sequence[int] = START, max_tokens: int = 100, **options: Any) -> Answer:
    """The text, why it ended, and how many tokens it took."""
    tokens = list(model.generate(prompt, max_tokens, **options))
    assert all(token.finish_reason is None for token in tokens[:-1])
    assert all(token.bytes == model.tokenizer.token_bytes(token.id) for token in tokens)
    return "".join(token.text for token in tokens), tokens[-1].finish_reason if tokens else None, len(tokens)


@contextmanager
def changed(folder: Path, **files: Any) -> Iterator[Model]:
    """The model in folder with other JSON files beside it."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    model = load(folder, threads=1)
    try:
        yield model
    finally:
        model.close()


# ---- whole texts ----


@pytest.mark.parametrize("kind", ["byte-level", "bytes to fall back to"])
@pytest.mark.parametrize("text", ["Hi é🙂!", "e\u0301x", "漢", "\x00\x01"])
def test_characters_of_several_tokens(say: Any, kind: str, text: str) -> None:
    """A character whose bytes are tokens of their own comes whole with the last, and the text goes on after it."""
    model = say(text.encode(), kind)
    assert answer(model) == (text, "stop", len(text.encode()) + 1)
    for token in model.generate(START):
        token.text.encode()


def test_sequence_of_characters_over_the_edges_of_tokens(say: Any) -> None:
    """Joined emoji and combining marks, cut anywhere: each character when its last byte is there."""
    pieces = [b"\xf0\x9f", b"\x91\xa9", b"\xe2\x80", b"\x8d\xf0\x9f", b"\x9a\x80e", b"\xcc\x81!"]
    texts = [token.text for token in say(pieces).generate(START)]
    assert texts == ["", "👩", "", "\u200d", "🚀e", "\u0301!", ""]


@pytest.mark.parametrize("kind", ["byte-level", "bytes to fall back to"])
def test_cut_in_mid_character(say: Any, kind: str) -> None:
    """Cut by the limit in mid-character: one replacement character, however many bytes there were."""
    model = say("a🙂b".encode(), kind)
    texts = [answer(model, max_tokens=n) for n in range(1, 7)]
    assert [text for text, _, _ in texts] == ["a", "a\ufffd", "a\ufffd", "a\ufffd", "a🙂", "a🙂b"]
    assert {reason for _, reason, _ in texts} == {"length"}
    assert answer(model, max_tokens=7) == ("a🙂b", "stop", 7)


@pytest.mark.parametrize("kind", ["byte-level", "bytes to fall back to"])
def test_bad_bytes_do_not_silence_the_rest(say: Any, kind: str) -> None:
    """Bytes that are no text are one mark, and what comes after them is printed at once."""
    model = say(b"a\xff\xfe\xf0\x9fb" + "é".encode(), kind)
    assert answer(model)[0] == "a\ufffdbé"
    assert [token.text for token in model.generate(START)][1:6] == ["\ufffd", "", "", "", "b"]


def test_no_bytes_wait_for_a_control_token(say: Any) -> None:
    """The end of the text after half a character gives the half up."""
    assert answer(say(b"a\xf0\x9f")) == ("a\ufffd", "stop", 4)


def test_first_space_of_an_answer(say: Any) -> None:
    """A continuation keeps its first space; after a control token a new text begins, whose put-in space is dropped."""
    model = say([b" one", b" two"], "bytes to fall back to")
    assert answer(model)[0] == " one two"
    assert answer(model, [id_of(ord("A"))])[0] == " two"
    tokens = model.generate([id_of(ord("x")), END], 1, SamplingParams(logit_bias={id_of(ord("A")): 99.0}))
    assert next(tokens).text == "one"


# ---- stop texts ----


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "tokens"),
    [
        (b"abcdefgh", ["d"], "abc", 4),
        (b"abcdefgh", ["def"], "abc", 6),
        ([b"abc", b"def", b"gh"], ["cd"], "ab", 2),
        ([b"abc", b"def", b"gh"], ["e"], "abcd", 2),
        ([b"abc", b"def", b"gh"], ["abc"], "", 1),
        ([b"abc", b"def", b"gh"], ["fg", "efgh"], "abcde", 3),
        ([b"abc", b"def", b"gh"], ["efgh", "fg"], "abcde", 3),
        ([b"abc", b"def", b"gh"], ["ef", "efg"], "abcd", 2),
        ([b"abc", b"def", b"gh"], ["efg", "ef"], "abcd", 2),
        ([b"abc", b"def", b"gh"], ["fx", "e"], "abcd", 2),
        ([b"aa", b"b!"], ["aab"], "", 2),
        ([b"aaa", b"aab", b"xx"], ["aab"], "aaa", 2),
        (b"abcdefgh", ["d", "d", "d"], "abc", 4),
        ("ab🙂cd".encode(), ["c"], "ab🙂", 7),
        ("ab🙂cd".encode(), ["🙂"], "ab", 6),
        ("ab🙂cd".encode(), ["🙂c"], "ab", 7),
        ("ab🙂cd".encode(), ["b🙂"], "a", 6),
        (["é".encode(), b"\xf0\x9f", b"\x99\x82!"], ["!"], "é🙂", 3),
        ([b"a\n", b"\nb"], ["\n\n"], "a", 2),
    ],
)  # fmt: skip
def test_nothing_of_a_stop_is_shown(say: Any, pieces: Any, stop: list[str], text: str, tokens: int) -> None:
    """Over the edges of tokens, inside one, after an emoji, one the start of another, twice the same."""
    assert answer(say(pieces), stop=stop) == (text, "stop", tokens)


@pytest.mark.parametrize("stop", [["hx"], ["h!"], ["ghx", "gh!"], ["abcdefgh!"], ["abcdefghi"]])
def test_stop_that_is_never_complete(say: Any, stop: list[str]) -> None:
    """What could have been a stop was held back and never printed: at the end of the text, at the limit, on the way."""
    model = say(b"abcdefgh")
    assert answer(model, stop=stop) == ("abcdefgh", "stop", 9)
    for limit in range(1, 9):
        assert answer(model, max_tokens=limit, stop=stop) == ("abcdefgh"[:limit], "length", limit)
    assert answer(say(b"ab\xf0\x9f"), stop=["b\ufffd!", "b"[:1] + "🙂"])[0] == "ab\ufffd"


def test_text_is_held_back_no_longer_than_it_must(say: Any) -> None:
    """With a stop given, the stream came late by the length of the stop."""
    model = say(b"abcdefgh")
    texts = [token.text for token in model.generate(START, stop=["cdx", "fg!"])]
    assert texts == ["a", "b", "", "", "cde", "", "", "fgh", ""]


def test_only_generated_text_is_searched(say: Any) -> None:
    """A stop that stands in the prompt, or begins there, is none."""
    model = say(b"abcdefgh")
    prompt = [*map(id_of, b"d\n"), *START]
    assert answer(model, prompt, stop=["\na", "\n", "d\n"]) == ("abcdefgh", "stop", 9)


def test_stops_do_not_depend_on_the_tokens() -> None:
    """The same text in other pieces stopped at another place."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        text = "".join(rng.choice(list("ab"), 14))
        stops = ["".join(rng.choice(list("ab"), rng.integers(1, 5))) for _ in range(3)]
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        wanted = text[: min(ends)[1]] if ends else text
        for size in (1, 2, 3, 14):
            finder = StopFinder(stops)
            shown = "".join(finder.push(text[i : i + size]) for i in range(0, len(text), size)) + finder.flush()
            if size == 1:
                assert shown == wanted
            assert shown == wanted, (text, stops, size)
            assert finder.found == bool(ends)


@pytest.mark.parametrize("stop", ["<|end|>", "<|stop|>"])
def test_control_token_as_stop(say: Any, tmp_path: Path, stop: str) -> None:
    """A control token is not in the text that is shown, so a stop of its name was never found."""
    folder = _write(tmp_path, b"abc", "byte-level", loop=True)
    file = json.loads((folder / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    vocab["<|stop|>"] = vocab.pop("c")
    file["added_tokens"].append(added(vocab["<|stop|>"], "<|stop|>"))
    with changed(folder, tokenizer=file) as model:
        wanted = ("ab", "stop", 3) if stop == "<|stop|>" else ("ab" * 3 + "a", "length", 10)
        assert answer(model, max_tokens=10, stop=[stop]) == wanted


def test_empty_stop(say: Any) -> None:
    """It would be found at once in any text."""
    with pytest.raises(TfmError, match="stop: found an empty text"):
        say(b"abc").generate(START, stop=["x", ""])


# ---- ends ----


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"generation_config": {"eos_token_id": id_of(ord("d"))}}, "abc"),
        ({"generation_config": {"eos_token_id": [id_of(ord("f")), id_of(ord("e"))]}}, "abcd"),
        ({"tokenizer_config": {"eos_token": "c"}}, "ab"),
        ({"tokenizer_config": {"eos_token": {"content": "c"}}, "generation_config": {"eos_token_id": None}}, "ab"),
        ({"tokenizer_config": {"eos_token": "f"}, "generation_config": {"eos_token_id": id_of(ord("e"))}}, "abcd"),
    ],
)  # fmt: skip
def test_every_eos_ends(tmp_path: Path, files: dict[str, Any], text: str) -> None:
    """The model talked on where its end is named in one file only, or printed its end mark."""
    with changed(_write(tmp_path, b"abcdefgh", "byte-level"), **files) as model:
        assert answer(model) == (text, "stop", len(text) + 1)
        assert answer(model, stop=["b"]) == ("a", "stop", 2)


def test_no_eos_at_all(tmp_path: Path) -> None:
    """Without EOS the limit ends the text; the end mark, as a control token, is still not shown."""
    folder = _write(tmp_path, b"abc", "byte-level")
    config = json.loads((folder / "config.json").read_text())
    with changed(folder, config={**config, "eos_token_id": None}) as model:
        assert answer(model, max_tokens=8) == ("abc", "length", 8)


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 9, 10, 10**9])
def test_limits(say: Any, limit: int) -> None:
    """None at all for 0; the end of the text counts as a token."""
    wanted = ("abcdefgh"[:limit], None if limit == 0 else "length" if limit < 9 else "stop", min(limit, 9))
    assert answer(say(b"abcdefgh"), max_tokens=limit) == wanted


def test_end_of_the_context(say: Any) -> None:
    """The last position can still be read from: a prompt that fills the context gets one token, a longer one none."""
    model = say(b"abcdefghij", loop=True, context=16)
    assert answer(model, [*START] * 10) == ("abcdefg", "length", 7)
    assert answer(model, [*START] * 15) == ("ab", "length", 2)
    assert answer(model, [*START] * 16) == ("a", "length", 1)
    with pytest.raises(TfmError, match="prompt: found 17 tokens; allowed: at most 16, the context; shorten"):
        model.generate([*START] * 17)
    assert answer(say(b"abc", context=16), [*START] * 13) == ("abc", "stop", 4)


def test_blocks_are_given_back(say: Any) -> None:
    """An answer that is not read to its end kept its memory."""
    model = say(b"abcdefghij", loop=True)
    list(model.generate(START, 3))
    free = len(model.pool._free)
    for _ in range(3):
        tokens = model.generate(START)
        next(tokens)
        assert len(model.pool._free) < free
        tokens.close()
        assert len(model.pool._free) == free


# ---- prompts ----


def test_empty_prompt(say: Any, tmp_path: Path) -> None:
    """It is BOS alone where the model has one, and an error where it has none."""
    with pytest.raises(TfmError, match="prompt: found no tokens; allowed: at least one: this model has no BOS"):
        say(b"abc").generate([])
    with changed(_write(tmp_path, b"abc", "byte-level"), tokenizer_config={"bos_token": "Ċ"}) as model:
        assert answer(model, []) == ("abc", "stop", 4)


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_that_cannot_be(tmp_path: Path, chunk: int) -> None:
    """Logits of no pass at all are memory that nobody has written."""
    model = load(write_checkpoint(tmp_path, LLAMA), threads=1)
    with pytest.raises(TfmError, match=f"chunk: found {chunk}; allowed: a whole number from 1"):
        model.logits([1, 2, 3], chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1000])
def test_prompt_in_chunks(tmp_path: Path, chunk: int) -> None:
    """A prompt cut where a chunk ends gave other tokens, or lost some."""
    model = load(write_checkpoint(tmp_path, LLAMA), threads=1)
    prompt = [3 + i * i % 90 for i in range(65)]
    params = SamplingParams(temperature=1.0, seed=4)

    def tokens(chunk: int) -> list[Token]:
        return list(model.generate(prompt, 12, params, logprobs=3, chunk=chunk))

    assert tokens(chunk) == tokens(512)
    model.close()


@pytest.mark.parametrize("options", [{"max_tokens": -1}, {"logprobs": -1}, {"chunk": 0}])
def test_options_that_make_no_sense(say: Any, options: dict[str, int]) -> None:
    """Named, with what is allowed, before any work is done."""
    name, value = next(iter(options.items()))
    with pytest.raises(TfmError, match=f"{name}: found {value}; allowed: a whole number from"):
        say(b"abc").generate(START, **options)


def test_bias_on_an_id_that_does_not_exist(say: Any) -> None:
    """Refused before any work is done."""
    with pytest.raises(TfmError, match="logit_bias: found token id 257; allowed: 0 to 256"):
        say(b"abc").generate(START, sampling=SamplingParams(logit_bias={257: 1.0}))


# ---- sampling ----


def test_tokens_are_those_of_their_logits(tmp_path: Path) -> None:
    """Each token against the logits of the text before it: choice, log-probability and the likeliest."""
    model = load(write_checkpoint(tmp_path, LLAMA), threads=1)
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0.9, seed=123)
    tokens = list(model.generate(prompt, 20, params, logprobs=4))
    ids = prompt + [token.id for token in tokens]
    logits_TV = model.logits(ids).astype(np.float64)
    for i, token in enumerate(tokens):
        logits = logits_TV[len(prompt) + i - 1]
        weights = np.exp((logits - logits.max()) / 0.9)
        shares = np.cumsum(weights) / weights.sum()
        assert token.id == int(np.argmax(shares > uniform(123, len(prompt) + i)))
        exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert token.logprob == pytest.approx(exact[token.id], abs=1e-5)
        assert [id_ for id_, _ in token.top] == np.argsort(-logits, kind="stable")[:4].tolist()
    model.close()


def test_continuing_equals_going_on(tmp_path: Path) -> None:
    """A draw depends on seed and position only: an answer cut and continued with its own ids is the same answer."""
    model = load(write_checkpoint(tmp_path, LLAMA), threads=1)
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=9)
    whole = [token.id for token in model.generate([5, 6], 16, params)]
    first = [token.id for token in model.generate([5, 6], 7, params)]
    rest = [token.id for token in model.generate([5, 6, *first], 9, params)]
    assert first + rest == whole
    model.close()


def test_penalties_see_prompt_and_answer(say: Any) -> None:
    """The parrot says a letter again unless that is made to cost something."""
    model = say(b"ab", loop=True)
    assert answer(model, max_tokens=6)[0] == "ababab"
    cost = SamplingParams(presence_penalty=20.0)
    assert answer(model, max_tokens=3, sampling=cost)[0][:2] == "ab"
    assert answer(model, max_tokens=3, sampling=cost)[0] != "aba"
    seen = SamplingParams(repeat_penalty=1e6, logit_bias={id_of(ord("b")): 0.5})
    assert answer(model, [id_of(ord("a")), *START], 1, sampling=seen)[0] == "b"


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    """Damaged weights gave the token 0 for ever."""
    folder = _write(tmp_path, b"abc", "byte-level")
    data = bytearray((folder / "model.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    begin = 8 + int.from_bytes(data[:8], "little") + header["lm_head.weight"]["data_offsets"][0]
    data[begin : begin + 4] = np.float32(np.nan).tobytes()
    (folder / "model.safetensors").write_bytes(data)
    with changed(folder) as model, pytest.raises(TfmError, match="logits for position 1: found 1 of 257 are NaN"):
        list(model.generate(START))
