"""What the machine gives this process: processors and memory."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_threads() -> int:
    """Processors that this process may use: the smaller of its affinity and its cgroup's quota (rounded up), or 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _cgroup_processors() or affinity))


def _cgroup_processors() -> int | None:
    """The quota of cgroup v2 or v1 in whole processors; None where there is none."""
    two = _read(_CGROUP / "cpu.max").split()
    if len(two) == 2:
        return None if two[0] == "max" else -(-int(two[0]) // int(two[1]))
    quota, period = (_read(_CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return -(-int(quota) // int(period)) if quota and period and int(quota) > 0 else None


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, by the machine's and the cgroup's count; None where nobody can know."""
    lines = _read(Path("/proc/meminfo")).splitlines()
    counts = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        counts.append(int(limit) - int(used) + _reclaimable())
    return min(counts, default=None)


def _reclaimable() -> int:
    """Bytes of the cgroup that are only cached files."""
    lines = (line.split() for line in _read(_CGROUP / "memory.stat").splitlines())
    return sum(int(count) for name, count in lines if name in ("inactive_file", "active_file"))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
