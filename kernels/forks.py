"""What a forked child can no longer do: load, when another thread was loading at that moment.

That thread is not in the child, and would never let go of what it held: Python's lock of a module that it imported,
LLVM's, the turn to compile. A fork that waits for it is no way out: the hooks of other libraries, concurrent.futures
among them, hold locks meanwhile that the loading thread wants.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_loading: list[int] = []  # the thread of each `loading` block
_forks_while_loading = 0


@contextmanager
def loading() -> Iterator[None]:
    """While the block runs, its thread imports, compiles or loads. Raises RuntimeError where that would never end."""
    if _forks_while_loading:
        raise RuntimeError(
            "this process was forked while another thread loaded a model, and can load none itself; "
            "fork before or after that, or start the process anew (multiprocessing: spawn)"
        )
    thread = threading.get_ident()
    _loading.append(thread)
    try:
        yield
    finally:
        _loading.remove(thread)


def _forked() -> None:
    global _forks_while_loading
    _forks_while_loading += any(thread != threading.get_ident() for thread in _loading)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
