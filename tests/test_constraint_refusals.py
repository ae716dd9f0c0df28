"""Schemas, regexes, grammars and rows with them that are refused: one line says which and why, and nothing hangs.

What is just within the limits is not refused, and is kept.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from constraint_walk import walk
from tokenizer_files import byte_level, puts_around, write_tokenizer

from tfm.engine.constraint import Constraints, Grammar, grammar_of_row
from tfm.engine.errors import TfmError
from tfm.engine.tokenizer import Tokenizer

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


@pytest.mark.parametrize("source", ["start: <|im_end|>", "start: <[2]>", 'start: "a" | <[2]>', "start: <[*]>"])
def test_control_tokens_by_name_or_id(constraints: Constraints, source: str) -> None:
    """Lark grammars of llguidance can name tokens; a control token's text would not be in the answer."""
    with pytest.raises(TfmError, match=r"^grammar: found "):
        constraints.start(Grammar("grammar", source))


def test_tokenizer_without_a_decoder(tmp_path: Path) -> None:
    """It puts spaces between tokens when it decodes: what was allowed was not what was shown."""
    tokenizer = write_tokenizer(tmp_path, byte_level(decoder=None, post_processor=puts_around([])))
    with pytest.raises(TfmError, match=r"^constraint: found a tokenizer that has no decoder"):
        Constraints(tokenizer, tokenizer.vocab_size)


# ------------------------------------------------------------------------------------------------ while it is answered


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
