"""The one compile policy: how a kernel is compiled, where its machine code is kept, and how it is called.

An *entry* is a compiled function that Python calls. Its arguments are plain numbers (counts, addresses), so that its
machine code needs nothing from Numba at run time: what Numba emitted is kept as an object file, and a later process
loads it with llvmlite alone, without importing Numba (0.5 s on a slow machine) or the module that holds the kernel's
source.

The object files lie in a folder named by a digest of everything they depend on: the sources, the versions of Numba and
llvmlite, the CPU's name and its features. Each is written under a temporary name and renamed, and carries the digest of
its own bytes: a truncated or foreign file is compiled again, and where the folder cannot be written, or none is known,
the work goes on without.
"""

import ctypes
import fcntl
import gc
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tfm.kernels.new_file import new_file

Progress = Callable[[str, int, int | None], None]

NOWHERE = Path(os.devnull) / "no home"  # nothing can be there
LONGEST_WAIT_S = 120  # for another process that compiles; it may have been stopped
KEPT_FOLDERS = 8  # compiled kernels of so many versions or CPU types are kept; each is about 1 MB


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel or a part of one: no GIL, bounds checks, exceptions, allocation; NumPy's rules for division."""
    return _compiled(function, forceinline=False)


def inline(function: Callable[..., Any]) -> Any:
    """The same for the inner part of a loop, not left to LLVM's taste: it becomes a part of whoever calls it."""
    return _compiled(function, forceinline=True)


def _compiled(function: Callable[..., Any], forceinline: bool) -> Any:
    import numba

    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False, "forceinline": forceinline}
    return numba.njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)


def cache_folder() -> Path:
    """Where tfm keeps what it made: $TFM_CACHE, else the platform's cache folder; NOWHERE for a user without a home."""
    import platformdirs

    try:
        folder = Path(os.environ.get("TFM_CACHE") or platformdirs.user_cache_dir("tfm", appauthor=False)).expanduser()
    except RuntimeError:  # neither HOME nor the user database knows a home
        return NOWHERE
    return NOWHERE if folder.parts[:1] == ("~",) else folder


def warn_not_kept(reason: str) -> None:
    """Say that the cache folder cannot be used, once in a process: every part of tfm may find it out for itself."""
    folder = cache_folder()
    if folder not in _told_of():
        _told_of().add(folder)
        remedy = "what is made for this run is not kept; set TFM_CACHE to a folder that can be written"
        warnings.warn(f"{unwritable(reason)}; {remedy}", stacklevel=3)


def unwritable(reason: str) -> str:
    """That the cache folder cannot be written, in words."""
    folder = cache_folder()
    if folder == NOWHERE:
        return "no cache folder: this user has no home folder"
    return f"cache folder {folder}: cannot be written: {reason}"


@cache
def _told_of() -> set[Path]:
    return set()


@cache
def _machine() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        # As Numba has it: any other name alone leaves the host's features on.
        features = "" if name.lower() == "generic" else llvm.get_host_cpu_features().flatten()
    spec = importlib.util.find_spec("numba")
    assert spec is not None
    assert spec.origin is not None
    # Read, not imported: importlib.metadata takes 10 ms to tell a version, Numba half a second.
    version = Path(spec.origin).with_name("_version.py").read_text(encoding="utf-8")
    return f"{llvm.get_default_triple()} {name} {features} llvmlite {llvmlite.__version__} numba {version}"


@cache
def _digest(sources: tuple[Path, ...]) -> str:
    """A name for the machine code of these sources, the kernels beside this file, and this machine."""
    digest = hashlib.sha256(_machine().encode())
    kernels = Path(__file__).parent
    for path in sorted({*kernels.rglob("*.py"), *sources}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Numba's millions of objects live until it is done: to look for garbage among them took a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def linked(dispatcher: Any, arguments: str) -> tuple[str, Any]:
    """The symbol of a compiled function and Numba's library with it and all that it calls, not optimised yet.

    Numba would optimise and emit every function that this one calls, each with all that it calls in turn: 35 s for the
    forward pass. Here the parts are only typed and linked together, so that the whole is optimised and emitted once.
    """
    from numba import types
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    class Part(JITCodeLibrary):  # type: ignore[misc]
        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout

        def _optimize_final_module(self) -> None:
            pass

        def _finalize_final_module(self) -> None:
            self._finalize_dynamic_globals()
            self._finalized = True

        def get_pointer_to_function(self, name: str) -> int:
            self._ensure_finalized()
            return 0

    codegen = cpu_target.target_context.codegen()
    with global_compiler_lock, _no_garbage_collection():
        codegen._library_class, codegen.set_env = Part, lambda name, environment: None
        try:
            dispatcher.compile(tuple({"i": types.int64, "f": types.float64}[letter] for letter in arguments))
        finally:
            del codegen._library_class, codegen.set_env
    (result,) = dispatcher.overloads.values()
    return result.fndesc.llvm_func_name, result.library


class Entry:
    """A compiled function of plain numbers, called from Python without the GIL.

    target is "module:function"; arguments has a letter for each, i for int64 and f for float64; a call gives an int64
    (0 where the function returns nothing). It is loaded or compiled at the first call, or before by `prepare`. sources
    names files other than the kernels and the module itself that the machine code depends on, pieces the entries that
    it calls by `called_as_piece`: they are compiled beside it, each in a process of its own.
    """

    def __init__(
        self, target: str, arguments: str, sources: tuple[str, ...] = (), pieces: "tuple[Entry, ...]" = ()
    ) -> None:
        self.module, self.function = target.split(":")
        self.arguments = arguments
        self.sources = sources
        self.pieces = pieces
        self._lock = threading.Lock()
        self._native: Any = None
        self._engine: Any = None  # owns the machine code

    def __call__(self, *arguments: float) -> int:
        if self._native is None:
            self.prepare()
        result, error = ctypes.c_int64(0), ctypes.c_void_p()
        status = self._native(ctypes.byref(result), ctypes.byref(error), *arguments)
        assert status in (0, -2), f"{self.function} ended with status {status}"  # -2 is Numba's "returned None"
        return result.value

    def prepare(self, progress: Progress | None = None) -> None:
        """Load the machine code, or compile and keep it; progress is told when compiling begins and ends."""
        with self._lock:
            if self._native is not None:
                return
            entries = (*self.pieces, self)
            kept = [_read_object(entry._path()) for entry in entries]
            if None in kept:
                label = "compiling kernels for this CPU (once)"
                if progress is not None:
                    progress(label, 0, 1)
                with _one_process_at_a_time(self._path().parent):
                    kept = self._complete(entries)
                if progress is not None:
                    progress(label, 1, 1)
            self._load([code for code in kept if code is not None])

    def _complete(self, entries: "tuple[Entry, ...]") -> list[bytes | None]:
        """The object files of entries; what nobody has kept meanwhile is compiled, and kept."""
        kept = [_read_object(entry._path()) for entry in entries]
        missing = [entry for entry, code in zip(entries, kept, strict=True) if code is None]
        for entry, code in zip(missing, _compile_side_by_side(missing) if missing else [], strict=True):
            _write_object(entry._path(), code)
            kept[entries.index(entry)] = code
        return kept

    def _path(self) -> Path:
        return cache_folder() / "kernels" / self.digest / f"{self.module}.{self.function}.o"

    @property
    def digest(self) -> str:
        """A name for its machine code, made of the sources, the versions of Numba and llvmlite, and this machine."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        return _digest((Path(spec.origin), *map(Path, self.sources)))

    @property
    def symbol(self) -> str:
        """The name of the function in the machine code."""
        return f"{self.module}.{self.function}"

    def compile(self) -> bytes:
        """The object file, from Numba."""
        from numba.core.codegen import CPUCodeLibrary
        from numba.core.registry import cpu_target

        name, library = linked(getattr(importlib.import_module(self.module), self.function), self.arguments)
        CPUCodeLibrary._optimize_final_module(library)
        for function in library._final_module.functions:
            if function.name == name:  # it is not when this process has compiled it before
                function.name = self.symbol
        code: bytes = cpu_target.target_context.codegen()._tm.emit_object(library._final_module)
        return code

    def compile_into(self, handle: int) -> None:
        """Compile, and write the object file to an open file with what tells that it is whole."""
        with os.fdopen(handle, "wb") as file:
            file.write(_sealed(self.symbol, self.compile()))

    def _load(self, objects: list[bytes]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        arguments = [{"i": ctypes.c_int64, "f": ctypes.c_double}[letter] for letter in self.arguments]
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
        self._native = kind(self._engine.get_function_address(self.symbol))


def called_as_piece(entry: Entry) -> Any:
    """What compiled code calls to reach `entry`, which is compiled by itself; it returns nothing.

    On two processors the forward pass compiles in 60 % of the time when attention is a piece.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    byte, status = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(status, [byte.as_pointer(), byte.as_pointer(), *[ir.IntType(64)] * len(entry.arguments)])

    @intrinsic
    def call(typingctx: Any, arguments: Any) -> Any:
        def build(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, kind, entry.symbol)
            nothing, error = (cgutils.alloca_once(builder, byte) for _ in range(2))
            builder.call(function, [nothing, error, *cgutils.unpack_tuple(builder, args[0])])
            return context.get_dummy_value()

        return types.none(types.UniTuple(types.int64, len(entry.arguments))), build

    return call


def _compile_side_by_side(entries: list[Entry]) -> list[bytes]:
    """The object files of entries: the last one is compiled here, the others meanwhile in processes of their own.

    What no process has compiled, because there is one processor only or none could be started, is compiled here too.
    """
    *others, last = entries
    alone = len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) < 2
    with ExitStack() as stack:
        processes = [None if alone else stack.enter_context(_Beside(entry)) for entry in others]
        code = last.compile()
        found = [None if process is None else process.result() for process in processes]
    return [other.compile() if c is None else c for other, c in zip(others, found, strict=True)] + [code]


class _Beside:
    """A process that compiles an entry; a context that ends it in any case.

    The object file comes back in a file of its own: what else a Python prints as it starts goes to its stdout.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._file: Any = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "_Beside":
        entry = self._entry
        code = "import sys; from tfm.kernels.jit import Entry; Entry(*sys.argv[2:]).compile_into(int(sys.argv[1]))"
        with suppress(OSError):  # no Python to start, or no folder for the file: it is compiled here
            self._file = tempfile.TemporaryFile()
            number = self._file.fileno()
            # -P: what lies in the working folder may bear the name of a module.
            target = f"{entry.module}:{entry.function}"
            command = [sys.executable or "", "-P", "-c", code, str(number), target, entry.arguments]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=nowhere, stdout=nowhere, stderr=nowhere, pass_fds=(number,)
            )  # fmt: skip
        return self

    def result(self) -> bytes | None:
        """The object file when the process has ended; None if it did not make one, or not all of it."""
        if self._process is None:
            return None
        self._process.wait()
        self._file.seek(0)
        return _opened(self._entry.symbol, self._file.read())

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._file is not None:
            self._file.close()


@contextmanager
def _one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Processes that start together on a new machine compile once, and the others wait; but not for ever."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("w"))
            end_s = time.monotonic() + LONGEST_WAIT_S
            while not _is_locked(file) and time.monotonic() < end_s:
                time.sleep(0.1)
        yield


def _is_locked(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_object(path: Path) -> bytes | None:
    """The object file kept at path; None where there is none, or it is not whole."""
    try:
        if not path.is_file():  # a pipe or a device would be read without end
            return None
        return _opened(path.stem, path.read_bytes())
    except OSError:
        return None


def _sealed(symbol: str, code: bytes) -> bytes:
    """An object file behind a line that has its checksum, and that of the symbol.

    A call of a symbol that the code does not have would end the process.
    """
    return hashlib.sha256(f"{symbol}\n".encode() + code).hexdigest().encode() + b"\n" + code


def _opened(symbol: str, sealed: bytes) -> bytes | None:
    """The object file of `_sealed`, None if not every byte is what it was."""
    code = sealed.partition(b"\n")[2]
    return code if _sealed(symbol, code) == sealed else None


def _write_object(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path.parent) as file:
            file.write(_sealed(path.stem, code))
            file.flush()
            os.replace(file.name, path)
        _drop_oldest(path.parent.parent)
    except OSError as error:
        warn_not_kept(error.strerror or str(error))


def _drop_oldest(folder: Path) -> None:
    times = []
    for entry in folder.iterdir():
        with suppress(OSError):  # another process may have removed it by now
            times.append((entry.stat().st_mtime, entry))
    for _, old in sorted(times, reverse=True)[KEPT_FOLDERS:]:
        shutil.rmtree(old, ignore_errors=True)
