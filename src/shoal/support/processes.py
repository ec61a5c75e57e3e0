"""Reads /proc: who descends from whom, and how much memory each process really takes; ends whole families."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def resident(pid: int) -> int | None:
    """Return the resident memory of a process in bytes."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") or None
    except (OSError, IndexError, ValueError):
        return None


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None where unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = (_cgroup() / "memory.events").read_text().splitlines()
        return {key: int(value) for key, value in map(str.split, lines)}.get("oom_kill")
    return None


# ---- families ------------------------------------------------------------------------------------------------

MARK = "SHOAL_WORKER"  # the environment variable that all of a worker's descendants carry


def found_family(mark: str) -> None:
    """Make this process the head of a session, and mark what it starts: so its descendants can be told from others'."""
    with contextlib.suppress(OSError):
        os.setsid()
    os.environ[MARK] = mark


def identify(pid: int) -> Process | None:
    """Return a running process, so that it is not mistaken for a later one of the same pid."""
    return _stat(pid)


def inner_pid(pid: int) -> int | None:
    """Return what a process takes for its own pid, which is another one inside of a container; None if it is gone."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        return pid
    return None


def end_children() -> None:
    """Kill the descendants of this process, if it has any."""
    try:
        tasks = [(PROC / "self/task" / task / "children").read_text() for task in os.listdir(PROC / "self/task")]
    except OSError:  # a kernel without that file, or no /proc
        tasks = ["unknown"]
    if any(text.strip() for text in tasks):
        kill(family(os.getpid()))


def kill(processes: Iterable[Process]) -> None:
    """Kill these very processes, and no later ones of the same pids."""
    for process in processes:
        if process.pid != os.getpid() and alive(process):
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


def end_families(heads: Mapping[str, Process]) -> None:
    """Kill what is left of families: of each mark its head's session, and whoever carries the mark. One look at all.

    The heads themselves are gone. A session keeps its number while it has members, so that nobody else gets it; but
    where a later process has the head's pid, the session may be that one's.
    """
    if not heads:
        return
    oldest = min(head.started for head in heads.values())
    for _ in range(5):  # they may start others while they are being ended
        everyone = table()
        sessions = {head.pid for head in heads.values() if everyone.get(head.pid, head).started == head.started}
        younger = [process for process in everyone.values() if process.started >= oldest]
        found = [one for one in younger if one.session in sessions or _mark_of(one.pid) in heads]
        found = [one for one in found if one.pid != os.getpid()]
        if not found:
            return
        kill(found)


def _mark_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode():
                return value.decode(errors="replace")
    return ""


def pss(pids: Iterable[int]) -> list[int]:
    """Return the proportional set size in bytes of each process that lets us read it."""
    sizes = (_pss(pid) for pid in pids)
    return [size for size in sizes if size is not None]


def available_memory() -> int | None:
    """Return how many bytes new processes could take without swapping, in this control group; None where unknown."""
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no such control group, or without a limit
        group = _cgroup()
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        return max(0, min(available, left + _reclaimable(group)))
    return available


def _cgroup() -> Path:
    path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    return Path("/sys/fs/cgroup") / path.lstrip("/")


def _reclaimable(group: Path) -> int:
    """Cached files count as used, and are given back when memory is needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0))


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
