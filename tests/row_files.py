"""Answers as tfm batch writes them to a file, and what the next run expects and finds there, for tests."""

from collections.abc import Iterator
from pathlib import Path

from tfm.cli.batch.resume import Done, Expected
from tfm.cli.batch.row_file import RowFile
from tfm.cli.batch.written import row_text

ROWS = 12


def answer(line: int, run: int = 0) -> str:
    """The answer to a line; ids of every kind, one with what looks like the rest of a row."""
    ids = (None, line, 1.5, f'"}}, "line": {line}, "key": "\\', "é🙂\u2028")
    content = {"error": f"no {line}"} if line % 5 == 4 else {"text": "é\n" * line}
    return row_text(ids[line % 5], line, key(line, run), content)


def key(line: int, run: int = 0) -> str:
    return f"{line + 1000 * run:016x}"


def expected(lines: Iterator[int] | range, run: int = 0) -> Iterator[Expected]:
    for line in lines:
        begin = answer(line, run).encode()
        end = begin.index(b'"error": ' if line % 5 == 4 else b'"text": ', begin.rindex(b'"key": '))
        yield Expected(line, key(line, run), lambda begin=begin, end=end: begin[:end])


def resume(path: Path, lines: range = range(1, ROWS + 1), in_order: bool = True, run: int = 0) -> Done:
    with RowFile(str(path)) as rows:
        return rows.resume(lambda: expected(lines, run), in_order)


def whole(lines: range) -> bytes:
    return "".join(f"{answer(line)}\n" for line in lines).encode()
