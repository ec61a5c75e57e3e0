"""Reads /proc: who descends from whom, and how much memory each process really takes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# Python's own helpers are no workers of anybody; they are told by how they were started.
HELPERS = (b"multiprocessing.forkserver import", b"multiprocessing.resource_tracker import")


class Process(NamedTuple):
    """One line of the process table; `started` tells a process from a later one of the same pid."""

    pid: int
    parent: int
    session: int
    started: int


def table() -> dict[int, Process]:
    """Return every process that can be seen, zombies left out; empty where there is no /proc."""
    found: dict[int, Process] = {}
    if not PROC.is_dir():
        return found
    for name in os.listdir(PROC):
        if name.isdigit() and (process := _stat(int(name))):
            found[process.pid] = process
    return found


def family(pid: int) -> list[Process]:
    """Return all descendants of `pid` and all members of its session, without `pid` itself."""
    everyone = table()
    children: dict[int, list[int]] = defaultdict(list)
    for process in everyone.values():
        children[process.parent].append(process.pid)
    found = {process.pid for process in everyone.values() if process.session == pid}
    todo = [pid, *found]
    while todo:
        below = [child for child in children[todo.pop()] if child not in found]
        found.update(below)
        todo.extend(below)
    found.discard(pid)
    return [everyone[one] for one in sorted(found)]


def workers(pid: int) -> list[int]:
    """Return the descendants of `pid` that do work: no fork server, no resource tracker."""
    return [one.pid for one in family(pid) if not (one.parent == pid and _is_helper(one.pid))]


def alive(process: Process) -> bool:
    """Tell whether this very process is still there."""
    now = _stat(process.pid)
    return now is not None and now.started == process.started


def pss(pids: Iterable[int]) -> list[int]:
    """Return the proportional set size in bytes of each process that lets us read it."""
    sizes = (_pss(pid) for pid in pids)
    return [size for size in sizes if size is not None]


def available_memory() -> int | None:
    """Return how many bytes new processes could take without swapping; None where unknown."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _stat(pid: int) -> Process | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command may hold blanks and brackets; everything after the last bracket is plain.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, parent=int(fields[1]), session=int(fields[3]), started=int(fields[19]))


def _is_helper(pid: int) -> bool:
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return True
    return any(mark in command for mark in HELPERS)


def _pss(pid: int) -> int | None:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def stolen_seconds() -> float:
    """CPU seconds that the hypervisor has given to others so far, over all cores; 0 on a real machine."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
