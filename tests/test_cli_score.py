"""tfm score: a line of JSON for every line, whatever stands in it; and the same figures that generating reports."""

import json
import math
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import TFM, TIMEOUT_S, environment, run, shell
from parrot import END, id_of, write_parrot

from tfm.engine import load

ANSWER = "Hi é🙂!"
NOTHING = {"tokens": 0, "logprob": None, "perplexity": None, "bits_per_byte": None}
Json = dict[str, Any]


@pytest.fixture(scope="module")
def llama(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, whose tokens are printable characters."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


def score(*arguments: str | Path, stdin: bytes | str | list[Json] = b"", status: int = 0) -> list[Json]:
    """The rows that tfm score prints. stdin may be rows too."""
    if isinstance(stdin, list):
        stdin = "".join(f"{json.dumps(row)}\n" for row in stdin)
    done = run("score", *arguments, stdin=stdin.encode() if isinstance(stdin, str) else stdin)
    assert done.returncode == status, done.stderr.decode()
    assert status or done.stderr == b""
    assert done.stdout.endswith(b"\n") or not done.stdout
    return [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]]


# ------------------------------------------------------------------------------------------------ figures


def test_figures_of_a_line(llama: Path) -> None:
    """All four, of the model's own logits in float64."""
    line = "The quick brown fox."
    with_model = load(llama)
    ids = with_model.tokenizer.encode(line)
    logits = with_model.logits(ids).astype(np.float64)
    with_model.close()
    nlls = [np.log(np.exp(logits[i - 1]).sum()) - logits[i - 1, ids[i]] for i in range(1, len(ids))]
    [row] = score("-m", llama, stdin=line)
    assert list(row) == ["tokens", "logprob", "perplexity", "bits_per_byte"]
    assert row["tokens"] == len(nlls) == 19
    assert row["logprob"] == pytest.approx(-sum(nlls), abs=1e-3)
    assert row["perplexity"] == pytest.approx(math.exp(sum(nlls) / 19), rel=1e-4)
    assert row["bits_per_byte"] == pytest.approx(sum(nlls) / math.log(2) / 19, rel=1e-4)


def test_per_token(parrot: Path) -> None:
    """Tokens with their own bytes, also in mid-character; the first has nothing before it."""
    [row] = score("-m", parrot, "--jsonl", "--per-token", stdin=[{"text": "\né"}])
    first, second, third = row["per_token"]
    assert first == {"id": id_of(10), "text": "\n", "bytes": [10], "logprob": None, "rank": None}
    assert (second["text"], second["bytes"]) == ("\ufffd", [0xC3])
    assert third["id"] == id_of(0xA9)
    assert row["tokens"] == 2
    assert row["logprob"] == math.fsum([second["logprob"], third["logprob"]])
    [row] = score("-m", parrot, "--per-token", "--jsonl", stdin=[{"prompt": "x\n", "completion": "Hi"}])
    assert [token["rank"] for token in row["per_token"]] == [1, 1]


def test_bos_is_read_and_not_counted(tmp_path: Path) -> None:
    """With BOS all of a text is counted, also one of one token, and BOS itself is not."""
    model = write_parrot(tmp_path, b"a")
    (model / "tokenizer_config.json").write_text('{"bos_token": "<|end|>", "add_bos_token": true}')
    rows = score("-m", model, "--per-token", stdin="ab\na\n\n")
    assert [row["tokens"] for row in rows] == [2, 1, 0]
    assert [token["text"] for token in rows[0]["per_token"]] == ["a", "b"]
    assert rows[0]["per_token"][0]["logprob"] == rows[1]["logprob"]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1.3", "--seed", "5"]])
def test_the_score_of_an_answer_is_what_generate_reported(llama: Path, sampling: list[str]) -> None:
    """The promise of the command, in two processes: every figure, with ==."""
    prompt = "Once upon a time"
    made = run("generate", "--raw", "--json", "--logprobs", "0", "-n", "60", "-m", llama, *sampling, prompt).stdout
    tokens = json.loads(made)["tokens"]
    row = {"id": 7, "prompt": prompt, "completion_ids": [token["id"] for token in tokens]}
    others = [{"text": "x" * n} for n in (5, 70, 200)]
    found = score("-m", llama, "--jsonl", "--raw", "--per-token", stdin=[*others, row, *others])[3]
    assert [token["logprob"] for token in found["per_token"]] == [token["logprob"] for token in tokens]
    assert found["logprob"] == math.fsum(token["logprob"] for token in tokens)
    assert (found["id"], found["tokens"]) == (7, len(tokens))


def test_the_score_of_a_chat(chatty_parrot: Path) -> None:
    """The text of an answer and its end, behind the prompt that the chat template makes."""
    options = "--json", "--logprobs", "0", "-m", chatty_parrot, "-s", "Be brief."
    tokens = json.loads(run("generate", *options, "hello").stdout)["tokens"]
    assert tokens[-1]["id"] == END
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    rows: list[Json] = [
        {"prompt": "hello", "system": "Be brief.", "completion": ANSWER}, {"messages": messages, "completion": ANSWER}
    ]  # fmt: skip
    logprobs = [token["logprob"] for token in tokens]
    for row in score("-m", chatty_parrot, "--jsonl", "--end", stdin=rows):
        assert row["logprob"] == math.fsum(logprobs)
        assert row["bits_per_byte"] == -row["logprob"] / math.log(2) / len(ANSWER.encode())
    for row in score("-m", chatty_parrot, "--jsonl", stdin=rows):
        assert row["logprob"] == math.fsum(logprobs[:-1])
    [other] = score("-m", chatty_parrot, "--jsonl", "--raw", stdin=[{"prompt": "hello", "completion": ANSWER}])
    assert other["logprob"] != math.fsum(logprobs[:-1])


def test_ids(parrot: Path) -> None:
    """Ids are what the tokenizer makes of the same text."""
    ids = run("tokenize", "-m", parrot, "hé!").stdout
    assert score("-m", parrot, "--ids", stdin=ids + b"[105, 0]\n\n") == [
        *score("-m", parrot, stdin="hé!"), *score("-m", parrot, "--jsonl", stdin=[{"ids": [105, 0]}]), NOTHING
    ]  # fmt: skip
    rows = score("-m", parrot, "--ids", stdin="1 2\n1 x\n1 257\n", status=1)
    assert [row.get("line") for row in rows] == [None, 2, 3]
    assert "token ids: found 257; allowed: 0 to 256" in rows[2]["error"]


def test_control_tokens_in_text(parrot: Path) -> None:
    """As in generate --raw their names are control tokens, unless --no-special; in a completion they are text."""
    line = "a<|end|>"
    assert score("-m", parrot, stdin=line)[0]["tokens"] == 1
    assert score("-m", parrot, "--no-special", stdin=line)[0]["tokens"] == 7
    rows: list[Json] = [{"prompt": "a", "completion": line}, {"text": line, "no_special": True}, {"text": line}]
    assert [row["tokens"] for row in score("-m", parrot, "--jsonl", stdin=rows)] == [8, 7, 1]


# ------------------------------------------------------------------------------------------------ lines


def test_lines_end_at_lf_only(parrot: Path) -> None:
    """U+2028 and U+0085 cut lines, CR was lost, a last line without LF was left out, a blank one shifted the rest."""
    lines = ["ab\u2028cd", "ab\u0085cd", "ab\r", "", "\0\x0b\x0c", " ", "\ufeffab", "last"]
    rows = score("-m", parrot, stdin="\n".join(lines))
    assert [row["tokens"] for row in rows] == [max(0, len(line.encode()) - 1) for line in lines]
    assert rows[3] == NOTHING
    assert score("-m", parrot, stdin="\n".join(lines) + "\n") == rows
    assert score("-m", parrot, stdin="\ufeffab\n") == score("-m", parrot, stdin="ab")
    assert score("-m", parrot) == []
    assert score("-m", parrot, stdin="\n\n") == [NOTHING] * 2


def test_a_plain_line_that_looks_like_json(parrot: Path, tmp_path: Path) -> None:
    """Guessing made a row of JSON out of a line of text."""
    line = b'{"text": "ab"}'
    assert score("-m", parrot, stdin=line)[0]["tokens"] == 13
    assert score("-m", parrot, "--jsonl", stdin=line)[0]["tokens"] == 1
    for name, tokens in (("rows.jsonl", 1), ("rows.txt", 13)):
        (tmp_path / name).write_bytes(line)
        assert score("-m", parrot, tmp_path / name)[0]["tokens"] == tokens


def test_jsonl(parrot: Path) -> None:
    """CRLF, blank lines, escapes and ids of any kind; a bad row in the middle leaves the others alone."""
    lines = [
        b'{"id": "a", "text": "xy\\u2028"}\r', b"", b" \r", '{"id": null, "text": "xy\u2028", "label": 3}'.encode(),
        b'{"id": 3, "text": 5}', b"{", b'{"id": 3, "text": "\\ud800"}', b'{"id": "\\ud800", "text": "xy\xe2\x80\xa8"}',
        b'\xff', b"[1]", b"[" * 100_000, b'{"id": NaN, "text": "a"}', b'{"id": [1], "text": "a"}',
        b'{"text": ' + b"1" * 5000 + b"}", b'{"text": "a", "text": "b"}', b'{"id": true, "text": "xy\xe2\x80\xa8"}',
    ]  # fmt: skip
    done = run("score", "-m", parrot, "--jsonl", stdin=b"\n".join(lines))
    assert done.returncode == 1
    assert done.stderr == b"tfm: score: 10 of 14 lines could not be scored; their rows say why\n"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    good = {number: row for number, row in enumerate(rows) if "error" not in row}
    assert [row["id"] for row in good.values()] == ["a", None, "\ud800", True]
    assert len({row["logprob"] for row in good.values()}) == 1
    assert [(row["id"], row["line"]) for row in rows if "error" in row] == [
        (3, 5), (None, 6), (3, 7), (None, 9), (None, 10), (None, 11), (None, 12), (None, 13), (None, 14), (None, 15)
    ]  # fmt: skip
    assert list(good) == [0, 1, 5, 13]
    assert list(rows[2]) == ["id", "line", "error"]
    assert "0xff at byte 0" in rows[6]["error"]


@pytest.mark.parametrize("row", [
    {}, {"text": None}, {"text": "a", "prompt": "b"}, {"text": "a", "completion": "b"}, {"completion": "b"},
    {"prompt": "a"}, {"messages": []}, {"prompt": "a", "ids": [1], "completion": "b"}, {"ids": [1.5]}, {"ids": [True]},
    {"prompt": "a", "completion": "b", "completion_ids": [1]}, {"ids": "1"}, {"prompt": "a", "completion_ids": [999]},
    {"prompt": ["a"], "completion": "b"}, {"messages": "a", "completion": "b"}, {"messages": [1], "completion": "b"},
    {"prompt": "a", "completion": "b", "raw": 1}, {"prompt": "a", "completion": "b", "raw": True, "system": "c"},
    {"messages": [{"role": "user", "content": "a"}], "completion": "b", "raw": True}, {"prompt": 1, "completion": "b"},
    {"text": "a", "system": "b"}, {"text": "a", "raw": True}, {"text": "a", "prefill": ""}, {"ids": [1], "raw": True},
    {"ids": [1], "completion": "b", "no_special": True}, {"prompt": "a", "completion": "b", "prefil": "c"},
    {"messages": [{"role": "user", "content": "a"}], "completion": "b", "system": "c"},
    {"text": "a", "no_specal": True}, {"text": "a", "no-special": True}, {"Text": ""}, {"text": "", "nospecial": None},
])  # fmt: skip
def test_rows_that_say_nothing_or_too_much(chatty_parrot: Path, row: Json) -> None:
    """A row of two texts was scored by one of them, an idle or misspelt field was passed over."""
    [found] = score("-m", chatty_parrot, "--jsonl", stdin=[row], status=1)
    assert list(found) == ["id", "line", "error"]


def test_rows_of_every_shape(chatty_parrot: Path) -> None:
    """What is allowed: an absent field may be null, other fields are left alone."""
    rows: list[Json] = [
        {"text": "ab", "prompt": None}, {"ids": [1, 2]}, {"prompt": "", "completion": ""},
        {"ids": [1], "completion": "ab"}, {"ids": [1], "completion_ids": [1, 2], "temperature": 3},
        {"prompt": "a", "prefill": "b", "completion": "ab"}, {"prompt": "a", "raw": True, "completion": "ab"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "completion": "ab", "raw": False},
        {"text": "ab", "test": 1, "prompt_id": 2, "title": "x", "context": "y", "index": 3, "system": None},
    ]  # fmt: skip
    assert [row["tokens"] for row in score("-m", chatty_parrot, "--jsonl", stdin=rows)] == [1, 1, 0, 2, 2, 2, 2, 2, 1]


def test_invalid_utf8_is_a_row(parrot: Path) -> None:
    """One bad byte ended all, or was replaced in silence; its place in the line is told."""
    rows = score("-m", parrot, stdin=b"ab\nab\xffcd\nab", status=1)
    assert rows[0] == rows[2]
    assert rows[1]["line"] == 2
    assert rows[1]["error"].startswith("line: not UTF-8: found 0xff at byte 2")


def test_longer_than_the_context(parrot: Path) -> None:
    """Cut in silence, or the end of the run; both numbers are told. The last token needs no place in the context."""
    rows = score("-m", parrot, "--ctx", "10", stdin="a" * 11 + "\n" + "a" * 12 + "\nab\n", status=1)
    assert [row.get("tokens") for row in rows] == [10, None, 1]
    assert "found 12 tokens; allowed: at most 11" in rows[1]["error"]


def test_a_line_of_ten_megabytes(parrot: Path) -> None:
    """Minutes and gigabytes to find out that a line is too long; a line without end took all memory."""
    rows = score("-m", parrot, "--jsonl", stdin=b'{"text": "' + b"a" * 10_000_000 + b'"}\n{"text": "ab"}', status=1)
    assert "found 10000000 characters" in rows[0]["error"]
    assert rows[1]["tokens"] == 1
    done = shell(f"(head -c 70000000 /dev/zero; echo; echo ab) | tfm score -m {parrot}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert "found 70000000 bytes" in rows[0]["error"]
    assert rows[1]["tokens"] == 1


# ------------------------------------------------------------------------------------------------ streams


def test_a_line_is_scored_when_it_comes(parrot: Path) -> None:
    """Lines waited for others that fill a step: a log that is followed gave nothing."""
    with subprocess.Popen([TFM, "score", "-m", parrot], stdin=-1, stdout=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in (b"ab", b"\xc3\xa9x", b"c\nabc"):
            process.stdin.write(line[:1])
            process.stdin.flush()
            time.sleep(0.1)
            process.stdin.write(line[1:] + b"\n")
            process.stdin.flush()
            for piece in line.split(b"\n"):
                assert json.loads(process.stdout.readline())["tokens"] == len(piece) - 1
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_stdin_that_does_not_block(parrot: Path) -> None:
    """A pipe in non-blocking mode ended the lines early."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with subprocess.Popen([TFM, "score", "-m", parrot], stdin=reader, stdout=-1, env=environment()) as process:
        os.close(reader)
        for piece in (b"a", b"b\nabc"):
            time.sleep(0.3)
            os.write(writer, piece)
        os.close(writer)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [1, 2]


def test_ctrl_c_keeps_what_is_done(parrot: Path) -> None:
    """Lines that were done were lost with those that were not, or a traceback came; also a note while it waits."""
    with subprocess.Popen([TFM, "score", "-m", parrot], stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"tfm: waiting for lines on stdin\n"
        process.stdin.write(b"ab\nabc\nab")
        process.stdin.flush()
        rows = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")
    assert [row["tokens"] for row in rows] == [1, 2]


def test_endless_lines_and_a_reader_that_leaves(parrot: Path) -> None:
    """`yes | tfm score | head` took memory without end, or complained."""
    done = shell(f"yes abc | tfm score -m {parrot} | head -n 2000 | sort -u; echo ${{PIPESTATUS[@]:0:2}}")
    row, statuses = done.stdout.splitlines()
    assert json.loads(row)["tokens"] == 2
    assert (statuses, done.stderr) == (b"141 141", b"")


@pytest.mark.parametrize("source", ["/", "no-such-file", "''"])
def test_what_cannot_be_read(parrot: Path, source: str) -> None:
    done = shell(f"tfm score -m {parrot} {source}")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.count(b"\n") == 1


def test_a_text_in_the_place_of_a_file(parrot: Path) -> None:
    """Nothing said how a text is scored that is no file."""
    done = run("score", "-m", parrot, "Ada's cat sat")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"tfm: file Ada's cat sat: found nothing there; to score this text: echo ")
    command = done.stderr.decode().split("this text: ")[1].strip()
    assert shell(f"{command} -m {parrot}").stdout == run("score", "-m", parrot, stdin=b"Ada's cat sat\n").stdout


def test_bar_on_a_terminal_only(parrot: Path, tmp_path: Path) -> None:
    """A bar in a log, or between the lines of the result."""
    (tmp_path / "lines.txt").write_text("a line of some text\n" * 4_000)
    command = f"exec tfm score -m {parrot} {tmp_path}/lines.txt > {tmp_path}/out"
    terminal, its_end = pty.openpty()
    path = f"{TFM.parent}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        ["bash", "-c", command], stderr=its_end, env=environment({"PATH": path, "TERM": "xterm", "COLUMNS": "80"})
    ) as process:
        os.close(its_end)
        shown = b""
        while True:
            try:
                piece = os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(TIMEOUT_S) == 0
    os.close(terminal)
    assert b"scoring" in shown
    assert (tmp_path / "out").read_bytes().count(b'"tokens": 18') == 4_000


# ------------------------------------------------------------------------------------------------ --perplexity


def test_perplexity_of_a_text_that_fits(llama: Path, tmp_path: Path) -> None:
    """One window gives what the same text gives as a row."""
    text = "The quick brown fox\njumps over the lazy dog.\n\n"
    (tmp_path / "text").write_text(text)
    [row] = score("-m", llama, "--jsonl", stdin=[{"text": text}])
    [found] = score("-m", llama, "--perplexity", tmp_path / "text", "--json")
    assert list(found) == ["tokens", "perplexity", "stderr", "bits_per_byte", "ctx", "stride"]
    assert (found["ctx"], found["stride"]) == (1024, 512)
    assert all(found[name] == row[name] for name in ("tokens", "perplexity", "bits_per_byte"))
    done = run("score", "-m", llama, "--perplexity", "-", stdin=text.encode())
    figures = f"{found['perplexity']:.4f} +/- {found['stderr']:.4f}"
    assert done.stdout.decode() == f"{figures} (perplexity of {found['tokens']} tokens)\n"


def test_perplexity_through_a_window(llama: Path) -> None:
    """Every token is counted, however the window moves; ids are as good as text."""
    text = ("The quick brown fox jumps over the lazy dog. " * 10).encode()
    options = "-m", llama, "--perplexity", "-", "--ctx", "50", "--json"
    for stride in ("1", "25", "49"):
        [found] = score(*options, "--stride", stride, stdin=text)
        assert (found["tokens"], found["ctx"], found["stride"]) == (449, 50, int(stride))
    ids = run("tokenize", "-m", llama, stdin=text).stdout
    assert score(*options, "--ids", stdin=ids) == score(*options, stdin=text)


@pytest.mark.parametrize("text", [b"", b"a", b"a\xff"])
def test_perplexity_that_cannot_be(parrot: Path, text: bytes) -> None:
    """Figures of no token."""
    done = run("score", "-m", parrot, "--perplexity", "-", stdin=text)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)


# ------------------------------------------------------------------------------------------------ wrong usage


@pytest.mark.parametrize("arguments", [
    ["--stride", "5"], ["--perplexity", "x", "y"], ["--perplexity", "x", "--jsonl"], ["--perplexity", "x", "--end"],
    ["--perplexity", "x", "--per-token"], ["--ids", "--jsonl"], ["--ids", "x.jsonl"], ["--ids", "--no-special"],
    ["--raw"], ["--raw", "x.txt"], ["--perplexity", "x", "--raw"], ["--stride", "0", "--perplexity", "x"],
    ["--ctx", "5", "--stride", "5", "--perplexity", "x"],
])  # fmt: skip
def test_options_that_contradict(wrong_usage: Callable[..., str], arguments: list[str]) -> None:
    """An option without effect was passed over in silence; the model is not even looked for."""
    assert "tfm score: " in wrong_usage("score", "-m", "no-such-model", *arguments)


def test_no_text_at_all(parrot: Path) -> None:
    """A terminal or a closed stdin was waited for."""
    terminal, its_end = pty.openpty()
    try:
        for arguments in ([], ["--perplexity", "-"]):
            done = run("score", "-m", parrot, *arguments, stdin=its_end)
            assert (done.returncode, done.stdout) == (2, b"")
            assert shell(f"tfm score -m {parrot} {' '.join(arguments)} <&-").returncode == 2
        assert shell(f"tfm score -m {parrot} - <&-").returncode == 2
    finally:
        os.close(terminal)
        os.close(its_end)
