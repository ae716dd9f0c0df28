"""What people call models becomes a folder: paths, .gguf files, names on the hub, and names that are none of these."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import write_gguf
from hub_server import REPO, HubServer, commit_of
from huggingface_hub import constants

from tfm.engine import load
from tfm.engine.errors import TfmError
from tfm.engine.hub import resolve
from tfm.engine.store import remove_run_folder

SMALL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"eos_token": "a"}',
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": 0}',
}
UNWANTED = {
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle" * 100,
    "consolidated.safetensors": b"the same weights again" * 100,
    "original/model.safetensors": b"and again" * 100,
}
SHARDS = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 50_000 for number in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}
SINGLE_REPO = SMALL | UNWANTED | {"model.safetensors": b"weights" * 20_000}
SHARDED_REPO = SMALL | UNWANTED | INDEX | SHARDS


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with one repository, and an empty cache. The library reads its environment once: its constants are set."""
    server = HubServer(dict(SINGLE_REPO))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_single_file_repository(hub: HubServer) -> None:
    """Only what is needed is fetched: other formats of the same weights would double the download."""
    folder = resolve(REPO)
    assert files_in(folder) == {*SMALL, "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == SINGLE_REPO["model.safetensors"]
    assert folder.name == commit_of(SINGLE_REPO)


def test_sharded_repository(hub: HubServer) -> None:
    hub.branches["main"] = SHARDED_REPO
    folder = resolve(REPO)
    assert files_in(folder) == {*SMALL, *INDEX, *SHARDS}
    for name, content in SHARDS.items():
        assert (folder / name).read_bytes() == content


def test_progress_counts_bytes(hub: HubServer, capfd: pytest.CaptureFixture[str]) -> None:
    """The hub's own bars stay off the screen; what they would show reaches the callback."""
    seen: list[tuple[str, int, int | None]] = []
    resolve(REPO, lambda *step: seen.append(step))
    size = len(SINGLE_REPO["model.safetensors"])
    assert (f"downloading {REPO}", size, size) in seen
    assert capfd.readouterr() == ("", "")


def test_cache_is_used_without_asking(hub: HubServer) -> None:
    """A model that is there starts without the network; only refresh looks for a newer one."""
    old = resolve(REPO)
    hub.branches["main"] = SINGLE_REPO | {"model.safetensors": b"newer"}
    asked = len(hub.requests)
    assert resolve(REPO) == old
    assert len(hub.requests) == asked
    new = resolve(REPO, refresh=True)
    assert new != old
    assert (new / "model.safetensors").read_bytes() == b"newer"
    assert resolve(REPO) == new


@pytest.mark.parametrize("repo", [SINGLE_REPO, SHARDED_REPO], ids=["one file", "shards"])
@pytest.mark.parametrize("damage", ["emptied", "halved", "changed"])
def test_damaged_files_are_fetched_again(hub: HubServer, repo: dict[str, bytes], damage: str) -> None:
    """What is in the hub's cache was taken for whole: a disk that was full left a model that no pull mended."""
    hub.branches["main"] = repo
    folder = resolve(REPO)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == len(files_in(folder)) >= len(SMALL) + 1
    for name in names:
        kept = {"emptied": b"", "halved": repo[name][: len(repo[name]) // 2], "changed": repo[name][:-1] + b"?"}
        (folder / name).write_bytes(kept[damage])
    asked = len(hub.downloads())
    assert resolve(REPO, refresh=True) == folder
    assert {name: (folder / name).read_bytes() for name in names} == {name: repo[name] for name in names}
    assert sorted(hub.downloads()[asked:]) == names
    resolve(REPO, refresh=True)
    assert len(hub.downloads()) == asked + len(names), "what is whole is not fetched again"


def test_damage_in_the_cache_is_told_with_its_remedy(hub: HubServer) -> None:
    """Who read "download the file again" did so, and found the same file."""
    folder = resolve(REPO)
    with pytest.raises(TfmError, match="field hidden_size: found nothing") as caught:
        load(REPO)
    assert "tfm pull" not in str(caught.value), "the model's authors wrote it so"
    (folder / "config.json").write_bytes(b"")
    with pytest.raises(TfmError, match=rf"not JSON.*the hub's cache is damaged: tfm pull {REPO} mends it"):
        load(REPO)
    commit = commit_of(SINGLE_REPO)
    (folder.parent.parent / "refs" / "main").write_text("0" * 40)
    with pytest.raises(TfmError, match=rf"tfm pull {REPO}@{commit} mends it"):
        load(f"{REPO}@{commit}")


def test_revision(hub: HubServer) -> None:
    """A branch, and a commit by its hash."""
    branch = SINGLE_REPO | {"model.safetensors": b"of the branch"}
    hub.branches["v1.0"] = branch
    for name in ("v1.0", commit_of(branch)):
        folder = resolve(f"{REPO}@{name}")
        assert (folder / "model.safetensors").read_bytes() == b"of the branch"
    assert (resolve(REPO) / "model.safetensors").read_bytes() == SINGLE_REPO["model.safetensors"]


def test_unknown_revision(hub: HubServer) -> None:
    with pytest.raises(TfmError, match=r"model tiny/model@v9: revision: found 'v9'"):
        resolve(f"{REPO}@v9")


def test_broken_connection_is_resumed(hub: HubServer) -> None:
    """A connection that ends half-way goes on where it stopped."""
    hub.branches["main"] = SHARDED_REPO
    hub.break_once = set(SHARDS)
    folder = resolve(REPO)
    for name, content in SHARDS.items():
        assert (folder / name).read_bytes() == content


def test_interrupted_download_goes_on(hub: HubServer) -> None:
    """After Ctrl-C the half-made snapshot is not taken for a model, and files that are there are not fetched again."""
    hub.branches["main"] = SHARDED_REPO
    whole, half = SHARDS
    hub.held = {half}

    calls: list[int] = []

    def interrupt(label: str, done: int, total: int | None) -> None:
        calls.append(done)
        if calls.count(50_000) == 2:  # the whole one has had time to get its name
            threading.Timer(0.2, hub.go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(REPO, interrupt)
    with pytest.raises(TfmError, match="not in the hub's cache"):
        resolve(REPO, offline=True)
    folder = resolve(REPO)
    assert files_in(folder) == {*SMALL, *INDEX, *SHARDS}
    downloads = hub.downloads()
    assert {name: downloads.count(name) for name in [*SMALL, whole]} == dict.fromkeys([*SMALL, whole], 1)
    assert downloads.count(half) == 2


def test_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache: the model. Without: one line, and no request at all."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TfmError, match="not in the hub's cache, and offline was asked for"):
        resolve(REPO)
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = resolve(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert resolve(REPO) == folder
    assert resolve(REPO, offline=True, refresh=True) == folder


def test_no_such_repository(hub: HubServer) -> None:
    with pytest.raises(TfmError, match=r"model tiny/other: found no such folder, and no such repository .*allowed: "):
        resolve("tiny/other")


def test_gated_repository(hub: HubServer) -> None:
    hub.gated = True
    with pytest.raises(TfmError, match=r"gated repository; accept its terms .* HF_TOKEN"):
        resolve(REPO)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_file(hub: HubServer, missing: str) -> None:
    """A repository of another format is refused by what it lacks, not by what fails to load later."""
    hub.branches["main"] = {name: content for name, content in SINGLE_REPO.items() if name != missing}
    with pytest.raises(TfmError, match=f"model tiny/model: {missing}: found not in the repository"):
        resolve(REPO)


def test_missing_shard(hub: HubServer) -> None:
    gone = "model-00002-of-00002.safetensors"
    hub.branches["main"] = {name: content for name, content in SHARDED_REPO.items() if name != gone}
    with pytest.raises(TfmError, match=f"model tiny/model: {gone}: found not in the repository"):
        resolve(REPO)


def test_unreachable_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TfmError, match=r"model tiny/model: download failed: .*check the network"):
        resolve(REPO)


def test_environment_is_honoured(hub: HubServer, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME and HF_TOKEN, as the library reads them when it starts."""
    hub.token = "hf_secret"
    code = f"from tfm.engine.hub import resolve; print(resolve({REPO!r}))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home/hub")
    refused = subprocess.run(
        command,
        env=environment | {"HF_TOKEN": "hf_wrong", "HF_HOME": str(tmp_path / "other")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "for a private repository set HF_TOKEN" in refused.stderr


# ---- paths and names ----


def test_a_path_that_exists_wins(hub: HubServer, tmp_path: Path) -> None:
    """A folder called like a repository is the user's own copy of it."""
    for name in (REPO, "smollm2-135m"):
        (tmp_path / name).mkdir(parents=True)
        assert resolve(name).samefile(tmp_path / name)
    assert hub.requests == []


@pytest.mark.parametrize(
    "ref", ["gpt2", "./missing", "~/missing", "a/b/c", "a/b.gguf", "", "/missing", "a/b@", "a b/c"]
)
def test_names_of_no_known_form(hub: HubServer, ref: str) -> None:
    """The error says the forms, and nothing is asked of the hub for what can be no name there."""
    with pytest.raises(TfmError, match=r"no such folder or file; allowed: a folder, a \.gguf file, org/name"):
        resolve(ref)
    assert hub.requests == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TfmError, match=r"found a file; allowed: .*give the folder"):
        resolve(tmp_path / "model.safetensors")


def test_gguf_file_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused where the cache cannot be written; what is made for one run leaves other files alone."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "file"))
    gguf = write_gguf(tmp_path / "m.gguf")
    with pytest.warns(UserWarning, match="cannot be written: .*not kept; set TFM_CACHE"):
        folder = resolve(gguf)
    assert (folder / "config.json").is_file()
    assert resolve(gguf) == folder
    with pytest.raises(TfmError, match="cannot be written"):
        resolve(gguf, keep=True)
    remove_run_folder()
    assert not folder.exists()
    assert (resolve(gguf) / "config.json").is_file()


def test_gguf_file_is_imported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again only when the file has changed, and then the old import goes; files of one name in two folders differ."""
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    first = write_gguf(tmp_path / "m.gguf", seed=1)
    second = write_gguf(tmp_path / "other/m.gguf", seed=2)
    folder = resolve(str(first))
    made_ns = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(first) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_ns
    other = resolve(second)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    write_gguf(first, seed=3)
    os.utime(first, ns=(1, 1))
    changed = resolve(first)
    assert changed != folder
    assert (changed / "config.json").is_file()
    assert not folder.exists()
    assert other.exists()
