"""Where machine code is kept, and what happens when it cannot be, or is not what it should be."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tfm.kernels import jit, object_files
from tfm.kernels.cache_folder import cache_folder

SOURCE = """
from tfm.kernels.jit import jit


@jit
def tens(a, b):
    return 10 * a + b


@jit
def nothing(a, x):
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of two small kernels, and an empty cache."""
    name = f"sample_kernel_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "cache"))
    return name


def prepared(module: str) -> tuple[jit.Entry, list[str]]:
    """A new entry for the module's kernel, as in another process, and what it said: nothing if the code was kept."""
    entry, said = jit.Entry(f"{module}:tens", "ii"), []
    entry.prepare(lambda label, done, total: said.append(f"{label} {done}/{total}"))
    assert entry(4, 2) == 42
    return entry, said


def test_an_entry_is_called_with_numbers(module: str) -> None:
    """Guards the calling convention of what Numba emitted: int64 both ways, float64 in, and no result at all."""
    entry, _ = prepared(module)
    assert entry(-(2**59), -7) == -10 * 2**59 - 7
    assert jit.Entry(f"{module}:nothing", "if")(1, 0.5) == 0


def test_the_second_time_nothing_is_compiled(module: str) -> None:
    """Guards the cache itself, that progress is told begin and end, and that no temporary file stays."""
    entry, said = prepared(module)
    assert [line[-3:] for line in said] == ["0/1", "1/1"]
    assert prepared(module)[1] == []
    assert sorted(os.listdir(entry._path().parent)) == [".lock", f"{module}.tens.o"]


DAMAGE = {
    "empty": lambda kept: b"",
    "truncated in the head": lambda kept: kept[:20],
    "truncated in the code": lambda kept: kept[: len(kept) // 2],
    "one byte short": lambda kept: kept[:-1],
    "a flipped bit": lambda kept: kept[:-100] + bytes([kept[-100] ^ 4]) + kept[-99:],
    "the head alone": lambda kept: kept[:65],
    "foreign text": lambda kept: b"hello\nworld",
    "foreign bytes": lambda kept: bytes(range(256)) * 16,
    "the code alone": lambda kept: kept[65:],
    "a line before": lambda kept: b"[1]\n" + kept,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_compiled_again(module: str, damage: str) -> None:
    """Guards against loading what is not the code that was written: at best an error, at worst a crash."""
    path = prepared(module)[0]._path()
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    assert prepared(module)[1] != []
    assert prepared(module)[1] == [], "the damaged file was replaced"


def test_the_object_of_another_function(module: str) -> None:
    """Guards a file under a wrong name: whole, but without the function that would be called."""
    path = prepared(module)[0]._path()
    other = jit.Entry(f"{module}:nothing", "if")
    other.prepare()
    path.write_bytes(other._path().read_bytes())
    assert prepared(module)[1] != []


PIECES = """
from tfm.kernels.jit import Entry, called_as_piece, jit
from tfm.kernels.simd import poke_i64

@jit
def part(address, value):
    poke_i64(address, 10 * value)

PART = Entry(__name__ + ":part", "ii")
part_piece = called_as_piece(PART)

@jit
def whole(address, value):
    part_piece((address, value + 1))
    return value
"""


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a kernel and its piece, which other processes find too, and an empty cache."""
    name = f"sample_pieces_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(PIECES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "cache"))
    return name


PROCESSES = {  # what stands for Python in the process beside
    "one of its own": None,
    "none can be started": "/nowhere/python",
    "no name": "",
    "one that fails": "false",
    "one that does nothing": "true",
}


@pytest.mark.parametrize("processes", PROCESSES)
def test_a_piece_is_compiled_beside_and_called(
    processes: str, pieces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Guards code in two object files: found when only one is kept, and compiled here where no process can do it."""
    (tmp_path / "sitecustomize.py").write_text("print('a word from the site')")
    program = PROCESSES[processes]
    if program is not None:
        monkeypatch.setattr(sys, "executable", program)

    def check() -> list[str]:
        part, said = jit.Entry(f"{pieces}:part", "ii"), []
        whole = jit.Entry(f"{pieces}:whole", "ii", pieces=(part,))
        whole.prepare(lambda label, done, total: said.append(label))
        out = np.zeros(1, np.int64)
        assert whole(out.ctypes.data, 4) == 4
        assert out[0] == 50
        return [str(entry._path()) for entry in (part, whole) if said]

    paths = check()
    assert check() == []
    for path in paths:
        Path(path).unlink()
        assert check() == paths
    assert check() == []


def test_pieces_begin_while_something_else_is_done(pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a first start, which packs weights on one processor: the other one compiles. And a start that ends early,
    or finds everything: no process is left behind, or begun."""

    def entries() -> tuple[jit.Entry, jit.Entry]:
        part = jit.Entry(f"{pieces}:part", "ii")
        return part, jit.Entry(f"{pieces}:whole", "ii", pieces=(part,))

    monkeypatch.setattr(jit, "processors", lambda: 2)
    part, whole = entries()
    with jit.begun(whole):
        processes = jit._begun[part]._processes
    assert processes
    assert {process.returncode for process in processes} == {-signal.SIGKILL}

    compiled, compile_here = [], jit.Entry.compile
    monkeypatch.setattr(jit.Entry, "compile", lambda self: (compiled.append(self.function), compile_here(self))[1])
    with jit.begun(whole):
        whole.prepare()
    assert compiled == [], "the other processes compile, not this one"
    _, whole = entries()
    with jit.begun(whole):
        assert not jit._begun
    part._path().unlink()
    with object_files.one_process_at_a_time(whole._path().parent), jit.begun(whole):
        assert not jit._begun, "another process is at it"
    with jit.begun(whole):
        with jit.begun(whole):  # as another thread does, which loads a model too
            pass
        assert list(jit._begun) == list(whole.pieces), "the whole itself is kept"
        whole.prepare()
    assert compiled == []


def test_two_threads_on_an_empty_cache(pieces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a wait of two minutes: one thread had the turn and was about to begin, the other had the entry, and each
    wanted what the other had."""
    monkeypatch.setattr(jit, "processors", lambda: 2)
    start = jit.Compilers._start
    monkeypatch.setattr(jit.Compilers, "_start", lambda self: (time.sleep(0.5), start(self)))
    whole = jit.Entry(f"{pieces}:whole", "ii", pieces=(jit.Entry(f"{pieces}:part", "ii"),))
    other = threading.Thread(target=lambda: (time.sleep(0.2), whole.prepare()))
    begun_s = time.monotonic()
    other.start()
    with jit.begun(whole):
        whole.prepare()
    other.join()
    assert time.monotonic() - begun_s < object_files.LONGEST_WAIT_S / 2


def test_an_object_that_comes_back_cut_off(module: str) -> None:
    """Guards code from the process beside that is kept though its end is missing: every later start would crash."""
    sealed = object_files.seal("symbol", bytes(range(256)) * 300)
    assert object_files.unseal("symbol", sealed) == bytes(range(256)) * 300
    assert [object_files.unseal("symbol", sealed[:size]) for size in (0, 10, 65, 65536, len(sealed) - 1)] == [None] * 5
    assert object_files.unseal("symbol", b"a word from the site\n" + sealed) is None


def test_a_folder_that_cannot_be_written(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards that a read-only home is a warning, not an end. Root may write anywhere, so the cache is below a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="TFM_CACHE"):
        prepared(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # there was one for every kernel
        jit.Entry(f"{module}:nothing", "if").prepare()


def test_a_folder_in_the_place_of_the_object(module: str) -> None:
    """Guards that an object that can be neither read nor replaced is a warning, and leaves no temporary file."""
    path = prepared(module)[0]._path()
    path.unlink()
    (path / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match="not kept"):
        prepared(module)
    assert sorted(os.listdir(path.parent)) == [".lock", path.name]


def test_edited_sources_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards stale code after an edit of the entry's module, of a kernel or of a format, and on another CPU."""
    kernels = tmp_path / "kernels"
    (kernels / "formats").mkdir(parents=True)
    files = [tmp_path / "forward.py", kernels / "object_files.py", kernels / "simd.py", kernels / "formats" / "q4.py"]
    for file in files:
        file.write_text("one")
    monkeypatch.setattr(object_files, "__file__", str(kernels / "object_files.py"))

    def digest(sources: tuple[Path, ...]) -> str:
        object_files._digest_of_files.cache_clear()
        return object_files.digest(sources)

    seen = {digest((files[0],))}
    assert digest((files[0],)) in seen
    for file in files:
        file.write_text("two")
        seen.add(digest((files[0],)))
    (kernels / "new.py").write_text("")
    seen.add(digest((files[0],)))
    monkeypatch.setattr(object_files, "machine", lambda: "another CPU")
    seen.add(digest((files[0],)))
    assert len(seen) == len(files) + 3


def test_the_machine_is_what_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards code for a forced CPU from being taken for the host's, or the other way round."""
    names = {}
    for name, features in ((None, None), ("generic", None), ("haswell", None), ("haswell", "+avx2"), (None, "+avx2")):
        for variable, value in (("NUMBA_CPU_NAME", name), ("NUMBA_CPU_FEATURES", features)):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        names[name, features] = object_files.machine.__wrapped__()
    assert len(set(names.values())) == 5


def test_only_so_many_folders_are_kept(module: str) -> None:
    """Guards a cache that grows with every edit, and the newest from being dropped."""
    folder = cache_folder() / "kernels"
    for i in range(object_files.KEPT_FOLDERS + 3):
        (folder / f"old{i}").mkdir(parents=True)
        os.utime(folder / f"old{i}", (i, i))
    path = prepared(module)[0]._path()
    left = sorted(os.listdir(folder))
    assert len(left) == object_files.KEPT_FOLDERS
    assert path.exists()
    assert "old0" not in left


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


CALL = """
    import sys
    from tfm.kernels.jit import Entry
    entry = Entry("{module}:tens", "ii")
    print(entry(4, 2), "numba" in sys.modules, "{module}" in sys.modules)
"""


def test_a_warm_process_does_not_import_numba(module: str, tmp_path: Path) -> None:
    """Guards the start of every command: half a second of imports that a kept object file makes unnecessary."""
    entry, _ = prepared(module)
    found = python(CALL.format(module=module), PYTHONPATH=str(tmp_path)).communicate()[0].split()
    assert found == ["42", "False", "False"]
    assert len(os.listdir(entry._path().parent)) == 2


def test_a_first_process_does_not_import_numba(module: str, tmp_path: Path) -> None:
    """Guards that other processes compile: half the memory of a first start, and no Ctrl-C among LLVM's objects."""
    found = python(CALL.format(module=module), PYTHONPATH=str(tmp_path)).communicate()[0].split()
    assert found == ["42", "False", "False"]


def test_no_signal_disturbs_llvm() -> None:
    """Guards a SIGSEGV: a Ctrl-C that came up after LLVM had taken a module over, and before llvmlite noted it."""
    done = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for i in range(20):
            time.sleep(0.01)
            done.append(i)

    with pytest.raises(KeyboardInterrupt):
        jit._undisturbed(work)
    end_s = time.monotonic() + 10
    while len(done) < 20 and time.monotonic() < end_s:
        time.sleep(0.01)
    assert len(done) == 20
    with pytest.raises(ZeroDivisionError):  # a fault of its own does come up
        jit._undisturbed(lambda: 1 // 0)


def test_two_processes_compile_at_once(module: str, tmp_path: Path) -> None:
    """Guards two first runs at once: both end well, one file is there, and it is whole. One waits for the other."""
    both = [python(CALL.format(module=module), PYTHONPATH=str(tmp_path)) for _ in range(2)]
    assert [process.communicate()[0].split()[0] for process in both] == ["42", "42"]
    assert [process.returncode for process in both] == [0, 0]
    path = jit.Entry(f"{module}:tens", "ii")._path()
    assert sorted(os.listdir(path.parent)) == [".lock", path.name]
    assert prepared(module)[1] == []


def test_a_forced_cpu_has_a_folder_of_its_own(module: str, tmp_path: Path) -> None:
    """Guards that code for one CPU is never loaded on another: a second folder is made, and the first stays."""
    path = prepared(module)[0]._path()
    found = python(CALL.format(module=module), PYTHONPATH=str(tmp_path), NUMBA_CPU_NAME="generic").communicate()[0]
    assert found.split()[0] == "42"
    assert len(os.listdir(path.parent.parent)) == (1 if os.environ.get("NUMBA_CPU_NAME") == "generic" else 2)
