"""Only regular files are opened as a part of a model: others are refused by name, at once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import run
from gguf_files import write_gguf

from tfm.engine.errors import TfmError
from tfm.engine.files import open_file, read_text_bytes
from tfm.engine.hub import resolve
from tfm.kernels import object_files

SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "a named pipe"),
    "folder": (os.mkdir, "a folder"),
    "/dev/zero": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "/dev/full": (lambda path: path.symlink_to("/dev/full"), "a device"),
}
FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_special_file_in_a_model(parrot: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A pipe was waited for and a device read without end, or until memory was full."""
    model = tmp_path / "model"
    shutil.copytree(parrot, model)
    (model / name).unlink(missing_ok=True)
    if name.endswith(".index.json"):
        (model / "model.safetensors").unlink()
    make, words = SPECIAL[kind]
    make(model / name)
    done = run("generate", "-m", model, "--no-stdin", "x")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert f"file {model / name}: found {words}; allowed: a regular file" in done.stderr.decode()


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_gguf(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    make, words = SPECIAL[kind]
    make(path)
    done = run("tokenize", "-m", path, "--no-stdin", "x", env={"TFM_CACHE": str(tmp_path / "cache")})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    if kind != "folder":  # that is a model's folder, with nothing in it
        assert f"file {path}: found {words}; allowed: a regular file" in done.stderr.decode()


def test_special_shard(tmp_path: Path, parrot: Path) -> None:
    """What an index names is opened like any other file."""
    model = tmp_path / "model"
    shutil.copytree(parrot, model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "shard.safetensors"}}')
    os.mkfifo(model / "shard.safetensors")
    done = run("show", model)
    assert b"shard.safetensors: found a named pipe" in done.stdout


def test_kept_kernel_that_is_no_file(tmp_path: Path) -> None:
    """A pipe where a compiled kernel was kept: it is compiled again."""
    os.mkfifo(tmp_path / "kernel.o")
    assert object_files.read_object(tmp_path / "kernel.o") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become someone else")
def test_file_that_may_not_be_read(parrot: Path, tmp_path: Path) -> None:
    """The remedy is a right, not another download."""
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0)
    if (child := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            open_file(path).close()
        except TfmError as error:
            os._exit(0 if "chmod" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become someone else")
def test_folder_that_may_not_be_entered(tmp_path: Path) -> None:
    """It was said that there is no such folder."""
    (tmp_path / "closed/model").mkdir(parents=True)
    (tmp_path / "closed").chmod(0)
    if (child := os.fork()) == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            resolve(tmp_path / "closed/model")
        except TfmError as error:
            os._exit(0 if "right to enter" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_length_is_bounded(tmp_path: Path) -> None:
    """A file of a terabyte, as long as it is empty, takes no place on the disk, and all memory when it is read."""
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TfmError, match="length: found more than 536870912 bytes"):
        read_text_bytes(path)


def test_link_to_a_file_will_do(tmp_path: Path) -> None:
    """The hub's cache is made of links."""
    (tmp_path / "link").symlink_to(write_gguf(tmp_path / "m.gguf"))
    open_file(tmp_path / "link").close()
