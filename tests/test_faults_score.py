"""tfm score where a text is at its limit or beyond, holds what is no character of a text, or has a bad template."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import run
from parrot import BAD_TEMPLATES, ids_of

from tfm.engine import load

CTX = 64  # a block of the cache


def scored(*words: str | Path, rows: Sequence[Mapping[str, Any]], status: int = 0) -> list[dict[str, Any]]:
    """What comes back for the rows, a line for each."""
    given = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    done = run("score", "--jsonl", *words, stdin=given.encode())
    assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr
    found = [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]]
    assert len(found) == len(rows)
    return found


def test_prompts_beside_the_context(parrot: Path, tmp_path: Path) -> None:
    """The last token is not run, so a prompt of exactly the context has room for one token behind it: with one token
    more a row was cut, or ended the others; and what there is room for is what generating reports."""
    model = write_checkpoint(tmp_path, {**LLAMA, "eos_token_id": None})
    with closing(load(model, ctx=CTX)) as loaded:
        prompts = [[3 + i * i % 40 for i in range(length)] for length in (1, CTX - 1, CTX)]
        made = [[*loaded.generate(ids, 2)] for ids in prompts]
    assert [len(tokens) for tokens in made] == [2, 2, 1]
    pairs = zip(prompts, made, strict=True)
    rows: list[dict[str, Any]] = [{"ids": ids, "completion_ids": [token.id for token in end]} for ids, end in pairs]
    full = prompts[-1]
    more, most = [*full, 5], [*full, 5, 5]
    rows += [{"ids": more}, {"ids": more, "completion": ""}, {"ids": full, "completion": ""}]
    beyond = [{"ids": full, "completion_ids": [5, 5]}, {"ids": more, "completion_ids": [5]}, {"ids": most}]
    beyond += [{"ids": most, "completion_ids": []}, {"ids": full * 99, "completion_ids": [5]}]
    found = scored("-m", model, "--ctx", str(CTX), "--per-token", rows=[*rows, *beyond], status=1)
    for row, tokens in zip(found, made, strict=False):
        assert [token["logprob"] for token in row["per_token"]] == [token.logprob for token in tokens]
    assert [row["tokens"] for row in found[3:6]] == [CTX, 0, 0]
    for row, length in zip(found[6:], (CTX + 2, CTX + 2, CTX + 2, CTX + 2, 99 * CTX + 1), strict=True):
        assert f"found {length} tokens; allowed: at most {CTX + 1}" in row["error"]


def test_what_is_no_letter(parrot: Path) -> None:
    """U+2028 and U+0085 in a field ended its row, NUL ended its text, CRLF became LF, a BOM went: bytes that no figure
    counts."""
    texts = [
        "a\u2028b",
        "\u0085",
        "\0",
        "a\0b\0",
        "a\r\nb\r",
        "\ufeffa",
        "\u2029\x0b\x0c\x1c\x1e",
        " \t ",
        "\ufffd\uffff",
    ]
    rows = [{"prompt": "x\u2028\0", "completion": text} for text in texts] + [{"text": text} for text in texts]
    found = scored("-m", parrot, rows=rows)
    sizes = [len(text.encode()) for text in texts]
    assert [row["tokens"] for row in found] == [*sizes, *(size - 1 for size in sizes)]


def test_rows_of_ten_megabytes(parrot: Path) -> None:
    """A row was refused for a column that is not scored, lost its long id, or took minutes to be refused."""
    much = "é" * 5_000_000
    rows = [
        {"id": much, "label": much, "text": "ab"}, {"prompt": much, "completion": "b"}, {"ids": [98] * 400_000},
        {"id": 7, "text": "ab"},
    ]  # fmt: skip
    long_id, prompt, ids, last = scored("-m", parrot, rows=rows, status=1)
    assert long_id.pop("id") == much
    assert last.pop("id") == 7
    assert long_id == last
    assert (prompt["line"], ids["line"]) == (2, 3)
    assert "found 5000000 characters" in prompt["error"]
    assert "found 400000 tokens; allowed: at most 1025" in ids["error"]


@pytest.mark.parametrize("template", ["{{ 'a' * 10000000000 }}", "{{ ''.__class__.__mro__ }}"])
def test_templates_that_fail(chatty_parrot: Path, tmp_path: Path, template: str) -> None:
    """A template that makes gigabytes or reaches for Python ended all rows, also those that need none."""
    model = shutil.copytree(chatty_parrot, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    needing: list[dict[str, Any]] = [
        {"prompt": "a", "completion": "b"}, {"messages": [{"role": "user", "content": "a"}], "completion": "b"}
    ]  # fmt: skip
    rows = [*needing, {"prompt": "a", "raw": True, "completion": "b"}, {"ids": ids_of("a"), "completion": "b"}]
    first, second, third, fourth = scored("-m", model, rows=rows, status=1)
    for row in (first, second):
        assert BAD_TEMPLATES[template] in row["error"]
        assert "chat_template.jinja" in row["error"]
    assert third == fourth
    assert third["tokens"] == 1
