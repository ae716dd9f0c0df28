"""stdin, stdout and stderr, as a shell uses them. Each test is a fault that such tools have had."""

import fcntl
import json
import os
import pty
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli_process import TFM, TIMEOUT_S, environment, read_terminal, run, shell

from tfm.cli import reading
from tfm.cli.output import Notes
from tfm.engine import load

ANSWER = "Hi é🙂!"


# ------------------------------------------------------------------------------------------------ stdin


def test_stdin_is_the_prompt(parrot: Path) -> None:
    """`echo ... | tfm generate --raw`: the line feed at the end of stdin was stripped, or one was added."""
    assert run("generate", "--raw", "-m", parrot, stdin=b"x\n").stdout == ANSWER.encode()
    assert run("generate", "--raw", "-m", parrot, stdin=b"x\n\n").stdout == ANSWER.encode()
    assert run("generate", "--raw", "-m", parrot, stdin=b"x").stdout == b""


def test_argument_files_and_stdin_are_joined_by_blank_lines(parrot: Path, tmp_path: Path) -> None:
    """The parts ran into each other, came in another order, or lost or gained line feeds."""
    (tmp_path / "one").write_bytes(b"\none\n\n")
    (tmp_path / "two").write_bytes(b" two")
    files = "-f", tmp_path / "one", "-f", tmp_path / "two"
    done = run("tokenize", "-m", parrot, "first", *files, stdin=b"last\r\n")
    text = run("tokenize", "-m", parrot, "--decode", stdin=done.stdout).stdout
    assert text == b"first\n\n\none\n\n\n\n two\n\nlast\r\n"


@pytest.mark.parametrize("stdin", ["< /dev/null", "<&-", "< EMPTY", "--no-stdin"])
def test_stdin_that_has_nothing(parrot: Path, tmp_path: Path, stdin: str) -> None:
    """An empty, closed or unwanted stdin added a blank line to the prompt, or was an error beside a prompt."""
    (tmp_path / "empty").write_bytes(b"")
    stdin = stdin.replace("EMPTY", str(tmp_path / "empty"))
    assert shell(f"tfm tokenize -m {parrot} 'a b' {stdin}").stdout == b"98 33 99\n"


def test_stdin_closed_does_not_lend_its_number(parrot: Path) -> None:
    """With stdin closed the next file that is opened becomes file 0, and is read as the prompt."""
    done = shell(f"tfm generate --raw -m {parrot} $'x\\n' <&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER.encode(), b"")


@pytest.mark.parametrize("stdin", ["< /dev/null", "<&-", "--no-stdin < /dev/zero"])
def test_no_prompt_at_all(parrot: Path, stdin: str) -> None:
    """Without any prompt the model was loaded and asked to continue nothing."""
    done = shell(f"tfm generate -m {parrot} {stdin}")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"No prompt" in done.stderr


@pytest.mark.parametrize("prompt", ["''", "-f /dev/null", "'' -f /dev/null"])
def test_prompt_that_is_empty(chatty_parrot: Path, prompt: str) -> None:
    """A variable of the shell that is not set: the model was loaded and answered to nothing."""
    done = shell(f"tfm generate -m {chatty_parrot} {prompt} < /dev/null")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"No prompt" in done.stderr
    assert shell(f"printf a | tfm generate -m {chatty_parrot} {prompt}").returncode == 0


def test_terminal_stdin_is_not_read(parrot: Path) -> None:
    """With a terminal as stdin the command waited for it, although the prompt was given."""
    terminal, its_end = pty.openpty()
    try:
        done = run("generate", "--raw", "-m", parrot, "x\n", stdin=its_end)
        assert (done.returncode, done.stdout) == (0, ANSWER.encode())
        done = run("generate", "--raw", "-m", parrot, stdin=its_end)
        assert done.returncode == 2
    finally:
        os.close(terminal)
        os.close(its_end)


def test_open_and_silent_stdin_is_told_of(parrot: Path) -> None:
    """A stdin that is inherited open and never written to made the command wait without a word."""
    command = [TFM, "generate", "--raw", "-m", parrot]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        begun = time.monotonic()
        note = process.stderr.readline()
        assert time.monotonic() - begun > 1.9
        assert note == b"tfm: waiting for text on stdin (--no-stdin leaves it alone)\n"
        out, more = process.communicate(b"x\n", timeout=TIMEOUT_S)
        assert (process.returncode, out, more) == (0, ANSWER.encode(), b"")


def test_quiet_and_quick_stdin_are_not_told_of(parrot: Path, tmp_path: Path) -> None:
    """The note came although text had come in time, or although --quiet was asked for."""
    quick = f"(printf 'x'; sleep 2.5; printf '\\n') | tfm generate --raw -m {parrot} > {tmp_path}/quick"
    quiet = f"(sleep 2.5; printf '\\n') | tfm generate -q --raw -m {parrot} > {tmp_path}/quiet"
    done = shell(f"{quick} & {quiet}; wait; cat {tmp_path}/quick {tmp_path}/quiet")
    assert (done.stdout, done.stderr) == (ANSWER.encode() * 2, b"")


def test_stdin_that_does_not_block(parrot: Path) -> None:
    """A pipe in non-blocking mode (as some programs leave it) ended the text early, or in a BlockingIOError."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with subprocess.Popen(
        [TFM, "generate", "--raw", "-m", parrot], stdin=reader, stdout=-1, stderr=-1, env=environment()
    ) as process:
        os.close(reader)
        for piece in (b"x", b"y\n"):
            time.sleep(0.3)
            os.write(writer, piece)
        os.close(writer)
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert (out, error) == (ANSWER.encode(), b"")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
@pytest.mark.parametrize("utf8_mode", ["0", None])
def test_bytes_pass_whatever_the_locale(parrot: Path, locale: str, utf8_mode: str | None) -> None:
    """Under the C locale text on argv, stdin or stdout came out as question marks, surrogates or an error."""
    env = {"LC_ALL": locale, "PYTHONUTF8": utf8_mode, "PYTHONCOERCECLOCALE": utf8_mode, "PYTHONIOENCODING": None}
    text = "é🙂\0 ü\r\n".encode()
    ids = run("tokenize", "-m", parrot, stdin=text, env=env)
    assert ids.stdout.split() == [str(byte + 1).encode() for byte in text]
    assert run("tokenize", "-m", parrot, "é🙂", env=env).stdout.split() == ids.stdout.split()[:6]
    assert run("tokenize", "-m", parrot, "--decode", stdin=ids.stdout, env=env).stdout == text
    assert run("generate", "--raw", "-m", parrot, "x\n", env=env).stdout == ANSWER.encode()


def test_byte_order_mark_is_dropped(parrot: Path, tmp_path: Path) -> None:
    """A BOM at the start of stdin or a file became a token; one in the middle of the text is text."""
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfab")
    done = run("tokenize", "-m", parrot, "-f", tmp_path / "file", stdin=b"\xef\xbb\xbfa\xef\xbb\xbf")
    assert done.stdout == b"98 99 11 11 98 240 188 192\n"


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"ab\xffcd", b"0xff at byte 2"), (b"\xef\xbb\xbf\xc3", b"0xc3 at byte 3"), (b"\xed\xa0\x80", b"0xed at byte 0")],
)
def test_what_is_not_utf8_is_refused(parrot: Path, tmp_path: Path, data: bytes, found: bytes) -> None:
    """Bytes that are no UTF-8 were replaced in silence, or ended in a traceback; the offset counts the BOM as well."""
    file = tmp_path / "file"
    file.write_bytes(data)
    name = os.fsencode(file)
    for source, done in (
        (b"stdin", run("generate", "-m", parrot, stdin=data)),
        (b"file " + name, run("generate", "-m", parrot, "-f", file)),
        (b"PROMPT", run("generate", "-m", parrot, data, env={"LC_ALL": "C.UTF-8"})),
    ):
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr == b"tfm: " + source + b": not UTF-8: found " + found + (
            b"; convert it, for example with iconv -t UTF-8\n"
        )


# ------------------------------------------------------------------------------------------------ stdout and stderr


def test_stdout_has_the_answer_and_nothing_else(chatty_parrot: Path) -> None:
    """A banner, the prompt, a progress bar or a line feed at the end were in what a pipe got."""
    done = run("generate", "-v", "-m", chatty_parrot, "hello")
    assert done.stdout == ANSWER.encode()
    assert [line.split()[1] for line in done.stderr.splitlines()] == [b"load", b"prompt", b"decode", b"memory"]
    assert run("generate", "-m", chatty_parrot, "hello").stderr == b""


def test_characters_are_written_whole(chatty_parrot: Path) -> None:
    """A character of four tokens was written byte by byte."""
    command = [TFM, "generate", "--no-stdin", "-m", chatty_parrot, "hello"]
    with subprocess.Popen(command, stdout=-1, env=environment()) as process:
        assert process.stdout is not None
        pieces = []
        while piece := os.read(process.stdout.fileno(), 99):
            pieces.append(piece.decode())
    assert "".join(pieces) == ANSWER


def test_answer_comes_as_it_is_made(endless_parrot: Path) -> None:
    """The answer was held back until the end: of 20,000 tokens some must come before the last."""
    command = [TFM, "generate", "--raw", "--no-stdin", "-n", "20000", "-m", endless_parrot, "\n"]
    with subprocess.Popen(command, stdout=-1, env=environment()) as process:
        assert process.stdout is not None
        pieces = []
        while piece := os.read(process.stdout.fileno(), 1_000_000):
            pieces.append(piece)
    assert b"".join(pieces) == b"abcdefghij" * 2000
    assert len(pieces) > 1


def test_reader_that_leaves_early(endless_parrot: Path) -> None:
    """`| head -c 5` ended in a traceback, in an error line, or not before the whole answer was made."""
    script = f"tfm generate --raw -n 900000 -m {endless_parrot} $'\\n' | head -c 5; echo :${{PIPESTATUS[0]}}"
    done = shell(script)
    assert (done.stdout, done.stderr) == (b"abcde:141\n", b"")


@pytest.mark.parametrize("command", ["--help", "generate --help", "--version", "tokenize -m {} --json a"])
def test_reader_that_was_never_there(parrot: Path, command: str) -> None:
    """Help into a closed pipe left Python's own complaint at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run(*command.format(parrot).split(), stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_stdout_that_is_full(parrot: Path) -> None:
    """A full disk ended in a traceback, or with status 0."""
    for command in (f"tfm generate --raw -m {parrot} $'\\n'", f"tfm tokenize -m {parrot} a", "tfm --help"):
        done = shell(f"{command} > /dev/full")
        assert done.returncode == 1
        assert b"No space left on device" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_stdout_closed(parrot: Path) -> None:
    """With stdout closed the answer went into the next file that was opened, or was lost with status 0."""
    done = shell(f"tfm generate --raw -m {parrot} $'\\n' >&-")
    assert done.returncode == 1
    assert done.stderr.startswith(b"tfm: stdout: found closed")


@pytest.mark.parametrize("arguments", ["--help", "--version", "show --help"])
def test_help_with_stdout_closed(arguments: str) -> None:
    """It ended with status 0, and nothing was printed."""
    done = shell(f"tfm {arguments} >&-")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert done.stderr.startswith(b"tfm: stdout: found closed")


def test_prompt_file_may_be_a_pipe(parrot: Path, tmp_path: Path) -> None:
    """As with <(command) in a shell; a folder is refused, with what to do."""
    done = shell(f"tfm generate --raw -m {parrot} -f <(echo)")
    assert (done.returncode, done.stdout) == (0, ANSWER.encode())
    done = run("generate", "--raw", "-m", parrot, "-f", tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert f"file {tmp_path}: found a folder; allowed: a file or a pipe; give -f for each".encode() in done.stderr


def test_stderr_closed_or_gone(parrot: Path) -> None:
    """Notes that nobody can read broke the command that had them."""
    for ending in ("2>&-", "2> >(true)", "2> /dev/full"):
        done = shell(f"tfm generate -v --threads 999 --raw -m {parrot} $'\\n' {ending}")
        assert (done.returncode, done.stdout) == (0, ANSWER.encode())
    assert shell("tfm generate --nonsense 2>&-").returncode == 2
    assert shell("tfm show /nowhere 2>&-").returncode == 1


def on_terminal(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Run tfm with a terminal as all three streams; the status and what the terminal got."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(TFM, [str(TFM), *map(str, arguments)], environment({"TERM": "xterm", **(env or {})}))
    shown = read_terminal(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), shown


def test_terminal_gets_a_line_feed_at_the_end(parrot: Path) -> None:
    """The shell's prompt stood behind the answer's last word."""
    assert on_terminal("generate", "--raw", "-m", parrot, "x\n") == (0, ANSWER.encode() + b"\r\n")
    assert on_terminal("generate", "--raw", "-m", parrot, "-n", "0", "x\n") == (0, b"")


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="needs a small pipe")
def test_output_that_does_not_block(endless_parrot: Path) -> None:
    """A pipe in non-blocking mode with a slow reader lost a part of the answer, or ended it with BlockingIOError."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    command = [TFM, "generate", "--raw", "-n", "10000", "--no-stream", "-m", endless_parrot, "\n"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, env=environment()) as process:
        os.close(writer)
        while int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder) < 4096:  # until it is full
            assert process.poll() is None
            time.sleep(0.01)
        got = b""
        while piece := os.read(reader, 1 << 16):
            got += piece
        assert process.wait(TIMEOUT_S) == 0
    os.close(reader)
    assert got == b"abcdefghij" * 1000


# ------------------------------------------------------------------------------------------------ progress

WORK = """
import sys, time
from tfm.cli.output import Notes
with Notes(quiet="quiet" in sys.argv) as notes:
    notes.progress("short work", 0, 9)
    notes.progress("short work", 9, 9)
    for part in range(2):
        notes.progress("long work", 0, 1)
        time.sleep(0.8)
        notes.note("by the way")
        notes.progress("long work", 1, 1)
"""


def test_progress_in_a_file() -> None:
    """Bars were written into logs; work of a moment was told of, or the same work twice."""
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, check=True)
    assert done.stdout == b""
    assert done.stderr == b"tfm: long work ...\ntfm: by the way\ntfm: by the way\n"
    assert subprocess.run([sys.executable, "-c", WORK, "quiet"], capture_output=True, check=True).stderr == b""


READ = """
import sys, time
from tfm.cli import reading as ours
from tfm.cli.output import Notes
from tfm.cli.reading import Reading
ours.PATIENCE_S = 1.5
with Notes(quiet="quiet" in sys.argv) as notes:
    reading = Reading(notes, 9000)
    def tokens():
        reading.progress("reading the prompt", 512, 9000)
        time.sleep(2.5 if "long" in sys.argv else 0.7)
        yield "token"
    assert list(reading.follow(tokens())) == ["token"]
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [(["long"], b"tfm: reading the prompt: 512 of 9000 tokens so far\n"), (["long", "quiet"], b""), (["short"], b"")],
)
def test_long_prompt_is_told_of(how: list[str], told: bytes) -> None:
    """Thousands of tokens were read in silence where stderr is no terminal."""
    done = subprocess.run([sys.executable, "-c", READ, *how], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", told)


def test_long_prompt_is_told_of_again(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One line after 5 seconds, and then silence for the minutes that a long prompt takes."""
    monkeypatch.setattr(reading, "PATIENCE_S", 0.1)
    monkeypatch.setattr(reading, "AGAIN_S", 0.2)
    with Notes() as notes:
        shown = reading.Reading(notes, 9000)

        def tokens() -> Iterator[str]:
            for done in (512, 1024, 1536):
                shown.progress("reading the prompt", done, 9000)
                time.sleep(0.5)
            yield "token"
            time.sleep(0.5)

        assert list(shown.follow(tokens())) == ["token"]  # type: ignore[arg-type, comparison-overlap]
    lines = capfd.readouterr().err.splitlines()
    assert {f"tfm: reading the prompt: {done} of 9000 tokens so far" for done in (512, 1024, 1536)} == set(lines)
    assert 3 <= len(lines) <= 8


def test_prompt_is_counted_while_it_is_read(parrot: Path) -> None:
    """What is told of a long prompt comes from the engine, after every part of it."""
    told: list[tuple[str, int, int | None]] = []
    with closing(load(parrot)) as model:
        list(model.generate([11] * 700, 1, chunk=256, progress=lambda *step: told.append(step)))
    assert told == [("reading the prompt", 256, 700), ("reading the prompt", 512, 700)]


def test_progress_on_a_terminal() -> None:
    """The bar stayed on the screen after the work, or the cursor hidden."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(sys.executable, [sys.executable, "-c", WORK], environment({"TERM": "xterm", "COLUMNS": "80"}))
    shown = read_terminal(terminal).decode()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert "long work" in shown
    assert "short work" not in shown
    assert shown.count("tfm: by the way\r\n") == 2
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again
    assert "\x1b[2K" in shown[shown.rindex("long work") :]  # and the line of the bar cleared


def test_bench_tells_that_it_measures_the_machine(parrot: Path) -> None:
    """On a terminal nothing was seen for the seconds before the first test."""
    shown = on_terminal("bench", "-m", parrot, "-p", "2", "-n", "0", "-r", "1", env={"COLUMNS": "100"})[1].decode()
    assert shown.index("measuring the limits of this machine") < shown.index("pp2")


# ------------------------------------------------------------------------------------------------ faults


def test_debug_shows_where(tmp_path: Path) -> None:
    """A traceback is for those who ask for it."""
    plain, debugged = (run("show", tmp_path / "no", env={"TFM_DEBUG": debug}) for debug in (None, "1"))
    assert (plain.returncode, debugged.returncode) == (1, 1)
    assert len(plain.stderr.splitlines()) == 1
    assert debugged.stderr.endswith(plain.stderr)
    assert b"Traceback" in debugged.stderr


def test_whole_json_run(chatty_parrot: Path) -> None:
    """All of it is one line of JSON on stdout, and UTF-8."""
    done = run("generate", "--json", "-m", chatty_parrot, "hello")
    assert (done.returncode, done.stderr, done.stdout.count(b"\n")) == (0, b"", 1)
    assert json.loads(done.stdout)["text"] == ANSWER
    assert "🙂".encode() in done.stdout
