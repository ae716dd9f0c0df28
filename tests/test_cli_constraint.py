"""tfm generate with --json-schema, --regex or --grammar: what is printed, how it ends, and what is wrong usage."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_process import run
from parrot import id_of

SCHEMA = '{"type": "object", "properties": {"city": {"enum": ["Paris", "Łódź 🙂"]}, "count": {"type": "integer", '
SCHEMA += '"minimum": 0, "maximum": 99}}, "required": ["city", "count"], "additionalProperties": false}'


def said(*arguments: str | Path, status: int = 0, **more: Any) -> str:
    """What a run prints that ends with status; one line on stderr when that is not 0."""
    done = run("generate", *arguments, **more)
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == (status != 0)
    return done.stdout.decode()


@pytest.fixture
def grammar(tmp_path: Path) -> Path:
    """A Lark grammar that the parrot can keep to, with a BOM and line ends of Windows."""
    path = tmp_path / "grammar.lark"
    path.write_bytes(b'\xef\xbb\xbfstart: "Hi " mark+\r\nmark: "\xf0\x9f\x99\x82" | "\xc3\xa9"\r\n')
    return path


# ------------------------------------------------------------------------------------------------ what is printed


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("Hi .", "Hi é"), ("Hi é🙂", "Hi é🙂"), ("H[a-z]", "Hi"), ("(Hi é🙂!)?", "Hi é🙂!"), ("Ho", "Ho"), ("🙂", "🙂")],
)
def test_regex(parrot: Path, pattern: str, text: str) -> None:
    """The answer ends where nothing may follow, also in mid-speech, and every character is whole."""
    assert said("-m", parrot, "--regex", pattern, "a\n") == text
    assert said("-m", parrot, "--regex", pattern, "--no-stream", "a\n") == text
    answer = json.loads(said("-m", parrot, "--regex", pattern, "--json", "--ids", "--logprobs", "1", "11"))
    assert (answer["text"], answer["finish_reason"]) == (text, "stop")
    assert answer["ids"] == [id_of(byte) for byte in text.encode()]
    assert bytes(byte for token in answer["tokens"] for byte in token["bytes"]).startswith(text.encode())


def test_ids_as_they_come(parrot: Path) -> None:
    """The last token of a text after which nothing may follow was taken for an end-of-text token and not shown."""
    assert said("-m", parrot, "--regex", "Hi", "--ids", "11") == f"{id_of(ord('H'))} {id_of(ord('i'))}\n"


def test_grammar(parrot: Path, grammar: Path) -> None:
    """A file with a BOM and CRLF; the grammar allows more, and the model ends by itself."""
    assert said("-m", parrot, "--grammar", grammar, "--logit-bias", f"{id_of(ord('!'))}=-9", "a\n") == "Hi é🙂"


@pytest.mark.parametrize("in_file", [False, True])
def test_json_schema(parrot: Path, tmp_path: Path, in_file: bool) -> None:
    """A file or a text. The layout is that of json.dumps, on one line."""
    schema = '\n {"type": "array", "prefixItems": [{"const": "Hi é🙂!"}, {"const": {"a": 1}}], '
    schema += '"items": false, "minItems": 2}'
    (tmp_path / "schema.json").write_text(schema, encoding="utf-8")
    given = str(tmp_path / "schema.json") if in_file else schema
    text = said("-m", parrot, "--json-schema", given, "a\n")
    assert text == json.dumps(["Hi é🙂!", {"a": 1}], ensure_ascii=False)


@pytest.mark.parametrize("how", [("--temperature", "0"), ("--temperature", "1.2", "--seed", "7")])
def test_default_model(default_model_folder: Path, how: tuple[str, ...]) -> None:
    """Greedy and sampled, streamed and not: the same bytes, JSON that matches."""
    text = said(*how, "--json-schema", SCHEMA, "Write a poem.")
    value = json.loads(text)
    assert list(value) == ["city", "count"]
    assert value["city"] in ("Paris", "Łódź 🙂")
    assert type(value["count"]) is int
    assert 0 <= value["count"] <= 99
    assert said(*how, "--no-stream", "--json-schema", SCHEMA, "Write a poem.") == text


def test_true_is_any_json(default_model_folder: Path) -> None:
    """true and {} are schemas, not names of files."""
    text = said("--json-schema", " true ", "--logit-bias", "107=50", "-n", "60", "Answer with {}.", status=0)
    assert isinstance(json.loads(text), dict)


# ------------------------------------------------------------------------------------------------ how it ends


@pytest.mark.parametrize("shape", [(), ("--json",), ("--no-stream",), ("--ids",)])
def test_length(parrot: Path, shape: tuple[str, ...]) -> None:
    """Half an answer looked like a whole one to the script that reads it. What there is is printed all the same."""
    prompt = "11" if "--ids" in shape else "a\n"
    done = run("generate", "-m", parrot, "--regex", "Hi é🙂! and more", "-n", "2", *shape, prompt)
    assert done.returncode == 1
    told = "tfm: --regex: the answer is not complete: found an end by length; raise --max-tokens"
    assert done.stderr.decode().startswith(told)
    if "--json" in shape:
        answer = json.loads(done.stdout)
        assert (answer["text"], answer["finish_reason"]) == ("Hi", "length")
    else:
        assert done.stdout.decode() == (f"{id_of(ord('H'))} {id_of(ord('i'))}\n" if "--ids" in shape else "Hi")


def test_length_where_it_might_end(parrot: Path) -> None:
    """12 is a number, and not the one that the model was about to say."""
    assert said("-m", parrot, "--regex", "[A-Za-z]+", "-n", "1", "a\n", status=1) == "H"


def test_limit_that_is_just_enough(parrot: Path) -> None:
    """The last token that fits also ended the text: that is no end by length."""
    assert said("-m", parrot, "--regex", "Hi", "-n", "2", "a\n") == "Hi"


def test_stop_in_mid_text(parrot: Path) -> None:
    """A stop text may end an answer before it is complete: status 1. One at a possible end is as good as the end."""
    done = run("generate", "-m", parrot, "--regex", "Hi é🙂!", "--stop", "é", "a\n")
    assert (done.returncode, done.stdout) == (1, b"Hi ")
    assert (
        done.stderr
        == b"tfm: --regex: the answer is not complete: found a text of --stop in it; choose another --stop\n"
    )
    assert said("-m", parrot, "--regex", "Hi é(🙂!)?", "--stop", "é", "a\n") == "Hi "


@pytest.mark.parametrize("seed", ["1", "2"])
def test_characters_are_whole(parrot: Path, seed: str) -> None:
    """Bytes of characters by lot, one a token: no half of one, no replacement character."""
    pattern = "[é漢🙂\u0301]{5}"
    text = said("-m", parrot, "--regex", pattern, "--temperature", "5", "--seed", seed, "a\n")
    assert re.fullmatch(pattern, text)


def test_bias_that_leaves_nothing(parrot: Path) -> None:
    """The only token that is allowed was forbidden: an error, not another token."""
    told = run("generate", "-m", parrot, "--regex", "Hi", "--logit-bias", f"{id_of(ord('i'))}=-inf", "a\n")
    assert (told.returncode, told.stdout) == (1, b"H")
    assert b"constraint" in told.stderr


# ------------------------------------------------------------------------------------------------ what is refused


def test_one_constraint(parrot: Path, grammar: Path) -> None:
    """Of two, one was ignored."""
    done = run("generate", "-m", parrot, "--regex", "a", "--grammar", grammar, "--json-schema", "true", "a")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--json-schema and --regex and --grammar: an answer has one constraint" in done.stderr


@pytest.mark.parametrize("option", ["--json-schema", "--grammar"])
def test_empty_value(parrot: Path, option: str) -> None:
    """A variable of the shell that is not set was taken for the folder that one is in."""
    done = run("generate", "-m", parrot, option, "", "a")
    assert (done.returncode, done.stdout) == (2, b"")
    assert f"{option} is empty" in done.stderr.decode()


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--json-schema", "no.json", "tfm: --json-schema: file no.json: found No such file or directory; "
         "allowed: a file with a JSON schema, or its text, which begins with {"),
        ("--json-schema", "[1]", "tfm: --json-schema: file [1]: found No such file or directory"),
        ("--json-schema", "{a", "tfm: --json-schema: found no JSON: "),
        ("--json-schema", '{"not": {}}', 'tfm: --json-schema: found Unimplemented keys: ["not"]; '),
        ("--json-schema", "/dev/zero", "tfm: --json-schema: file /dev/zero: found more than "),
        ("--regex", "(a", "tfm: --regex: found unclosed group; "),
        ("--grammar", "no.lark", "tfm: --grammar: file no.lark: found No such file or directory; "
         "allowed: a file with a Lark grammar; for a text let the shell make one: <(printf '%s' "),
        ("--grammar", ".", "tfm: --grammar: file .: found Is a directory"),
        ("--grammar", "/dev/null", "tfm: --grammar: found no start rule found; "),
    ],
)  # fmt: skip
def test_refused(parrot: Path, option: str, value: str, told: str) -> None:
    """Each with one line, the option's name and nothing on stdout."""
    done = run("generate", "-m", parrot, option, value, "a\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().startswith(told)
    assert len(done.stderr.splitlines()) == 1


def test_bytes_that_are_not_utf8(parrot: Path, tmp_path: Path) -> None:
    """Latin-1 in a grammar's file, and on the command line."""
    (tmp_path / "latin.lark").write_bytes(b'start: "caf\xe9"')
    done = run("generate", "-m", parrot, "--grammar", tmp_path / "latin.lark", "a\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"not UTF-8: found 0xe9 at byte 11" in done.stderr
    done = run("generate", "-m", parrot, "--regex", b"caf\xe9", "a\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"not UTF-8" in done.stderr
