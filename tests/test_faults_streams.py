"""Bytes that other tools lost or choked on: locales that know no UTF-8, streams that end, break or are full."""

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from cli_process import LOCALES, TFM, TIMEOUT_S, environment, run, shell

ANSWER = "Hi é🙂!"


# ------------------------------------------------------------------------------------------------ locales


@pytest.mark.parametrize("locale", LOCALES)
def test_texts_of_options_whatever_the_locale(chatty_parrot: Path, locale: str) -> None:
    """PROMPT came through and the texts of options did not: a stop that never matched, a system prompt of question
    marks; and JSON that stdout cannot encode."""
    options = "--system", "é🙂", "--prefill", "H", "--stop", "🙂"
    done = run("generate", "--json", "-m", chatty_parrot, *options, "ü\r\n", env=LOCALES[locale])
    assert (done.returncode, done.stderr) == (0, b"")
    answer = json.loads(done.stdout.decode())
    said = "<system>é🙂</system>\n<user>ü\r\n</user>\n<assistant>\nH"
    assert (answer["text"], answer["prompt_tokens"]) == ("i é", len(said.encode()))
    assert "é".encode() in done.stdout


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    ("arguments", "stdin", "source"),
    [
        ([], b"ab\xff", "stdin"),
        (["-f", "FILE"], b"", "file FILE"),
        ([b"ab\xff"], b"", "PROMPT"),
        ([b"--stop=ab\xff", "x"], b"", "stop"),
        ([b"--system=ab\xff", "x"], b"", "system"),
    ],
)
def test_invalid_utf8_whatever_the_locale(
    parrot: Path, tmp_path: Path, arguments: list[str | bytes], stdin: bytes, source: str, locale: str
) -> None:
    """Under the C locale bytes above 127 arrive as half surrogates, which went on into the tokenizer."""
    file = tmp_path / "file"
    file.write_bytes(b"ab\xff")
    given = [str(file) if word == "FILE" else word for word in arguments]
    done = run("generate", "-m", parrot, *given, stdin=stdin, env=LOCALES[locale])
    where = source.replace("FILE", str(file))
    remedy = "convert it, for example with iconv -t UTF-8"
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"tfm: {where}: not UTF-8: found 0xff at byte 2; {remedy}\n"


@pytest.mark.parametrize("locale", LOCALES)
def test_names_in_messages(locale: str) -> None:
    """An error named the file m\\udcc3\\udcb6del, which nobody has. What is no UTF-8 is shown as its bytes."""
    done = run("show", "mödel", env=LOCALES[locale])
    assert done.returncode == 1
    assert done.stderr.startswith("tfm: model mödel: found no such folder".encode())
    done = run("show", b"m\xffdel", env=LOCALES[locale])
    assert done.returncode == 1
    assert done.stderr.startswith(b"tfm: model m\\xffdel: found no such folder")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_names_in_results(parrot: Path, tmp_path: Path, locale: str) -> None:
    """The result named another folder than was asked for; the JSON must be JSON whatever the folder's name."""
    for name, shown in ((b"m\xc3\xb6del", "mödel"), (b"m\xff", "m\ufffd")):
        folder = os.path.join(os.fsencode(tmp_path), name)
        if not os.path.exists(folder):
            os.symlink(os.fsencode(parrot), folder)
        done = run("generate", "--raw", "--json", "-m", folder, "\n", env=LOCALES[locale])
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout.decode())["model"] == str(tmp_path / shown)


# ------------------------------------------------------------------------------------------------ stdin


@pytest.mark.parametrize(
    ("stdin", "ids"),
    [
        (b"a\r\nb\rc\n", [98, 14, 11, 99, 14, 100, 11]),
        (b"\0", [1]),
        (b"a\0b\0", [98, 1, 99, 1]),
        (b"\xef\xbb\xbf\xef\xbb\xbfa", [240, 188, 192, 98]),
        (b"\xef\xbb\xbf\r\n", [14, 11]),
        (b"\xe2\x80\xa8\xc2\x85\x0c\x1c", [227, 129, 169, 195, 134, 13, 29]),
        (b"\x1a", [27]),
        ("\ufffd\ufeff".encode(), [240, 192, 190, 240, 188, 192]),
    ],
    ids=["line ends", "NUL alone", "NUL", "two BOMs", "BOM and CRLF", "other line ends", "Ctrl-Z", "not characters"],
)
def test_no_byte_is_changed(parrot: Path, tmp_path: Path, stdin: bytes, ids: list[int]) -> None:
    """Universal newlines, C strings and trimming changed what was piped in; the same from a file."""
    assert run("tokenize", "-m", parrot, stdin=stdin).stdout.split() == [b"%d" % id_ for id_ in ids]
    (tmp_path / "file").write_bytes(stdin)
    assert run("tokenize", "-m", parrot, "-f", tmp_path / "file").stdout.split() == [b"%d" % id_ for id_ in ids]


def test_byte_order_mark_alone_is_no_prompt(parrot: Path) -> None:
    """An empty file that an editor gave its mark was answered."""
    done = run("generate", "-m", parrot, stdin=b"\xef\xbb\xbf")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"No prompt" in done.stderr


def test_utf_16_is_refused(parrot: Path) -> None:
    """What Windows calls Unicode became every second character."""
    done = run("generate", "-m", parrot, stdin="\ufeffab".encode("utf-16-le"))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"stdin: not UTF-8: found 0xff at byte 0" in done.stderr


def test_stdin_that_cannot_be_read(parrot: Path) -> None:
    """A stream that was opened for writing ended in a traceback."""
    done = shell(f"tfm generate -m {parrot} 0>/dev/null")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert done.stderr.startswith(b"tfm: stdin: cannot be read: found ")


# ------------------------------------------------------------------------------------------------ stdout


@pytest.mark.parametrize(
    "command",
    [
        "generate --raw --json -n 200 -m ENDLESS $'\\n'",
        "generate --raw --no-stream -n 200 -m ENDLESS $'\\n'",
        "generate --ids -n 200 -m ENDLESS 11",
        "tokenize --json -m ENDLESS -f TEXT",
        "generate --help",
    ],
)
def test_head_of_every_shape(endless_parrot: Path, tmp_path: Path, command: str) -> None:
    """Only the streamed text knew of a reader that leaves early; the others ended in an error, or with status 0."""
    (tmp_path / "text").write_bytes(b"abc " * 3000)
    command = command.replace("ENDLESS", str(endless_parrot)).replace("TEXT", str(tmp_path / "text"))
    # The reader is gone before anything is written.
    done = shell(f"set -o pipefail; tfm {command} | (exec <&-; true); echo :${{PIPESTATUS[0]}}")
    assert (done.stdout, done.stderr) == (b":141\n", b"")


@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--json"]])
def test_disk_that_fills_up(endless_parrot: Path, tmp_path: Path, options: list[str]) -> None:
    """The answer was cut without a word, or the signal of a file that is too long killed the process."""
    out = tmp_path / "out"
    arguments = ["generate", "--raw", "-n", "1500", *options, "-m", str(endless_parrot), "\n"]
    with out.open("wb") as file:
        done = subprocess.run(
            [TFM, *arguments], stdout=file, stderr=-1, stdin=-3, env=environment(), timeout=TIMEOUT_S, check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)),
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"tfm: stdout: cannot be written: found File too large\n")
    assert out.stat().st_size == 1024, "what there was room for is there"
    assert options == ["--json"] or out.read_bytes() == (b"abcdefghij" * 103)[:1024]


@pytest.mark.parametrize("redirections", ["1</dev/null", "<&- >&- 2>&-", "> /dev/full 2>/dev/full", ">&- 2>/dev/full"])
def test_nowhere_to_write(parrot: Path, redirections: str) -> None:
    """With nobody to tell, the exit status is all there is; it was 0, or that of a crash."""
    done = shell(f"tfm generate --raw -m {parrot} $'\\n' {redirections}")
    assert (done.returncode, done.stdout) == (1, b"")
    assert len(done.stderr.splitlines()) == (1 if "2>" not in redirections else 0)


def test_current_folder_that_is_gone(default_model_folder: Path, tmp_path: Path) -> None:
    """An answer needs no folder to be in; where one was asked for, stdout was blamed."""
    (tmp_path / "p").symlink_to(default_model_folder)
    gone = tmp_path / "gone"
    done = shell(f"mkdir {gone} && cd {gone} && rmdir {gone} && tfm generate -m ../p -n 1 hi && tfm generate -m . hi")
    assert done.returncode == 1
    assert done.stdout
    assert done.stderr.startswith(b"tfm: model folder .: found ")
