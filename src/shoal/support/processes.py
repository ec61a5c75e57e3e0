"""Finds, measures and ends processes: psutil's table, and what psutil lacks (marks, pids in containers, memory limits).

A process is known by its pid and its start time, as `psutil.Process` is: a later process of the same pid is another
one. psutil is imported when it is first needed, so that `import shoal` and the start of a worker do not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.support.system import system

if TYPE_CHECKING:
    from psutil import Process as Process  # for annotations elsewhere, too

PROC = system.proc
MARK = "SHOAL_WORKER"  # the environment variable that all descendants of a worker inherit
# Processes that do no work of an env are recognized by their command lines: our launcher, and two of Python's own.
HELPERS = ("import be_launcher", "multiprocessing.forkserver import", "multiprocessing.resource_tracker import")


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now; None if there is none, or only a zombie."""
    with _psutil() as psutil:
        process: Process = psutil.Process(pid)
        return process if alive(process) else None
    return None


def alive(process: Process) -> bool:
    """Tell whether this very process still runs. A zombie does not."""
    with _psutil() as psutil:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def started(pid: int) -> int | None:
    """Return when a process started, in milliseconds since the system booted; None if it is gone.

    All processes of a machine get the same number, even if the system's clock is set meanwhile.
    """
    process = identify(pid)
    with _psutil() as psutil:
        return None if process is None else round((process.create_time() - psutil.boot_time()) * 1000)
    return None


def descendants(pid: int) -> list[Process]:
    """Return all descendants of `pid` and all members of its session, without `pid` itself."""
    found: dict[int, Process] = {}
    for head in (pid, *(one for one in _pids() if _session_of(one) == pid)):
        if head not in found:
            with _psutil() as psutil:
                process = psutil.Process(head)
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    found.pop(pid, None)
    return [found[one] for one in sorted(found) if alive(found[one])]


def workers(pid: int) -> list[int]:
    """Return the pids of the descendants that do work: no fork server, no resource tracker."""
    found = []
    for process in descendants(pid):
        with _psutil():
            command = " ".join(process.cmdline())
            if process.ppid() != pid or (command and not any(helper in command for helper in HELPERS)):
                found.append(process.pid)
    return found


def kill(processes: Iterable[Process]) -> None:
    """Kill these very processes, and no later ones of the same pids."""
    for process in processes:
        if process.pid != os.getpid():
            with _psutil():
                process.kill()


@contextlib.contextmanager
def _psutil() -> Iterator[Any]:
    """psutil. The block ends early if a process is gone, or something cannot be read."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        yield psutil


# ---- a worker's session ------------------------------------------------------------------------------------------


def start_session(mark: str) -> None:
    """Make this process the head of a session, and mark all that it starts: so its descendants can be found later."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.setsid()
    os.environ[MARK] = mark


def end_descendants() -> None:
    """Kill the descendants of this process, if it has any."""
    try:
        tasks = [(PROC / "self/task" / task / "children").read_text() for task in os.listdir(PROC / "self/task")]
    except OSError:  # a kernel without that file, or no /proc
        tasks = ["unknown"]
    if any(text.strip() for text in tasks):
        kill(descendants(os.getpid()))


def end_sessions(heads: Mapping[str, Process]) -> None:
    """Kill what is left of workers that are gone: the members of their sessions, and all that carry their marks.

    A session keeps its number while it has members, so that no other session gets it. But where a later process has
    the head's pid, the session may be that process's own, and is left alone. `heads` are the workers by their marks.
    """
    for _ in range(5 if heads else 0):  # they may start others while they are being ended
        own = {head.pid for head in heads.values() if identify(head.pid) in (None, head)}
        # Looked at twice: a pid may have passed to another process before we knew which process has it.
        candidates = [identify(pid) for pid in _pids() if pid != os.getpid() and belongs(pid, own, heads)]
        found = [process for process in candidates if process is not None and belongs(process.pid, own, heads)]
        if not found:
            return
        kill(found)


def belongs(pid: int, sessions: Collection[int], marks: Collection[str]) -> bool:
    """Tell whether a process is in one of these sessions, or carries one of these marks."""
    return _session_of(pid) in sessions or system.variable_of(pid, MARK) in marks


def holds(pid: int, inodes: Collection[int]) -> bool:
    """Tell whether a process has one of these sockets open."""
    names = {f"socket:[{inode}]" for inode in inodes}
    with contextlib.suppress(OSError):
        for file in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(file) in names:
                    return True
    return False


def end_marked(marks: Collection[str]) -> None:
    """Kill all processes that carry one of these marks."""
    for _ in range(5 if marks else 0):  # they may start others while they are being ended
        found = [process for pid in _marked(marks) if (process := identify(pid)) is not None]
        if not found:
            return
        kill(found)


def children(pid: int) -> list[int]:
    """Return the pids of the direct children of a process."""
    with _psutil() as psutil:
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _pids() -> list[int]:
    with _psutil() as psutil:
        return list(psutil.pids())
    return []


def _session_of(pid: int) -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _marked(marks: Collection[str]) -> list[int]:
    return [pid for pid in _pids() if system.variable_of(pid, MARK) in marks]


def inner_pid(pid: int) -> int | None:
    """Return the pid that a process has for itself, which is another one inside of a container; None if it is gone."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
        return pid
    return None


# ---- memory and time -------------------------------------------------------------------------------------------


def resident(pid: int) -> int | None:
    """Return the resident memory of a process in bytes."""
    with _psutil() as psutil:
        return int(psutil.Process(pid).memory_info().rss) or None
    return None


def pss(pids: Iterable[int]) -> list[int]:
    """Return the proportional set size in bytes of each process that lets us read it."""
    found = []
    for pid in pids:
        with _psutil() as psutil, contextlib.suppress(AttributeError):  # the system knows no such size
            found.append(int(psutil.Process(pid).memory_full_info().pss))
    return found


def available_memory() -> int | None:
    """Return how many bytes new processes could take without swapping, in this control group; None where unknown."""
    available: int | None = None
    with _psutil() as psutil, contextlib.suppress(KeyError):
        available = int(psutil.virtual_memory().available)
    if available is None:
        return None
    with contextlib.suppress(OSError, ValueError):  # no such control group, or without a limit
        group = _control_group()
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        # Cached files count as used. The kernel drops them when memory is needed.
        return max(0, min(available, left + _counts(group / "memory.stat").get("inactive_file", 0)))
    return available


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None where unknown."""
    with contextlib.suppress(OSError, ValueError):
        return _counts(_control_group() / "memory.events").get("oom_kill")
    return None


def _control_group() -> Path:
    path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    return Path("/sys/fs/cgroup") / path.lstrip("/")


def _counts(path: Path) -> dict[str, int]:
    return {name: int(count) for name, count in map(str.split, path.read_text().splitlines())}


def stolen_seconds() -> float:
    """Return the CPU seconds that the hypervisor gave to others so far, over all cores; 0 on a real machine."""
    with _psutil() as psutil:
        return float(getattr(psutil.cpu_times(), "steal", 0.0))
    return 0.0
