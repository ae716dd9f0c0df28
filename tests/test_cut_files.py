"""Weights that another program cuts short while tfm reads them: one line that names the file, no SIGBUS."""

import os
import re
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
from cli_process import environment, run
from gguf_files import write_gguf
from parrot import write_parrot

from tfm.engine.checkpoint import Checkpoint
from tfm.engine.config import read_config
from tfm.engine.errors import TfmError
from tfm.engine.gguf_file import GgufFile
from tfm.engine.image import Plan
from tfm.engine.weights import load_weights
from tfm.kernels.packing import aligned_empty

TINY = checkpoints.FLOATS["llama-wide"]


@pytest.mark.parametrize("size", [0, 5000, -1])
def test_cut_between_opening_and_packing(tmp_path: Path, size: int) -> None:
    """The file was mapped, and reading behind its new end killed the process."""
    folder = checkpoints.write_checkpoint(tmp_path / "model", TINY)
    config, file = read_config(folder), folder / "model.safetensors"
    plan = Plan(config, load_weights(Checkpoint(folder), config))
    os.truncate(file, file.stat().st_size - 1 if size < 0 else size)
    with pytest.raises(TfmError) as caught:
        plan.write(aligned_empty(plan.size), 2)
    told = re.fullmatch(
        rf"file {file}: cut short in tensor \S+: found (\d+) bytes; allowed: (\d+) at least; .*", str(caught.value)
    )
    assert told is not None
    assert int(told[1]) == file.stat().st_size < int(told[2])


def test_folder_that_is_gone(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(tmp_path / "model", TINY)
    config = read_config(folder)
    plan = Plan(config, load_weights(Checkpoint(folder), config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(TfmError, match=r"model\.safetensors: found nothing there"):
        plan.write(aligned_empty(plan.size), 2)


CUT_AT_PACKING = """
import os, sys
from tfm.engine import image
from tfm.cli.main import main

write = image.Plan.write
def cut_and_write(*arguments):
    os.truncate(sys.argv[-1] + "/model.safetensors", 100_000)
    write(*arguments)
image.Plan.write = cut_and_write
main()
"""


def test_what_a_person_sees(parrot: Path, tmp_path: Path) -> None:
    """tfm ended with "Bus error" and no word of its own; here the other program is at work at a known moment."""
    folder = write_parrot(tmp_path / "model", b"abc")
    command = [sys.executable, "-c", CUT_AT_PACKING, "generate", "--no-stdin", "--raw", "x", "-m", folder]
    done = subprocess.run(command, capture_output=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"tfm: file {folder}/model.safetensors: cut short in tensor ")
    assert ": found 100000 bytes; allowed: " in line
    assert line.endswith("run again; or download the file again")


def test_gguf_cut_while_it_is_imported(tmp_path: Path) -> None:
    """The same for a .gguf file: its header and its tensors were mapped."""
    path = write_gguf(tmp_path / "m.gguf")
    file = GgufFile(path)
    tensor = max(file.tensors.values(), key=lambda tensor: tensor.data_offset)
    end = tensor.data_offset + int(tensor.n_bytes)
    os.truncate(path, end - 1)
    found = rf"cut short in tensor {re.escape(tensor.name)}: found {end - 1} bytes; allowed: {end} at least"
    with pytest.raises(TfmError, match=found):
        file.data(tensor.name)
    os.truncate(path, 0)
    assert file.sequence("tokenizer.ggml.tokens")  # the header is a copy
    for name in file.tensors:
        with pytest.raises(TfmError, match="found 0 bytes"):
            file.data(name)


def test_gguf_that_ends_in_its_tensors(tmp_path: Path) -> None:
    """One that was cut short before: as always, and nothing of the copy of its header is told of."""
    path = write_gguf(tmp_path / "m.gguf")
    os.truncate(path, path.stat().st_size - 100)
    done = run("pull", path, env={"TFM_CACHE": str(tmp_path / "cache")})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert done.stderr.startswith(f"tfm: {path}: not readable as GGUF".encode())
