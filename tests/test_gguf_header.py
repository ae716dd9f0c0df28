"""A GGUF file's header is walked with bounds before the format's own library, which believes every count, reads it."""

import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from cli_process import run
from gguf_files import write_gguf

from tfm.engine.errors import TfmError
from tfm.engine.gguf_header import header_of

HUGE = 2**60


def header(tensors: int, fields: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def array(kind: int, count: int, rest: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + rest


NAME = text("a.name")
STRING, ARRAY = struct.pack("<I", 8), struct.pack("<I", 9)
CASES = {
    "number of tensors": header(HUGE, 0),
    "number of fields": header(0, HUGE),
    "length of its name": header(0, 1, struct.pack("<Q", HUGE) + bytes(9)),
    "field a.name: length": header(0, 1, NAME + STRING + struct.pack("<Q", HUGE)),
    "field a.name: length of the array": header(0, 1, NAME + ARRAY + array(0, HUGE, bytes(100))),
    "field a.name: length of the array of strings": header(0, 1, NAME + ARRAY + array(8, HUGE, bytes(100))),
    "field a.name: length of the array in an array": header(0, 1, NAME + ARRAY + array(9, 1, array(9, HUGE))),
    "tensor 1 of 1: length of its name": header(1, 0, struct.pack("<Q", HUGE) + bytes(16)),
}


@pytest.mark.parametrize("what", CASES)
def test_count_beyond_the_file(tmp_path: Path, what: str) -> None:
    """Such a count made the library go round for ever and take all memory. The file, the field, both numbers."""
    path = tmp_path / "m.gguf"
    path.write_bytes(CASES[what])
    done = run("pull", path, env={"TFM_CACHE": str(tmp_path / "cache")})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    named = what.removesuffix(" of strings").removesuffix(" in an array")
    assert f"{path}: " in done.stderr.decode()
    assert f"{named}: found {HUGE}; allowed: up to " in done.stderr.decode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "first bytes b''"),
        (b"GGUF", "bytes: found 0 to the end of the file; allowed: 4 at least"),
        (header(0, 1, NAME + struct.pack("<I", 77)), "field a.name: type: found 77; allowed: 0 to 12"),
        (header(0, 1, NAME + ARRAY + array(9, 1) * 20), "field a.name: arrays in arrays: found more than 8"),
        (header(1, 0, text("t") + struct.pack("<I", 2**31) + bytes(16)), "tensor t: dimensions: found 2147483648"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: found the other byte order; allowed: 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version: found 9; allowed: 2 or 3"),
    ],
)
def test_other_faults(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with path.open("rb") as file, pytest.raises(TfmError) as caught:
        header_of(path, file)
    assert words in str(caught.value)


def test_whole_files_pass(tmp_path: Path) -> None:
    for kind in ("byte-level", "spm"):
        path = write_gguf(tmp_path / f"{kind}.gguf", tokenizer=kind)
        with path.open("rb") as file:
            header_of(path, file)


def test_damaged_headers_are_read_in_bounded_time(tmp_path: Path) -> None:
    """What passes the walk, the library reads within bounds: bytes of real headers changed at random places."""
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    rolls = random.Random(1)
    passed = 0
    for _ in range(300):
        content = bytearray(whole)
        place = rolls.randrange(8, rolls.choice([60, 1200, 9000]))
        content[place : place + 8] = rolls.choice([0, 1, 9, 10**6, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little")
        path = tmp_path / "damaged.gguf"
        path.write_bytes(content)
        try:
            with path.open("rb") as file:
                header_of(path, file)
        except TfmError:
            continue
        passed += 1
        code = f"import gguf\ntry: gguf.GGUFReader({str(path)!r})\nexcept (ValueError, KeyError, IndexError): pass"
        if passed % 20 == 0:
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, timeout=60)
    assert passed > 20
    assert gguf.GGUFReader(tmp_path / "m.gguf").tensors
