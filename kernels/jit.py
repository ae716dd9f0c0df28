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
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

Progress = Callable[[str, int, int | None], None]

NOWHERE = Path(os.devnull) / "no home"  # nothing can be there
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
    import llvmlite.binding as llvm

    name = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        # As Numba has it: any other name alone leaves the host's features on.
        features = "" if name.lower() == "generic" else llvm.get_host_cpu_features().flatten()
    return f"{llvm.get_default_triple()} {name} {features} numba {version('numba')} llvmlite {version('llvmlite')}"


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
    names files other than the kernels and the module itself that the machine code depends on.
    """

    def __init__(self, target: str, arguments: str, sources: tuple[str, ...] = ()) -> None:
        self.module, self.function = target.split(":")
        self.arguments = arguments
        self.sources = sources
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
            path = self._path()
            kept = _read_object(path)
            if kept is None:
                label = "compiling kernels for this CPU (once)"
                if progress is not None:
                    progress(label, 0, 1)
                kept = self._compile()
                _write_object(path, *kept)
                if progress is not None:
                    progress(label, 1, 1)
            self._load(*kept)

    def _path(self) -> Path:
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        digest = _digest((Path(spec.origin), *map(Path, self.sources)))
        return cache_folder() / "kernels" / digest / f"{self.module}.{self.function}.o"

    def _compile(self) -> tuple[str, bytes]:
        """The symbol's name and the object file, from Numba."""
        from numba.core.codegen import CPUCodeLibrary
        from numba.core.registry import cpu_target

        symbol, library = linked(getattr(importlib.import_module(self.module), self.function), self.arguments)
        CPUCodeLibrary._optimize_final_module(library)
        return symbol, cpu_target.target_context.codegen()._tm.emit_object(library._final_module)

    def _load(self, symbol: str, code: bytes) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        arguments = [{"i": ctypes.c_int64, "f": ctypes.c_double}[letter] for letter in self.arguments]
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
        self._native = kind(self._engine.get_function_address(symbol))


def _checksum(symbol: str, code: bytes) -> str:
    """Of both: a call of a symbol that the code does not have would end the process."""
    return hashlib.sha256(f"{symbol}\n".encode() + code).hexdigest()


def _read_object(path: Path) -> tuple[str, bytes] | None:
    """The symbol and object file kept at path; None where there is none, or it is not whole."""
    try:
        if not path.is_file():  # a pipe or a device would be read without end
            return None
        head, code = path.read_bytes().split(b"\n", 1)
        fields = json.loads(head)
        symbol, digest = fields["symbol"], fields["sha256"]
        return (symbol, code) if _checksum(symbol, code) == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_object(path: Path, symbol: str, code: bytes) -> None:
    head = json.dumps({"symbol": symbol, "sha256": _checksum(symbol, code)}).encode()
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(handle, "wb") as file:
            file.write(head + b"\n" + code)
        os.replace(temporary, path)
        _drop_oldest(path.parent.parent)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warn_not_kept(error.strerror or str(error))


def _drop_oldest(folder: Path) -> None:
    folders = sorted(folder.iterdir(), key=lambda entry: entry.stat().st_mtime, reverse=True)
    for old in folders[KEPT_FOLDERS:]:
        shutil.rmtree(old, ignore_errors=True)
