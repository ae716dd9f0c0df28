"""The file of answers: whole rows only, one writer, and what an earlier run has left; and the rows that come in."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from row_files import ROWS, answer, key, resume, whole

from tfm.cli.batch.row_file import RowFile, RowStream, open_rows
from tfm.cli.batch.row_order import Turns
from tfm.cli.batch.rows import LONGEST_ROW_BYTES, next_row
from tfm.cli.batch.written import read_written, row_begin, row_text
from tfm.cli.lines import Lines
from tfm.cli.output import Notes, Output
from tfm.engine.errors import TfmError

# ------------------------------------------------------------------------------------------------ going on


@pytest.mark.parametrize("in_order", [True, False])
def test_cut_at_every_byte(tmp_path: Path, in_order: bool) -> None:
    """A run may be killed after any byte: the rows that are whole stay, and nothing else."""
    path, content = tmp_path / "out", whole(range(1, 6))
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        done = resume(path, in_order=in_order)
        rows = content[:size].count(b"\n")
        assert [line for line in range(1, ROWS + 1) if line in done] == list(range(1, rows + 1))
        assert path.read_bytes() == whole(range(1, rows + 1))
        assert (done.count, done.errors, done.first_error) == (rows, int(rows > 3), "line 4: no 4" if rows > 3 else "")


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"notes", 1),
        (b"a text\nof lines\n", 1),
        (b'{"id": 1, "prompt": "Hi"}', 1),
        (b'{"id": 1, "prompt": "Hi"}\n', 1),
        (b'{"id"', 1),
        (b"\n", 1),
        (b"\0\0\0\0", 1),
        (whole(range(1, 3)) + b"\n", 3),
        (whole(range(1, 3)) + b"x", 3),
        (whole(range(1, 3)) + answer(3).encode()[:-3] + b"\n", 3),
        (whole(range(1, 3)) + answer(4, run=1).encode() + b"\n", 3),
        (whole(range(1, 3)) + answer(4, run=1).encode()[:-1], 3),
        (whole(range(1, ROWS + 2)), ROWS + 1),
        (whole(range(1, ROWS + 1)) + b"{", ROWS + 1),
        (whole(range(1, 3)) + whole(range(2, 3)), 3),
    ],
)
def test_other_content_is_refused_and_kept(tmp_path: Path, content: bytes, line: int, in_order: bool) -> None:
    """-o with the name of another file took its last line, or all of it."""
    path = tmp_path / "out"
    path.write_bytes(content)
    if content == b'{"id"':
        assert resume(path, in_order=in_order).count == 0  # the begin of every answer, and so of the first
        return
    remedy = "give another -o, or (remove this file|take out this line .*)"
    with pytest.raises(TfmError, match=rf"^file {path}: line {line}: found .*; .*{remedy}$"):
        resume(path, in_order=in_order)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_answers_of_another_run_are_refused(tmp_path: Path) -> None:
    """Answers by other options or another model were taken for those of this one; the error told two digests first."""
    path = tmp_path / "out"
    path.write_bytes(whole(range(1, 4)))
    for in_order in (True, False):
        with pytest.raises(TfmError, match="line 1: found an answer from before FILE was changed at line 1") as told:
            resume(path, in_order=in_order, run=1)
        assert "restore that; or give another -o" in str(told.value)
        assert key(1) not in str(told.value)


def test_order(tmp_path: Path) -> None:
    """What was written as it finished is not the begin of what is written in order; and the other way round it is."""
    path, mixed = tmp_path / "out", [3, 1, 2, 9]
    path.write_text("".join(f"{answer(line)}\n" for line in mixed), encoding="utf-8")
    told = "line 1: found the answer to line 3; allowed: the answer to line 1; add --unordered, if that wrote them; or"
    with pytest.raises(TfmError, match=told):
        resume(path)
    done = resume(path, in_order=False)
    assert [line for line in range(1, ROWS + 1) if line in done] == sorted(mixed)
    path.write_bytes(whole(range(1, 4)))
    assert resume(path, in_order=False).count == 3


def test_blank_lines_have_no_answer(tmp_path: Path) -> None:
    """Lines without a row between others were taken for rows that are missing."""
    path, lines = tmp_path / "out", range(1, ROWS, 3)
    path.write_text("".join(f"{answer(line)}\n" for line in (1, 4, 7)), encoding="utf-8")
    done = resume(path, lines)
    assert (done.count, 7 in done, 10 in done) == (3, True, False)


def test_many_rows_read_fast(tmp_path: Path) -> None:
    """Rows longer than a piece that is read at once, and many in one piece."""
    path = tmp_path / "out"
    texts = ["x" * size for size in (0, 70_000, 3, 1 << 20, *[9] * 20_000)]
    rows = [row_text(None, line, key(line), {"text": text}) for line, text in enumerate(texts, 1)]
    path.write_text("\n".join(rows) + "\n")
    with path.open("rb", buffering=0) as file:
        found = [(row.line, row.size_bytes) for row in read_written("file", file)]
    assert found == [(line, len(row) + 1) for line, row in enumerate(rows, 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_file_that_an_editor_gave_other_line_ends(tmp_path: Path, in_order: bool) -> None:
    """Rows behind which an editor had put CRs counted as done, and rows with LFs alone followed."""
    path, content = tmp_path / "out", whole(range(1, 4)).replace(b"}\n", b"}\r\n")
    path.write_bytes(content)
    with pytest.raises(TfmError, match=f"^file {path}: line 1: found a CR before its LF; allowed: rows as tfm batch"):
        resume(path, in_order=in_order)
    assert path.read_bytes() == content


# ------------------------------------------------------------------------------------------------ one writer


HOLD = "import sys; import tfm.cli.batch.row_file as f; rows = f.RowFile(sys.argv[1]); print(1, flush=True); input()"


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    """The name of a model's folder, in every row: a file and a named pipe ended the run, where stdout had U+FFFD."""
    row = row_text("é", 1, key(1), {"text": "🙂", "model": "m\udcff\udce9"})
    with RowFile(str(tmp_path / "out")) as rows:
        rows.append(row)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb") as pipe, RowStream.open(str(tmp_path / "pipe")) as stream:
        stream.append(row)
        written = [(tmp_path / "out").read_bytes(), os.read(pipe.fileno(), 1000)]
    assert written[0] == written[1]
    assert json.loads(written[0])["model"] == "m\ufffd\ufffd"


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    """Two runs at once made one file of both; after one was killed the file stayed locked."""
    path = tmp_path / "out"
    (tmp_path / "link").symlink_to(path)
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for name in (path, tmp_path / "link"):
            with pytest.raises(TfmError, match=f"^file {name}: found another tfm batch that writes it; wait"):
                RowFile(str(name))
        os.remove(path)  # then the file of waiting rows is still the other's
        with pytest.raises(TfmError, match=f"^file {path}.waiting: found another tfm batch"):
            RowFile(str(path))
        other.kill()
    with RowFile(str(path)) as rows:
        rows.append(answer(1))
    assert path.read_bytes() == whole(range(1, 2))


CHANGES = {"cut": b"", "cut in a row": whole(range(1, 2))[:-9], "appended": whole(range(1, 3)) + b"a line of another\n"}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_at_end", [True, False])
def test_file_that_another_program_changes(tmp_path: Path, change: str, is_at_end: bool) -> None:
    """`: > OUT` during a run, or a line that another program appended, and the run ended with status 0. What is there
    then is not tfm's to touch."""
    path, content = tmp_path / "out", CHANGES[change]
    told = f"^file {path}: found {len(content)} bytes, changed by another program .*; allowed: the "

    def work() -> None:
        with RowFile(str(path)) as rows:
            for line in (1, 2):
                rows.append(answer(line))
            path.write_bytes(content)
            if not is_at_end:
                rows.append(answer(3))

    with pytest.raises(TfmError, match=told):
        work()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"out": content}


def test_file_that_got_nothing_is_taken_away(tmp_path: Path) -> None:
    """A run that could not begin left an empty file, or took one away that had been there."""
    for content in (None, b""):
        path = tmp_path / "out"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(TfmError), RowFile(str(path)):
            raise TfmError("model")
        assert path.exists() == (content is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with RowFile(str(tmp_path / "empty")):
        pass
    assert (tmp_path / "empty").read_bytes() == b""


@pytest.mark.parametrize("method", ["_open", "__init__", "__enter__"])
def test_stopped_while_a_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: None, method: str
) -> None:
    """A stop between the opening of OUT and the `with` that takes it away left two empty files behind."""
    path, real = tmp_path / "out", getattr(RowFile, method)

    def at_ctrl_c(*arguments: Any) -> Any:
        given = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return given

    (tmp_path / "rows").write_text("{}\n")
    monkeypatch.setattr(RowFile, method, at_ctrl_c)
    with (
        Notes(quiet=True) as notes, Lines(str(tmp_path / "rows"), notes, "rows", LONGEST_ROW_BYTES) as source,
        pytest.raises(KeyboardInterrupt), ExitStack() as stack,
    ):  # fmt: skip
        open_rows(str(path), Output(), source, stack)
    assert [file.name for file in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("name", ["", "no/file", "folder"])
def test_files_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(TfmError, match=r"^file .*: cannot be written: found .*; check its folder"):
        RowFile(str(tmp_path / name) if name else "")


def test_full_disk(tmp_path: Path) -> None:
    """A row that did not fit stayed there in part."""
    import resource

    path = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(whole(range(1, 4))) + 5
    told = f"^file {path}: cannot be written: found File too large; make room"
    with RowFile(str(path)) as rows:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            for line in range(1, 4):
                rows.append(answer(line))
            with pytest.raises(TfmError, match=told):
                rows.append(answer(4))
            turns = Turns(rows.append, rows.waiting, in_order=True)
            turns.begin(1)
            turns.begin(2)
            with pytest.raises(TfmError, match=rf"^file {path}.waiting: cannot be written: found File too large"):
                turns.finish(2, "x" * 2 * size)
            turns.finish(2, answer(2))
            assert rows.waiting.read(2) == answer(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole(range(1, 4))


# ------------------------------------------------------------------------------------------------ rows that come in


def lines_of(path: Path | str) -> list[tuple[int, bytes]]:
    with Lines(str(path), Notes(), longest_bytes=LONGEST_ROW_BYTES, must_fit=True) as source:
        return rows_of(source)


def rows_of(lines: Lines) -> list[tuple[int, bytes]]:
    return list(iter(partial(next_row, lines), None))


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"", []),
        (b"\n\n \t\r\n", []),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\n b", [(1, b"a"), (3, b"b")]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbf\na", [(2, b"a")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        ("a\u2028b\u0085c\x0b\x0c\x1c\rd\n".encode(), [(1, "a\u2028b\u0085c\x0b\x0c\x1c\rd".encode())]),
        (b"a\0b\n\0", [(1, b"a\0b"), (2, b"\0")]),
        (b"x" * 10_000_000 + b"\ny", [(1, b"x" * 10_000_000), (2, b"y")]),
    ],
)
def test_lines_end_at_lf_only(tmp_path: Path, content: bytes, rows: list[tuple[int, bytes]]) -> None:
    """Lines ended at what Python takes for the end of one; BOM, CR and blank lines became rows or parts of them."""
    path = tmp_path / "rows"
    path.write_bytes(content)
    assert lines_of(path) == rows
    with Lines(str(path), Notes()) as source:
        assert source.count() == content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
        assert rows_of(source) == rows
        source.rewind()
        assert rows_of(source) == rows


def test_pipe_is_read_twice(tmp_path: Path) -> None:
    """What a pipe has is compared with the answers first, and then it is answered."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with subprocess.Popen(["sh", "-c", f"printf 'a\\nb' > {path}"]), Lines(str(path), Notes()) as source:
        assert source.count() is None
        source.make_repeatable()
        for _ in range(2):
            assert rows_of(source) == [(1, b"a"), (2, b"b")]
            source.rewind()


def test_pipe_that_has_nothing_yet(tmp_path: Path) -> None:
    """Rows that are there waited for the next ones to come."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with ExitStack() as stack:
        held = os.open(path, os.O_RDWR)
        source = stack.enter_context(Lines(str(path), Notes()))
        writer = os.open(path, os.O_WRONLY)
        os.close(held)
        assert not source.comes_within(0.01)
        os.write(writer, b"a\n\nb")
        assert source.comes_within(0)
        assert next_row(source) == (1, b"a")
        assert source.comes_within(0)  # the blank line
        select.select([], [], [], 0)
        os.write(writer, b"c\n")
        assert next_row(source) == (3, b"bc")
        os.close(writer)
        assert source.comes_within(0)
        assert next_row(source) is None


def test_line_without_end() -> None:
    """/dev/zero took all memory."""
    with pytest.raises(TfmError, match=r"^file /dev/zero: line 1: found more than 268435456 bytes"):
        lines_of("/dev/zero")


def test_begin_of_a_row() -> None:
    for id_ in (None, 1, 2.5, 'é"\n'):
        assert row_text(id_, 3, key(3), {"text": ""}).encode() == row_begin(id_, 3, key(3)) + b'"text": ""}'
