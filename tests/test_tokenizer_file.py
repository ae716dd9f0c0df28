"""What the tokenizers library panics on is refused before, in one line, with nothing else on stderr."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_process import run
from tokenizer_files import byte_level, puts_around, write_tokenizer

from tfm.engine.errors import TfmError
from tfm.engine.tokenizer import Tokenizer
from tfm.engine.tokenizer_file import library_faults


def template(single: list[Any]) -> dict[str, Any]:
    return {**puts_around([]), "single": single}


TEXT_A: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
TEXT_B: dict[str, Any] = {"Sequence": {"id": "B", "type_id": 0}}
NO_TOKEN = template([{"SpecialToken": {"id": "<zz>", "type_id": 0}}, TEXT_A])
PREFIX = {"type": "BPE", "continuing_subword_prefix": "###", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
PANICS = {
    "'<zz>' is not": byte_level(post_processor=NO_TOKEN),
    "field post_processor": byte_level(post_processor={"type": "Sequence", "processors": [NO_TOKEN]}),
    "a template of one text": byte_level(post_processor=template([TEXT_A, TEXT_B])),
    "field normalizer": byte_level(normalizer={"type": "Prepend", "prepend": ""}),
    "normalizer: found": byte_level(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}),
    "normalizer: found {": byte_level(
        normalizer={
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": ""}, "content": "x"}],
        }
    ),
    "field pre_tokenizer": byte_level(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "field model.merges": {**byte_level(), "model": PREFIX},
}


@pytest.mark.parametrize("words", PANICS)
def test_what_the_library_panics_on(parrot: Path, tmp_path: Path, words: str) -> None:
    """It was called a bug in tfm, below what Rust has to say of a panic."""
    model = tmp_path / "model"
    shutil.copytree(parrot, model)
    (model / "tokenizer.json").write_text(json.dumps(PANICS[words]))
    done = run("tokenize", "-m", model, "--no-stdin", "a b", env={"RUST_BACKTRACE": "1"})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert done.stderr.startswith(f"tfm: file {model / 'tokenizer.json'}: ".encode())
    assert words in done.stderr.decode()


def test_panic_of_another_kind(tmp_path: Path) -> None:
    """Not all can be foreseen (this one: a table of a normalizer that is cut short); it is our error all the same."""
    with pytest.raises(TfmError, match=r"tokenizer\.json: not a tokenizer: found .*charsmap"):
        write_tokenizer(tmp_path, byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}))


def test_panic_while_encoding(tmp_path: Path) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAACAAAA"}
    tokenizer = write_tokenizer(tmp_path, byte_level(normalizer=normalizer))
    with pytest.raises(TfmError, match="cannot be encoded"):
        tokenizer.encode("abc")


def test_unknown_token_that_is_not_there(tmp_path: Path) -> None:
    """The library finds out when a text has need of it, and raises a plain Exception."""
    model = {"type": "WordLevel", "unk_token": "<none>", "vocab": {"a": 0}}
    tokenizer = write_tokenizer(tmp_path, {**byte_level(), "model": model})
    with pytest.raises(TfmError, match=r"cannot be encoded.*UNK"):
        tokenizer.encode("b")


def test_own_mistakes_and_interrupts_pass() -> None:
    """Only the library's two kinds of fault are turned into ours."""
    for kind in (KeyboardInterrupt, AssertionError, TypeError, MemoryError):
        with pytest.raises(kind), library_faults("file"):
            raise kind


def test_file_cut_short(parrot: Path, tmp_path: Path) -> None:
    """At any length: one line."""
    whole = (parrot / "tokenizer.json").read_bytes().rstrip()
    for length in [*range(0, 60), *range(60, len(whole), max(1, len(whole) // 100)), len(whole) - 1]:
        (tmp_path / "tokenizer.json").write_bytes(whole[:length])
        with pytest.raises(TfmError, match=r"tokenizer\.json: not a tokenizer"):
            Tokenizer.load(tmp_path)
