"""tfm chat in pipes, and its options."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_process import TFM, TIMEOUT_S, environment, run, shell
from parrot import write_parrot

ANSWER = "Hi é🙂!"
LETTERS = b"abcdefghij"


def test_lines_in_blocks_out(chatty_parrot: Path) -> None:
    """A line's end was part of the message, a blank line was answered, U+2028 or a lone CR ended a line."""
    stdin = b"\xef\xbb\xbfone\r\n\n  \n/bye\ntwo\xe2\x80\xa8x\ry\n//three"
    done = run("chat", "-v", "-m", chatty_parrot, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n".encode() * 4)
    found = [int(number) for number in re.findall(rb"prompt (\d+) new tokens", done.stderr)]
    # An earlier answer is written without the line feed behind <assistant>: it is run again, with its end.
    rest = len(ANSWER.encode()) + len("</assistant>\n")
    frame = len("<user></user>\n<assistant>\n")
    sizes = [len("one"), len("/bye"), len("two...x\ry"), len("//three")]
    assert found == [frame + size + (rest if i else 0) for i, size in enumerate(sizes)]
    assert run("chat", "-m", chatty_parrot, stdin=stdin).stderr == b""


@pytest.mark.parametrize("stdin", ["< /dev/null", "<&-"])
def test_no_lines(chatty_parrot: Path, stdin: str) -> None:
    done = shell(f"tfm chat -m {chatty_parrot} {stdin}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_each_answer_comes_before_the_next_line(chatty_parrot: Path) -> None:
    """A program that waits for the answer before it writes the next line waited for ever."""
    command = [TFM, "chat", "-m", chatty_parrot]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for text in (b"one\n", b"two\n"):
            process.stdin.write(text)
            process.stdin.flush()
            assert process.stdout.readline() == f"{ANSWER}\n".encode()
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_error_at_a_line(small_chat: Path) -> None:
    """Answers before the failing turn were lost, or the turns after it went on without it."""
    done = run("chat", "-m", small_chat, stdin=b"one\n" + b"x" * 200 + b"\ntwo\n")
    assert (done.returncode, done.stdout) == (1, f"{ANSWER}\n".encode())
    assert done.stderr.startswith(b"tfm: stdin, line 2: message: found ")
    done = run("chat", "-m", small_chat, stdin=b"one\na\xffb\n")
    assert (done.returncode, done.stdout) == (1, f"{ANSWER}\n".encode())
    assert done.stderr.startswith(b"tfm: stdin, line 2: not UTF-8: found 0xff at byte 1")


def test_conversation_that_is_full(small_chat: Path) -> None:
    """The message told of /drop and /reset, which a pipe does not have."""
    stdin = b"".join(b"%d 0123456789\n" % number for number in range(9))
    done = run("chat", "-m", small_chat, stdin=stdin)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b": conversation with this message: found " in done.stderr
    assert done.stderr.endswith(b"; in a pipe nothing is forgotten: begin another conversation with this message\n")
    done = run("chat", "--ctx", "100", "-m", small_chat, stdin=stdin)
    assert done.stderr.endswith(b" begin another conversation with this message, or raise --ctx\n")


def test_stdout_that_is_full(chatty_parrot: Path) -> None:
    """The first word of the error was stdin and its line, which is not at fault."""
    done = shell(f"tfm chat -m {chatty_parrot} <<< x > /dev/full")
    found = b"tfm: stdout: cannot be written: found No space left on device; make room for the result\n"
    assert (done.returncode, done.stderr) == (1, found)


def test_reader_that_leaves(endless_chat: Path) -> None:
    done = shell(f"yes | tfm chat -n 900000 -m {endless_chat} | head -c 5; echo :${{PIPESTATUS[1]}}")
    assert (done.stdout, done.stderr) == (b"abcde:141\n", b"")


def test_ctrl_c_in_a_pipe(endless_chat: Path) -> None:
    command = [TFM, "chat", "-n", "900000", "-m", endless_chat]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=environment()) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(1) == b"a"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, error) == (130, b"")


# ------------------------------------------------------------------------------------------------ options


def test_options(chatty_parrot: Path) -> None:
    """-n, --stop, --speculate and the answer's notes on stderr."""
    done = run("chat", "-n", "2", "-m", chatty_parrot, stdin=b"x\n")
    assert (done.returncode, done.stdout) == (0, b"Hi\n")
    assert done.stderr == b"tfm: the answer ends here: it has 2 tokens, and -n allows no more\n"
    assert run("chat", "-q", "-n", "2", "-m", chatty_parrot, stdin=b"x\n").stderr == b""
    done = run("chat", "--stop", "🙂", "--speculate", "4", "-m", chatty_parrot, stdin=b"x\ny\n")
    assert (done.stdout, done.stderr) == ("Hi é\nHi é\n".encode(), b"")
    for wrong in (["-n", "0"], ["--stop", ""], ["--speculate", "-1"], ["--temperature", "-1"]):
        assert run("chat", *wrong, "-m", chatty_parrot, stdin=b"x\n").returncode == 2


def test_no_chat_template(parrot: Path, tmp_path: Path) -> None:
    """All of the model was loaded before it was found out; nothing said what to do."""
    done = run("chat", "-m", parrot, stdin=b"x\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(f"tfm: {parrot}: chat template: found none; talk with a model".encode())
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    assert b"chat template: found none" in run("chat", "-m", bare, stdin=b"x\n").stderr


def test_system_message_that_is_refused(parrot: Path, tmp_path: Path) -> None:
    folder = write_parrot(tmp_path / "model", ANSWER.encode(), chat=True)
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + template.read_text()
    )
    done = run("chat", "-s", "Be kind.", "-m", folder, stdin=b"x\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"tfm: --system: ")


def test_heavy_imports_stay_out(chatty_parrot: Path) -> None:
    """The line editor was imported where nobody types."""
    script = (
        "import sys; from tfm.cli.main import main; main(); print('prompt_toolkit' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "chat", "-m", chatty_parrot], input=b"x\n", capture_output=True, check=True,
        env=environment(),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (f"{ANSWER}\n".encode(), b"False\n")


def test_constraint(chatty_parrot: Path) -> None:
    """An answer that broke off before its constraint allows went by as complete."""
    options = "chat", "-m", chatty_parrot, "--regex", "[A-Za-z]{4}[0-9]"
    done = run(*options, stdin=b"x\ny\n")
    assert done.returncode == 0
    assert all(re.fullmatch(rb"[A-Za-z]{4}[0-9]", line) for line in done.stdout.splitlines())
    assert len(done.stdout.splitlines()) == 2
    done = run(*options, "-n", "3", stdin=b"x\ny\n")
    assert (done.returncode, len(done.stdout)) == (1, 4)
    assert b"tfm: stdin, line 1: --regex: the answer is not complete: found an end by length" in done.stderr
    done = run("chat", "-m", chatty_parrot, "--regex", "(", stdin=b"")
    assert (done.returncode, done.stderr[:20]) == (1, b"tfm: --regex: found ")


@pytest.mark.parametrize("place", ["2>&1 | cat", "> FILE 2>&1; cat FILE"])
def test_errors_have_lines_of_their_own(chatty_parrot: Path, tmp_path: Path, place: str) -> None:
    """Where stdout and stderr were one place, an error or a line of -v went on behind a part of an answer."""
    options = f"-m {chatty_parrot} --regex '[a-z]{{9}}' -n 2"
    place = place.replace("FILE", str(tmp_path / "all"))
    for command in (f"generate {options} x", f"generate -v {options} x", f"chat -v {options} <<< x"):
        lines = shell(f"tfm {command} {place}").stdout.splitlines()
        assert re.fullmatch(rb"[a-z]{2}", lines[0])
        assert all(line.startswith(b"tfm: ") for line in lines[1:])
    assert len(shell(f"tfm generate {options} x").stdout) == 2  # and not a byte more where it is another place


def test_prompt_cache(chatty_parrot: Path, tmp_path: Path) -> None:
    """The beginning of a conversation that was run before was run again, or what it was kept in was not written."""
    file = tmp_path / "cache"
    stdin = b"x" * 200 + b"\nagain\n"
    options = "chat", "-v", "-m", chatty_parrot, "--prompt-cache", file
    first, second = run(*options, stdin=stdin), run(*options, stdin=stdin)
    assert (first.returncode, second.returncode, second.stdout) == (0, 0, first.stdout)
    counts = [re.findall(rb"prompt (\d+) new tokens", done.stderr) for done in (first, second)]
    prompt = len("<user></user>\n<assistant>\n") + 200
    assert counts[0][0] == str(prompt).encode()
    assert counts[1][0] == str(prompt - prompt // 64 * 64).encode()
    assert counts[0][1] == counts[1][1]
    (tmp_path / "notes").write_text("precious")
    done = run("chat", "-m", chatty_parrot, "--prompt-cache", tmp_path / "notes", stdin=stdin)
    assert (done.returncode, done.stdout, (tmp_path / "notes").read_text()) == (1, b"", "precious")
