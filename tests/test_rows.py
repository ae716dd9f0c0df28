"""A row of JSON lines: what is taken, what is refused, and which option wins."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tfm.cli.batch.rows import FIELDS, Defaults, id_in, read_row
from tfm.cli.prompt import PromptOptions
from tfm.engine import load
from tfm.engine.constraint import Constraint, Constraints, Grammar
from tfm.engine.errors import TfmError
from tfm.engine.generate import Request
from tfm.engine.model import Model
from tfm.engine.sampling_params import SamplingParams

NO_PROMPT_OPTIONS = PromptOptions(system=None, prefill=None, raw=False, no_special=False, ids=False)


@pytest.fixture(scope="module")
def chatty(chatty_parrot: Path) -> Iterator[Model]:
    with closing(load(chatty_parrot)) as model:
        yield model


@pytest.fixture(scope="module")
def plain(parrot: Path) -> Iterator[Model]:
    with closing(load(parrot)) as model:
        yield model


def defaults(prompt: Mapping[str, Any] | None = None, seed: int | None = None, **more: Any) -> Defaults:
    options = PromptOptions(**{**vars(NO_PROMPT_OPTIONS), **(prompt or {})})
    values = {"max_tokens": 7, "stop": ("S",), "logprobs": None, "grammar": None, **more}
    return Defaults(options, sampling=SamplingParams(top_k=5, seed=seed), has_seed=seed is not None, **values)


def request(model: Model, row: Mapping[str, Any], settings: Defaults | None = None, line: int = 3) -> Request:
    start = Constraints(model.tokenizer, model.config.vocab_size).start
    return read_row(line, json.dumps(row).encode()).request(model, settings or defaults(), start)


def no_constraint(grammar: Grammar, ids: list[int]) -> Constraint:
    raise AssertionError("no constraint was asked for")


def text_of(model: Model, row: Mapping[str, Any], settings: Defaults | None = None) -> str:
    return model.tokenizer.decode(request(model, row, settings).ids)


# ------------------------------------------------------------------------------------------------ lines


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "row: not JSON: found Expecting property name enclosed in double quotes at character 2"),
        (b'{"prompt": "a"} x', 'row: not JSON: found Extra data at character 17; allowed: a JSON object, such as {"'),
        (
            b"Buy milk",
            'row: not JSON: found Expecting value at character 1; allowed: a JSON object, such as {"prompt": "Hi"}; '
            "jq -Rc '{prompt: .}' makes such rows of lines of text",
        ),
        (b'{"prompt": "a\tb"}', "row: not JSON: found Invalid control character at character 14"),
        (b'"Hi"', 'row: found "Hi"; allowed: a JSON object, such as {"prompt": "Hi"}'),
        (b"[]", 'row: found []; allowed: a JSON object, such as {"prompt": "Hi"}'),
        (b'{"prompt": "\xff"}', "row: not UTF-8: found 0xff at byte 12"),
        (b'{"prompt": "\xed\xa0\x80"}', "row: not UTF-8: found 0xed at byte 12"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "row: not JSON: found Unexpected UTF-8 BOM"),
        (b'{"prompt": "a", "prompt": "b"}', "row: field prompt: found it twice; allowed: it once"),
        (b'{"messages": [{"role": "user", "role": "x"}]}', "row: field role: found it twice; allowed: it once"),
        (b'{"prompt": "a", "temperature": NaN}', "row: not JSON: found NaN; allowed: numbers that JSON has"),
        (b'{"prompt": "a", "top_p": -Infinity}', "row: not JSON: found -Infinity; allowed: numbers that JSON has"),
        (b'{"prompt": "a\\ud800b"}', "row: field prompt: found half of a surrogate pair, U+D800; allowed: text that"),
        (b'{"prompt": "a", "\\udc00": 1}', r"row: field \udc00: found half of a surrogate pair, U+DC00; allowed: text"),
        (b'{"prompt": "a", "stop": ["\\udfff"]}', "row: field stop: found half of a surrogate pair, U+DFFF"),
        (b"[" * 100_000, "row: not JSON that can be read: found lists or objects in each other without end"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "row: not JSON that can be read: found a whole number of more than 43"),
    ],
)  # fmt: skip
def test_lines_that_are_no_rows(data: bytes, message: str) -> None:
    """Each of these ended the whole batch, or was mended in silence."""
    with pytest.raises(TfmError) as caught:
        read_row(1, data)
    assert str(caught.value).startswith(message)


def test_what_json_allows_in_a_text(plain: Model) -> None:
    """U+2028, U+0085, NUL and characters beyond U+FFFF are content, as they are or escaped."""
    wanted = "a\u2028b\u0085c\0d🙂"
    for data in (json.dumps({"prompt": wanted}), json.dumps({"prompt": wanted}, ensure_ascii=False)):
        row = read_row(1, data.encode())
        assert row.fields.value("prompt") == wanted
    assert text_of(plain, {"prompt": wanted}) == wanted


def test_unknown_fields_are_refused_with_a_proposal() -> None:
    """A field that is misspelt was ignored, and the row was answered without what it asked for."""
    for wrong, meant in (("temprature", "temperature"), ("max-tokens", "max_tokens"), ("Prompt", "prompt")):
        with pytest.raises(TfmError, match=f'no such field: found "{wrong}"; did you mean {meant}'):
            read_row(1, json.dumps({"prompt": "a", wrong: 1}).encode())
    with pytest.raises(TfmError, match="fields: id, prompt, messages"):
        read_row(1, b'{"prompt": "a", "zzz": 1}')


def test_one_prompt_exactly() -> None:
    """A row with two prompts was answered to one of them."""
    for row, found in (({}, "no prompt"), ({"prompt": "a", "ids": [1]}, "prompt and ids"), ({"prompt": None}, "no pr")):
        with pytest.raises(TfmError, match=f"row: found {found}"):
            read_row(1, json.dumps(row).encode())


@pytest.mark.parametrize("id_", ["", "é🙂", 0, -3, 2**70, 1.5, 1e300, None])
def test_ids_that_may_be(id_: object) -> None:
    row = read_row(1, json.dumps({"prompt": "a", "id": id_}).encode())
    assert row.id == id_


@pytest.mark.parametrize("id_", ["[1]", "{}", "true", "1e999"])
def test_ids_that_may_not_be(id_: str) -> None:
    with pytest.raises(TfmError, match=r"field id: found .*; allowed: a text, a number, null"):
        read_row(1, f'{{"prompt": "a", "id": {id_}}}'.encode())


def test_id_of_a_row_with_faults() -> None:
    """The error row lost the id that tells whose it is, or could not be written for it."""
    assert id_in(b'{"id": 7, "promt": 1}') == 7
    assert id_in(b'{"id": [7]}') is None
    assert id_in(b'{"id": "\\ud800"}') is None
    assert id_in(b'{"id": 7') is None
    for fault in ('"prompt": "\\ud800x"', '"a": 1, "a": 2', '"a": NaN', '"a": {"id": 3}', '"seed": ' + "1" * 5000):
        assert id_in(f'{{"id": 7, {fault}}}'.encode()) == 7
    assert id_in(b'{"id": 7, "id": 8}') is None
    assert id_in(b'[["id", 7]]') is None


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 3), ("prompt", ["a"]), ("system", 1), ("prefill", {}), ("raw", 1), ("no_special", "yes"),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "8"), ("logprobs", -1),
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("temperature", 10**400),
        ("top_k", 1.5), ("top_k", -1), ("top_k", 10**400), ("top_p", 1.1), ("min_p", -0.1), ("repeat_penalty", 0),
        ("presence_penalty", []), ("frequency_penalty", 10**309), ("seed", -1), ("seed", 2**64), ("seed", "1"),
        ("logit_bias", [1, 2]), ("logit_bias", {"a": 1}), ("logit_bias", {"01": 1}), ("logit_bias", {"1": "x"}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"²": 1}), ("logit_bias", {"1": 10**400}),
        ("logit_bias", {"1" * 30: 1}),
        ("stop", 1), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", {}),
        ("json_schema", 1), ("json_schema", "{"), ("json_schema", {"type": "nonsense"}), ("regex", "[a"), ("regex", {}),
        ("grammar", "start: x"),
    ],
)  # fmt: skip
def test_values_that_may_not_be(chatty: Model, field: str, value: object) -> None:
    """A value of a wrong type or range: the error names the field; none of them is another exception."""
    with pytest.raises(TfmError, match=f"field {field}: "):
        request(chatty, {"prompt": "a", field: value})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ids": [1, -1]}, "field ids: found"), ({"ids": "1 2"}, "field ids: found"), ({"ids": [True]}, "field ids: f"),
        ({"ids": [1, 257]}, "field ids: found 257; allowed: 0 to 256"), ({"ids": [10**30]}, "field ids: found"),
        ({"messages": []}, "field messages"), ({"messages": "Hi"}, "field messages"), ({"messages": [1]}, "field mess"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.: content: found 1"),
        ({"messages": [{"content": "a"}]}, "messages.0.: found"),
        ({"prompt": ""}, "field prompt: found \"\"; allowed: at least one character"),
        ({"prompt": "a", "raw": True, "system": "s"}, "field system: found it beside raw"),
        ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "field raw: found it beside messages"),
        ({"ids": [1], "prefill": "p"}, "field prefill: found it beside ids"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "field system: found \"b\""),
        ({"prompt": "a", "regex": "a", "grammar": "start: \"a\""}, "row: found regex and grammar"),
    ],
)  # fmt: skip
def test_rows_that_contradict_themselves(chatty: Model, row: dict[str, Any], message: str) -> None:
    with pytest.raises(TfmError, match=message):
        request(chatty, row)


def test_message_in_messages_without_end(chatty: Model) -> None:
    """A message that holds lists in lists ended the batch with a RecursionError."""
    deep: list[Any] = []
    for _ in range(700):
        deep = [deep]
    data = json.dumps({"messages": [{"role": "user", "content": "a", "extra": deep}]}).encode()
    with pytest.raises(TfmError, match="field messages: found lists or objects in each other without end"):
        read_row(1, data).request(chatty, defaults(), no_constraint)


def test_null_is_absent(plain: Model) -> None:
    """What writes tables as JSON puts null where there is nothing."""
    row = {name: None for name in FIELDS} | {"prompt": "a"}
    assert request(plain, row) == request(plain, {"prompt": "a"})


# ------------------------------------------------------------------------------------------------ which option wins


def test_options_are_defaults(plain: Model) -> None:
    """A row's own value came second, or left the options without effect where it says nothing."""
    made = request(plain, {"prompt": "a"})
    assert (made.max_tokens, made.stop, made.logprobs, made.sampling.top_k) == (7, ("S",), 0, 5)
    own = {"max_tokens": 0, "stop": "T", "logprobs": 2, "top_k": 9, "temperature": 1, "logit_bias": {"3": -5}}
    made = request(plain, {"prompt": "a", **own})
    assert (made.max_tokens, made.stop, made.logprobs, made.sampling.top_k) == (0, ("T",), 2, 9)
    assert (made.sampling.temperature, made.sampling.logit_bias) == (1, {3: -5})
    assert request(plain, {"prompt": "a", "stop": []}).stop == ()
    assert request(plain, {"prompt": "a", "stop": ["x", "y"]}).stop == ("x", "y")


def test_seed_is_the_rows_the_commands_or_the_lines(plain: Model) -> None:
    """A seed that is drawn anew makes another answer when the row is run again."""
    assert request(plain, {"prompt": "a"}, line=12).sampling.seed == 12
    assert request(plain, {"prompt": "a"}, defaults(seed=5), line=12).sampling.seed == 5
    assert request(plain, {"prompt": "a", "seed": 0}, defaults(seed=5), line=12).sampling.seed == 0


def test_chat_options_and_rows(chatty: Model) -> None:
    """system, prefill and raw of the command hold for rows that do not say otherwise, and no row gets both."""
    user, settings = "<user>a</user>\n<assistant>\n", defaults({"system": "S", "prefill": "P"})
    assert text_of(chatty, {"prompt": "a"}) == user
    assert text_of(chatty, {"prompt": "a"}, settings) == f"<system>S</system>\n{user}P"
    assert text_of(chatty, {"prompt": "a", "system": "T", "prefill": ""}, settings) == f"<system>T</system>\n{user}"
    assert text_of(chatty, {"prompt": "a", "raw": True}, settings) == "a"
    assert text_of(chatty, {"ids": [98]}, settings) == "a"
    messages = [{"role": "user", "content": "a"}]
    assert text_of(chatty, {"messages": messages}, settings) == f"<system>S</system>\n{user}P"
    own = [{"role": "system", "content": "T"}, *messages]
    assert text_of(chatty, {"messages": own}, settings) == f"<system>T</system>\n{user}P"
    raw = defaults({"raw": True})
    assert text_of(chatty, {"prompt": "a"}, raw) == "a"
    assert text_of(chatty, {"prompt": "a", "raw": False}, raw) == user
    assert text_of(chatty, {"messages": messages}, raw) == user
    with pytest.raises(TfmError, match=r"field system: found .*; allowed: none beside --raw"):
        text_of(chatty, {"prompt": "a", "system": "S"}, raw)


def test_control_tokens(chatty: Model) -> None:
    """The name of a control token in a chat is text; with raw it is the token, unless no_special."""
    assert 0 not in request(chatty, {"prompt": "<|end|>"}).ids
    assert list(request(chatty, {"prompt": "<|end|>", "raw": True}).ids) == [0]
    assert 0 not in request(chatty, {"prompt": "<|end|>", "raw": True, "no_special": True}).ids


def test_constraint_of_row_or_command(plain: Model) -> None:
    """A row's constraint takes the place of the command's, of whatever kind that is."""
    settings = defaults(grammar=Grammar("regex", "b", "--regex"))
    for row, first in (({}, "b"), ({"regex": "c"}, "c"), ({"grammar": 'start: "d"'}, "d")):
        constraint = request(plain, {"prompt": "a", **row}, settings).constraint
        assert constraint is not None
        assert plain.tokenizer.decode([int(constraint.allowed().nonzero()[0][0])]) == first
    schema = {"type": "string", "enum": ["x"]}
    for value in (schema, json.dumps(schema)):
        constraint = request(plain, {"prompt": "a", "json_schema": value}, settings).constraint
        assert constraint is not None
        assert plain.tokenizer.decode(constraint.allowed().nonzero()[0].tolist()) == '"'


def test_fields_are_the_options_of_generate() -> None:
    """An option that generate has or gets, and rows do not."""
    from tfm.cli.commands.generate import command

    options = {max(p.opts, key=len).lstrip("-").replace("-", "_") for p in command.params if p.opts[0].startswith("-")}
    not_of_a_row = {
        "file", "no_stdin", "json", "no_stream", "verbose", "quiet", "model", "threads", "kv_type", "ctx", "max_ram",
        "prompt_cache", "speculate",
    }  # fmt: skip
    assert options - not_of_a_row == set(FIELDS) - {"id", "prompt", "messages"}
