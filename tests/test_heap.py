"""The heap in large pages while a tokenizer is read."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import ctypes, resource, sys
from contextlib import nullcontext
from tfm.kernels.heap import large_pages
spare, large = int(sys.argv[1]), sys.argv[2] == "large"
if spare:
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + spare, in_use + spare))
system = ctypes.CDLL(None)
system.malloc.restype, system.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with large_pages(32 << 20) if large else nullcontext():
    for _ in range(24 << 10):
        ctypes.memset(system.malloc(1000), 1, 1000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, spare: int = 0) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, str(spare), how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(
    not (PAGES.exists() and "[never]" not in PAGES.read_text() and hasattr(mmap, "MADV_HUGEPAGE")),
    reason="this system has no large pages",
)
@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is another one")
def test_small_pieces_lie_in_large_pages() -> None:
    """Guards the start: 24 MB in small pieces were 6,000 page faults, a fifth of what a tokenizer takes to be read."""
    assert faults("large") * 4 < faults("small")


def test_a_heap_that_cannot_grow_so_much() -> None:
    """Guards a process with little memory (ulimit -v): asking for room in advance is no reason to fail."""
    assert faults("large", 30 << 20) > 0
