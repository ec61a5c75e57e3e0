"""The cores that may be used: affinity, cut by cgroup quotas of either version, read from made-up trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.support import cores


def tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# what it is, /proc/self/cgroup, files below /sys/fs/cgroup, cores
CASES: list[tuple[str, str, dict[str, str], float | None]] = [
    ("v2, no limit", "0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "cpu.max": "max 100000\n"}, None),
    ("v2, own limit", "0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
    ("v2, tighter above", "0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
    ("v2, tighter below", "0::/a/b\n", {"a/b/cpu.max": "100000 100000\n", "a/cpu.max": "max 100000\n"}, 1.0),
    ("v2, at the mount", "0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    ("v2, path of the host", "0::/docker/0a1b\n", {"cpu.max": "300000 100000\n"}, 3.0),
    ("v2, path above the mount", "0::/../../a\n", {"cpu.max": "300000 100000\n"}, 3.0),
    ("v2, nonsense", "0::/\n", {"cpu.max": "many\n"}, None),
    ("v2, other period", "0::/\n", {"cpu.max": "25000 50000\n"}, 0.5),
    ("v1, no limit", "4:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "-1",
                                           "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
    ("v1", "4:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000",
                                  "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2.5),
    ("v1, mounted as cpu", "4:cpu,cpuacct:/a\n", {"cpu/cpu.cfs_quota_us": "200000",
                                                  "cpu/cpu.cfs_period_us": "100000"}, 2.0),
    ("v1, only cpuset", "4:cpuset:/a\n", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, None),
    ("v1, period missing", "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "200000"}, None),
    ("both, the tighter one", "4:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000",
                                                  "cpu.max": "100000 100000"}, 1.0),
    ("neither", "", {}, None),
    ("a path with colons", "0::/a:b\n", {"a:b/cpu.max": "100000 100000"}, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("proc", "files", "quota"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_quota_from_a_made_up_tree(tmp_path: Path, proc: str, files: dict[str, str], quota: float | None) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    tree(root, files)
    (tmp_path / "self").write_text(proc)
    assert cores.cgroup_quota(tmp_path / "self", root) == quota


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cores.cgroup_quota(tmp_path / "nothing", tmp_path) is None


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [(8, None, 8), (8, 2.0, 2), (8, 1.5, 2), (8, 0.4, 1), (2, 16.0, 2), (1, None, 1)],
)
def test_the_tighter_of_both_counts(
    monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(cores, "affinity_cores", lambda: affinity)
    monkeypatch.setattr(cores, "cgroup_quota", lambda: quota)
    assert cores.usable_cores() == expected


def test_affinity_is_asked_for_and_not_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert cores.affinity_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores.affinity_cores() == 1


def test_here_it_is_at_least_one() -> None:
    assert 1 <= cores.usable_cores() <= cores.affinity_cores()
