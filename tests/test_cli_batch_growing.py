"""A FILE that somebody still writes: its last line may be the begin of a row, and is one when it is whole."""

import os
from pathlib import Path

import pytest
from batch_process import objects
from cli_process import run

FIRST = b'{"id": 1, "prompt": "\\n"}\n'
SECOND = '{"id": "zwei é🙂", "prompt": "\\n", "max_tokens": 3}'.encode()
LAST = b'{"id": 3, "prompt": "\\n"}\n'
PLACES = [1, 9, SECOND.index("é".encode()) + 1, SECOND.index("🙂".encode()) + 3, len(SECOND) - 9, len(SECOND) - 1]


@pytest.fixture(scope="module")
def whole(parrot: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The answers to all three rows, in the order of a run that had them from the begin."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "rows").write_bytes(FIRST + SECOND + b"\n" + LAST)
    assert run("batch", "--raw", "-m", parrot, folder / "rows", "-o", folder / "out").returncode == 0
    return (folder / "out").read_bytes().splitlines()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("unordered", [False, True])
def test_the_begin_of_a_row_is_no_row_yet(
    parrot: Path, whole: list[bytes], tmp_path: Path, place: int, unordered: bool
) -> None:
    """Its error stood in OUT for good: when the line was whole, the same command refused to go on."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    command = ["batch", "--raw", "-m", parrot, rows, *["--unordered"] * unordered, "-o", out]
    rows.write_bytes(FIRST + SECOND[:place])
    for _ in range(2):
        done = run(*command)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.decode().splitlines()[-1] == (
            f"tfm: file {rows}: line 2, the last one: found no JSON, and no line feed at its end; "
            "allowed: a whole row; run the same command again when it is whole: nothing was written for it"
        )
        assert [row["id"] for row in objects(out.read_bytes())] == [1]
    rows.write_bytes(FIRST + SECOND + b"\n" + LAST)
    assert run(*command).returncode == 0
    order = sorted if unordered else list
    assert order(out.read_bytes().splitlines()) == order(whole)
    assert {row["id"] for row in objects(out.read_bytes())} == {1, "zwei é🙂", 3}
    assert sorted(os.listdir(tmp_path)) == ["out", "rows"]


def test_a_whole_row_without_a_line_feed_is_one(parrot: Path, tmp_path: Path) -> None:
    """An editor leaves out the last line feed: that row is answered, and so it is when the line feed comes later."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    command = ["batch", "--raw", "-q", "-m", parrot, rows, "-o", out]
    rows.write_bytes(FIRST + SECOND)
    assert run(*command).returncode == 0
    rows.write_bytes(FIRST + SECOND + b"\n" + LAST)
    assert run(*command).returncode == 0
    assert [row["id"] for row in objects(out.read_bytes())] == [1, "zwei é🙂", 3]


@pytest.mark.parametrize("row", [b'{"id": 2, "promt": "a"}', b'{"id": 2, "id": 2}', b'{"id": 2, "seed": NaN}'])
def test_a_whole_row_with_a_fault_keeps_its_error(parrot: Path, tmp_path: Path, row: bytes) -> None:
    """No more bytes make it another row."""
    rows, out = tmp_path / "rows", tmp_path / "out"
    rows.write_bytes(FIRST + row)
    done = run("batch", "--raw", "-m", parrot, rows, "-o", out)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert b"1 of 2 rows have no answer but an error; the first: line 2: " in done.stderr
    assert ["error" in row for row in objects(out.read_bytes())] == [False, True]


def test_an_error_and_the_begin_of_a_row(parrot: Path, tmp_path: Path) -> None:
    """Both are told. On stdout, where no run goes on, the line gives its error, as every line gives a row."""
    rows = tmp_path / "rows"
    rows.write_bytes(b"[]\n" + FIRST + SECOND[:9])
    done = run("batch", "--raw", "-m", parrot, rows, "-o", tmp_path / "out")
    (told,) = done.stderr.decode().splitlines()
    assert told.startswith("tfm: 1 of 2 rows have no answer but an error; the first: line 1: row: found []")
    assert f"; file {rows}: line 3, the last one: found no JSON" in told
    done = run("batch", "--raw", "-m", parrot, rows)
    assert (done.returncode, ["error" in row for row in objects(done.stdout)]) == (1, [True, False, True])
    assert b"2 of 3 rows have no answer but an error" in done.stderr
