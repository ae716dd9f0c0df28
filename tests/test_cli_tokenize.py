"""tfm tokenize: ids, text and places that are exact to the byte."""

import json
import os
import random
from pathlib import Path

import pytest
from cli_process import run, shell
from parrot import write_parrot

TEXTS = ["a", " Once upon  a time\n\n", "é🙂 ü\0\r\n", "<|end|>", "日本語 한국어", "\u2028\u0085\ufeffx", "a" * 3000]


@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(default_model_folder: Path, text: str) -> None:
    """The text of the ids of a text is the text, control tokens' names and line ends included."""
    ids = run("tokenize", "-f", "/dev/stdin", "--no-stdin", stdin=text.encode()).stdout
    assert run("tokenize", "--decode", stdin=ids).stdout == text.encode().removeprefix(b"\xef\xbb\xbf")


@pytest.mark.parametrize("text", TEXTS)
def test_places(default_model_folder: Path, text: str) -> None:
    """Places counted characters where they should count bytes, or were those of another token."""
    pieces = json.loads(run("tokenize", "--json", stdin=text.encode()).stdout)
    data = text.encode()
    assert [piece["start"] for piece in pieces] == [0, *(piece["end"] for piece in pieces[:-1])]
    assert pieces[-1]["end"] == len(data)
    for piece in pieces:
        assert list(piece) == ["id", "text", "bytes", "start", "end"]
        assert data[piece["start"] : piece["end"]] == bytes(piece["bytes"])


def test_places_of_what_is_not_in_the_text(tmp_path: Path) -> None:
    """A BOS has no width; it moved all places behind it."""
    model = write_parrot(tmp_path, b"a")
    (model / "tokenizer_config.json").write_text('{"bos_token": "<|end|>", "add_bos_token": true}')
    pieces = json.loads(run("tokenize", "--json", "-m", model, "hi").stdout)
    assert [(piece["id"], piece["start"], piece["end"]) for piece in pieces] == [(0, 0, 0), (105, 0, 1), (106, 1, 2)]
    assert run("tokenize", "-m", model, "hi").stdout == b"0 105 106\n"
    assert run("tokenize", "-m", model, "--no-bos", "hi").stdout == b"105 106\n"


def test_places_in_a_text_that_was_changed(tmp_path: Path) -> None:
    """A tokenizer that rewrites the text first: what is found keeps its place, the rest shares the gap."""
    model = write_parrot(tmp_path, b"a")
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "X"}, "content": "yz"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    pieces = json.loads(run("tokenize", "--json", "-m", model, "aXXb").stdout)
    assert [piece["text"] for piece in pieces] == list("ayzyzb")
    assert [(piece["start"], piece["end"]) for piece in pieces] == [(0, 1), *[(1, 3)] * 4, (3, 4)]


def test_json_of_ids(parrot: Path) -> None:
    pieces = json.loads(run("tokenize", "--decode", "--json", "-m", parrot, "105 0 106").stdout)
    assert [piece["text"] for piece in pieces] == ["h", "<|end|>", "i"]
    assert [(piece["start"], piece["end"]) for piece in pieces] == [(0, 1), (1, 8), (8, 9)]


def test_count(parrot: Path) -> None:
    assert run("tokenize", "--count", "-m", parrot, "héllo").stdout == b"6\n"
    assert run("tokenize", "--count", "-m", parrot, "").stdout == b"0\n"
    assert run("tokenize", "--count", "--decode", "-m", parrot, "[1, 2,3]").stdout == b"3\n"


def test_control_tokens(parrot: Path) -> None:
    """Seen in text and shown of ids, unless --no-special."""
    assert run("tokenize", "-m", parrot, "a<|end|>").stdout == b"98 0\n"
    assert len(run("tokenize", "--no-special", "-m", parrot, "a<|end|>").stdout.split()) == 8
    assert run("tokenize", "--decode", "-m", parrot, "98 0 99").stdout == b"a<|end|>b"
    assert run("tokenize", "--decode", "--no-special", "-m", parrot, "98 0 99").stdout == b"ab"


def test_nothing(parrot: Path) -> None:
    """Nothing given is wrong usage; an empty text that is given has no tokens: an empty file on stdin was refused."""
    assert run("tokenize", "--no-stdin", "-m", parrot).returncode == 2
    assert shell(f"tfm tokenize -m {parrot} <&-").returncode == 2
    assert run("tokenize", "--count", "-m", parrot).stdout == b"0\n"
    assert run("tokenize", "--count", "-m", parrot, "-f", os.devnull).stdout == b"0\n"
    assert run("tokenize", "-m", parrot).stdout == b"\n"
    assert run("tokenize", "-m", parrot, "").stdout == b"\n"
    assert run("tokenize", "--decode", "-m", parrot, "").stdout == b""
    assert run("tokenize", "--json", "-m", parrot, "").stdout == b"[]\n"


@pytest.mark.parametrize("ids", ["257", "1 2 x", "99999999999999999999", "1;2", "0x1", "9" * 5000, "²"])
def test_wrong_ids(parrot: Path, ids: str) -> None:
    """An id that is no token became an empty text."""
    done = run("tokenize", "--decode", "-m", parrot, ids)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"token ids: found" in done.stderr


def test_needs_only_the_tokenizer(parrot: Path, tmp_path: Path) -> None:
    """Weights were wanted for counting tokens."""
    (tmp_path / "tokenizer.json").write_bytes((parrot / "tokenizer.json").read_bytes())
    assert run("tokenize", "-m", tmp_path, "a").stdout == b"98\n"


def test_json_and_count_are_two_shapes(parrot: Path) -> None:
    assert run("tokenize", "--json", "--count", "-m", parrot, "a").returncode == 2


def test_any_bytes_of_a_text(default_model_folder: Path) -> None:
    """Places and round trips of mixed scripts, at random."""
    letters = [*"aZ 0\n\t\0", *"éß€🙂日\u0301\u200d", "<|im_end|>"]
    text = "".join(random.Random(0).choices(letters, k=2000))
    pieces = json.loads(run("tokenize", "--json", stdin=text.encode()).stdout)
    assert b"".join(bytes(piece["bytes"]) for piece in pieces) == text.encode()
    ids = " ".join(str(piece["id"]) for piece in pieces)
    assert run("tokenize", "--decode", stdin=ids.encode()).stdout == text.encode()
