"""The two commands that take rows, batch and score, where a stream, a locale, a byte or a weight is an odd one.

The rows of these tests are ids, which both understand: batch goes on with them, score says how likely they are.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_process import LOCALES, run, shell
from parrot import id_of, ids_of, write_parrot
from safetensors.numpy import load_file, save_file

ANSWER = "Hi é🙂!"
WORDS = {"batch": ("batch", "--raw"), "score": ("score", "--jsonl")}
COMMANDS = [*WORDS]
NAME = "é🙂"
ROWS: Sequence[Mapping[str, Any]] = [{"id": NAME, "ids": ids_of("\nHi")}, {"id": 2, "ids": ids_of("\nH")}]


@dataclass(frozen=True)
class Rows:
    """A command with its model, a file of ROWS, and what it prints of them."""

    name: str
    words: tuple[str | Path, ...]
    file: Path
    out: bytes

    @property
    def script(self) -> str:
        """For a shell."""
        return " ".join(map(str, ("tfm", *self.words)))


def jsonl(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def objects(out: bytes) -> list[dict[str, Any]]:
    """Rows of a result, all of which are whole."""
    assert out.endswith(b"\n") or not out
    return [json.loads(line) for line in out.split(b"\n")[:-1]]


@pytest.fixture(scope="module", params=COMMANDS)
def rows(request: pytest.FixtureRequest, parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes(jsonl(ROWS))
    words = (*WORDS[request.param], "-m", parrot)
    done = run(*words, file)
    assert (done.returncode, done.stderr) == (0, b"")
    found = objects(done.stdout)
    assert [row["id"] for row in found] == [NAME, 2]
    if request.param == "batch":
        assert [row["text"] for row in found] == [ANSWER[2:], ANSWER[1:]]
    else:
        assert [row["tokens"] for row in found] == [2, 1]
    return Rows(request.param, words, file, done.stdout)


# ------------------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("streams", ["2>&-", "<&- 2>/dev/full", "0<>PIPE"])
def test_streams_that_nobody_needs(rows: Rows, tmp_path: Path, streams: str) -> None:
    """Beside FILE stdin was read or waited for (a pipe that is open and silent); a note that nobody could read ended
    the command, or became a line of the next file that was opened."""
    os.mkfifo(tmp_path / "pipe")
    streams = streams.replace("PIPE", str(tmp_path / "pipe"))
    done = shell(f"{rows.script} --threads 999 {rows.file} {streams}")
    assert (done.returncode, done.stdout) == (0, rows.out)
    assert b"waiting" not in done.stderr


@pytest.mark.parametrize("streams", [">&-", "> /dev/full 2>/dev/full"])
def test_nowhere_to_write(rows: Rows, streams: str) -> None:
    """Rows were lost with status 0; with nobody to tell, the exit status is all there is."""
    done = shell(f"{rows.script} {rows.file} {streams}")
    assert (done.returncode, done.stdout) == (1, b"")
    assert len(done.stderr.splitlines()) == (0 if "2>" in streams else 1)


@pytest.mark.parametrize("out", ["OUT", "/dev/null"])
def test_stdout_that_is_closed_and_not_needed(parrot: Path, tmp_path: Path, out: str) -> None:
    """With -o a closed stdout was a fault, or OUT was taken for stdout."""
    (tmp_path / "rows").write_bytes(jsonl(ROWS))
    out = out.replace("OUT", str(tmp_path / "out"))
    done = shell(f"tfm batch --raw -m {parrot} {tmp_path}/rows -o {out} >&-")
    assert (done.returncode, done.stderr) == (0, b"")
    if out != "/dev/null":
        assert [row["text"] for row in objects(Path(out).read_bytes())] == [ANSWER[2:], ANSWER[1:]]


GONE = "(exec <&-; true)"


def test_reader_that_leaves_early(rows: Rows) -> None:
    """A reader that is gone before the first row ended in a traceback, an error, or a run to the end."""
    done = shell(f"{rows.script} {rows.file} | {GONE}; echo :${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == (b":141\n", b"")


@pytest.mark.parametrize("command", ["batch --raw FILE -o >GONE | cat", "score --perplexity FILE | GONE"])
def test_reader_of_something_else_that_leaves(parrot: Path, tmp_path: Path, command: str) -> None:
    """The same of a pipe that is OUT, and of what is no rows."""
    (tmp_path / "rows").write_bytes(jsonl(ROWS))
    script = command.replace("FILE", f"{tmp_path}/rows -m {parrot}").replace("GONE", GONE)
    done = shell(f"tfm {script}; echo :${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == (b":141\n", b"")


# ------------------------------------------------------------------------------------------------ bytes


def test_same_bytes_whatever_the_locale(rows: Rows, tmp_path: Path) -> None:
    """Under the C locale a FILE was not found by its name, a stop never matched, and the answers of a run that went on
    in another locale were those of another command."""
    file, out = (os.path.join(os.fsencode(tmp_path), name) for name in (b"r\xc3\xb6\xffws.jsonl", b"\xc3\xb6ut"))
    Path(os.fsdecode(file)).write_bytes(jsonl(ROWS))
    found = []
    for locale in ("C", "C.UTF-8"):
        more = ["-o", out, "--stop", "🙂"] if rows.name == "batch" else []
        done = run(*rows.words, *more, file, env=LOCALES[locale])
        assert (done.returncode, done.stderr) == (0, b"")
        found.append(done.stdout)
        if more:
            found[-1] += Path(os.fsdecode(out)).read_bytes()
            os.remove(out)
    assert found[0] == found[1]
    assert NAME.encode() in found[0]
    if rows.name == "batch":
        assert [row["text"] for row in objects(found[0])] == [" é", "i é"]
    else:
        assert found[0] == rows.out


LINES = [
    b'\xef\xbb\xbf{"id": "a", "ids": [11]}\r', b"", b"\r", b" \t", b'{"id": "\xe2\x80\xa8\xc2\x85", "ids": [11]}',
    b'{"id": "\\u0000\\n", "ids": [11]}\r', b'{"id": "\0", "ids": [11]}', b"\0", b'{"id": "\xff", "ids": [11]}',
    b'\xef\xbb\xbf{"id": 1, "ids": [11]}', b'{"id": "last", "ids": [11]}',
]  # fmt: skip


def test_odd_bytes_in_a_file(rows: Rows, tmp_path: Path) -> None:
    """BOM, CRLF, NUL, bytes that are no UTF-8 and what Unicode calls a line's end: in FILE as on stdin, where a bad
    line ended all, shifted the lines behind it, or was mended in silence."""
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(LINES))
    done = run(*rows.words, tmp_path / "rows.jsonl")
    found = objects(done.stdout)
    assert done.returncode == 1
    assert [row["id"] for row in found if "error" not in row] == ["a", "\u2028\x85", "\0\n", "last"]
    assert [row["line"] for row in found if "error" in row] == [7, 8, 9, 10]
    assert "0xff at byte 8" in next(row["error"] for row in found if row.get("line") == 9)
    piped = run(*rows.words, stdin=b"\n".join(LINES))
    assert (piped.stdout, piped.stderr) == (done.stdout, done.stderr)


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("command", COMMANDS)
def test_weights_that_are_not_finite(parrot: Path, tmp_path: Path, command: str) -> None:
    """A row that meets an infinite weight got a token at random, or a score of nan that JSON cannot hold, or it spoilt
    the rows beside it."""
    folder = write_parrot(tmp_path / "model", ANSWER.encode())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][id_of(ord(" ")), 7] = np.inf
    save_file(tensors, folder / "model.safetensors")
    good, bad = {"ids": ids_of("🙂!")}, {"ids": ids_of("\nHi x")}
    done = run(*WORDS[command], "-m", folder, stdin=jsonl([good, bad, good, bad]))
    first, second, third, fourth = objects(done.stdout)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "257 of 257 are NaN or infinite" in second["error"]
    assert second["error"] == fourth["error"]
    assert "error" not in {*first, *third}
