"""tfm pull, list, show and rm, against a small hub on this machine and caches of their own."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import GPT2, GROUPED, LLAMA, PLAINS, write_checkpoint
from cli_process import TFM, TIMEOUT_S, environment, read_terminal, run
from gguf_files import write_gguf
from hub_server import REPO, HubServer, commit_of
from parrot import CONFIG, write_parrot

from tfm.cli.units import size
from tfm.engine import packed
from tfm.engine.config import read_config

Env = dict[str, str | None]


@pytest.fixture
def hub(parrot: Path) -> Iterator[HubServer]:
    """A hub that serves the parrot."""
    server = HubServer({path.name: path.read_bytes() for path in parrot.iterdir()})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def env(hub: HubServer, tmp_path: Path) -> Env:
    """The environment of a person with that hub, and with an empty hub cache."""
    return {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_CACHE": None, "HF_HUB_OFFLINE": None,
        "HF_TOKEN": None, "NO_PROXY": "127.0.0.1",
    }  # fmt: skip


def test_pull_then_run_without_the_hub(hub: HubServer, env: Env, parrot: Path) -> None:
    """The folder is on stdout, alone; what was pulled needs no hub afterwards."""
    done = run("pull", "-q", REPO, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    folder = Path(done.stdout.decode().removesuffix("\n"))
    assert (folder / "model.safetensors").read_bytes() == (parrot / "model.safetensors").read_bytes()
    hub.requests.clear()
    for offline in ("1", None):
        done = run("generate", "--raw", "-m", REPO, "\n", env=env | {"HF_HUB_OFFLINE": offline})
        assert (done.returncode, done.stdout.decode()) == (0, "Hi é🙂!")
    assert hub.requests == []


def test_generate_fetches_by_itself(hub: HubServer, env: Env, tmp_path: Path) -> None:
    """A name on the hub is as good as a folder, also with a revision."""
    other = write_parrot(tmp_path / "other", b"xyz")
    hub.branches["v2"] = {path.name: path.read_bytes() for path in other.iterdir()}
    assert run("generate", "--raw", "-m", REPO, "\n", env=env).stdout.decode() == "Hi é🙂!"
    assert run("generate", "--raw", "-m", f"{REPO}@v2", "\n", env=env).stdout == b"xyz"
    commit = commit_of(hub.branches["v2"])
    assert run("generate", "--raw", "-m", f"{REPO}@{commit}", "\n", env=env).stdout == b"xyz"


def test_token_is_honoured(hub: HubServer, env: Env) -> None:
    hub.token = "hf_secret"
    refused = run("pull", REPO, env=env)
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (1, b"", 1)
    assert b"HF_TOKEN" in refused.stderr
    assert run("pull", REPO, env=env | {"HF_TOKEN": "hf_secret"}).returncode == 0


@pytest.mark.parametrize(
    ("ref", "word"),
    [
        (f"{REPO}@nothing", "'nothing'"),
        ("no/body", "no such repository"),
        ("nobody", "allowed: a folder"),
        ("nobody", "org/name"),
    ],
)
def test_pull_what_is_not_there(env: Env, ref: str, word: str) -> None:
    done = run("pull", ref, env=env)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert word in done.stderr.decode()


def test_pull_what_cannot_be_run(hub: HubServer, env: Env) -> None:
    """That it will not run is told at once and not at the first use; it ended as if all were well. It stays there."""
    hub.branches["main"]["config.json"] = b'{"model_type": "bert"}'
    done = run("pull", "-q", REPO, env=env)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
    assert b"it is here (" in done.stderr
    assert b"tfm cannot run it: " in done.stderr
    hub.requests.clear()
    assert run("show", REPO, env=env | {"HF_HUB_OFFLINE": "1"}).returncode == 0
    assert b"bert" in done.stderr
    assert b"llama" in done.stderr


def test_pull_names_rm_where_it_helps(hub: HubServer, env: Env, tmp_path: Path) -> None:
    """`tfm pull` of a folder of the user's own, or of what rm does not list, ended with: tfm rm takes it away."""
    own = run("pull", tmp_path, env=env)
    assert (own.returncode, own.stdout, len(own.stderr.splitlines())) == (1, b"", 1)
    assert own.stderr.startswith(f"tfm: model {tmp_path}: tfm cannot run it: model folder {tmp_path}: ".encode())
    assert b"tfm rm" not in own.stderr
    hub.branches["main"]["tokenizer.json"] = b"{}"
    assert run("pull", "-q", REPO, env=env).stderr.endswith(b"; tfm rm takes it away\n")
    assert run("rm", "-q", REPO, env=env).returncode == 0
    hub.branches["main"]["config.json"] = b'{"model_type": "bert"}'
    assert b"tfm rm" not in run("pull", "-q", REPO, env=env).stderr
    assert run("rm", REPO, env=env).returncode == 1


def test_pull_fetches_what_is_new(hub: HubServer, env: Env, tmp_path: Path) -> None:
    """A branch that has moved on stayed as it was first seen."""
    before = run("pull", REPO, env=env).stdout
    other = write_parrot(tmp_path / "other", b"xyz")
    hub.branches["main"] = {path.name: path.read_bytes() for path in other.iterdir()}
    assert run("generate", "--raw", "-m", REPO, "\n", env=env).stdout.decode() == "Hi é🙂!"
    assert run("pull", REPO, env=env).stdout != before
    assert run("generate", "--raw", "-m", REPO, "\n", env=env).stdout == b"xyz"


def test_slow_download_is_told_of_and_can_be_stopped(hub: HubServer, env: Env) -> None:
    """A download without a word; Ctrl-C that waits for it, or leaves half a file under the full name."""
    hub.held = {"model.safetensors"}
    command = [TFM, "pull", REPO]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, env=environment(env)) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"tfm: downloading {REPO} ...\n".encode()
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        out, error = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, error) == (130, b"", b"")
    assert time.monotonic() - begun < 4
    hub.go_on.set()
    assert run("pull", REPO, env=env).returncode == 0
    assert run("generate", "--raw", "-m", REPO, "\n", env=env).stdout.decode() == "Hi é🙂!"


def on_terminal(*arguments: str, env: Env) -> list[str]:
    """The lines that tfm shows on a terminal."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(TFM, [str(TFM), *arguments], environment(env))
    shown = read_terminal(terminal).decode().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    return shown


def test_list_and_rm(hub: HubServer, env: Env, tmp_path: Path) -> None:
    """Everything that is listed can be removed by the name it is listed with; nothing else is touched."""
    env = env | {"TFM_CACHE": str(tmp_path / "cache")}
    empty = run("list", env=env)
    assert (empty.returncode, empty.stdout) == (0, b"")
    assert b"no models yet" in empty.stderr
    assert run("list", "--json", env=env).stdout == b"[]\n"
    gguf = write_gguf(tmp_path / "tiny.gguf", kind="F32")
    imported = run("pull", gguf, env=env)
    assert imported.returncode == 0
    run("pull", REPO, env=env)
    listed = [line.split() for line in run("list", env=env).stdout.decode().splitlines()]
    assert [(row[0], row[2], row[3]) for row in listed] == [(str(gguf), "0", "gguf"), (REPO, "0", "hub")]
    assert listed[0][4] == imported.stdout.decode().strip()
    titles, *shown = on_terminal("list", env=env)
    assert titles.split() == ["model", "size", "packed", "kind", "folder", "remark"]
    assert [line.split() for line in shown] == listed
    rows = json.loads(run("list", "--json", env=env).stdout)
    keys = ["ref", "kind", "size_bytes", "packed_bytes", "folder", "fault", "shared_with"]
    assert [list(row) for row in rows] == [keys] * 2
    for row in rows:
        done = run("rm", row["ref"], env=env)
        assert (done.returncode, done.stdout) == (0, b"")
        assert done.stderr.endswith(b" freed\n")
        assert not Path(row["folder"]).exists()
    assert run("list", "-q", env=env).stderr == b""
    assert gguf.exists()


def test_packed_weights_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tfm keeps of a folder of the user's own could be neither seen nor removed; the folder itself stays."""
    env = {"TFM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    monkeypatch.setenv("TFM_CACHE", env["TFM_CACHE"])
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    folder = write_parrot(tmp_path / "mine", b"abc")
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    nbytes = len(packed.make_image(folder, read_config(folder), 1, lambda size: None, None))
    (row,) = json.loads(run("list", "--json", env=env).stdout)
    shown = {"ref": str(folder), "kind": "packed", "size_bytes": 0, "packed_bytes": nbytes}
    assert row == {**shown, "folder": str(folder), "fault": None, "shared_with": []}
    assert run("list", env=env).stdout.decode().split() == [str(folder), "0", size(nbytes), "packed", str(folder)]
    done = run("rm", folder, env=env)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (0, b"", f"tfm: {size(nbytes)} freed\n")
    assert (folder / "model.safetensors").exists()
    assert run("list", "--json", env=env).stdout == b"[]\n"
    assert run("rm", folder, env=env).returncode == 1


def test_packed_weights_that_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two copies each was said to take the whole size, and to remove one freed 0 bytes without a reason."""
    env = {"TFM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    monkeypatch.setenv("TFM_CACHE", env["TFM_CACHE"])
    monkeypatch.setattr(packed, "LEAST_BYTES", 0)
    one, two = write_parrot(tmp_path / "one", b"abc"), tmp_path / "two"
    shutil.copytree(one, two)
    time.sleep(packed.YOUNG_NS / 1e9 + 0.05)
    for folder in (one, two):
        nbytes = len(packed.make_image(folder, read_config(folder), 1, lambda size: None, None))
    lines = run("list", env=env).stdout.decode().splitlines()
    assert [line.partition("  packed weights ")[2] for line in lines] == [f"shared with {two}", f"shared with {one}"]
    assert [row["shared_with"] for row in json.loads(run("list", "--json", env=env).stdout)] == [[str(two)], [str(one)]]
    assert run("rm", one, env=env).stderr.decode() == f"tfm: 0 freed; its packed weights stay, shared with {two}\n"
    assert run("list", env=env).stdout.decode().split() == [str(two), "0", size(nbytes), "packed", str(two)]
    assert run("rm", two, env=env).stderr.decode() == f"tfm: {size(nbytes)} freed\n"


def test_list_tells_of_a_gguf_file_that_is_gone(tmp_path: Path) -> None:
    """A file that was renamed stayed in the list under its old name, like any other."""
    env = {"TFM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    gguf = write_gguf(tmp_path / "tiny.gguf")
    run("pull", gguf, env=env)
    gguf.unlink()
    assert run("list", env=env).stdout.endswith(b"  its file is gone\n")
    (row,) = json.loads(run("list", "--json", env=env).stdout)
    assert row["fault"] == "its file is gone"


def test_pull_without_a_cache(tmp_path: Path) -> None:
    """It is there to keep a model: elsewhere a cache that cannot be written is gone on without."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    for cache in ("/dev/null", "/proc"):
        done = run("pull", gguf, env={"TFM_CACHE": cache})
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1)
        assert f"cache folder {cache}: cannot be written" in done.stderr.decode()
        done = run("tokenize", "-m", gguf, "--count", "a", env={"TFM_CACHE": cache})
        assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)


def test_run_without_a_cache_that_is_stopped(tmp_path: Path) -> None:
    """It must not leave its import behind."""
    (tmp_path / "t").mkdir()
    env = {"TFM_CACHE": "/dev/null", "TMPDIR": str(tmp_path / "t")}
    gguf = write_gguf(tmp_path / "tiny.gguf")
    command = [TFM, "generate", "--raw", "-n", "1", "-m", gguf, "a"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, env=environment(env)) as process:
        assert process.stderr is not None
        assert any(b"compiling" in line for line in iter(process.stderr.readline, b""))
        assert len(list((tmp_path / "t").glob("tfm-run-*"))) == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert list((tmp_path / "t").glob("tfm-run-*")) == []


def test_rm_what_is_not_in_the_cache(env: Env, parrot: Path, tmp_path: Path) -> None:
    """A folder of the user's own was removed."""
    mine = tmp_path / "mine"
    shutil.copytree(parrot, mine)
    for ref in (str(mine), "no/body"):
        done = run("rm", ref, env=env | {"TFM_CACHE": str(tmp_path / "cache")})
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"not in the cache" in done.stderr
    assert (mine / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("config", "options", "formats", "parameters"),
    [
        (LLAMA, {"dtype": "BF16"}, {"bf16"}, None),
        (GPT2, {"dtype": "F16"}, {"f16"}, 3 * (12 * 40 * 40 + 13 * 40) + 97 * 40 + 1024 * 40 + 80),
        (PLAINS["plain-attention-only"], {}, {"f32"}, 3 * 4 * 40 * 40 + 2 * 97 * 40),
        (
            GROUPED["llama-grouped"],
            {"dtype": "F16", "quantization": {"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32}}},
            {"q4, groups of 64, f16 scales", "q8, groups of 32, f16 scales", "f16"},
            None,
        ),
    ],
)
def test_show(tmp_path: Path, config: dict, options: dict, formats: set[str], parameters: int | None) -> None:
    """Bytes by format are those of the file; a quantised matrix has its parameters and not its words."""
    folder = write_checkpoint(tmp_path / "model", config, **options)
    shown = json.loads(run("show", "--json", folder).stdout)
    assert (shown["model_type"], shown["unsupported"], shown["chat_template"]) == (config["model_type"], None, False)
    assert set(shown["formats"]) == formats
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert file_bytes - 20_000 < sum(shown["formats"].values()) < file_bytes
    assert (shown["context"], shown["vocab_size"], shown["num_hidden_layers"]) == (1024, 97, 3)
    assert parameters in (None, shown["parameters"])
    assert all(value > 0 for value in shown["memory"].values())
    lines = run("show", folder).stdout.decode().splitlines()
    assert lines[-1].split() == ["runs", "yes"]


def test_show_of_a_quantised_model_counts_parameters(tmp_path: Path) -> None:
    config = GROUPED["llama-grouped"]
    plain, quantised = (
        json.loads(run("show", "--json", write_checkpoint(tmp_path / name, config, quantization=how)).stdout)
        for name, how in (("f32", None), ("q8", {"bits": 8, "group_size": 32}))
    )
    assert plain["parameters"] == quantised["parameters"]
    assert plain["memory"]["weights_bytes"] > quantised["memory"]["weights_bytes"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mystery"}, ["model_type", "mystery", "llama"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope", "yarn"]),
        ({"num_hidden_layers": 2}, ["layers.1"]),
        ({"vocab_size": 256}, ["embed_tokens"]),
    ],
)
def test_show_says_why_it_does_not_run(tmp_path: Path, changes: dict, words: list[str]) -> None:
    """What is unsupported is a part of the answer, beside all that can be known; a missing model is an error."""
    folder = write_parrot(tmp_path / "model", b"abc")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    done = run("show", folder)
    assert (done.returncode, done.stderr) == (0, b"")
    last = done.stdout.decode().splitlines()[-1]
    shown = json.loads(run("show", "--json", folder).stdout)
    assert last.startswith("runs")
    assert "no: " in last
    assert shown["model_type"] == changes.get("model_type", "llama")
    assert set(shown["formats"]) == {"f32"}
    for word in words:
        assert word in last
        assert word in shown["unsupported"]
    assert run("show", tmp_path / "nothing").returncode == 1


def test_show_of_an_empty_folder(tmp_path: Path) -> None:
    done = run("show", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"config.json" in done.stdout


def test_show_does_not_load_the_compiler() -> None:
    """Numba takes half a second to import, for a command that only reads headers."""
    code = (
        "import sys; sys.argv = ['tfm', 'show', 'smollm2-135m']; from tfm.cli.main import main; main(); "
        "assert not {'numba', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
