"""What the Tab key finds: the protocol that the shells' own code speaks with tfm."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cli_process import environment, run, shell

NOT_SET = dict.fromkeys(("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"))


def complete(*words: str, env: Mapping[str, str | None] = NOT_SET) -> list[str]:
    """What bash is given for the last of words: "plain,WORD", or "file," where it is to look for files by itself."""
    asked = {"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "\n".join(("tfm", *words)), "COMP_CWORD": str(len(words))}
    done = run(env={**env, **asked})
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """tfm's cache with an import, the hub's with a model and with one that has no files, and a folder to stand in."""
    imported = tmp_path / "cache" / "models" / "import"
    imported.mkdir(parents=True)
    (imported / "tfm_source.json").write_text('{"ref": "/models/story.gguf"}')
    for name in ("models--some--model", "models--some--nothing", "datasets--some--texts"):
        (tmp_path / "hub" / name / "snapshots" / "0a").mkdir(parents=True)
    for name in ("models--some--model", "datasets--some--texts"):
        (tmp_path / "hub" / name / "snapshots" / "0a" / "config.json").touch()
    here = tmp_path / "here"
    (here / "my-checkpoint").mkdir(parents=True)
    (here / "my-checkpoint" / "config.json").touch()
    (here / "no-checkpoint").mkdir()
    (here / "tiny.gguf").touch()
    (here / "notes.txt").touch()
    monkeypatch.chdir(here)
    return {**NOT_SET, "TFM_CACHE": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}


def plain(*words: str) -> list[str]:
    return [f"plain,{word}" for word in words]


def test_commands_and_options() -> None:
    assert complete("gen") == plain("generate")
    assert complete("generate", "--max") == plain("--max-tokens", "--max-ram")
    assert complete("genrate", "") == complete("")  # a command that does not exist: it was called a bug in tfm


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "score", "bench"])
def test_choices(command: str) -> None:
    assert complete(command, "--kv-type", "") == plain("f32", "f16", "q8")


@pytest.mark.parametrize("before", [("generate", "-m"), ("chat", "--model"), ("show",), ("pull",), ("rm",)])
def test_models(before: tuple[str, ...], caches: dict[str, str | None]) -> None:
    """Those of both caches and of this folder; a name that none has is left to the shell, which knows paths."""
    found = plain("/models/story.gguf", "my-checkpoint", "smollm2-135m", "some/model", "tiny.gguf")
    assert complete(*before, "", env=caches) == found
    assert complete(*before, "so", env=caches) == plain("some/model")
    assert complete(*before, "./t", env=caches) == ["file,./t"]


def test_models_without_caches(tmp_path: Path) -> None:
    """A shell that completes is told of no errors."""
    nowhere = {**NOT_SET, "TFM_CACHE": str(tmp_path / "none"), "HF_HOME": str(tmp_path / "none")}
    assert complete("generate", "-m", "s", env=nowhere) == plain("smollm2-135m")


def test_models_come_at_once(caches: dict[str, str | None]) -> None:
    """Tab is not to wait for libraries; told by modules, for a busy machine's clock lies."""
    code = "import sys; from tfm.cli.main import main; main(); print(*sys.modules, file=sys.stderr)"
    asked = {"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "tfm show s", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({**caches, **asked}), capture_output=True, check=True
    )
    assert done.stdout == b"plain,smollm2-135m\nplain,some/model\n"
    assert {"numpy", "numba", "huggingface_hub", "tokenizers"} & set(done.stderr.decode().split()) == set()


@pytest.mark.parametrize(
    "before",
    [
        ("generate", "-f"), ("generate", "--prompt-cache"), ("generate", "--json-schema"), ("chat", "--grammar"),
        ("batch",), ("batch", "-o"), ("batch", "rows.jsonl", "--output"), ("score",), ("score", "--perplexity"),
        ("bench", "--config"), ("tokenize", "--file"),
    ],
)  # fmt: skip
def test_files(before: tuple[str, ...]) -> None:
    """The shell finds them itself, and is only told that a file is wanted."""
    assert complete(*before, "no") == ["file,no"]


def test_bash_as_a_person_uses_it(caches: dict[str, str | None]) -> None:
    """The line of the documents in a bash, and then the function that Tab calls."""
    script = """
        eval "$(_TFM_COMPLETE=bash_source tfm)"
        complete -p tfm
        COMP_WORDS=(tfm generate -m smo) COMP_CWORD=3
        _tfm_completion tfm
        echo "${COMPREPLY[@]}"
    """
    done = shell(script, caches)
    assert done.stdout.decode().splitlines() == ["complete -o nosort -F _tfm_completion tfm", "smollm2-135m"]
    assert done.stderr == b""


@pytest.mark.parametrize("name", ["zsh", "fish"])
def test_other_shells(name: str) -> None:
    """Their code is there, and where the shell is, it takes it."""
    done = run(env={"_TFM_COMPLETE": f"{name}_source"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"{name}_complete".encode() in done.stdout
    if shutil.which(name):
        assert shell(f"{name} -n <(_TFM_COMPLETE={name}_source tfm)").returncode == 0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"_TFM_COMPLETE": ""}, "$_TFM_COMPLETE: found ''; allowed: bash_source, "),
        ({"_TFM_COMPLETE": "bash"}, "$_TFM_COMPLETE: found 'bash'"),
        ({"_TFM_COMPLETE": "ksh_complete", "COMP_WORDS": "tfm", "COMP_CWORD": "0"}, "$_TFM_COMPLETE: found 'ksh_comp"),
        ({"_TFM_COMPLETE": "bash_complete"}, "$COMP_WORDS: found nothing"),
        ({"_TFM_COMPLETE": "fish_complete", "COMP_WORDS": "tfm"}, "$COMP_CWORD: found nothing"),
        ({"_TFM_COMPLETE": "zsh_complete", "COMP_CWORD": "1"}, "$COMP_WORDS: found nothing"),
        ({"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "tfm", "COMP_CWORD": "x"}, "$COMP_CWORD: found 'x'"),
        ({"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "tfm", "COMP_CWORD": "-1"}, "$COMP_CWORD: found '-1'"),
        ({"_TFM_COMPLETE": "zsh_complete", "COMP_WORDS": "tfm", "COMP_CWORD": "9" * 5000}, "$COMP_CWORD: found '999"),
    ],
)
def test_what_no_shell_asks(asked: dict[str, str], told: str) -> None:
    """Each was called a bug in tfm, or answered with silence."""
    done = run(env={"COMP_WORDS": None, "COMP_CWORD": None, **asked})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert done.stderr.startswith(f"tfm: {told}".encode())


@pytest.mark.parametrize(
    "asked",
    [
        {"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "tfm list 'a", "COMP_CWORD": "2"},
        {"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "", "COMP_CWORD": "7"},
        {"_TFM_COMPLETE": "bash_complete", "COMP_WORDS": "tfm generate -f \udcff", "COMP_CWORD": "3"},
        {"_TFM_COMPLETE": "fish_complete", "COMP_WORDS": "tfm generate ", "COMP_CWORD": " "},
        {"_TFM_COMPLETE": "fish_complete", "COMP_WORDS": "tfm list '", "COMP_CWORD": "'"},
    ],
)
def test_words_in_the_making(asked: dict[str, str]) -> None:
    """A quote that is still open, bytes that are no text: a Tab there finds perhaps nothing, and breaks nothing."""
    done = run(env=asked)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("asked", ["bash_source", "zsh_source", "fish_complete"])
def test_stdout_that_cannot_be_written(asked: str) -> None:
    """A full disk was a bug in tfm, and a closed stdout was success."""
    command = f"COMP_WORDS='tfm gen' COMP_CWORD=gen _TFM_COMPLETE={asked} tfm"
    done = shell(f"{command} > /dev/full")
    assert (done.returncode, done.stderr) == (1, b"tfm: stdout: No space left on device\n")
    done = shell(f"{command} >&-")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"tfm: stdout: found closed; ")
    assert shell(f"{command} | true; exit ${{PIPESTATUS[0]}}").stderr == b""
