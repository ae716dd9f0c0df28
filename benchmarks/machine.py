"""The machine that a benchmark ran on, and whether it was quiet."""

import os
import platform
import time
from pathlib import Path

FEATURES = {
    "x86_64": ("fma", "f16c", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    "aarch64": ("asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
}
"""What kernels for transformers use of a CPU, by the names in /proc/cpuinfo."""


def describe() -> dict[str, object]:
    """CPU, the features that matter here, cores, last-level cache and memory; None where the system does not say."""
    fields = _cpuinfo()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    cache = _read("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "features": [name for name in FEATURES.get(platform.machine(), ()) if name in flags],
        "cores": os.cpu_count(),
        "cache_bytes": int(cache[:-1]) * 1024 if cache.endswith("K") else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
    }


class Busy:
    """How much of the machine is in use, counted from the moment that this is made."""

    def __init__(self) -> None:
        self._since, self._used, self._own = time.perf_counter(), _used_s(), _own_s()

    def others_share(self) -> float | None:
        """The share of all cores that others took than this process and its ended children; None: not known."""
        if self._used is None:
            return None
        available = (time.perf_counter() - self._since) * (os.cpu_count() or 1)
        others = (_used_s() or 0.0) - self._used - (_own_s() - self._own)
        return round(max(0.0, others / available), 3)


def _used_s() -> float | None:
    """Seconds that all cores together have been in use since the system started; those that a host took away count."""
    lines = _read("/proc/stat").splitlines()
    if not lines:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, lines[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields."""
    pairs = (line.partition(":") for line in _read("/proc/cpuinfo").split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
