"""tfm batch where a disk is full: the one that answers are written to, or that of the temporary folder."""

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import shell
from parrot import ids_of

ANSWER = "Hi é🙂!"
START = ids_of("\n")


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    (folder / "rows").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def long_and_short(id_: str, count: int = 5) -> list[dict[str, Any]]:
    """A row that ends last, and others behind it that have to wait."""
    short = {"ids": START, "max_tokens": 1, "id": id_}
    return [{"ids": START, "max_tokens": 3000}, *[short] * count]


def on_small_disk(folder: Path, script: str) -> list[str]:
    """The lines that a script prints, in bash, where folder is a disk of 64 KiB; a mark before those of stderr."""
    mount = f"mount -t tmpfs -o size=64k tmpfs {folder}"
    if shutil.which("unshare") is None or shell(f"unshare -rm {mount}").returncode:
        pytest.skip("no disk of 64 KiB can be had here")
    done = shell(f"unshare -rm bash -c {shlex.quote(f'{mount} && cd {folder} && {{ {script}; }}')}")
    return [*done.stdout.decode().splitlines(), *(f"! {line}" for line in done.stderr.decode().splitlines())]


def test_full_disk_at_the_first_row(parrot: Path, tmp_path: Path) -> None:
    """A file of answers without one was left, or half a row; with room the same command does all."""
    write_rows(tmp_path, [{"ids": START}] * 3)
    (tmp_path / "disk").mkdir()
    command = f"tfm batch -m {parrot} {tmp_path}/rows -o out"
    script = f"head -c 9M /dev/zero > fill 2>/dev/null; {command}; echo $?; ls -A; rm fill; {command}; echo $?; ls -A"
    *lines, told = on_small_disk(tmp_path / "disk", f"{script}; grep -c {shlex.quote(ANSWER)} out")
    assert lines == ["1", "fill", "0", "out", "3"]
    assert told.startswith("! tfm: file out: cannot be written: found No space left on device; make room, then run")


def test_full_disk_while_rows_wait(endless_parrot: Path, tmp_path: Path) -> None:
    """Rows that had finished and wait for the first took the room: what was there was lost, or written in part."""
    write_rows(tmp_path, long_and_short("x" * 20_000))
    (tmp_path / "disk").mkdir()
    command = f"tfm batch -q -m {endless_parrot} {tmp_path}/rows -o"
    script = f"{command} out; echo $?; ls -A; mount -o remount,size=9m .; {command} out; echo $?; ls -A"
    *lines, told = on_small_disk(tmp_path / "disk", f"{script}; {command} other; cmp out other; echo $?; wc -l < out")
    assert lines == ["1", "out.waiting", "0", "out", "0", "6"]
    assert told.startswith("! tfm: file ")
    assert "out.waiting: cannot be written: found No space left on device; make room on the disk" in told


@pytest.mark.parametrize(("id_size", "room_kib"), [(9000, 10), (1000, 3)], ids=["at once", "behind a buffer"])
def test_no_room_for_rows_that_come_through_a_pipe(parrot: Path, tmp_path: Path, id_size: int, room_kib: int) -> None:
    """To go on, rows of a pipe are copied into the temporary folder: a fault there was called one of stdout."""
    write_rows(tmp_path, [{"ids": START, "id": "x" * id_size}] * 4)
    command = f"tfm batch -q -m {parrot} -o out"
    begin = f"cd {tmp_path}; head -n 1 rows | {command}; ulimit -f {room_kib}"
    done = shell(f"{begin}; TMPDIR={tmp_path} {command} < <(cat rows)")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    told = f"tfm: folder {tmp_path}: a copy of stdin cannot be written: found File too large; make room there"
    assert done.stderr.decode().startswith(told)
    assert (tmp_path / "out").read_bytes().count(b"\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows"]


@pytest.mark.parametrize(
    ("id_size", "count", "room_kib"), [(400_000, 5, 100), (2000, 700, 1100)], ids=["at once", "behind a buffer"]
)
def test_no_room_for_rows_that_wait_for_stdout(
    endless_parrot: Path, tmp_path: Path, id_size: int, count: int, room_kib: int
) -> None:
    """Rows that wait are too many for memory: a fault of the temporary folder was called one of stdout."""
    write_rows(tmp_path, long_and_short("x" * id_size, count))
    done = shell(f"ulimit -f {room_kib}; TMPDIR={tmp_path} tfm batch -m {endless_parrot} {tmp_path}/rows")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)
    assert done.stderr.startswith(b"tfm: temporary file: cannot be written: found File too large; make room")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
