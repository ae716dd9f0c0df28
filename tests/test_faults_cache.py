"""Caches as disks, users and other processes leave them: the answer is the same, and nothing half-made stays."""

import ast
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import LLAMA, write_checkpoint
from cli_process import TFM, TIMEOUT_S, environment, run
from gguf_files import write_gguf

from tfm.engine.packed import YOUNG_NS
from tfm.engine.team import RUN
from tfm.kernels import jit, object_files
from tfm.kernels.cache_folder import cache_folder

ANSWER = "Hi é🙂!".encode()
WIDE = {**LLAMA, "hidden_size": 256, "vocab_size": 2048, "intermediate_size": 512, "eos_token_id": None}


@pytest.fixture
def warm(parrot: Path, tmp_path: Path) -> Path:
    """A cache that holds the compiled kernels and nothing else."""
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copytree(cache_folder() / "kernels", cache / "kernels", ignore=shutil.ignore_patterns(".new-*"))
    return cache


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose packed weights are worth keeping, old enough to be trusted."""
    folder = write_checkpoint(tmp_path_factory.mktemp("wide"), WIDE, dtype="F32")
    time.sleep(YOUNG_NS / 1e9 + 0.05)
    return folder


def limited(nbytes: int) -> Callable[[], None]:
    """For a child: no file may grow beyond nbytes, as on a disk that is full; works for every user."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def rights_as_written() -> None:
    """For a child: what is read-only is so for root as well."""
    if os.geteuid() == 0:
        for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
            if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
                os._exit(77)


def started(
    *arguments: str | Path, cache: Path, before: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run tfm with this cache; before is done in the child."""
    command = [TFM, *arguments]
    return subprocess.run(
        command, stdin=-3, stdout=-1, stderr=-1, env=environment({"TFM_CACHE": str(cache), **env}),
        preexec_fn=before, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def continued(model: Path, cache: Path, before: Callable[[], None] | None = None) -> bytes:
    """What a model of random weights says; nothing on stderr."""
    done = started("generate", "--ids", "-n", "5", "-m", model, "5 6 7", cache=cache, before=before)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.split()) == 5
    return done.stdout


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# ------------------------------------------------------------------------------------------------ from nothing

TELLS_WHAT_IT_COMPILED = (
    "import sys; from tfm.cli.main import _main; from tfm.kernels import jit; write, made = jit.write_object, [];"
    "jit.write_object = lambda path, code: (made.append(path.name), write(path, code));"
    "status = _main(); sys.stdout.flush(); print(*made, file=sys.stderr); sys.exit(status)"
)


def test_eight_processes_from_nothing(parrot: Path, tmp_path: Path) -> None:
    """Eight first runs at once compiled eight times, or one loaded what another had half written."""
    arguments = ["generate", "-q", "--raw", "-m", str(parrot), "\n"]
    command = [sys.executable, "-c", TELLS_WHAT_IT_COMPILED, *arguments]
    env = environment({"TFM_CACHE": str(tmp_path)})
    processes = [subprocess.Popen(command, stdin=-3, stdout=-1, stderr=-1, env=env) for _ in range(8)]
    ended = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    assert [out for out, _ in ended] == [ANSWER] * 8
    kept = files_in(tmp_path)
    # One after the other: between two entries, each a few files, another process may have its turn.
    made = [name for _, error in ended for name in error.decode().split()]
    assert sorted(made) == sorted(path.name for path in kept if path.suffix == ".o")
    assert {path.suffix for path in kept} <= {".o", ""}
    assert all(path.suffix == ".o" or path.name == ".lock" for path in kept)
    assert all(object_files.read_object(path) is not None for path in kept if path.suffix == ".o")


# ------------------------------------------------------------------------------------------------ damaged


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [emptied, halved])
def test_everything_kept_is_damaged(warm: Path, wide: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A disk that was full left files of no or half their length: every later start failed, or read past their end."""
    gguf = write_gguf(tmp_path / "tiny.gguf", kind="F32")
    expected = continued(wide, warm)
    from_gguf = continued(gguf, warm)
    assert {path.suffix for path in files_in(warm)} >= {".o", ".image", ".json", ".safetensors", ".jinja"}
    whole = {path: path.read_bytes() for path in files_in(warm) if path.suffix != ".o" and path.name[0] != "."}
    for path in whole:
        damage(path)
    assert continued(wide, warm) == expected
    done = started("generate", "--ids", "-n", "5", "-m", gguf, "5 6 7", cache=warm)
    assert (done.returncode, done.stdout) == (0, from_gguf)
    assert b"made anew in the cache" in done.stderr
    assert {path: path.read_bytes() for path in files_in(warm) if path in whole} == whole
    assert continued(wide, warm) == expected
    assert continued(gguf, warm) == from_gguf
    assert not list(warm.rglob(".new-*"))


@pytest.mark.parametrize("damage", [emptied, halved])
def test_damaged_machine_code_is_not_loaded(warm: Path, damage: Callable[[Path], None]) -> None:
    """The real objects, all of them: half a function that is run ends the process."""
    objects = [path for path in files_in(warm) if path.suffix == ".o"]
    assert len(objects) >= 3
    for path in objects:
        assert object_files.read_object(path) is not None
        damage(path)
        assert object_files.read_object(path) is None


# ------------------------------------------------------------------------------------------------ not writable


def read_only(folder: Path, writable: bool = False) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o700 if writable else 0o500) if path.is_dir() else (0o600 if writable else 0o400))


@pytest.fixture
def closed(warm: Path) -> Iterator[Path]:
    """A cache in which nothing may be written."""
    read_only(warm)
    yield warm
    read_only(warm, writable=True)


def test_read_only_cache(closed: Path, wide: Path) -> None:
    """A cache that an administrator filled: kernels come from it, and what cannot be added is no fault."""
    done = subprocess.run(["true"], preexec_fn=rights_as_written, check=False)
    if done.returncode:
        pytest.skip("root cannot give up its rights here")
    before = files_in(closed)
    assert continued(wide, closed, rights_as_written) == continued(wide, closed, rights_as_written)
    assert files_in(closed) == before
    done = started("rm", "smollm2-135m", cache=closed, before=rights_as_written)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize("home", [None, "", "/nowhere/at/all", os.devnull, "/proc"])
def test_home_that_is_none(warm: Path, parrot: Path, home: str | None) -> None:
    """HOME of a service, a container or cron: unset, empty, not there, no folder. What needs no home does not ask."""
    for variables in ({"TFM_CACHE": str(warm)}, {"TFM_CACHE": None, "XDG_CACHE_HOME": None, "HF_HUB_OFFLINE": "1"}):
        env = {**variables, "HOME": home}
        done = run("tokenize", "-m", parrot, "a", env=env)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"98\n", b"")
        assert run("list", "-q", env=env).returncode == 0
    done = run("generate", "--raw", "-m", parrot, "\n", env={"TFM_CACHE": str(warm), "HOME": home})
    assert (done.returncode, done.stdout, done.stderr) == (0, ANSWER, b"")
    assert not Path("/nowhere").exists()


def test_a_warm_start_imports_what_it_uses(parrot: Path) -> None:
    """Numba takes half a second of each start to be imported, and every other library its part."""
    code = """if True:
        import sys
        before = set(sys.modules)
        from tfm.cli.main import _main
        _main()
        imported = {name.partition(".")[0] for name in sys.modules.keys() - before}
        print(*sorted(imported - sys.stdlib_module_names))
    """
    command = [sys.executable, "-c", code, "generate", "--raw", "-q", "-m", str(parrot), "\n"]
    done = subprocess.run(command, stdin=-3, capture_output=True, env=environment(), check=True)
    assert done.stdout == ANSWER + b"click llvmlite numpy platformdirs tfm tokenizers\n"


def test_what_packs_weights_is_missing(warm: Path, wide: Path) -> None:
    """Compiling for packing was not told of, and Ctrl-C had to wait for it: its threads did it."""
    for path in warm.glob("kernels/*/tfm.kernels.matmul.pack_panels.o"):
        path.unlink()
    command = [TFM, "generate", "--ids", "-n", "1", "-m", wide, "5"]
    env = environment({"TFM_CACHE": str(warm)})
    with subprocess.Popen(command, stdin=-3, stdout=-1, stderr=-1, env=env) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"tfm: compiling kernels for this CPU (once) ...\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert [path.name for path in files_in(warm / "packed") if path.name != ".lock"] == []


# ------------------------------------------------------------------------------------------------ a full disk

COMPILE = """
import sys, warnings
from tfm.kernels.jit import Entry
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(Entry("full_disk_kernel:tens", "ii")(4, 2), *(warning.message for warning in told))
"""


def test_full_disk_while_code_is_kept(tmp_path: Path) -> None:
    """Compiled code that finds no room is used all the same, once; half a file was kept, and loaded the next time."""
    source = "from tfm.kernels.jit import jit\n\n\n@jit\ndef tens(a, b):\n    return 10 * a + b\n"
    (tmp_path / "full_disk_kernel.py").write_text(source)
    env = environment({"TFM_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-B", "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=limited(200), check=True)
    assert done.stdout.startswith(f"42 cache folder {tmp_path / 'cache'}: cannot be written: File too large")
    assert [path.name for path in files_in(tmp_path / "cache")] == [".lock"]


def test_full_disk_while_weights_are_kept(warm: Path, wide: Path) -> None:
    """Packed weights that find no room are used all the same: writing into a mapped file would end the process."""
    before = files_in(warm)
    assert continued(wide, warm, limited(1 << 20)) == continued(wide, warm, limited(1 << 20))
    assert [path for path in files_in(warm) if path not in before] == []


def test_full_disk_while_a_model_is_imported(warm: Path, tmp_path: Path) -> None:
    """Where neither the cache nor the temporary folder has room it is an error of one line; nothing half-made stays."""
    gguf = write_gguf(tmp_path / "tiny.gguf", kind="F32")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = started(
        "generate", "-q", "--ids", "-m", gguf, "5", cache=warm, before=limited(100_000), TMPDIR=str(temporary)
    )  # fmt: skip
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, b"", 1), done.stderr
    assert b"cannot be written: found File too large" in done.stderr
    assert list(temporary.iterdir()) == []
    assert [path.name for path in files_in(warm / "models") if path.suffix != ".lock"] == []
    assert len(continued(gguf, warm)) > 0


# ------------------------------------------------------------------------------------------------ edited sources


def test_edited_kernel_is_compiled_again(tmp_path: Path) -> None:
    """Numba's own cache looks at a function's own file, not at those of what it calls: an edit was not seen."""
    package = tmp_path / "tfm"
    shutil.copytree(Path(jit.__file__).parent, package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    other = package / "kernels" / "formats" / "helper.py"
    part = "from tfm.kernels.jit import jit\n\n\n@jit\ndef part(a):\n    return {factor} * a\n"
    (package / "kernels" / "whole.py").write_text(
        "from tfm.kernels.formats.helper import part\nfrom tfm.kernels.jit import jit\n\n\n"
        "@jit\ndef whole(a, b):\n    return part(a) + b\n"
    )
    code = (
        "from tfm.kernels.jit import Entry; import tfm.kernels.jit as jit;"
        "write, made = jit.write_object, []; jit.write_object = lambda path, code: (made.append(1), write(path, code));"
        "print(Entry('tfm.kernels.whole:whole', 'ii')(4, 2), len(made), jit.__file__)"
    )
    env = environment({"TFM_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)})
    for factor, compiled in ((3, 1), (5, 1), (5, 0), (3, 0)):
        other.write_text(part.format(factor=factor))
        done = subprocess.run(
            [sys.executable, "-B", "-c", code], capture_output=True, text=True, env=env, check=True, cwd=tmp_path
        )
        assert done.stdout.split() == [str(factor * 4 + 2), str(compiled), str(package / "kernels" / "jit.py")]


def test_every_source_of_the_forward_pass_counts() -> None:
    """A file that forward.py imports and the digest does not know of would leave old code in use after an edit."""
    engine = Path(__file__).parent.parent / "engine"
    known = {Path(source).name for source in RUN.sources} | {"forward.py"}
    for name in known:
        for node in ast.walk(ast.parse((engine / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tfm.engine."):
                assert f"{node.module.rpartition('.')[2]}.py" in known, f"{name} imports {node.module}"
    kernels = engine.parent / "kernels"
    for path in kernels.rglob("*.py"):
        assert "tfm.engine" not in path.read_text(encoding="utf-8"), path
