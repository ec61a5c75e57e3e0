"""Finds the running pools of this user, reads their counters, and computes what a pool has done between two looks.

The pools need not do anything for it. A pool's slab is an anonymous file. The kernel lets a user's processes (and root)
open it by /proc/PID/fd, so no pool needs a name, a socket or a permission of its own. It is read, not mapped: so a slab
that goes away cannot cause a fault, and nothing stays open between two looks.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

if sys.platform == "win32":
    raise ImportError("pools of other processes are found by /proc, which Windows does not have")

import numpy as np
import numpy.typing as npt

from shoal.memory import header
from shoal.support import processes
from shoal.support.usage import UsageError

LINK = re.compile(r"/memfd:shoal( \(deleted\))?")
LARGEST = 1 << 25  # entries of one field; a header that claims more is damaged
# The fields that are read: their type and number of axes, and the columns that a row must have.
TYPES: dict[str, tuple[Any, int]] = {
    "roster": (np.int64, 2), "stats": (np.int64, 2), "episode_sums": (np.float64, 2), "pool_stats": (np.int64, 1),
    "pending": (np.uint8, 1), "requested": (np.uint64, 1), "answered": (np.uint64, 1),
}  # fmt: skip
COLUMNS = {
    "stats": ("busy_ns", "at", "since_ns"), "episode_sums": ("ended", "return", "length"), "pool_stats": ("restarts",),
}  # fmt: skip


class Gone(Exception):
    """The pool was closed, or its process has ended."""


@dataclass(frozen=True)
class RunningPool:
    """A pool of a process, and the descriptor and inode of its slab. `about` is the header."""

    pid: int
    fd: int
    inode: int
    about: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.inode


class Unreadable(NamedTuple):
    """A pool that runs but cannot be read, and why."""

    pid: int
    inode: int
    reason: str


@dataclass(frozen=True)
class Look:
    """The counters of a pool at one moment. Each has one writer, and writers do not wait for each other.

    A row of the roster is the process id (0 for the caller's own process, -1 while the worker is replaced), the first
    lane, and the lane after the last.
    """

    at_ns: int  # on the monotonic clock, which all processes share
    workers: dict[str, npt.NDArray[Any]]  # [workers] for each column of `stats` and `episode_sums` that is read
    restarts: int  # envs that were replaced
    answers: npt.NDArray[np.int64]  # [workers], of all lanes of each; unlike `steps`, it moves with every lane
    roster: npt.NDArray[np.int64]  # [workers, 3]
    pending: npt.NDArray[np.bool_]  # [lanes]: it has an action and was not yet received
    done: npt.NDArray[np.bool_]  # [lanes]: it is pending, and its answer is finished


# ---- finding -------------------------------------------------------------------------------------------------


def find() -> tuple[list[RunningPool], list[Unreadable]]:
    """Return all running pools of this user, oldest first, and those that this version cannot read."""
    found: list[RunningPool] = []
    refused: list[Unreadable] = []
    for name in os.listdir(processes.PROC) if processes.PROC.is_dir() else ():
        # A process may have ended meanwhile, or belong to another user.
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"{processes.PROC}/{name}").st_uid == os.geteuid():
                here, unread = find_in(int(name))
                found += here
                refused += unread
    # Workers and forks hold the slab too. The process that made it is the oldest, so it is kept.
    oldest_last = sorted(refused, key=lambda one: -_started(one.pid))
    return sorted(found, key=lambda pool: int(pool.about["began_ns"])), list({o.inode: o for o in oldest_last}.values())


def find_in(pid: int) -> tuple[list[RunningPool], list[Unreadable]]:
    """Return the pools that this process made itself. Raises OSError if it has ended or belongs to another user."""
    pools: dict[int, RunningPool] = {}
    refused: dict[int, Unreadable] = {}
    for fd, inode in _slabs(pid):
        if inode in pools or inode in refused:
            continue  # another descriptor of the same slab
        try:
            with _opened(pid, fd, inode) as handle:
                about = _facts(handle)
            if about["started"] == _started(pid) and about["pid"] == processes.inner_pid(pid):
                pools[inode] = RunningPool(pid, fd, inode, about)
        except header.OtherVersion as error:
            refused[inode] = Unreadable(pid, inode, str(error))
        except (header.NoHeader, Gone):
            continue
    return list(pools.values()), list(refused.values())


def _slabs(pid: int) -> Iterator[tuple[int, int]]:
    """Yield descriptor and inode of each slab that a process has open."""
    folder = f"{processes.PROC}/{pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if LINK.fullmatch(os.readlink(f"{folder}/{name}")):
                yield int(name), os.stat(f"{folder}/{name}").st_ino


def _started(pid: int) -> int:
    found = processes.started(pid)
    return -1 if found is None else found


# ---- reading -------------------------------------------------------------------------------------------------


def look(pool: RunningPool) -> Look:
    """Read the counters. Raises Gone if the pool was closed."""
    with _opened(pool.pid, pool.fd, pool.inode) as handle:
        try:
            about = _facts(handle)
        except (header.NoHeader, header.OtherVersion) as error:
            raise Gone(str(error)) from error
        if about["began_ns"] != pool.about["began_ns"]:
            raise Gone("another pool has taken its place")
        now = time.monotonic_ns()
        fields = {name: _field(handle, *place) for name, place in about["fields"].items()}
    roster = fields["roster"]
    columns = {
        column: fields[name][..., about["columns"][name].index(column)]
        for name, wanted in COLUMNS.items()
        for column in wanted
    }
    pending = fields["pending"] != 0
    # These were read after `pending`: meanwhile the caller may have received a lane and sent it a new action.
    done = pending & (fields["requested"] == fields["answered"])
    so_far = np.concatenate([[0], np.cumsum(fields["answered"].astype(np.int64))])
    blocks = np.clip(roster[:, 1:], 0, len(pending))
    answers = so_far[blocks[:, 1]] - so_far[blocks[:, 0]]
    restarts = int(columns.pop("restarts"))
    return Look(now, columns, restarts, answers, roster, pending, done)


@contextlib.contextmanager
def _opened(pid: int, fd: int, inode: int) -> Iterator[int]:
    """Open a slab. The descriptor may be another file by now, even a pipe, so opening must not block."""
    path = processes.PROC / str(pid) / "fd" / str(fd)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise Gone(str(error)) from error
    try:
        status = os.fstat(handle)
        if status.st_ino != inode or not stat.S_ISREG(status.st_mode):
            raise Gone("its descriptor is another file now")
        yield handle
    finally:
        os.close(handle)


def _facts(handle: int) -> dict[str, Any]:
    """Return the checked header. A later version may have more in it; other files may hold anything."""
    facts = header.read(os.pread(handle, header.SIZE, 0))
    try:
        facts["fields"] = fields = {name: _place(name, *facts["fields"][name]) for name in TYPES}
        shapes = {name: shape for name, (_, _, shape) in fields.items()}
        lanes, workers = shapes["pending"][0], shapes["stats"][0]
        firsts = {"requested": lanes, "answered": lanes, "episode_sums": workers, "roster": workers}
        if any(shapes[name][0] != first for name, first in firsts.items()) or shapes["roster"][1] != 3:
            raise ValueError("its fields do not belong together")
        for name, wanted in COLUMNS.items():
            if any(facts["columns"][name].index(column) >= shapes[name][-1] for column in wanted):
                raise ValueError(f"{name} has too many columns")
        for name in ("pid", "started", "began_ns", "envs", "batch_size"):
            facts[name] = _small(facts[name])
        for name in ("env", "backend"):
            facts[name] = "".join(c if c.isprintable() else "?" for c in str(facts[name]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise header.NoHeader(f"its header cannot be understood: {error!r}") from error
    return facts


def _place(name: str, offset: Any, dtype: Any, shape: Sequence[Any]) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    expected, axes = np.dtype(TYPES[name][0]), TYPES[name][1]
    sizes = tuple(_small(size) for size in shape)
    if dtype != expected.str or len(sizes) != axes or 0 in sizes or math.prod(sizes) > LARGEST:
        raise ValueError(f"{name} has the type {dtype!r} and the shape {sizes}")
    return _small(offset), expected, sizes


def _small(number: Any) -> int:
    if not 0 <= int(number) < 2**62:
        raise ValueError(f"{number!r} is no number of anything here")
    return int(number)


def _field(handle: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    nbytes = math.prod(shape) * dtype.itemsize
    data = os.pread(handle, nbytes, offset)
    if len(data) < nbytes:
        raise Gone("its memory was cut off")
    return np.frombuffer(data, dtype).reshape(shape)


# ---- one process ---------------------------------------------------------------------------------------------


def check_process(pid: int) -> None:
    """Raise UsageError if this user may not look at the process, or there is none."""
    try:
        os.listdir(processes.PROC / str(pid) / "fd")
    except PermissionError as error:
        raise UsageError(f"process {pid} is another user's: only that user, or root, may look at its pools") from error
    except OSError as error:
        raise UsageError(f"there is no process {pid}") from error


# ---- rates ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerRates:
    """What one worker has done."""

    index: int
    pid: int | None  # None for threads and for the caller's own block
    envs: tuple[int, int]  # the first and the last
    steps_per_second: float
    episodes_per_second: float
    busy: float  # the share of the time in which it was stepping
    env: int | None  # that it is stepping or resetting now,
    env_seconds: float  # and since when
    away: bool  # it has died and is being replaced


@dataclass(frozen=True)
class PoolRates:
    """What one pool has done in `interval` seconds."""

    pid: int
    env: str
    backend: str
    envs: int
    batch_size: int
    seconds: float  # the age of the pool
    interval: float
    steps: int  # all of them so far,
    episodes: int  # those that have ended so far,
    restarts: int  # and envs that were replaced so far
    steps_per_second: float
    episodes_per_second: float
    mean_return: float | None  # of the episodes that ended in the interval; None if none did
    mean_length: float | None
    pending: int  # lanes that have an action and no answer that the caller has received
    done: int  # pending lanes with a finished answer
    workers: list[WorkerRates]


def at_its_start(pool: RunningPool, now: Look) -> Look:
    """Return what a look at the pool would have shown when it was made."""
    workers = {name: np.zeros_like(column) for name, column in now.workers.items()}
    nothing = np.zeros_like(now.pending)
    return Look(pool.about["began_ns"], workers, 0, 0 * now.answers, now.roster, nothing, nothing)


def between(pool: RunningPool, before: Look, now: Look) -> PoolRates:
    seconds = max((now.at_ns - before.at_ns) / 1e9, 1e-9)

    # Nothing is locked, so a counter that was read halfway may go backwards.
    steps = np.maximum(now.answers - before.answers, 0) / seconds
    episodes = np.maximum(now.workers["ended"] - before.workers["ended"], 0) / seconds
    busy = np.clip((_busy_ns(now) - _busy_ns(before)) / 1e9 / seconds, 0.0, 1.0)
    inside, since = now.workers["at"], _inside_ns(now) / 1e9
    workers = [
        WorkerRates(
            index=index,
            pid=int(pid) if pid > 0 else None,
            envs=(int(start), int(stop) - 1),
            steps_per_second=float(steps[index]),
            episodes_per_second=float(episodes[index]),
            busy=float(busy[index]),
            env=abs(int(inside[index])) - 1 if inside[index] else None,
            env_seconds=float(since[index]),
            away=bool(pid < 0),
        )
        for index, (pid, start, stop) in enumerate(now.roster)
    ]
    return PoolRates(
        pid=pool.pid,
        **{name: pool.about[name] for name in ("env", "backend", "envs", "batch_size")},
        seconds=max(0.0, (now.at_ns - pool.about["began_ns"]) / 1e9),
        interval=seconds,
        steps=int(now.answers.sum()),
        episodes=int(now.workers["ended"].sum()),
        restarts=now.restarts,
        steps_per_second=float(steps.sum()),
        episodes_per_second=float(episodes.sum()),
        mean_return=_mean("return", before, now),
        mean_length=_mean("length", before, now),
        pending=int(now.pending.sum()),
        done=int(now.done.sum()),
        workers=workers,
    )


def _mean(name: str, before: Look, now: Look) -> float | None:
    """Return the mean over the episodes that have ended between the looks."""
    ended = now.workers["ended"].sum() - before.workers["ended"].sum()
    mean = (now.workers[name].sum() - before.workers[name].sum()) / ended if ended >= 1 else np.nan
    return float(mean) if np.isfinite(mean) else None


def _inside_ns(look: Look) -> npt.NDArray[Any]:
    """Return how long each worker has been in its env; 0 if it is in none."""
    since = look.workers["since_ns"]
    known = (look.workers["at"] != 0) & (since > 0)
    return np.where(known, np.maximum(look.at_ns - since, 0), 0)


def _busy_ns(look: Look) -> npt.NDArray[Any]:
    """Return the time at work so far. Workers count a pass at its end; until then only the present env counts."""
    return look.workers["busy_ns"] + np.where(look.workers["at"] > 0, _inside_ns(look), 0)
