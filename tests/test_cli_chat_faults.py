"""tfm chat in a pipe, where something is odd or fails: bytes, streams, the context, the model's files, Ctrl-C."""

import json
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from cli_process import TFM, TIMEOUT_S, environment, run, shell
from parrot import END, write_parrot
from raw_safetensors import write_tensors
from safetensors.numpy import load_file

from tfm.engine import TfmError, load
from tfm.engine.conversation import Conversation

ANSWER = "Hi é🙂!"
FRAME = len("<user></user>\n<assistant>\n")  # tokens are bytes


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("printf 'a\\n' | tfm chat -q -n 4", "Hi \ufffd\n"),  # a character cut by -n
        ("printf 'a\\n' | tfm chat -q -n 7", "Hi é\ufffd\n"),
        ("printf 'a\\n' | tfm chat -v 2>&-", f"{ANSWER}\n"),
        ("printf 'é\\n' | LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 tfm chat", f"{ANSWER}\n"),
        ("printf 'a\\0b\\nc' | tfm chat", f"{ANSWER}\n{ANSWER}\n"),
    ],
)
def test_odd_bytes_and_streams(chatty_parrot: Path, script: str, expected: str) -> None:
    """A half character in the output, a traceback of a closed stderr or of a locale, a line that ended at NUL."""
    done = shell(
        f"{script} -m {chatty_parrot}" if "2>&-" not in script else f"export TFM_MODEL={chatty_parrot}; {script}"
    )
    assert done.stdout.decode() == expected
    assert (done.returncode, done.stderr) == (0, b"")


def test_end_of_text_in_the_tokenizer_only(chatty_parrot: Path, tmp_path: Path) -> None:
    """A model whose config.json names no EOS answered until the context was full."""
    folder = shutil.copytree(chatty_parrot, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert END == 0
    done = run("chat", "-m", folder, stdin=b"a\n")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, f"{ANSWER}\n", b"")


def test_prompt_that_fills_the_context(chatty_parrot: Path) -> None:
    """A prompt of exactly the context has room for one token, whose keys nobody needs; one more is refused."""
    ctx = FRAME + 5
    done = run("chat", "-m", chatty_parrot, "--ctx", str(ctx), stdin=b"xxxxx\n")
    assert done.returncode == 0
    assert done.stdout == b"H\n"
    assert f"the context of {ctx} tokens is full".encode() in done.stderr
    done = run("chat", "-m", chatty_parrot, "--ctx", str(ctx), stdin=b"xxxxxx\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert f"found {ctx + 1} tokens".encode() in done.stderr


def test_weights_that_are_no_numbers(parrot: Path, tmp_path: Path) -> None:
    """NaN gave an answer; the turn stayed in the conversation."""
    folder = write_parrot(tmp_path / "model", ANSWER.encode(), chat=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.full_like(tensors["lm_head.weight"], np.nan)
    write_tensors(folder / "model.safetensors", tensors)
    done = run("chat", "-m", folder, stdin=b"a\nb\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"tfm: stdin, line 1: ")
    assert done.stderr.count(b"\n") == 1
    with closing(load(folder)) as model, Conversation(model) as conversation:
        with pytest.raises(TfmError):
            list(conversation.answer("a"))
        assert conversation.messages == []


def test_ctrl_c_while_compiling(chatty_parrot: Path, tmp_path: Path) -> None:
    """The compiler is one long call: Ctrl-C was noticed ten seconds later."""
    command, env = [TFM, "chat", "-m", chatty_parrot], environment({"TFM_CACHE": str(tmp_path)})
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, env=env) as process:
        assert process.stderr is not None
        assert any(b"compiling" in line for line in iter(process.stderr.readline, b""))
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, error) == (130, b"", b"")
