"""Answers that keep to a JSON schema, a regex or a grammar: which tokens are allowed, and what they make together."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constraint_walk import walk
from tokenizer_files import SENTENCEPIECE_SIZE, SPACE, added, byte_level, sentencepiece, write_tokenizer

from tfm.engine import load
from tfm.engine.constraint import Constraint, Constraints, Grammar
from tfm.engine.errors import TfmError
from tfm.engine.model import Model
from tfm.engine.sampling_params import SamplingParams
from tfm.engine.tokenizer import Tokenizer

WORDS = ("hello", "help", "héllo", "h🙂", "h🙂🙂", "漢字", "漢語", "no", " no", "a\nb", "")
PIECES = (b"he", b"hel", b"h\xf0", b"\xf0\x9f", b"\x9f\x99\x82", b"\x82\xf0", b"\xe6\xbc\xa2\xe5", b"no", b" no", b"lo")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["é🙂", "漢字", "plain"]}, "minItems": 1, "maxItems": 3},
        "is_happy": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "tags", "is_happy"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "tags", "is_happy"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 30
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"é🙂", "漢字", "plain"}
        and value["is_happy"] in (True, False, None)
    )


SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    (PERSON, is_person),
    ({"enum": ["cat", "🙂", 5, None]}, lambda value: value in ("cat", "🙂", 5, None)),
    ({"type": "string", "pattern": "^[a-z]{3}-[0-9]+$", "maxLength": 9}, lambda value: re.fullmatch(
        "[a-z]{3}-[0-9]{1,5}", value) is not None),
    ({"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 2, "maxItems": 4},
     lambda value: 2 <= len(value) <= 4 and all(-1 <= number <= 1 for number in value)),
    ({"$defs": {"pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False,
      "minItems": 2}}, "anyOf": [{"$ref": "#/$defs/pair"}, {"const": {"é": [1, "x"]}}]},
     lambda value: value in ([True, None], [False, None], {"é": [1, "x"]})),
]  # fmt: skip
REGEXES = [
    "(yes|no|maybe)",
    "[A-Z][a-z]{2,8}( [a-z]{1,8}){0,3}\\.",
    "(é|🙂|漢字|e\u0301|\N{MAN}\u200d\N{WOMAN}){2,5}",
    "\\d{4}-\\d\\d-\\d\\d",
    '^a/b\\n"c"$',
]


@pytest.fixture(scope="module")
def model(default_model_folder: Path) -> Iterator[Model]:
    loaded = load(default_model_folder)
    yield loaded
    loaded.close()


def small(folder: Path, kind: str) -> Tokenizer:
    """A small tokenizer with two end-of-text tokens and another control token."""
    if kind == "byte_level":
        first = 256 + len(PIECES)
        extra = [added(first, "</s>"), added(first + 1, "<|end|>"), added(first + 2, "<|user|>")]
        written = byte_level(extra, PIECES)
    else:
        first = SENTENCEPIECE_SIZE
        written = sentencepiece([added(first, "</s>"), added(first + 1, "<|end|>"), added(first + 2, "<|user|>")])
    return write_tokenizer(folder, written, {"eos_token": "</s>"}, generation_config={"eos_token_id": [first + 1]})


def allowed_ids(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(constraint.allowed()).tolist())


# ------------------------------------------------------------------------------------------------ which tokens


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_allowed_tokens_are_those_that_some_text_goes_on_with(tmp_path: Path, kind: str) -> None:
    """Tokens that end within a character were never allowed, or ones that lead nowhere were. All ways are tried."""
    tokenizer = small(tmp_path, kind)
    size = tokenizer.vocab_size + 5
    texts = [word.encode() for word in WORDS]
    constraints = Constraints(tokenizer, size)
    grammar = Grammar("regex", "|".join(map(re.escape, WORDS)))
    waiting: list[list[int]] = [[]]
    seen: set[bytes] = set()
    while waiting:
        ids = waiting.pop()
        said = b"".join(map(tokenizer.token_bytes, ids))
        if said in seen:
            continue
        seen.add(said)
        constraint = constraints.start(grammar)
        for id_ in ids:
            constraint.accept(id_)
        rests = {text[len(said) :] for text in texts if text.startswith(said)}
        following = {
            id_
            for id_ in range(size)
            if id_ not in tokenizer.eos_ids and not tokenizer.is_special(id_) and (data := tokenizer.token_bytes(id_))
            and any(rest.startswith(data) for rest in rests)
        }  # fmt: skip
        assert constraint.may_end == (b"" in rests)
        assert constraint.is_finished == (rests == {b""})
        ending = tokenizer.eos_ids if b"" in rests else frozenset()
        assert allowed_ids(constraint) - ending <= following
        assert allowed_ids(constraint) & tokenizer.eos_ids == ending
        if len({rest[:1] for rest in rests}) > 1:  # else the tokens of the only text are wanted
            assert allowed_ids(constraint) - ending == following
        assert following == set() or allowed_ids(constraint) - ending
        waiting += [[*ids, id_] for id_ in allowed_ids(constraint) - ending]
    assert set(texts) <= seen


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_one_text_is_said_in_the_tokens_of_the_tokenizer(tmp_path: Path, kind: str) -> None:
    """Text that is the only one came in pieces that the model has never seen it in, or with SentencePiece's space."""
    tokenizer = small(tmp_path, kind)
    constraint = Constraints(tokenizer, tokenizer.vocab_size).start(Grammar("regex", "hello, hello"))
    assert tokenizer.decode(walk(constraint, tokenizer.eos_ids, 0), continues=True) == "hello, hello"
    if kind == "sentencepiece":
        constraint = Constraints(tokenizer, tokenizer.vocab_size).start(Grammar("regex", "hello hello"))
        wanted = [tokenizer.token_id("hello"), tokenizer.token_id(SPACE + "hello")]
        assert walk(constraint, tokenizer.eos_ids, 0) == wanted


def test_a_normalizer_that_changes_the_text(tmp_path: Path) -> None:
    """The tokenizer gave tokens of another text than the one that was wanted, and nothing was allowed."""
    written = byte_level([added(256 + len(PIECES), "</s>")], PIECES, normalizer={"type": "Lowercase"})
    tokenizer = write_tokenizer(tmp_path, written, {"eos_token": "</s>"})
    constraint = Constraints(tokenizer, tokenizer.vocab_size).start(Grammar("regex", "HELlo é"))
    ids = walk(constraint, tokenizer.eos_ids, 0)
    assert tokenizer.decode(ids) == "HELlo é"


def test_control_tokens_are_not_text(constraints: Constraints, big: Tokenizer) -> None:
    """Where everything is allowed, so was the mark of a turn, or an id beyond the vocabulary; or EOS was not."""
    constraint = constraints.start(Grammar("regex", "(?s:.*)"))
    size = len(constraint.allowed())
    assert size == big.vocab_size + 7
    hidden = set(big.hidden.values())
    assert allowed_ids(constraint) & hidden == big.eos_ids
    assert max(allowed_ids(constraint)) < big.vocab_size
    name = next(name for name, id_ in big.hidden.items() if id_ in big.eos_ids)
    named = constraints.start(Grammar("json_schema", json.dumps({"const": name})))
    ids = walk(named, big.eos_ids, 0)
    assert not set(ids) & hidden
    assert json.loads(big.decode(ids)) == name


@pytest.mark.parametrize(("prompt", "is_first"), [((), True), ((-1,), True), ((104,), False), (None, False)])
@pytest.mark.parametrize("pattern", ["hello", " hello", "(é|h)e?", " ?no"])
def test_space_that_is_not_shown(tmp_path: Path, prompt: Any, is_first: bool, pattern: str) -> None:
    """After a control token SentencePiece's answers begin with a space that is not shown: the text lacked its own."""
    control = SENTENCEPIECE_SIZE + 2
    tokenizer = small(tmp_path, "sentencepiece")
    constraints = Constraints(tokenizer, tokenizer.vocab_size)
    for seed in range(8):
        ids = None if prompt is None else [control if id_ < 0 else id_ for id_ in prompt]
        constraint = constraints.start(Grammar("regex", pattern), ids)
        said = tokenizer.decode(walk(constraint, tokenizer.eos_ids, seed), continues=not is_first)
        assert re.fullmatch(pattern, said)


def test_model_without_eos(tmp_path: Path) -> None:
    """Nothing was left to choose from, or the answer never ended."""
    tokenizer = write_tokenizer(tmp_path, byte_level())
    constraints = Constraints(tokenizer, tokenizer.vocab_size)
    constraint = constraints.start(Grammar("regex", "ab?"))
    constraint.accept(ord("a"))
    assert (constraint.may_end, constraint.is_finished, allowed_ids(constraint)) == (True, False, {ord("b")})
    constraint.accept(ord("b"))
    assert (constraint.may_end, constraint.is_finished) == (True, True)
    with pytest.raises(TfmError, match="no text that it allows but the empty one"):
        constraints.start(Grammar("regex", ""))


def test_text_that_no_token_says(tmp_path: Path) -> None:
    """A vocabulary without all bytes: the mask was empty, and the error spoke of penalties."""
    vocab = {letter: id_ for id_, letter in enumerate("ab")}
    written = byte_level() | {"model": {"type": "BPE", "merges": [], "vocab": vocab}}
    tokenizer = write_tokenizer(tmp_path, written)
    constraints = Constraints(tokenizer, tokenizer.vocab_size)
    assert walk(constraints.start(Grammar("regex", "ab")), tokenizer.eos_ids, 0) == [0, 1]
    with pytest.raises(TfmError, match=r"^regex: found "):
        walk(constraints.start(Grammar("regex", "ac")), tokenizer.eos_ids, 0)


def test_constraints_do_not_share_their_place(constraints: Constraints, big: Tokenizer) -> None:
    """A grammar that is used twice went on where the first answer stood."""
    first = constraints.start(Grammar("regex", "(yes|no)", "--regex"))
    before = first.allowed()
    first.accept(big.encode("y", add_special=False)[0])
    second = constraints.start(Grammar("regex", "(yes|no)", "field regex"))
    assert (second.allowed() == before).all()
    with pytest.raises(TfmError, match=r"^field regex: found token 0, which may not follow"):
        second.accept(0)
    with pytest.raises(TfmError, match=r"^--regex: found token -1, which may not follow"):
        first.accept(-1)


def test_one_token_is_allowed_where_it_is_among_all(constraints: Constraints, big: Tokenizer) -> None:
    """`allows` asks llguidance in another way than `allowed` does: a greedy answer would leave its grammar."""
    one, all_ = (constraints.start(Grammar("regex", "[a-z]{2,5}( [0-9]+)?")) for _ in range(2))
    lot = np.random.default_rng(1)
    for _ in range(4):
        allowed_V = all_.allowed()
        ids = [*np.flatnonzero(allowed_V)[:40].tolist(), *lot.integers(0, len(allowed_V), 200).tolist(), *big.eos_ids]
        assert [one.allows(id_) for id_ in ids] == [bool(allowed_V[id_]) for id_ in ids]
        chosen = int(lot.choice([id_ for id_ in np.flatnonzero(allowed_V).tolist() if id_ not in big.eos_ids]))
        one.accept(chosen)
        all_.accept(chosen)
        assert (one.may_end, one.is_finished) == (all_.may_end, all_.is_finished)


def test_greedy_choice_is_the_largest_of_those_allowed(constraints: Constraints) -> None:
    """What may follow is held against the likeliest first: the same token as when all others are taken away."""
    from tfm.engine.sampling import sample
    from tfm.engine.sampling_params import SamplingParams

    lot = np.random.default_rng(2)
    for pattern in ("[a-z]{3}", "[0-9]{9}", '\\{"a": 1\\}'):
        constraint = constraints.start(Grammar("regex", pattern))
        allowed_V = constraints.start(Grammar("regex", pattern)).allowed()
        for _ in range(5):
            logits_V = lot.standard_normal(len(allowed_V)).astype(np.float32).round(1)  # many are equal
            before_V = logits_V.copy()
            found = sample(logits_V, SamplingParams(), 0, 0, constraint=constraint)
            assert np.array_equal(logits_V, before_V)
            assert found.id == int(np.where(allowed_V, logits_V, -np.inf).argmax())


# ------------------------------------------------------------------------------------------------ whole answers


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("schema", "is_right"), SCHEMAS, ids=range(len(SCHEMAS)))
def test_any_walk_matches_the_schema(
    constraints: Constraints, big: Tokenizer, schema: Any, is_right: Callable[[Any], bool], seed: int
) -> None:
    """Tokens by lot find what a model would rarely say: a key twice, a number out of range, half a character."""
    ids = walk(constraints.start(Grammar("json_schema", json.dumps(schema))), big.eos_ids, seed)
    text = big.decode(ids)
    assert is_right(json.loads(text)), text
    assert "\n" not in text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pattern", REGEXES)
def test_any_walk_matches_the_regex(constraints: Constraints, big: Tokenizer, pattern: str, seed: int) -> None:
    """Python's re is the judge."""
    ids = walk(constraints.start(Grammar("regex", pattern)), big.eos_ids, seed)
    assert re.fullmatch(pattern, big.decode(ids))


@pytest.mark.parametrize("seed", range(4))
def test_any_walk_matches_the_grammar(constraints: Constraints, big: Tokenizer, seed: int) -> None:
    """Sums in brackets, which no regex can say; Python's own parser is the judge."""
    source = 'start: sum\nsum: part ("+" part){0,2}\npart: /[1-9][0-9]?/ | "(" deep ")"\ndeep: /[1-9]/ "-" /[1-9]/'
    text = big.decode(walk(constraints.start(Grammar("grammar", source)), big.eos_ids, seed))
    assert isinstance(eval(text, {"__builtins__": {}}), int)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("schema", "is_right"), SCHEMAS[:3], ids=range(3))
def test_model_keeps_to_the_schema(
    model: Model, schema: Any, is_right: Callable[[Any], bool], temperature: float
) -> None:
    """The mask was not applied before the choice, or was one token late. A prompt that asks for something else."""
    ids = model.tokenizer.chat_ids([{"role": "user", "content": "Write a short poem about the sea."}])
    constraint = Constraints(model.tokenizer, model.config.vocab_size).start(
        Grammar("json_schema", json.dumps(schema)), ids
    )
    sampling = SamplingParams(temperature=temperature, seed=1)
    tokens = list(model.generate(ids, max_tokens=150, sampling=sampling, constraint=constraint))
    assert tokens[-1].finish_reason == "stop"
    assert is_right(json.loads("".join(token.text for token in tokens)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", REGEXES[1:3])
def test_model_keeps_to_the_regex(model: Model, pattern: str, temperature: float) -> None:
    """Characters whose bytes are in several tokens, chosen by a model that wanted to say something else."""
    ids = model.tokenizer.encode("1, 2, 3, 4,")
    constraint = Constraints(model.tokenizer, model.config.vocab_size).start(Grammar("regex", pattern), ids)
    sampling = SamplingParams(temperature=temperature, seed=2)
    tokens = list(model.generate(ids, max_tokens=100, sampling=sampling, constraint=constraint))
    assert tokens[-1].finish_reason == "stop"
    assert re.fullmatch(pattern, "".join(token.text for token in tokens))


def test_speculation_changes_nothing(model: Model) -> None:
    """Tokens that are proposed and not taken were accepted by the constraint."""
    ids = model.tokenizer.encode("cat, dog, cat, dog, cat, dog, cat,")
    texts = []
    for speculate in (0, 4):
        constraint = Constraints(model.tokenizer, model.config.vocab_size).start(
            Grammar("regex", " dog, cat, (dog|bird|fish)(, (cat|cow)){1,3}"), ids
        )
        tokens = model.generate(ids, max_tokens=40, constraint=constraint, speculate=speculate)
        texts.append("".join(token.text for token in tokens))
    assert texts[0] == texts[1]
    assert texts[0].startswith(" dog, cat, ")
