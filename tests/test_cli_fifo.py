"""Files that are named pipes: waited for with a word about it, and read like any other."""

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_process import TFM, TIMEOUT_S, environment, run, shell

CONST = b'{"const": true}'
CASES: dict[str, tuple[list[str], str, bytes, bytes]] = {
    "-f": (["tokenize", "-f"], "text", b"ab", b"98 99\n"),
    "--json-schema": (["generate", "--no-stdin", "--raw", "x\n", "--json-schema"], "text", CONST, b"true"),
    "--grammar": (["generate", "--no-stdin", "--raw", "x\n", "--grammar"], "text", b'start: "Hi"', b"Hi"),
    "batch": (["batch", "--raw"], "rows", b'{"prompt": "\\n"}', b'{"id": null, "line": 1'),
    "score": (["score"], "lines", b"ab", b'{"tokens": '),
    "--perplexity": (["score", "--perplexity"], "text", b"ab", b""),
}
"""Arguments before the pipe, what is waited for, what comes, how stdout begins."""


def test_pipe_into_which_nobody_writes(parrot: Path, tmp_path: Path) -> None:
    """It was waited for without a word, for ever, while stdin in the same state was told of."""
    with ExitStack() as stack:
        processes = []
        for number, (arguments, *_) in enumerate(CASES.values()):
            os.mkfifo(tmp_path / str(number))
            command = [TFM, *arguments, tmp_path / str(number), "-m", parrot]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, env=environment())
            processes.append(stack.enter_context(process))
        for number, (process, (_, noun, content, expected)) in enumerate(zip(processes, CASES.values(), strict=True)):
            assert process.stderr is not None
            told = process.stderr.readline().decode()
            assert told == f"tfm: waiting for {noun} on file {tmp_path / str(number)}\n"
            (tmp_path / str(number)).write_bytes(content)
            out, error = process.communicate(timeout=TIMEOUT_S)
            assert (process.returncode, error) == (0, b"")
            assert out.startswith(expected)


@pytest.mark.parametrize("case", CASES)
def test_what_a_shell_makes_of_a_command(parrot: Path, case: str) -> None:
    """<(...) is such a pipe too, and answers at once: nothing is told."""
    arguments, _, content, expected = CASES[case]
    words = " ".join("$'x\\n'" if word == "x\n" else word for word in arguments)
    done = shell(f"tfm {words} <(printf '%s' '{content.decode()}') -m {parrot}")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(expected)


def test_ctrl_c_while_it_is_waited_for(parrot: Path, tmp_path: Path) -> None:
    """As everywhere."""
    os.mkfifo(tmp_path / "fifo")
    command = f"timeout -s INT 1 tfm generate --no-stdin x --json-schema {tmp_path}/fifo -m {parrot}; echo $?"
    done = shell(f"trap - INT; {command}")
    assert (done.stdout, done.stderr) == (b"124\n", b"")


def test_a_schema_that_never_ends(parrot: Path) -> None:
    """/dev/zero took all memory, or time without end."""
    done = run("generate", "--no-stdin", "x", "--json-schema", "/dev/zero", "-m", parrot)
    assert done.returncode == 1
    assert b"--json-schema: file /dev/zero: found more than 4000000 bytes" in done.stderr
