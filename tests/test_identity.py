"""Digests of what an answer depends on: the same for a copy, another one for every change that can change a bit."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import checkpoints
import pytest
from parrot import write_parrot

from tfm.engine import identity, load, packed
from tfm.engine.identity import TEXT_FILES, kernels_digest, text_digest, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_parrot(tmp_path / "model", b"abc", chat=True)


def test_a_copy_is_the_same(folder: Path, tmp_path: Path) -> None:
    """Guards digests of paths and times."""
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy/model.safetensors", (1, 1))
    assert weights_digest(folder) == weights_digest(tmp_path / "copy")
    assert text_digest(folder) == text_digest(tmp_path / "copy")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_weights_digest_tells_a_byte(folder: Path, name: str) -> None:
    before = weights_digest(folder), text_digest(folder)
    data = bytearray((folder / name).read_bytes())
    data[-2] ^= 1 if name == "model.safetensors" else ord("}") ^ ord("0")
    (folder / name).write_bytes(data)
    assert weights_digest(folder) != before[0]
    assert text_digest(folder) == before[1]


def test_weights_digest_is_noted_with_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a digest that differs once packed weights are kept, or that is the old one when they are out of date."""
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed, "_root", lambda: tmp_path / "packed")
    folder = checkpoints.write_checkpoint(tmp_path / "model", checkpoints.LLAMA)
    before = weights_digest(folder)
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    load(folder, threads=1).close()
    assert packed.list_packed()
    assert weights_digest(folder) == before
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    changed = weights_digest(folder)
    assert changed != before
    load(folder, threads=1).close()
    assert weights_digest(folder) == changed


@pytest.mark.parametrize("name", TEXT_FILES)
def test_text_digest_tells_every_file(folder: Path, name: str) -> None:
    """Guards a batch that is resumed with another template or tokenizer: also one that appears, or goes."""
    before, weights = text_digest(folder), weights_digest(folder)
    path = folder / name
    path.write_bytes(path.read_bytes() + b" " if path.exists() else b"{}")
    changed = text_digest(folder)
    assert changed != before
    path.unlink()
    assert text_digest(folder) != changed
    assert weights_digest(folder) == weights


def test_key_of_a_row_tells_what_made_its_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows of tfm batch -o that are taken for this run's, though the model's folder has become another."""
    from tfm.cli.batch.rows import Defaults
    from tfm.cli.batch.run import Keys
    from tfm.cli.prompt import PromptOptions
    from tfm.engine.sampling_params import SamplingParams

    options = Defaults(PromptOptions(None, None, False, False, False), 8, (), None, SamplingParams(), False, None)
    keys = []
    changes = {
        "nothing": b"",
        "chat_template.jinja": b"{{ messages[0].content }}",
        "generation_config.json": b"{}",
        "tokenizer.json": (folder / "tokenizer.json").read_bytes() + b" ",
        "config.json": (folder / "config.json").read_bytes() + b" ",
        "model.safetensors": (folder / "model.safetensors").read_bytes()[:-1] + b"\1",
    }
    for name, data in changes.items():
        if data:
            (folder / name).write_bytes(data)
        with closing(load(folder, threads=1)) as model:
            keys.append(Keys(model, options).key(1, b"{}"))
            assert keys[-1] == Keys(model, options).key(1, b"{}")
    with closing(load(folder, threads=1)) as model:
        monkeypatch.setattr(identity, "kernels_digest", lambda: "of another CPU")
        keys.append(Keys(model, options).key(1, b"{}"))
    assert len(set(keys)) == len(changes) + 1


def test_kernels_digest_tells_the_cpu() -> None:
    """Guards keys and values of another CPU: the same in each process of this one, and no other's."""
    code = "from tfm.engine.identity import kernels_digest; print(kernels_digest())"

    def digest(**more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        return subprocess.check_output([sys.executable, "-c", code], env=environment | more, text=True).strip()

    own, generic = digest(), digest(NUMBA_CPU_NAME="generic")
    assert own != generic
    if not any(name.startswith("NUMBA_CPU") for name in os.environ):
        assert own == kernels_digest()
