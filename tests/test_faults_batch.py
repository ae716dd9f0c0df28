"""tfm batch where a text or a value is at its limit or beyond: the answer of tfm generate, or a row that says why not.

All rows of a kind run in one process, so that each stands beside others that have other settings.
"""

import json
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import run
from parrot import BAD_TEMPLATES, FAMILY, PIECES, id_of, ids_of, set_ends, with_pieces, write_parrot

from tfm.engine import SamplingParams, load

ANSWER = "Hi é🙂!"
START = ids_of("\n")
SAMPLING = ("temperature", "top_k", "top_p")
Row = Mapping[str, Any]


def jsonl(rows: Sequence[Row]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def answered(model: Path, rows: Sequence[Row], *options: str, status: int = 0) -> list[dict[str, Any]]:
    """The rows that come back, of which none is missing."""
    done = run("batch", "--raw", "-m", model, *options, stdin=jsonl(rows))
    assert (done.returncode, len(done.stderr.splitlines())) == (status, status), done.stderr
    found = [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]
    assert [row["line"] for row in found] == list(range(1, len(rows) + 1))
    return found


def ends(found: Sequence[Row]) -> list[tuple[str, str]]:
    return [(row["text"], row["finish_reason"]) for row in found]


def alone(model: Path, rows: Sequence[Row], ctx: int | None = None) -> list[tuple[str, str]]:
    """The same of the rows, as tfm generate makes them one after the other."""
    found = []
    with closing(load(model, ctx=ctx)) as loaded:
        for line, row in enumerate(rows, 1):
            own = {name: row[name] for name in SAMPLING if name in row}
            stop = [row["stop"]] if isinstance(row.get("stop"), str) else row.get("stop", ())
            params = SamplingParams(**own, seed=line)
            tokens = list(loaded.generate(row["ids"], row.get("max_tokens", 1024), params, stop))
            found.append(("".join(t.text for t in tokens), (tokens and tokens[-1].finish_reason) or "length"))
    return found


# ------------------------------------------------------------------------------------------------ characters, stops


@pytest.mark.parametrize("fall_back", [False, True])
def test_characters_cut_by_the_limit(parrot: Path, tmp_path: Path, fall_back: bool) -> None:
    """A row that ended in mid-character was lost, had a replacement character for each byte, or left the bytes to the
    row that took its place."""
    pieces = [bytes([byte]) for byte in ANSWER.encode()] if fall_back else PIECES
    model = with_pieces(tmp_path, [b"".join(pieces)] if fall_back else pieces, bytes_to_fall_back_to=fall_back)
    rows = [{"ids": START, "max_tokens": count} for count in range(len(pieces) + 2)]
    found = ends(answered(model, rows, "--slots", "3"))
    for count, (text, reason) in enumerate(found):
        begun = b"".join(pieces[:count])
        whole = begun.decode(errors="ignore")
        assert text == whole + "\ufffd" * (len(whole.encode()) < len(begun))
        assert reason == ("length" if count <= len(pieces) else "stop")
    assert found == alone(model, rows)


BYTES = {
    "right after an emoji": (["!"], "Hi é🙂"),
    "an emoji of four tokens": ("🙂", "Hi é"),
    "twice": (["é", "é", "é"], "Hi "),
    "one the prefix of another": (["🙂!", "🙂"], "Hi é"),
    "the longer one first": (["🙂", "🙂!"], "Hi é"),
    "two that end together": (["🙂!", "é🙂!"], "Hi "),
    "two that overlap": (["i é", " é🙂"], "H"),
    "never complete": (["🙂!?", "!!", "\n"], ANSWER),
    "all of it": ([ANSWER], ""),
    "a thousand": ([f"{i}" for i in range(999)] + ["🙂"], "Hi é"),
}
TOKENS = {
    "over three tokens": ("\u200d🚀e", "👩"),
    "inside the last token": ("षि", "👩\u200d🚀e\u0301क्"),
    "a combining mark": ("\u0301", "👩\u200d🚀e"),
    "a letter with its mark": ("e\u0301", "👩\u200d🚀"),
    "the same letter in other characters": ("é", FAMILY),
    "a part of a family": (["🚀", "🚀e"], "👩\u200d"),
    "behind it": ("क", "👩\u200d🚀e\u0301"),
}


@pytest.mark.parametrize(
    ("pieces", "cases", "speculate"), [(None, BYTES, "0"), (PIECES, TOKENS, "4")], ids=["bytes", "pieces"]
)
def test_stops(parrot: Path, tmp_path: Path, pieces: list[bytes] | None, cases: Any, speculate: str) -> None:
    """A stop over the edges of tokens was printed, in part or as a whole; or that of one row ended another."""
    model = parrot if pieces is None else with_pieces(tmp_path, pieces)
    rows = [{"ids": [*ids_of("🙂!é"), *START], "stop": stop} for stop, _ in cases.values()]
    found = ends(answered(model, rows, "--speculate", speculate))
    texts = dict(zip(cases, (text for text, _ in found), strict=True))
    assert texts == {name: text for name, (_, text) in cases.items()}
    assert found == alone(model, rows)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "text"),
    [
        (None, id_of(ord("e")), None, "abcd"),
        (None, None, {"eos_token": {"content": "d"}}, "abc"),
        (None, None, None, "abcdefgh"),
        ([], [id_of(ord("f")), id_of(ord("d"))], {"eos_token": None}, "abc"),
        (id_of(ord("f")), [id_of(ord("e"))], {"eos_token": "d"}, "abc"),
        ([id_of(ord("h")), id_of(ord("d"))], 10**12, {"eos_token": "g"}, "abc"),
    ],
)
def test_ends_of_three_files(
    parrot: Path, tmp_path: Path, config: Any, generation: Any, tokenizer: Any, text: str
) -> None:
    """Rows went on behind an end that stands in one file only, and a row's stop took the ends away or ended others."""
    model = write_parrot(tmp_path, b"abcdefgh")
    set_ends(model, config, generation, tokenizer)
    rows = [{"ids": START, "max_tokens": 8, "stop": stop} for stop in ([], ["b"], ["zz"])]
    reason = "length" if len(text) == 8 else "stop"
    assert ends(answered(model, rows)) == [(text, reason), ("a", "stop"), (text, reason)]


# ------------------------------------------------------------------------------------------------ numbers

HOT = {"temperature": 1.0}
ALLOWED: list[Row] = [
    *({**HOT, "top_p": value} for value in (0, 1e-300, 1e-8, 1, 1.0)),
    *({**HOT, "top_k": value} for value in (0, 1, 96, 97, 98, 2**31 - 1)),
    *({"temperature": value} for value in (0, 5e-324, 1e-9, 1e308)),
    *({"max_tokens": value} for value in (0, 1, 10**12, sys.maxsize)),
]
GREEDY = [i for i, row in enumerate(ALLOWED) if row.get("top_p", 1) < 0.1 or row.get("top_k") == 1]
GREEDY += [i for i, row in enumerate(ALLOWED) if row.get("temperature", 0) < 0.1 and row.get("max_tokens", 99) > 40]
REFUSED = {
    '"temperature": -1': "field temperature: found -1",
    '"temperature": -1e-9': "field temperature: found -1e-09",
    '"temperature": 1e400': "field temperature: found inf",
    '"temperature": NaN': "found NaN; allowed: numbers that JSON has",
    '"top_p": -1e-8': "field top_p: found -1e-08",
    '"top_p": 1.0000001': "field top_p: found 1.0000001",
    '"top_k": -1': "field top_k: found -1",
    '"top_k": 2147483648': "field top_k: found 2147483648",
    '"max_tokens": -1': "field max_tokens: found -1",
    f'"max_tokens": {"9" * 30}': "field max_tokens: found 999",
    '"logit_bias": {"97": 1}': "logit_bias: found token id 97; allowed: 0 to 96",
    '"logit_bias": {"5": 1e308}': "logit_bias: found inf as the largest logit",
    '"presence_penalty": -1e400': "field presence_penalty: found -inf",
}


def test_values_at_their_limits(parrot: Path, tmp_path: Path) -> None:
    """top-p of nothing, top-k of V and beyond, a temperature near 0, a limit that no memory has: each is what it says,
    and one that is not allowed is named in its own row, beside rows that are answered."""
    model = write_checkpoint(tmp_path, {**LLAMA, "eos_token_id": None})
    rows = [{"ids": [7, 5, 9], **row} for row in ALLOWED]
    bad = "".join(f'{{"ids": [7], {fields}}}\n' for fields in REFUSED).encode()
    done = run("batch", "-m", model, "--ctx", "40", stdin=jsonl(rows) + bad)
    assert done.returncode == 1
    found = [json.loads(line) for line in done.stdout.split(b"\n")[:-1]]
    errors = [row["error"] for row in found[len(rows) :]]
    assert len(errors) == len(REFUSED)
    for error, told in zip(errors, REFUSED.values(), strict=True):
        assert told in error
    texts = ends(found[: len(rows)])
    assert texts == alone(model, rows, ctx=40)
    assert len({texts[i] for i in GREEDY}) == 1
    assert len({*texts}) > 5


@pytest.mark.parametrize(
    ("ctx", "options"), [(64, ()), (129, ("--slots", "2", "--no-prefix-sharing", "--speculate", "5"))]
)
def test_prompts_beside_the_context(endless_parrot: Path, ctx: int, options: Sequence[str]) -> None:
    """A prompt of exactly the context was refused, one that is longer cut, or it ended the rows beside it."""
    lengths = (1, ctx - 1, ctx, ctx + 1, 10 * ctx, ctx)
    rows = [{"ids": START * length} for length in lengths]
    found = answered(endless_parrot, rows, "--ctx", str(ctx), *options, status=1)
    for row, length in zip(found, lengths, strict=True):
        if length > ctx:
            assert f"found {length} tokens; allowed: at most {ctx}, the context" in row["error"]
        else:
            assert (row["text"], row["finish_reason"]) == (("abcdefghij" * 20)[: ctx - length + 1], "length")
            assert (row["prompt_tokens"], row["completion_tokens"]) == (length, ctx - length + 1)


# ------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("template", [name for name, told in BAD_TEMPLATES.items() if told == "chat template: found"])
def test_templates_that_fail(chatty_parrot: Path, tmp_path: Path, template: str) -> None:
    """A template that never ends, makes gigabytes or reaches for Python ended all rows, also those that need none."""
    model = shutil.copytree(chatty_parrot, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = run("batch", "-m", model, stdin=jsonl([{"ids": START}, {"prompt": "a"}, {"prompt": "\n", "raw": True}]))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20
    first, second, third = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert first["text"] == third["text"] == ANSWER
    assert BAD_TEMPLATES[template] in second["error"]
    assert "chat_template.jinja" in second["error"]
