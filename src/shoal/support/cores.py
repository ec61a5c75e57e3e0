"""How many cores this process may really use."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def usable_cores() -> int:
    """Cores by affinity, cut by the cgroup's CPU quota; never `os.cpu_count()`, which counts the machine's."""
    cores = affinity_cores()
    quota = cgroup_quota()
    # A quota of 1.5 cores feeds two workers; a quota of 0.4 still feeds one.
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def cores_beside(learner_threads: int | None) -> int:
    """Cores that are left for envs beside a learner of so many threads; None for those that torch was told to use.

    By default torch may use all cores. Then none would be left, and `torch_fills_cores` says so instead.
    """
    cores, threads = usable_cores(), learner_threads
    if threads is None:
        threads = torch_threads()
        threads = threads if 1 < threads < cores else 0
    return max(1, cores - threads)


def torch_threads() -> int:
    """How many threads torch may use; 0 where it was not loaded."""
    count = getattr(sys.modules.get("torch"), "get_num_threads", None)
    return int(count()) if callable(count) else 0


def torch_fills_cores() -> bool:
    """Whether torch computes on the CPU in as many threads as there are cores, as it does by default.

    Even a small policy runs in all of them, and for milliseconds afterwards they spin and wait for more. Workers that
    are woken meanwhile get a core late.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    initialized = getattr(cuda, "is_initialized", None)
    return torch_threads() >= usable_cores() > 1 and not (callable(initialized) and initialized())


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
    return min((quota for line in lines for quota in _quotas(line, root)), default=None)


def _quotas(line: str, root: Path) -> Iterator[float]:
    """The quotas from one cgroup up to the mount. Inside a container, the path may not exist there."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    mounts = (root / controllers, root / "cpu", root / "cpu,cpuacct") if controllers else (root,)
    for mount in [one for one in mounts if one.is_dir()][:1]:
        folder = mount / path.lstrip("/")
        for level in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # no limit there, or "max"
                quota, period = _read_quota(level, version=1 if controllers else 2)
                if quota > 0 and period > 0:
                    yield quota / period
            if level == mount:
                break


def _read_quota(folder: Path, version: int) -> tuple[int, int]:
    if version == 2:
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)
