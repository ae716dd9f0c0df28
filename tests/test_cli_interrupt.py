"""Ctrl-C, whatever tfm is doing at that moment: the status, what was made until then, and nothing that stays behind."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import TFM, TIMEOUT_S, environment, read_terminal, shell, wait_for_work

ANSWER = "Hi é🙂!"
IN_ONE_CALL = "generate", "--no-stdin", "--json", "--raw", "-q", "--threads", "1"


def interrupted(
    *arguments: str | Path, when: Callable[[subprocess.Popen[bytes]], object], env: dict[str, str] | None = None,
    number: int = signal.SIGINT, command: tuple[str | Path, ...] = (TFM,),
) -> tuple[int, bytes, bytes, float]:  # fmt: skip
    """Run tfm, send it what Ctrl-C sends as soon as `when` returns; status, stdout, stderr, seconds it took to end."""
    words = [*command, *arguments]
    with subprocess.Popen(words, stdin=-1, stdout=-1, stderr=-1, env=environment(env or {})) as process:
        first = when(process)
        process.send_signal(number)
        sent = time.monotonic()
        assert process.stdout is not None
        assert process.stderr is not None
        out, error = process.stdout.read(), process.stderr.read()
        process.wait(TIMEOUT_S)
        return process.returncode, (first if isinstance(first, bytes) else b"") + out, error, time.monotonic() - sent


def decoding(process: subprocess.Popen[bytes]) -> None:
    wait_for_work(process, 1.5)


def reading(process: subprocess.Popen[bytes]) -> None:
    wait_for_work(process, 2)


def first_byte(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.read(1)


def test_ctrl_c_while_decoding(endless_parrot: Path) -> None:
    """Ctrl-C in the middle of an answer gave a traceback, or lost what was there."""
    arguments = "generate", "--no-stdin", "--raw", "-n", "900000", "-m", endless_parrot, "\n"
    status, out, error, took_s = interrupted(*arguments, when=first_byte)
    assert (status, error) == (130, b"")
    assert out == (b"abcdefghij" * (len(out) // 10 + 1))[: len(out)]
    assert took_s < 2


def test_ctrl_c_without_streaming_prints_what_is_there(endless_parrot: Path) -> None:
    """With --no-stream all that was made until Ctrl-C was lost."""
    arguments = "generate", "--no-stdin", "--no-stream", "--raw", "-n", "900000", "-m", endless_parrot, "\n"
    status, out, error, _ = interrupted(*arguments, when=decoding)
    assert (status, error) == (130, b"")
    assert out.startswith(b"abcdefghijabc")


def test_ctrl_c_with_json_prints_what_is_there(endless_parrot: Path) -> None:
    """With --json all that was made until Ctrl-C was lost."""
    arguments = "generate", "--no-stdin", "--json", "--raw", "-n", "900000", "-m", endless_parrot, "\n"
    status, out, error, _ = interrupted(*arguments, when=decoding)
    assert (status, error, out.count(b"\n")) == (130, b"", 1)
    answer = json.loads(out)
    assert answer["finish_reason"] is None
    assert answer["completion_tokens"] == len(answer["text"])
    assert answer["text"].startswith("abcdefghijabc")


def test_ctrl_c_with_json_in_one_long_call(default_model_folder: Path) -> None:
    """Also where the main thread is in the middle of a forward pass and another one ends the process."""
    arguments = *IN_ONE_CALL, "-m", default_model_folder, "hi " * 8000
    status, out, error, _ = interrupted(*arguments, when=reading)
    assert (status, error) == (130, b"")
    answer = json.loads(out)
    assert (answer["text"], answer["finish_reason"], answer["completion_tokens"]) == ("", None, 0)


def test_ctrl_c_while_stdin_is_waited_for(parrot: Path) -> None:
    """Ctrl-C while reading stdin gave a traceback, or was not noticed."""

    def noted(process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        process.stderr.readline()

    status, out, error, took_s = interrupted("generate", "-m", parrot, when=noted)
    assert (status, out, error) == (130, b"", b"")
    assert took_s < 2


FIRST_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if "tfm.cli.main" in sys.modules and name not in PYTHONS_OWN:
            os.kill(os.getpid(), signal.SIGINT)
PYTHONS_OWN = {"signal"}
sys.meta_path.insert(0, Finder)
sys.modules.pop("signal")
import tfm.cli.main
"""


def test_ctrl_c_at_the_first_import() -> None:
    """Ctrl-C while main.py imports gave a traceback: that it ends the process simply was said after the imports."""
    done = subprocess.run([sys.executable, "-c", FIRST_IMPORT], capture_output=True, check=False, env=environment())
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


BEGUN = "import os, sys; from tfm.cli.main import main; os.write(1, b'.'); sys.exit(main())"


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.2, 0.3, 0.4])
def test_ctrl_c_while_starting(endless_parrot: Path, delay_s: float) -> None:
    """Ctrl-C while modules are imported or weights are loaded gave a traceback. At first it may be a plain end.
    Python's own start, which is not tfm's, is waited for."""
    arguments = "generate", "--no-stdin", "--raw", "-n", "900000", "-m", endless_parrot, "\n"
    command = (sys.executable, "-c", BEGUN)

    def begun(process: subprocess.Popen[bytes]) -> None:
        first_byte(process)
        time.sleep(delay_s)

    status, _, error, took_s = interrupted(*arguments, when=begun, command=command)
    assert status in (130, -signal.SIGINT)
    assert error == b""
    assert took_s < 2


def test_ctrl_c_while_compiling(parrot: Path, tmp_path: Path) -> None:
    """The compiler is one long call: Ctrl-C was noticed ten seconds later."""

    def compiling(process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        assert b"compiling" in process.stderr.readline()

    arguments = "generate", "--no-stdin", "--raw", "-m", parrot, "\n"
    status, out, error, took_s = interrupted(*arguments, when=compiling, env={"TFM_CACHE": str(tmp_path)})
    assert (status, out, error) == (130, b"", b"")
    assert took_s < 3


def test_ctrl_c_while_reading_a_long_prompt(parrot: Path, default_model_folder: Path) -> None:
    """A forward pass over hundreds of tokens is one long call too."""
    arguments = "generate", "--no-stdin", "--raw", "-q", "-m", default_model_folder, "hello " * 8000
    status, out, error, took_s = interrupted(*arguments, when=reading)
    assert (status, out, error) == (130, b"", b"")
    assert took_s < 3


def test_ctrl_c_that_is_ignored_stays_ignored(parrot: Path) -> None:
    """A shell starts `tfm ... &` with SIGINT ignored, so that Ctrl-C reaches only what is in front."""
    done = shell(f"trap '' INT; tfm generate --raw -m {parrot} $'\\n' & sleep 0.3; kill -INT $!; wait $!")
    assert (done.returncode, done.stdout) == (0, ANSWER.encode())


def test_ctrl_c_on_a_terminal_gives_it_back(endless_parrot: Path) -> None:
    """After Ctrl-C the cursor stayed hidden, or the prompt stood in the middle of the answer's line."""
    process, terminal = pty.fork()
    if process == 0:
        arguments = [str(TFM), "generate", "--raw", "-n", "900000", "-m", str(endless_parrot), "\n"]
        os.execve(TFM, arguments, environment({"TERM": "xterm"}))
    shown = os.read(terminal, 1)
    os.write(terminal, b"\x03")
    shown += read_terminal(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert shown.endswith(b"\r\n\x1b[?25h")
    assert b"Traceback" not in shown


def test_ctrl_c_with_json_on_a_terminal(endless_parrot: Path) -> None:
    """The object ends its line; a blank one followed."""
    process, terminal = pty.fork()
    if process == 0:
        arguments = [str(TFM), "generate", "--json", "--raw", "-n", "900000", "-m", str(endless_parrot), "\n"]
        os.execve(TFM, arguments, environment({"TERM": "xterm"}))
    time.sleep(2)
    os.write(terminal, b"\x03")
    shown = read_terminal(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    assert shown.startswith(b"^C{")
    assert shown.endswith(b"}\r\n\x1b[?25h")


PAIRS = [(1, 15), (2, 15), (1, 2), (2, 3), (15, 1), (15, 2), (3, 1)]


@pytest.mark.parametrize("numbers", PAIRS)
def test_two_signals_at_once(endless_parrot: Path, numbers: tuple[int, int]) -> None:
    """SIGTERM and SIGHUP, as service managers send them, gave a traceback of Python's: the handler of the one took away
    that of the other, which had come by then. The status is that of the first which was handled."""
    command = [TFM, "generate", "--no-stdin", "--raw", "-n", "900000", "-m", endless_parrot, "\n"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=environment()) as process:
        first_byte(process)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        for number in (*numbers, signal.SIGCONT):  # both are there before Python looks
            process.send_signal(number)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert error == b""
    # The lowest is handled first, but for the moment in which one thread takes the one and another thread the other.
    assert process.returncode in {128 + number for number in numbers}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)])
def test_other_signals_lose_nothing_either(endless_parrot: Path, number: int, status: int) -> None:
    """`kill`, `timeout` and the end of a session lost all of a long answer that was not streamed."""
    arguments = "generate", "--no-stdin", "--raw", "-n", "900000", "-m", endless_parrot, "\n"
    for shape in ("--no-stream", "--json"):
        found, out, error, took_s = interrupted(*arguments, shape, when=decoding, number=number)
        assert (found, error) == (status, b"")
        assert (json.loads(out)["text"].encode() if shape == "--json" else out).startswith(b"abcdefghijabc")
        assert took_s < 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_in_one_long_call(default_model_folder: Path, number: int, status: int) -> None:
    """Where the main thread is in the middle of a forward pass, another one ends the process, with that status."""
    arguments = *IN_ONE_CALL, "-m", default_model_folder, "hi " * 8000
    found, out, error, _ = interrupted(*arguments, when=reading, number=number)
    assert (found, error) == (status, b"")
    assert json.loads(out)["finish_reason"] is None


def test_a_signal_while_a_class_is_made() -> None:
    """Guards imports: Python 3.11 wraps what comes up in __set_name__, and a stop was told of as a bug."""
    code = """
import os, signal, sys
from tfm.cli import main
class Signalled:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
def invoke(arguments, output):
    class Made:
        field = Signalled()
    return 0
main._invoke = invoke
sys.exit(main.main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (143, b"")
