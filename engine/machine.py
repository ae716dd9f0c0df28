"""What the machine gives this process: processors and memory, by its affinity, its memory and its control groups.

A control group (cgroup) may limit both, and so may every group around it. /proc/self/cgroup names the process's own:
one line "0::/path" for version 2, and one for each controller of version 1, "4:cpu,cpuacct:/path". In a container the
path may be that of the machine outside, of which nothing is to be seen here: then what stands at the root counts.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_threads(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Processors that this process may use: the smaller of its affinity and its quota (rounded up), at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota(proc, cgroups) or affinity))


def available_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that can be taken without swapping, by the machine's and the groups' count; None where nobody can know."""
    lines = (line.split() for line in _read(proc / "meminfo").splitlines())
    counts = [
        int(line[1]) * 1024 for line in lines if line[:1] == ["MemAvailable:"] and line[1:2] and line[1].isdigit()
    ]
    for folder in _groups("", proc, cgroups):
        counts += _free_bytes(folder, "memory.max", "memory.current", "")
    for folder in _groups("memory", proc, cgroups):
        counts += _free_bytes(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return min(counts, default=None)


def _quota(proc: Path, cgroups: Path) -> int | None:
    """The smallest quota of the groups around this process in whole processors; None where there is none."""
    pairs = [_read(folder / "cpu.max").split() for folder in _groups("", proc, cgroups)]
    for folder in _groups("cpu", proc, cgroups):
        pairs.append([_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")])
    numbers = [(int(pair[0]), int(pair[1])) for pair in pairs if len(pair) == 2 and all(map(str.isdigit, pair))]
    return min((-(-quota // period) for quota, period in numbers if quota > 0 and period > 0), default=None)


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's group and of those around it; "" is version 2, which has all controllers."""
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(",") or not path.startswith("/") or (number == "0") != (controller == ""):
            continue
        place = Path(path.lstrip("/"))
        inside = [] if ".." in place.parts else [place, *place.parents]  # the last of the parents is the root itself
        for root in (cgroups, cgroups / "unified") if number == "0" else (cgroups / names, cgroups / controller):
            yield from (root / part for part in inside or [Path()])


def _free_bytes(folder: Path, limit_file: str, used_file: str, prefix: str) -> list[int]:
    """What a group may still take: pages that are only cached files can be had back. Nothing where it has no limit."""
    limit, used = _read(folder / limit_file), _read(folder / used_file)
    if not (limit.isdigit() and used.isdigit()):
        return []
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    cached = sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in names and line[1].isdigit())
    return [max(0, int(limit) - int(used) + cached)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def last_cache_bytes() -> int | None:
    """Bytes of the largest cache of the first processor; None where nobody can know."""
    sizes = [_read(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 1024 for size in sizes if size[:-1].isdigit() and size.endswith("K")), default=None)


def cpu_name() -> str:
    """What the processor calls itself."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
