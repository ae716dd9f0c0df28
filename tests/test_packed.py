"""Packed weights in the cache: mapped by the next start, never those of another checkpoint, never in the way."""

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

from tfm.engine import TfmError, load, packed
from tfm.engine import model as model_module
from tfm.engine.image import Plan
from tfm.engine.summary import summarize
from tfm.kernels import packing
from tfm.kernels.jit import Entry
from tfm.kernels.new_file import PREFIX, sweep

CONFIG = checkpoints.FLOATS["llama-wide"]
IDS = checkpoints.random_ids(CONFIG, 20)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty place for images, in which tiny ones are kept too; kernels come from the usual cache."""
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed, "_root", lambda: tmp_path / "packed")


def write(folder: Path, seed: int = 0, dtype: str = "F32") -> Path:
    """A checkpoint that is old enough to be kept."""
    checkpoints.write_checkpoint(folder, CONFIG, dtype=dtype, seed=seed)
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    return folder


def test_layout_digest_covers_what_makes_an_image() -> None:
    """Guards a layout that changes while its name stays: weights that were packed before would be read wrongly."""
    engine = Path(packed.__file__).parent
    imported = set()
    for node in ast.walk(ast.parse((engine / "image.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfm."):
            imported.add(engine.parent.joinpath(*node.module.split(".")[1:]).with_suffix(".py"))
    entries = [value for value in vars(packing).values() if isinstance(value, Entry)]
    assert entries
    imported |= {engine.parent.joinpath(*entry.module.split(".")[1:]).with_suffix(".py") for entry in entries}
    assert imported - {engine / "progress.py"} <= set(packed.layout_sources())


def logits(folder: Path) -> bytes:
    model = load(folder, threads=1)
    try:
        return model.logits(IDS).tobytes()
    finally:
        model.close()


def images() -> list[Path]:
    return sorted(packed._root().glob("*.image"))


def test_the_next_start_maps_the_image(tmp_path: Path) -> None:
    """Guards a start that packs again: the weights lie in the kept file, and the checkpoint's are not even opened."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    (image,) = images()
    model = load(folder, threads=1)
    address, size = model.table.image.ctypes.data, len(model.table.image)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(line[-1] == str(image) and int(line[0].split("-")[0], 16) == address for line in maps)
    assert not any(line[-1].endswith(".safetensors") and str(folder) in line[-1] for line in maps)
    assert size == image.stat().st_size
    assert model.logits(IDS).tobytes() == expected
    model.close()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("how", ["replaced", "written", "linked"])
def test_a_checkpoint_that_changes_while_it_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_kept: bool
) -> None:
    """Guards against weights that are a mixture of two checkpoints: they ran without a word. A link changes nothing."""
    folder, other = write(tmp_path / "model"), write(tmp_path / "other", seed=1)
    expected = logits(write(tmp_path / "same"))
    monkeypatch.setattr(packed, "LEAST_BYTES", 0 if is_kept else 1 << 40)
    write_plan, weights = Plan.write, folder / "model.safetensors"

    def change_and_write(*arguments: Any) -> None:
        monkeypatch.setattr(Plan, "write", write_plan)
        if how == "replaced":
            os.replace(other / "model.safetensors", weights)
        elif how == "written":
            weights.write_bytes((other / "model.safetensors").read_bytes())
        else:
            os.link(weights, tmp_path / "link")
        write_plan(*arguments)

    monkeypatch.setattr(Plan, "write", change_and_write)
    shutil.rmtree(packed._root(), ignore_errors=True)
    if how == "linked":
        assert logits(folder) == expected
        return
    with pytest.raises(TfmError, match=r"model/model\.safetensors: changed while it was read; another program"):
        load(folder, threads=1)
    assert images() == []
    assert logits(folder) != expected


def test_a_checkpoint_that_is_replaced_before_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the moment between a header, which says where tensors lie, and the file that they are then read from."""
    folder, other = write(tmp_path / "model"), write(tmp_path / "other", seed=1)
    files_of = packed._files_of

    def replace_and_look(checkpoint: Any) -> Any:
        os.replace(other / "model.safetensors", folder / "model.safetensors")
        return files_of(checkpoint)

    monkeypatch.setattr(packed, "_files_of", replace_and_look)
    with pytest.raises(TfmError, match="changed while it was read"):
        load(folder, threads=1)


def test_a_start_compiles_only_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a start with packed weights, but without what packs them (after an update): it began to compile that, and
    threw it away, each time."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    monkeypatch.setattr(packing.PACK, "digest", "of a newer version")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert logits(folder) == expected


def test_summary_tells_what_packed_weights_take(tmp_path: Path) -> None:
    """Guards `tfm show` of bf16: it said a third too much after the weights had been packed in 12 bits."""
    folder = write(tmp_path / "model", dtype="BF16")
    before = summarize(folder).memory
    logits(folder)
    (image,) = images()
    after = summarize(folder).memory
    assert before is not None
    assert after is not None
    assert after.weights_bytes == image.stat().st_size < before.weights_bytes


def test_a_long_run_takes_the_weights_into_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the change from the mapped file to a copy within a text: no bit changes, and nothing stays mapped."""
    monkeypatch.setattr(model_module, "STEPS_TO_STAY", 16)
    folder = write(tmp_path / "model")
    model = load(folder, threads=2)
    expected = model.logits(IDS)  # packed now
    with model.sequence() as sequence:
        for id_, row in zip(IDS, expected, strict=True):
            assert model.step([(sequence, [id_])]).tobytes() == row.tobytes()
    moved = str(images()[0]) not in Path("/proc/self/maps").read_text()
    assert moved == packed._has_large_pages()
    assert model.logits(IDS).tobytes() == expected.tobytes()
    model.close()


def test_a_checkpoint_changed_in_place_is_noticed(tmp_path: Path) -> None:
    """Guards old weights after an edit that keeps size and time of modification, as copying tools can leave it."""
    folder, other = write(tmp_path / "model"), write(tmp_path / "other", seed=1)
    before = logits(folder)
    weights = folder / "model.safetensors"
    times = weights.stat().st_atime_ns, weights.stat().st_mtime_ns
    with weights.open("r+b") as file:
        file.write((other / "model.safetensors").read_bytes())
    os.utime(weights, ns=times)
    assert logits(folder) == logits(other) != before
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    assert logits(folder) != before
    assert len(images()) == 1, "nobody has the old weights any more, and no command would remove them"


def test_packed_weights_of_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Guards files that no command lists or removes: their note went, and they stayed."""
    gone, other = write(tmp_path / "gone"), write(tmp_path / "other", seed=1)
    logits(gone)
    (old,) = images()
    shutil.rmtree(gone)
    logits(other)
    assert len(images()) == 1
    assert not old.exists()


def test_a_changed_config_is_noticed(tmp_path: Path) -> None:
    """Guards an image whose layer table holds what config.json used to say."""
    folder = write(tmp_path / "model")
    before = logits(folder)
    text = (folder / "config.json").read_text()
    assert '"rms_norm_eps": 1e-05' in text
    (folder / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-01'))
    assert logits(folder) != before


def test_a_file_that_was_just_written_is_not_trusted(tmp_path: Path) -> None:
    """Guards an image of a file that is written again within the same tick of the file system's clock."""
    folder = tmp_path / "model"
    checkpoints.write_checkpoint(folder, CONFIG, dtype="F32")
    files = packed._files(folder, ())
    with packed._new_file(64) as file:
        assert file is not None
        packed._keep(file, folder, files, "content")
    assert not images()


def test_copies_share_one_image(tmp_path: Path) -> None:
    """Guards images by path: the same checkpoint in two folders takes the disk's space and memory once."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    shutil.copytree(folder, tmp_path / "copy")
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    assert logits(tmp_path / "copy") == expected
    assert len(images()) == 1
    assert [model.folder.name for model in packed.list_packed()] == ["copy", "model"]


@pytest.mark.parametrize("damage", ["emptied", "halved", "no header", "other records", "a folder", "a pipe"])
def test_a_damaged_image_is_made_again(damage: str, tmp_path: Path) -> None:
    """Guards a crash, or wrong weights, after a full disk or a stray hand in the cache folder."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    (image,) = images()
    content = image.read_bytes()
    image.unlink()
    if damage == "a folder":
        image.mkdir()
    elif damage == "a pipe":
        os.mkfifo(image)
    else:
        half, headless = content[: len(content) // 2], bytes(256) + content[256:]
        other = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
        image.write_bytes({"emptied": b"", "halved": half, "no header": headless, "other records": other}[damage])
    assert logits(folder) == expected
    if damage != "a folder":
        assert image.read_bytes() == content


@pytest.mark.parametrize("damage", ["", "[]", '{"files": 3}', '{"files": [[]], "content": 1}', '{"files": null}'])
def test_a_damaged_note_is_made_again(damage: str, tmp_path: Path) -> None:
    """Guards a crash on what stands beside the images."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    (note,) = packed._root().glob("*.json")
    note.write_text(damage)
    assert logits(folder) == expected
    assert packed.find_image(folder) is not None


def test_pipes_in_the_place_of_notes_and_new_files(tmp_path: Path) -> None:
    """Guards a start that waits for ever for somebody to write into a pipe."""
    folder = write(tmp_path / "model")
    expected = logits(folder)
    (note,) = packed._root().glob("*.json")
    note.unlink()
    os.mkfifo(note)
    os.mkfifo(packed._root() / f"{PREFIX}pipe")
    assert logits(folder) == expected


def test_an_image_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cache on a read-only file system, or of another user, that is packed again at every start."""

    def refuse(*arguments: object) -> None:
        raise PermissionError("not yours")

    folder = write(tmp_path / "model")
    logits(folder)
    monkeypatch.setattr(os, "utime", refuse)
    assert packed.find_image(folder) is not None


def test_without_a_folder_that_can_be_written(tmp_path: Path) -> None:
    """Guards a refusal where the cache cannot be used."""
    folder = write(tmp_path / "model")
    packed._root().write_text("a file")
    assert len(logits(folder)) == 4 * len(IDS) * CONFIG["vocab_size"]


def test_images_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a cache that grows for ever: the one used longest ago goes, and what is too large is not kept at all."""
    folders = [write(tmp_path / f"model-{seed}", seed) for seed in range(3)]
    logits(folders[0])
    size = images()[0].stat().st_size
    monkeypatch.setattr(packed, "_room", lambda root: 2 * size)
    for used in (1, 0, 2):
        time.sleep(0.02)  # a file system's clock goes in steps of some milliseconds
        logits(folders[used])
    kept = [model.folder.name for model in packed.list_packed()]
    assert kept == ["model-0", "model-2"]
    monkeypatch.setattr(packed, "_room", lambda root: size - 1)
    assert len(logits(write(tmp_path / "model-3", 3))) > 0
    assert [model.folder.name for model in packed.list_packed()] == kept


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Guards half-made files that stay for ever, and the removal of one that a living process makes."""
    root = packed._root()
    root.mkdir()
    code = (
        "import sys, time; from pathlib import Path; from tfm.engine import packed;"
        "packed.LEAST_BYTES = 0; packed._root = lambda: Path(sys.argv[1])\n"
        "with packed._new_file(4096): print(flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    sweep(root)
    assert len(list(root.glob(f"{PREFIX}*"))) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    sweep(root)
    assert not list(root.glob(f"{PREFIX}*"))


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Guards a race of two first starts: both answer the same, and one image remains."""
    folder = write(tmp_path / "model")
    code = (
        "import sys; from pathlib import Path; from tfm.engine import load, packed;"
        "packed.LEAST_BYTES = 0; packed._root = lambda: Path(sys.argv[2]);"
        "sys.stdout.buffer.write(load(sys.argv[1], threads=1).logits([1, 2, 3]).tobytes())"
    )
    command = [sys.executable, "-c", code, str(folder), str(packed._root())]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert np.isfinite(np.frombuffer(outputs.pop(), np.float32)).all()
    assert len(images()) == 1
    assert not list(packed._root().glob(f"{PREFIX}*"))
