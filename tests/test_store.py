"""What is on the disk is listed under the names that -m takes, and removed without touching anything else."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import FLOATS, write_checkpoint
from gguf_files import write_gguf
from huggingface_hub import constants

from tfm.engine import load, manifest, packed
from tfm.engine.config import read_config
from tfm.engine.errors import TfmError
from tfm.engine.gguf_import import import_gguf
from tfm.engine.hub import resolve
from tfm.engine.store import StoredModel, building, list_models, remove_model
from tfm.kernels.cache_folder import cache_folder

COMMITS = {"main": "1" * 40, "v2": "2" * 40, "": "3" * 40}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of tfm and of the hub."""
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add_to_hub_cache(hub: Path, repo: str, commit: str, branch: str, files: dict[str, bytes]) -> Path:
    """One revision laid out as the hub's library does: blobs, links to them, and the branch's commit."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = folder / "blobs" / f"{commit[:1]}{name}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    if branch:
        (folder / "refs" / branch).write_text(commit)
    return snapshot


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """The files of a tiny llama."""
    import_gguf(write_gguf(tmp_path / "tiny.gguf", kind="F32"), tmp_path / "tiny")
    return {path.name: path.read_bytes() for path in (tmp_path / "tiny").iterdir()}


def test_empty_caches(tmp_path: Path) -> None:
    """Nothing there, not even the folders: nothing listed, and nothing made."""
    assert list_models() == []
    assert not (tmp_path / "cache").exists()
    with pytest.raises(TfmError, match="model some/thing: found not in the cache; allowed: nothing"):
        remove_model("some/thing")


def test_imported_gguf(tmp_path: Path) -> None:
    """It goes by the path it was imported from; removing the import leaves the file."""
    path = write_gguf(tmp_path / "m.gguf")
    folder = resolve("m.gguf")
    (model,) = list_models()
    assert model == StoredModel(str(path), "gguf", folder, model.size_bytes)
    assert model.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert remove_model("m.gguf") == model.size_bytes
    assert list_models() == []
    assert path.is_file()
    assert [entry for entry in (cache_folder() / "models").iterdir() if entry.is_dir()] == []
    assert resolve("m.gguf") == folder


def test_gguf_file_that_is_gone(tmp_path: Path) -> None:
    """A file that was renamed left an import under its old name that looked like any other."""
    path = write_gguf(tmp_path / "m.gguf")
    resolve("m.gguf")
    path.rename(tmp_path / "n.gguf")
    (model,) = list_models()
    assert (model.ref, model.fault) == (str(path), "its file is gone")
    assert remove_model(str(path)) == model.size_bytes


def test_damaged_import_of_a_gguf_file(tmp_path: Path) -> None:
    """It is listed without config.json, made anew when it is used, and can be removed as it is."""
    write_gguf(tmp_path / "m.gguf")
    folder = resolve("m.gguf")
    (folder / "config.json").unlink()
    (model,) = list_models()
    assert (model.folder, model.fault) == (folder, "to be made anew: config.json is not there")
    with pytest.warns(UserWarning, match="made anew"):
        assert resolve("m.gguf") == folder
    assert (folder / "config.json").is_file()
    (folder / "config.json").unlink()
    remove_model("m.gguf")
    assert list_models() == []


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_damage_that_only_shows_when_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a large file only the size is looked at before: then the error says how to get it anew, and pull does it."""
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
    write_gguf(tmp_path / "m.gguf", kind="F32")
    file = resolve("m.gguf") / name
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * 12 + whole[12:])
    with pytest.raises(TfmError, match=r"the cache is damaged: tfm pull .*m\.gguf makes it anew"):
        load(tmp_path / "m.gguf")
    with pytest.warns(UserWarning, match=f"{name} has changed"):
        resolve("m.gguf", refresh=True, keep=True)
    assert file.read_bytes() == whole


def test_hub_models(tmp_path: Path, checkpoint: dict[str, bytes]) -> None:
    """The main branch goes by the bare name, others by branch or commit; what tfm cannot load is left out."""
    hub = tmp_path / "hub"
    snapshots = {
        branch: add_to_hub_cache(hub, "org/tiny", commit, branch, checkpoint | {"note": branch.encode()})
        for branch, commit in COMMITS.items()
    }
    add_to_hub_cache(hub, "org/bert", "4" * 40, "main", checkpoint | {"config.json": b'{"model_type": "bert"}'})
    no_weights = {name: content for name, content in checkpoint.items() if not name.endswith(".safetensors")}
    add_to_hub_cache(hub, "org/pickle", "5" * 40, "main", no_weights)
    found = {model.ref: model for model in list_models()}
    assert set(found) == {"org/tiny", "org/tiny@v2", f"org/tiny@{COMMITS['']}"}
    assert found["org/tiny"].folder.samefile(snapshots["main"])
    assert found["org/tiny@v2"].kind == "hub"
    assert found["org/tiny@v2"].size_bytes > len(checkpoint["model.safetensors"])
    for ref in ("org/tiny", "org/tiny@v2"):
        assert resolve(ref, offline=True).samefile(found[ref].folder)


def test_removing_a_hub_revision_leaves_the_others(tmp_path: Path, checkpoint: dict[str, bytes]) -> None:
    for branch, commit in COMMITS.items():
        add_to_hub_cache(tmp_path / "hub", "org/tiny", commit, branch, checkpoint)
    freed = remove_model("org/tiny@v2")
    assert freed >= len(checkpoint["model.safetensors"])
    assert {model.ref for model in list_models()} == {"org/tiny", f"org/tiny@{COMMITS['']}"}
    remove_model("org/tiny")
    assert {model.ref for model in list_models()} == {f"org/tiny@{COMMITS['']}"}


def test_a_folder_of_the_user_is_never_removed(tmp_path: Path, checkpoint: dict[str, bytes]) -> None:
    with pytest.raises(TfmError, match="not in the cache"):
        remove_model(str(tmp_path / "tiny"))
    assert (tmp_path / "tiny/model.safetensors").is_file()


def pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Keep the packed weights of a tiny model; gives their size."""
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    return len(packed.make_image(folder, read_config(folder), 1, lambda size: None, None))


def images() -> list[Path]:
    return list((cache_folder() / "packed").glob("*.image"))


def test_packed_weights_go_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed, larger than the model itself, and were listed nowhere."""
    path = write_gguf(tmp_path / "m.gguf", kind="F32")
    nbytes = pack(resolve("m.gguf"), monkeypatch)
    (model,) = list_models()
    assert (model.kind, model.packed_bytes) == ("gguf", nbytes)
    assert len(images()) == 1
    assert remove_model(str(path)) == model.size_bytes + nbytes
    assert list_models() == []
    assert images() == []


def test_packed_weights_go_with_an_older_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file that is written anew left the packed weights of its former content, under a folder that is gone."""
    write_gguf(tmp_path / "m.gguf", kind="F32")
    pack(resolve("m.gguf"), monkeypatch)
    write_gguf(tmp_path / "m.gguf", kind="F16")
    resolve("m.gguf")
    (model,) = list_models()
    assert (model.kind, model.packed_bytes) == ("gguf", 0)
    assert images() == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_packed_weights_of_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool) -> None:
    """They are listed by the folder and can be removed by it, also when it is there no more; the folder stays."""
    folder = write_checkpoint(tmp_path / "mine", FLOATS["llama-wide"], dtype="F32")
    nbytes = pack(folder, monkeypatch)
    files = sorted(folder.iterdir())
    if is_gone:
        shutil.rmtree(folder)
    (model,) = list_models()
    fault = "its folder is gone" if is_gone else None
    assert model == StoredModel(str(folder.resolve()), "packed", folder.resolve(), 0, fault, nbytes)
    assert remove_model("mine") == nbytes
    assert (list_models(), images()) == ([], [])
    assert is_gone or sorted(folder.iterdir()) == files


def test_packed_weights_that_a_copy_shares_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of two folders was removed with the first; it goes with the last."""
    write_checkpoint(tmp_path / "one", FLOATS["llama-wide"], dtype="F32")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        nbytes = pack(tmp_path / name, monkeypatch)
    assert remove_model("one") == 0
    assert [model.folder.name for model in list_models()] == ["two"]
    assert len(images()) == 1
    assert remove_model("two") == nbytes
    assert images() == []


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"content": 3}', '{"content": "x"}', '{"folder": 3}'])
def test_damaged_note_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """It must not keep anything else from being listed and removed."""
    folder = write_checkpoint(tmp_path / "mine", FLOATS["llama-wide"], dtype="F32")
    pack(folder, monkeypatch)
    (note,) = (cache_folder() / "packed").glob("*.json")
    note.write_text(damage)
    write_gguf(tmp_path / "m.gguf")
    resolve("m.gguf")
    (model,) = list_models()
    assert remove_model("m.gguf") == model.size_bytes
    with pytest.raises(TfmError, match="not in the cache"):
        remove_model("mine")


def test_building_fails_without_traces() -> None:
    """An error in the middle leaves no folder under either name, and the next try starts anew."""

    def build() -> None:
        with building("x") as staging:
            assert staging is not None
            (staging / "model").mkdir()
            raise ValueError("broken")

    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            build()
        assert [entry for entry in (cache_folder() / "models").iterdir() if entry.is_dir()] == []


def test_what_is_being_built_is_not_swept_nor_listed() -> None:
    """Another model's making must not remove the half-made folder of a process that is alive."""
    with building("x") as staging:
        assert staging is not None
        (staging / "model").mkdir()
        with building("y") as other:
            assert other is not None
            (other / "model").mkdir()
        assert staging.is_dir()
        assert list_models() == []
    assert (cache_folder() / "models/x").is_dir()
