"""Computes what a pool has done between two looks at its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.observe.running_pools import Look, RunningPool

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class WorkerRates:
    """What one worker has done.

    Attributes:
        pid: None for threads and for the caller's own block.
        envs: the first and the last of its envs.
        busy: the share of the time in which it was stepping.
        env, env_seconds: the env that it is stepping or resetting now, and since when.
        away: the worker has died and is being replaced.
    """

    index: int
    pid: int | None
    envs: tuple[int, int]
    steps_per_second: float
    episodes_per_second: float
    busy: float
    env: int | None
    env_seconds: float
    away: bool


@dataclass(frozen=True)
class PoolRates:
    """What one pool has done in `interval` seconds.

    Attributes:
        seconds: the age of the pool.
        steps, episodes, restarts: all of them so far; episodes that have ended, and envs that were replaced.
        mean_return, mean_length: of the episodes that ended in the interval; None if none did.
        pending: the number of lanes that have an action and no answer that the caller has received.
        done: the number of pending lanes with a finished answer.
    """

    pid: int
    env: str
    backend: str
    envs: int
    batch_size: int
    seconds: float
    interval: float
    steps: int
    episodes: int
    restarts: int
    steps_per_second: float
    episodes_per_second: float
    mean_return: float | None
    mean_length: float | None
    pending: int
    done: int
    workers: list[WorkerRates]


def at_its_start(pool: RunningPool, now: Look) -> Look:
    """Return what a look at the pool would have shown when it was made."""
    workers = {name: np.zeros_like(column) for name, column in now.workers.items()}
    nothing = np.zeros_like(now.pending)
    return Look(pool.about["began_ns"], workers, 0, 0 * now.answers, now.roster, nothing, nothing)


def between(pool: RunningPool, before: Look, now: Look) -> PoolRates:
    """Return the rates between two looks."""
    seconds = max((now.at_ns - before.at_ns) / 1e9, 1e-9)

    def rate(then: Numbers, later: Numbers) -> Numbers:
        # Nothing is locked, so a counter that was read halfway may go backwards.
        return np.asarray(np.maximum(later - then, 0) / seconds)

    steps = rate(before.answers, now.answers)
    episodes = rate(before.workers["ended"], now.workers["ended"])
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


def _inside_ns(look: Look) -> Numbers:
    """Return how long each worker has been in its env; 0 if it is in none."""
    since = look.workers["since_ns"]
    known = (look.workers["at"] != 0) & (since > 0)
    return np.where(known, np.maximum(look.at_ns - since, 0), 0)


def _busy_ns(look: Look) -> Numbers:
    """Return the time at work so far. Workers count a pass at its end; until then only the present env counts."""
    return look.workers["busy_ns"] + np.where(look.workers["at"] > 0, _inside_ns(look), 0)
