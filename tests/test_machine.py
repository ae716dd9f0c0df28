"""Processors and memory as control groups limit them, read from trees of files like those of /proc and /sys."""

import os
from pathlib import Path

import pytest

from tfm.engine import machine
from tfm.engine.machine import available_memory, available_threads

MEMINFO = "MemTotal:       16000 kB\nMemFree:  1 kB\nMemAvailable:    8000 kB\n"
NO_LIMIT_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a machine of 64, so that the quota decides on any machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def tree(root: Path, groups: str, files: dict[str, str], meminfo: str = MEMINFO) -> tuple[Path, Path]:
    """The folders proc and cgroup under root: the process's own /proc/self/cgroup, and files by path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/meminfo").write_text(meminfo)
    (root / "cgroup").mkdir()
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root / "proc", root / "cgroup"


def test_the_groups_own_quota_of_version_2(tmp_path: Path) -> None:
    """Only the root was read: a service or a job with a quota of its own got all the machine's processors."""
    files = {"a/b/cpu.max": "250000 100000", "a/cpu.max": "max 100000"}
    assert available_threads(*tree(tmp_path, "0::/a/b\n", files)) == 3


def test_the_smallest_quota_around_counts(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "800000 100000", "a/cpu.max": "150000 100000", "cpu.max": "900000 100000"}
    assert available_threads(*tree(tmp_path, "0::/a/b\n", files)) == 2


def test_quota_of_version_1(tmp_path: Path) -> None:
    """Controllers have folders of their own, named together or alone; -1 is no quota."""
    groups = "12:memory:/jobs/7\n4:cpu,cpuacct:/jobs/7\n1:name=systemd:/x\n"
    for number, mount in enumerate(("cpu,cpuacct", "cpu")):
        files = {
            f"{mount}/jobs/7/cpu.cfs_quota_us": "-1", f"{mount}/jobs/7/cpu.cfs_period_us": "100000",
            f"{mount}/jobs/cpu.cfs_quota_us": "50000", f"{mount}/jobs/cpu.cfs_period_us": "10000",
        }  # fmt: skip
        assert available_threads(*tree(tmp_path / str(number), groups, files)) == 5


@pytest.mark.parametrize("path", ["/docker/0123", "/../outside"])
def test_a_path_that_is_only_known_outside(tmp_path: Path, path: str) -> None:
    """A container sees its own group as the root, under the name that it has on the machine around it."""
    files = {"cpu.max": "200000 100000", "memory.max": "3000000", "memory.current": "1000000"}
    folders = tree(tmp_path, f"0::{path}\n", files)
    assert available_threads(*folders) == 2
    assert available_memory(*folders) == 2_000_000


def test_memory_of_version_2(tmp_path: Path) -> None:
    """What is left is the smallest along the path; cached files can be had back; "max" is no limit."""
    files = {
        "a/b/memory.max": "max", "a/b/memory.current": "100",
        "a/memory.max": "5000000", "a/memory.current": "4000000",
        "a/memory.stat": "anon 7\ninactive_file 300000\nactive_file 20000\nfile 999999",
        "memory.max": "9000000", "memory.current": "1000000",
    }  # fmt: skip
    assert available_memory(*tree(tmp_path, "0::/a/b\n", files)) == 1_320_000


def test_memory_of_version_1(tmp_path: Path) -> None:
    """The counts of a group and all below it are those with total_ in front."""
    files = {
        "memory/j/memory.limit_in_bytes": "2000000", "memory/j/memory.usage_in_bytes": "1500000",
        "memory/j/memory.stat": "inactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 100",
        "memory/memory.limit_in_bytes": NO_LIMIT_V1, "memory/memory.usage_in_bytes": "5",
    }  # fmt: skip
    assert available_memory(*tree(tmp_path, "9:memory:/j\n0::/\n", files)) == 501_100


def test_a_group_that_is_over_its_limit_has_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "100", "memory.current": "200"}
    assert available_memory(*tree(tmp_path, "0::/\n", files)) == 0


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0:\n::\n", "0::relative\n", "0::/a\n\n4:cpu\n", "\0\xff:::\n"])
def test_malformed_files(tmp_path: Path, groups: str) -> None:
    """What is not understood limits nothing, and breaks nothing."""
    files = {
        "cpu.max": "many few", "memory.max": "x", "memory.current": "", "a/cpu.max": "100000 0", "a/memory.stat": "x",
        "a/memory.max": "1", "cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "",
    }  # fmt: skip
    folders = tree(tmp_path, groups, files, meminfo="MemAvailable:\nMemAvailable: many kB\n")
    assert available_threads(*folders) == 64
    assert available_memory(*folders) is None


def test_no_files_at_all(tmp_path: Path) -> None:
    assert available_threads(tmp_path, tmp_path) == 64
    assert available_memory(tmp_path, tmp_path) is None


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory(*tree(tmp_path, "0::/\n", {})) == 8_000 * 1024


def test_this_machine() -> None:
    assert 1 <= available_threads() <= 64
    assert machine.PROC.exists() is (available_memory() is not None)
