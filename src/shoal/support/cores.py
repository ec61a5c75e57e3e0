"""How many cores this process may really use."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["affinity_cores", "cgroup_quota", "usable_cores"]


def usable_cores() -> int:
    """Cores by affinity, cut by the cgroup's CPU quota; never `os.cpu_count()`, which counts the machine's."""
    cores = affinity_cores()
    quota = cgroup_quota()
    if quota is not None:
        # A quota of 1.5 cores feeds two workers; of 0.4 still one.
        cores = min(cores, max(1, math.ceil(quota)))
    return cores


def affinity_cores() -> int:
    """Cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def cgroup_quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The tightest CPU quota, in cores, of this process's cgroup and those above it; None for no limit."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            quotas.append(_tightest(root, path, _quota_v2))
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu", root / "cpu,cpuacct"):
                if mount.is_dir():
                    quotas.append(_tightest(mount, path, _quota_v1))
                    break
    found = [quota for quota in quotas if quota is not None]
    return min(found) if found else None


def _tightest(mount: Path, path: str, read: Callable[[Path], float | None]) -> float | None:
    """The smallest quota from the cgroup up to the mount; inside a container the path may not exist there."""
    folder = mount / path.lstrip("/")
    quotas = []
    while True:
        quota = read(folder)
        if quota is not None:
            quotas.append(quota)
        if folder == mount or mount not in folder.parents:
            break
        folder = folder.parent
    return min(quotas) if quotas else None


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 and period > 0 else None
    except (OSError, ValueError):
        return None
