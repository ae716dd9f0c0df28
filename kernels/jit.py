"""The one compile policy: how a kernel is compiled, and how it is called.

An *entry* is a compiled function that Python calls. Its arguments are plain numbers (counts, addresses), so that its
machine code needs nothing from Numba at run time: what Numba emitted is kept as an object file (object_files.py), and a
later process loads it with llvmlite alone, without importing Numba (0.5 s on a slow machine) or the module that holds
the kernel's source.
"""

import ctypes
import gc
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tfm.kernels.cache_folder import cache_folder
from tfm.kernels.object_files import digest, one_process_at_a_time, read_object, seal, unseal, write_object

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
        self._begun: dict[Entry, _Beside] = {}
        self._beginning, self._has_turn = threading.Lock(), False  # to compile, since `begun`
        self._native: Any = None
        self._engine: Any = None  # owns the machine code

    def __call__(self, *arguments: float) -> int:
        if self._native is None:
            self.prepare()
        result, error = ctypes.c_int64(0), ctypes.c_void_p()
        status = self._native(ctypes.byref(result), ctypes.byref(error), *arguments)
        assert status in (0, -2), f"{self.function} ended with status {status}"  # -2 is Numba's "returned None"
        return result.value

    @contextmanager
    def begun(self) -> Iterator[None]:
        """While the block runs, processes compile the pieces that are not kept; a `prepare` in it takes what they made.

        A first start has other work meanwhile, which keeps only one processor busy. Where another process is at it
        already, or another thread of this one, nothing is begun.
        """
        with ExitStack() as stack:
            if self._native is None and self._beginning.acquire(blocking=False):
                stack.callback(self._beginning.release)
                missing = [piece for piece in self.pieces if not piece._path().exists()]
                if missing and not _is_alone():
                    self._has_turn = stack.enter_context(one_process_at_a_time(self._path().parent, 0))
                    stack.callback(self._end_turn)
                    if self._has_turn:
                        self._begun = {piece: stack.enter_context(_Beside(piece)) for piece in missing}
            yield

    def _end_turn(self) -> None:
        self._begun, self._has_turn = {}, False

    def prepare(self, progress: Progress | None = None) -> None:
        """Load the machine code, or compile and keep it; progress is told when compiling begins and ends."""
        with self._lock:
            if self._native is not None:
                return
            entries = (*self.pieces, self)
            kept = [read_object(entry._path()) for entry in entries]
            if None in kept:
                label = "compiling kernels for this CPU (once)"
                if progress is not None:
                    progress(label, 0, 1)
                with nullcontext() if self._has_turn else one_process_at_a_time(self._path().parent):
                    kept = self._complete(entries)
                if progress is not None:
                    progress(label, 1, 1)
            self._load([code for code in kept if code is not None])

    def _complete(self, entries: "tuple[Entry, ...]") -> list[bytes | None]:
        """The object files of entries; what nobody has kept meanwhile is compiled, and kept."""
        kept = [read_object(entry._path()) for entry in entries]
        missing = [entry for entry, code in zip(entries, kept, strict=True) if code is None]
        for entry, code in zip(missing, _side_by_side(missing, self._begun) if missing else [], strict=True):
            write_object(entry._path(), code)
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
        return digest((Path(spec.origin), *map(Path, self.sources)))

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
        """Compile, and write the object file to an open file with what tells that it is whole. For `_Beside`."""
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with os.fdopen(handle, "wb") as file:
            file.write(seal(self.symbol, self.compile()))

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


def _is_alone() -> bool:
    """Whether this process has one processor only."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) < 2


def _side_by_side(entries: list[Entry], begun: "dict[Entry, _Beside]") -> list[bytes]:
    """The object files of entries: the last that is not begun is compiled here, the others meanwhile in processes.

    What no process has compiled, because there is one processor only or none could be started, is compiled here too.
    """
    here = [entry for entry in entries if entry not in begun][-1:]
    with ExitStack() as stack:
        others = [entry for entry in entries if entry in begun or not (entry in here or _is_alone())]
        processes = {entry: begun.get(entry) or stack.enter_context(_Beside(entry)) for entry in others}
        code = {entry: entry.compile() for entry in here}
        found = code | {entry: process.result() for entry, process in processes.items()}
    return [found.get(entry) or entry.compile() for entry in entries]


def _end_with_parent() -> None:
    """The process that wants the code holds the other end of stdin: when it has ended, however, so does this one."""
    os.read(0, 1)
    os._exit(1)


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
                command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, pass_fds=(number,)
            )  # fmt: skip
        return self

    def result(self) -> bytes | None:
        """The object file when the process has ended; None if it did not make one, or not all of it."""
        if self._process is None:
            return None
        self._process.wait()
        self._file.seek(0)
        return unseal(self._entry.symbol, self._file.read())

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._file is not None:
            self._file.close()
