"""What a pool has done between two looks at its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.observe.running_pools import Look, RunningPool

__all__ = ["PoolRates", "WorkerRates", "at_its_start", "between"]

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class WorkerRates:
    """One worker.

    Attributes:
        pid: None for threads and for the caller's own block.
        envs: the first and the last of its envs.
        busy: the share of the time in which it was stepping.
        env, env_seconds: the env that it is in at the moment, and for how long.
        away: it was lost, and is being replaced.
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
    """One pool, over `interval` seconds.

    Attributes:
        seconds: since the pool was made.
        steps, episodes, restarts: since then; episodes that have ended, and envs that were replaced.
        mean_return, mean_length: of the episodes that have ended in the interval; None where none has.
        pending: lanes that were sent to and not yet received.
        done: of these, those that wait to be received.
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
    """What a look at the pool would have shown when it was made."""
    workers = {name: np.zeros_like(column) for name, column in now.workers.items()}
    nothing = np.zeros_like(now.pending)
    return Look(pool.about["began_ns"], workers, 0, 0 * now.answers, now.roster, nothing, nothing)


def between(pool: RunningPool, before: Look, now: Look) -> PoolRates:
    """From one look to the next."""
    seconds = max((now.at_ns - before.at_ns) / 1e9, 1e-9)

    def rate(then: Numbers, later: Numbers) -> Numbers:
        # Nothing is locked: what was read halfway may go backwards.
        return np.asarray(np.maximum(later - then, 0) / seconds)

    steps = rate(before.answers, now.answers)
    episodes = rate(before.workers["ended"], now.workers["ended"])
    busy = np.clip((_busy_ns(now) - _busy_ns(before)) / 1e9 / seconds, 0.0, 1.0)
    inside, since = now.workers["at"], _inside_ns(now) / 1e9
    workers = [
        WorkerRates(
            index, int(pid) if pid > 0 else None, (int(start), int(stop) - 1), float(steps[index]),
            float(episodes[index]), float(busy[index]), abs(int(inside[index])) - 1 if inside[index] else None,
            float(since[index]), bool(pid < 0),
        )
        for index, (pid, start, stop) in enumerate(now.roster)
    ]  # fmt: skip
    about = pool.about
    return PoolRates(
        pool.pid, about["env"], about["backend"], about["envs"], about["batch_size"],
        max(0.0, (now.at_ns - about["began_ns"]) / 1e9), seconds, int(now.answers.sum()),
        int(now.workers["ended"].sum()), now.restarts, float(steps.sum()), float(episodes.sum()),
        _mean("return", before, now), _mean("length", before, now),
        int(now.pending.sum()), int(now.done.sum()), workers,
    )  # fmt: skip


def _mean(name: str, before: Look, now: Look) -> float | None:
    """Of the episodes that have ended in between."""
    ended = now.workers["ended"].sum() - before.workers["ended"].sum()
    mean = (now.workers[name].sum() - before.workers[name].sum()) / ended if ended >= 1 else np.nan
    return float(mean) if np.isfinite(mean) else None


def _inside_ns(look: Look) -> Numbers:
    """How long each worker has been in its env; 0 where it is in none."""
    since = look.workers["since_ns"]
    known = (look.workers["at"] != 0) & (since > 0)
    return np.where(known, np.maximum(look.at_ns - since, 0), 0)


def _busy_ns(look: Look) -> Numbers:
    """Time at work so far. Workers count it when a pass ends; of a long one, the env that they are in counts now."""
    return look.workers["busy_ns"] + np.where(look.workers["at"] > 0, _inside_ns(look), 0)
