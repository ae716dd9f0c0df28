"""The one compile policy: how a kernel is compiled, and how it is called.

An *entry* is a compiled function that Python calls. Its arguments are plain numbers (counts, addresses), so that its
machine code needs nothing from Numba at run time: what Numba emitted is kept as an object file (object_files.py), and a
later process loads it with llvmlite alone, without importing Numba (0.5 s on a slow machine) or the module that holds
the kernel's source. So does the process that compiles for the first time: other processes do it, side by side.
"""

import ctypes
import gc
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tfm.kernels.cache_folder import cache_folder
from tfm.kernels.compilers import Compilers, processors
from tfm.kernels.forks import loading
from tfm.kernels.object_files import digest, one_process_at_a_time, read_object, write_object

Progress = Callable[[str, int, int | None], None]


def jit(function: Callable[..., Any]) -> Any:
    """Compile a kernel or a part of one: no GIL, bounds checks, exceptions, allocation; NumPy's rules for division."""
    return _compiled(function, forceinline=False)


def inline(function: Callable[..., Any]) -> Any:
    """The same for the inner part of a loop, not left to LLVM's taste: it becomes a part of whoever calls it."""
    return _compiled(function, forceinline=True)


def _compiled(function: Callable[..., Any], forceinline: bool) -> Any:
    import numba

    options = {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False, "forceinline": forceinline}
    dispatcher = numba.njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    own = dispatcher.get_call_template

    def template(arguments: Any, keywords: Any) -> Any:
        """A call with a constant is a call with a number: Numba would compile the function anew for every constant.

        That was a third of all functions, and of the time that compiling takes.
        """
        return own([numba.types.unliteral(argument) for argument in arguments], keywords)

    dispatcher.get_call_template = template
    return dispatcher


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
    names files other than the kernels and the module itself that the machine code depends on. pieces are entries that
    are compiled beside it and loaded with it: what it calls by `called_as_piece`, and what is wanted whenever it is.
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

    @loading()
    def prepare(self, progress: Progress | None = None) -> None:
        """Load the machine code, or compile and keep it; progress is told when compiling begins and ends."""
        with self._lock:
            if self._native is not None:
                return
            entries = self.together
            kept = [read_object(entry._path()) for entry in entries]
            if None in kept:
                label = "compiling kernels for this CPU (once)"
                if progress is not None:
                    progress(label, 0, 1)
                # Another thread may have the turn, and be about to begin this.
                with one_process_at_a_time(
                    self._path().parent, is_needless=lambda: not _begun.keys().isdisjoint(entries)
                ):
                    kept = _complete(entries)
                if progress is not None:
                    progress(label, 1, 1)
            _undisturbed(lambda: self._load([code for code in kept if code is not None]))

    @property
    def together(self) -> "tuple[Entry, ...]":
        """The entries that are loaded at once: this one and its pieces."""
        return self, *self.pieces

    def _path(self) -> Path:
        return cache_folder() / "kernels" / self.digest / f"{self.module}.{self.function}.o"

    @cached_property
    def digest(self) -> str:
        """A name for its machine code, made of the sources, the versions of Numba and llvmlite, and this machine."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        sources = Path(spec.origin), *map(Path, self.sources)
        return str(_undisturbed(lambda: digest(sources)))

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

    def _load(self, objects: list[bytes]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for entry in self.together:
            arguments = [{"i": ctypes.c_int64, "f": ctypes.c_double}[letter] for letter in entry.arguments]
            kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *arguments)
            entry._engine, entry._native = self._engine, kind(self._engine.get_function_address(entry.symbol))


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


_begun: "dict[Entry, Compilers]" = {}  # what is being compiled, since `begun`
_beginning = threading.Lock()


@contextmanager
def begun(*entries: Entry) -> Iterator[None]:
    """While the block runs, processes compile what is not kept of these; a `prepare` in it takes what they made.

    A first start has other work meanwhile, which keeps only one processor busy. Where another process is at it already,
    or another thread of this one, nothing is begun.
    """
    with ExitStack() as stack:
        if _beginning.acquire(blocking=False):
            stack.callback(_beginning.release)
            missing = [one for entry in entries for one in entry.together if not one._path().exists()]
            folders = dict.fromkeys(entry._path().parent for entry in missing)
            turns = stack.enter_context(ExitStack())
            if processors() > 1 and all([turns.enter_context(one_process_at_a_time(folder, 0)) for folder in folders]):
                stack.callback(_begun.clear)
                _begun.update(dict.fromkeys(missing, stack.enter_context(Compilers(missing))))
            else:
                turns.close()
        yield


def _complete(entries: Sequence[Entry]) -> list[bytes | None]:
    """The object files of entries; what nobody has kept meanwhile is compiled, and kept."""
    kept = {entry: read_object(entry._path()) for entry in entries}
    missing = [entry for entry, code in kept.items() if code is None]
    for entry, code in zip(missing, _side_by_side(missing), strict=True):
        write_object(entry._path(), code)
        kept[entry] = code
    return list(kept.values())


def _side_by_side(entries: list[Entry]) -> list[bytes]:
    """The object files of entries, from processes that have begun or do so now.

    What no process could compile is compiled here; so is what has not begun where this process has imported Numba
    already, one of it meanwhile or, on one processor, all.
    """
    left = [entry for entry in entries if entry not in _begun]
    here = left[: 1 if processors() > 1 else None] if "numba" in sys.modules else []
    with Compilers(left[len(here) :]) as compilers:
        found = {entry: _undisturbed(entry.compile) for entry in here}
        found |= {entry: _begun.get(entry, compilers).result(entry) for entry in entries if entry not in found}
    return [found[entry] or _undisturbed(entry.compile) for entry in entries]


def _undisturbed(work: Callable[[], Any]) -> Any:
    """The result of work with LLVM, done in a thread: there no signal raises an exception.

    When LLVM has taken a module over, llvmlite notes so in the next line; after a KeyboardInterrupt between the two the
    module is freed twice, which ends the process with SIGSEGV. After such an exception here the work goes on meanwhile.
    """
    results, faults = [], []

    def attempt() -> None:
        try:
            results.append(work())
        except Exception as fault:  # noqa: BLE001  raised again below, in the thread that asked
            faults.append(fault)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]
    return results[0]
