"""Answers that keep to a JSON schema, a regex or a grammar: which tokens are allowed, and what is refused."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_files import SENTENCEPIECE_SIZE, SPACE, added, byte_level, puts_around, sentencepiece, write_tokenizer

from tfm.engine import load
from tfm.engine.constraint import Constraint, Constraints, Grammar, grammar_of_row
from tfm.engine.errors import TfmError
from tfm.engine.model import Model
from tfm.engine.sampling import SamplingParams
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
def big(default_model_folder: Path) -> Tokenizer:
    return Tokenizer.load(default_model_folder)


@pytest.fixture(scope="module")
def constraints(big: Tokenizer) -> Constraints:
    """On the default model's vocabulary, as a model has it that has a few rows more."""
    return Constraints(big, big.vocab_size + 7)


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


def walk(constraint: Constraint, eos_ids: frozenset[int], seed: int) -> list[int]:
    """Allowed tokens, drawn by lot, until the end."""
    lot = np.random.default_rng(seed)
    ids: list[int] = []
    while not constraint.is_finished:
        assert len(ids) < 1000
        ids.append(int(lot.choice(np.flatnonzero(constraint.allowed()))))
        constraint.accept(ids[-1])
    return [id_ for id_ in ids if id_ not in eos_ids]


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


@pytest.mark.parametrize("source", ["start: <|im_end|>", "start: <[2]>", 'start: "a" | <[2]>', "start: <[*]>"])
def test_control_tokens_by_name_or_id(constraints: Constraints, source: str) -> None:
    """Lark grammars of llguidance can name tokens; a control token's text would not be in the answer."""
    with pytest.raises(TfmError, match=r"^grammar: found "):
        constraints.start(Grammar("grammar", source))


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


def test_tokenizer_without_a_decoder(tmp_path: Path) -> None:
    """It puts spaces between tokens when it decodes: what was allowed was not what was shown."""
    tokenizer = write_tokenizer(tmp_path, byte_level(decoder=None, post_processor=puts_around([])))
    with pytest.raises(TfmError, match=r"^constraint: found a tokenizer that has no decoder"):
        Constraints(tokenizer, tokenizer.vocab_size)


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


# ------------------------------------------------------------------------------------------------ what is refused

REFUSED = [
    ("json_schema", "{a", "no JSON: "),
    ("json_schema", "[1]", "give a JSON schema, which is an object"),
    ("json_schema", "false", "which no value matches"),
    ("json_schema", '{"const": NaN}', "no JSON that can be read: NaN"),
    ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000, "no JSON that can be read"),
    ("json_schema", '{"tpye": "string"}', "the keyword 'tpye'"),
    ("json_schema", '{"properties": {"a": {"items": [{"reqired": []}]}}}',
     "the keyword 'reqired' in #/properties/a/items/0, which JSON Schema does not have"),
    ("json_schema", '{"properties": {"type": {"type": ["null", "strin"]}}}',
     "the type 'strin' in #/properties/type, which is none of array, boolean, integer, null, number, object, string"),
    ("json_schema", '{"properties": {"' + "a" * 999 + '": {"type": "x"}}}', "the type 'x' in #/properties/aaa"),
    ("json_schema", '{"type": 3}', "type must be a string or array of strings"),
    ("json_schema", '{"type": "string", "nullable": true}', "the keyword 'nullable'"),
    ("json_schema", '{"type": "strng"}', "the type 'strng', which is none of array, "),
    ("json_schema", '{"not": {"type": "string"}}', "not"),
    ("json_schema", '{"if": {"type": "string"}, "then": {"maxLength": 3}}', "if"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"type": "array", "contains": {"type": "integer"}}', "contains"),
    ("json_schema", '{"type": "object", "dependentRequired": {"a": ["b"]}}', "dependentRequired"),
    ("json_schema", '{"type": "object", "propertyNames": {"pattern": "a"}}', "propertyNames"),
    ("json_schema", '{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
    ("json_schema", '{"oneOf": [{"type": "number"}, {"type": "integer"}]}', "anyOf takes them"),
    ("json_schema", '{"type": "string", "format": "idn-email"}', "idn-email"),
    ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-ahead"),
    ("json_schema", '{"$ref": "https://example.com/x.json"}', "not present"),
    ("json_schema", '{"$ref": "#/$defs/x"}', "does not exist"),
    ("json_schema", '{"$ref": "#"}', "no text that it allows"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
    ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "incompatible types"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "x-guidance.lenient"),
    ("json_schema", '{"x-guidance": {"foo": true}}', "foo"),
    ("json_schema", '{"x-guidance": 3}', "x-guidance"),
    ("json_schema", '{"const": 123456789012345678}', "#/const: 123456789012345678; allowed: -9007199254740991 to"),
    ("json_schema", '{"enum": ["a", {"b": [1, 9007199254740993]}]}', "#/enum: 9007199254740993"),
    ("json_schema", '{"properties": {"n": {"minimum": 1e30}}}', "#/properties/n/minimum: 1e+30"),
    ("json_schema", '{"type": "integer", "maximum": 9223372036854775807}', "#/maximum: 9223372036854775807"),
    ("json_schema", '{"type": "integer", "minimum": -9223372036854775808}', "#/minimum: -9223372036854775808"),
    ("json_schema", '{"x-a": [{"minimum": -1e19}], "$ref": "#/x-a/0"}', "#/x-a/0/minimum: -1e+19"),
    ("json_schema", '{"const": 1.5e300}', "#/const: 1.5e+300"),
    ("json_schema", '{"const": 1e400}', "#/const: Infinity"),
    ("json_schema", '{"const": -109.22561189039709}', "#/const: -109.22561189039709"),
    ("json_schema", '{"type": "number", "minimum": 1e-23}', "#/minimum: 1e-23"),
    ("json_schema", '{"type": "integer", "multipleOf": -1}', "#/multipleOf: -1; allowed: a number above 0"),
    ("json_schema", '{"type": "integer", "multipleOf": 0}', "#/multipleOf: 0; allowed: a number above 0"),
    ("json_schema", '{"type": "integer", "multipleOf": 65536, "allOf": [{"multipleOf": 65537}]}', "multipleOf"),
    ("json_schema", '{"allOf": [{"multipleOf": 60}, {"multipleOf": 11}], "const": 60}', "a multiple of 660"),
    ("json_schema", '{"type": "object", "minProperties": 2}', "#/minProperties: 2, where"),
    ("json_schema", '{"type": "object", "minProperties": 3, "required": ["a", "b", "a"]}', "allowed: at most 2"),
    ("json_schema", '{"additionalProperties": false, "patternProperties": {"^x": {}}, "minProperties": 2}', "may come"),
    ("json_schema", '{"prefixItems": [{"const": 1}], "additionalItems": false}', "#/additionalItems without a list"),
    ("json_schema", '{"prefixItems": [{"const": 1}], "items": [{}]}', "#/prefixItems beside a list"),
    ("json_schema", '{"exclusiveMinimum": true}', "#/exclusiveMinimum: true without minimum"),
    ("json_schema", '{"type": "string", "maximum": "9"}', '#/maximum: "9"; allowed: a number'),
    ("json_schema", '{"properties": {"a": {"type": "null", "required": true}}}', "#/properties/a/required: true"),
    ("json_schema", '{"x-guidance": {"item_separator": "ZZ"}}', "x-guidance.item_separator"),
    ("json_schema", '{"x-guidance": {"key_separator": ""}}', "x-guidance.key_separator"),
    ("json_schema", '{"x-guidance": {"whitespace_pattern": "[ x]*"}}', "x-guidance.whitespace_pattern"),
    ("json_schema", '{"x-guidance": {"whitespace_pattern": "\\\\s"}}', "x-guidance.whitespace_pattern"),
    ("json_schema", '{"items": {"x-guidance": {"item_separator": ","}}}', "#/items/x-guidance, which has no effect"),
    ("regex", "(a", "unclosed group"),
    ("regex", "a\\", "a backslash at the end"),
    ("regex", "(a)\\1", "backreferences are not supported"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", "a$b", "^ or $ with something before or behind it"),
    ("regex", "\\bword", "found a word boundary, such as \\b: neither it nor any other look"),
    ("regex", "[^\\s\\S]", "no text that it allows"),
    ("regex", "(" * 100_000 + "a" + ")" * 100_000, "250"),
    ("regex", "a\udc80", "half of a surrogate pair at character 1"),
    ("regex", "a" * 1_000_001, "shorten it"),
    ("regex", "|".join(f"v{i}" for i in range(120_000)), "too big"),
    ("grammar", "", "no start rule"),
    ("grammar", 'start: "a', "in line 1, column 10"),
    ("grammar", 'start: "a" word\nword: foo', "in line 2, column 7: unknown name"),
    ("grammar", "start: /[a/", "in line 1, column 8: unclosed character class"),
    ("grammar", "start: start", "no text that it allows"),
    ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "too deeply nested"),
    ("grammar", 'start: text\ntext[temperature=0.5]: /a+/', "the attribute temperature"),
    ("grammar", 'start: %json {"not": {}}', "not"),
    ("grammar", 'start: "a" %json {"minimum": -9223372036854775808}', "#/minimum: -9223372036854775808"),
    ("grammar", '{"grammars": []}', "in line 1, column 1"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "reason"), REFUSED, ids=lambda value: repr(value)[:30])
def test_refused(constraints: Constraints, kind: Any, source: str, reason: str) -> None:
    """Ignored in silence, a panic, or an error that is a page long: one line says which option and why."""
    with pytest.raises(TfmError) as error:
        constraints.start(Grammar(kind, source, "--option"))
    told = str(error.value)
    assert told.startswith("--option: found ")
    assert reason in told
    assert len(told.splitlines()) == 1
    assert len(told) < 500
    assert "docs/" not in told, "who has installed tfm has no such folder"
    assert "Word" not in told, "llguidance's own names say nothing to a person"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 2**53 - 1}, "9007199254740991"),
        ({"enum": [-(2**53) + 1]}, "-9007199254740991"),
        ({"const": {"a": [1e-22, -0.5, 123456789.012345, 98765432109876.0]}},
         '{"a": [0.0000000000000000000001, -0.5, 123456789.012345, 98765432109876]}'),
        ({"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53 - 1}, "9007199254740991"),
        ({"type": "integer", "exclusiveMinimum": -(2**53) + 1, "maximum": -(2**53) + 2}, "-9007199254740990"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"const": 1}}, "minProperties": 1,
          "maxProperties": 1}, '{"a": 1}'),
        ({"type": "object", "additionalProperties": False, "minProperties": 2, "required": ["a", "b"],
          "properties": {"a": {"const": 1}, "b": {"const": 2}}}, '{"a": 1, "b": 2}'),
        ({"x-guidance": {"item_separator": "\n, ", "key_separator": ":"}, "const": [1, {"a": 2}]},
         '[1\n, {"a":2}]'),
        ({"x-guidance": {"whitespace_pattern": "[ \\n]{0,2}", "whitespace_flexible": True}, "const": 1}, "1"),
        ({"x-guidance": {"coerce_one_of": True}, "oneOf": [{"const": 1}, {"enum": [1]}]}, "1"),
    ],
)  # fmt: skip
def test_what_is_not_refused_is_kept(constraints: Constraints, big: Tokenizer, schema: Any, text: str) -> None:
    """Limits were a step too narrow, or a number within them came out as another one."""
    ids = walk(constraints.start(Grammar("json_schema", json.dumps(schema))), big.eos_ids, 0)
    assert big.decode(ids) == text


@pytest.mark.parametrize("pattern", ["(\\w+\\s?){1,300}", "[ab]*a[ab]{500}", "(.{0,300}x){5}", "((a*)*)*b"])
def test_costly_grammars_end(constraints: Constraints, big: Tokenizer, pattern: str) -> None:
    """A regex whose states are without number made the program hang: it goes on, or is refused at some token."""
    constraint = constraints.start(Grammar("regex", pattern))
    lot = np.random.default_rng(0)
    told = "regex: found "
    for _ in range(100):
        try:
            if constraint.is_finished:
                break
            constraint.accept(int(lot.choice(np.flatnonzero(constraint.allowed()))))
        except TfmError as error:
            told = str(error)
            break
    assert told.startswith("regex: found ")


def test_dead_end_in_mid_text(constraints: Constraints, big: Tokenizer) -> None:
    """A rule without an end behind a letter: the answer stopped there as if it were complete."""
    constraint = constraints.start(Grammar("grammar", 'start: "a" x\nx: x', "--grammar"))
    constraint.accept(big.encode("a", add_special=False)[0])
    assert not constraint.is_finished
    with pytest.raises(TfmError, match=r"^--grammar: found no text that it allows"):
        constraint.allowed()


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
    from tfm.engine.sampling import SamplingParams, sample

    lot = np.random.default_rng(2)
    for pattern in ("[a-z]{3}", "[0-9]{9}", "\\{\"a\": 1\\}"):
        constraint = constraints.start(Grammar("regex", pattern))
        allowed_V = constraints.start(Grammar("regex", pattern)).allowed()
        for _ in range(5):
            logits_V = lot.standard_normal(len(allowed_V)).astype(np.float32).round(1)  # many are equal
            before_V = logits_V.copy()
            found = sample(logits_V, SamplingParams(), 0, 0, constraint=constraint)
            assert np.array_equal(logits_V, before_V)
            assert found.id == int(np.where(allowed_V, logits_V, -np.inf).argmax())


def test_interrupt_inside_of_the_library(
    constraints: Constraints, big: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while llguidance asks for the tokens of a text was told as a fault of the grammar."""

    def interrupted(*arguments: Any, **more: Any) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "encode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        constraints.start(Grammar("regex", "hello world"))


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("row", "grammar"),
    [
        ({}, None),
        ({"regex": None, "prompt": "a"}, None),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": ""}, Grammar("regex", "")),
        ({"grammar": 'start: "a"', "regex": None}, Grammar("grammar", 'start: "a"')),
        ({"json_schema": '{"type": "null"}'}, Grammar("json_schema", '{"type": "null"}')),
        ({"json_schema": {"type": "null"}}, Grammar("json_schema", '{"type": "null"}')),
        ({"json_schema": True}, Grammar("json_schema", "true")),
    ],
)
def test_grammar_of_row(row: dict[str, Any], grammar: Grammar | None) -> None:
    """Absent, null, an object or its text."""
    assert grammar_of_row(row) == grammar


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"regex": "a", "grammar": "b"}, "row: found regex and grammar; allowed: one of json_schema, regex, grammar"),
        ({"regex": 3}, "field regex: found 3; allowed: a text"),
        ({"json_schema": [1]}, "field json_schema: found [1]; allowed: a JSON schema or its text"),
    ],
)
def test_row_with_a_fault(row: dict[str, Any], told: str) -> None:
    with pytest.raises(TfmError) as error:
        grammar_of_row(row)
    assert str(error.value) == told
