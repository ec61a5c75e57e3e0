"""What `pool.stats()` returns: counts, and where the time goes. `native/counters.py` names the counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.memory.slab import Slab
from shoal.native import counters as c
from shoal.observe.diagnosis import diagnosis
from shoal.observe.words import duration, plural

Array = npt.NDArray[Any]
NS = 1e-9
EDGES = c.bucket_edges() * NS
MOST_ROWS = 16  # of workers in the table


@dataclass(frozen=True)
class WorkerInfo:
    """One worker of a pool, as `pool.workers` lists them.

    Attributes:
        index: its number.
        pid: its process; None for threads and for the caller's own block.
        env_ids: its envs.
        state: what it is doing, in a word.
        node: the machine that it runs on, "" for this one.
    """

    index: int
    pid: int | None
    env_ids: list[int]
    state: str
    node: str = ""


@dataclass(frozen=True)
class WorkerStats:
    """What one worker did. Times are in seconds.

    Attributes:
        busy: the fraction of the time in which it was stepping.
        passes: how often it went over its envs.
        waking: how long a pass had to wait, on average, for the worker to wake up.
        median, p99: times of the steps of single envs, autoresets included; exact to an eighth.
    """

    index: int
    env_ids: list[int]
    steps: int
    busy: float
    passes: int
    waking: float
    median: float
    p99: float


@dataclass(frozen=True)
class EnvStats:
    """The steps of one env, autoresets included, in seconds. `longest` is the longest since the pool was made."""

    env_id: int
    steps: int
    mean: float
    longest: float


@dataclass(frozen=True)
class Shares:
    """Where the caller's time went, as fractions that make up 1.

    Attributes:
        envs: envs stepped, and the caller waited for them or stepped some itself.
        resets: the same for resets.
        stragglers: the caller waited for answers that would have been there if all workers had ended together.
        waking: workers, or the caller, had to wake up first.
        copying: the pool copied or gathered answers out of the slab.
        infos: the pool read infos, and waited for those that travel as messages, or joined them.
        pool: the rest of the pool's own work; it checked, wrote and posted actions.
        caller: the caller was outside of the pool.
    """

    envs: float
    resets: float
    stragglers: float
    waking: float
    copying: float
    infos: float
    pool: float
    caller: float


LABELS = {
    "envs": "the envs' steps",
    "resets": "the envs' resets",
    "stragglers": "waiting for stragglers",
    "waking": "waking",
    "copying": "copying",
    "infos": "infos",
    "pool": "Shoal's own work",
    "caller": "the caller",
}


COLOURS = {
    "envs": "#0072b2", "resets": "#56b4e9", "stragglers": "#d55e00", "waking": "#e69f00", "copying": "#cc79a7",
    "infos": "#882255", "pool": "#009e73", "caller": "#999999",
}  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """The slab's counters at one moment, or their growth between two moments."""

    workers: Array
    episodes: Array
    step_times: Array
    lanes: Array
    pool: Array

    @classmethod
    def read(cls, slab: Slab, now_ns: int) -> Counts:
        """Copy the counters. The time since the last call of the pool counts as the caller's."""
        slab.settle()
        pool = slab.array("pool_stats").copy()
        pool[c.POOL_CALLER_NS] += max(0, now_ns - pool[c.POOL_SINCE_NS])
        workers, episodes = slab.array("stats").copy(), slab.array("episode_sums").copy()
        return cls(workers, episodes, slab.array("step_times").copy(), slab.array("lane_stats").copy(), pool)

    def __sub__(self, earlier: Counts) -> Counts:
        lanes = self.lanes - earlier.lanes
        lanes[:, c.LANE_LONGEST_NS] = self.lanes[:, c.LANE_LONGEST_NS]
        return Counts(
            self.workers - earlier.workers, self.episodes - earlier.episodes, self.step_times - earlier.step_times,
            lanes, self.pool - earlier.pool,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PoolStats:
    """Counts and times since the pool was made, or between two moments: `later - earlier`. As text, a table.

    Attributes:
        seconds: the length of that time.
        backend, batch_size: those of the pool.
        blocks: the env ids of each worker.
        counts: the raw counters.
    """

    seconds: float
    backend: str
    batch_size: int
    blocks: list[list[int]]
    counts: Counts

    @classmethod
    def read(cls, slab: Slab, backend: str, batch_size: int, blocks: Sequence[list[int]]) -> PoolStats:
        now_ns = time.monotonic_ns()
        counts = Counts.read(slab, now_ns)
        seconds = max((now_ns - int(counts.pool[c.POOL_BEGAN_NS])) * NS, NS)
        return cls(seconds, backend, batch_size, [list(block) for block in blocks], counts)

    def __sub__(self, earlier: PoolStats) -> PoolStats:
        if not isinstance(earlier, PoolStats) or self.blocks != earlier.blocks:
            raise TypeError("a difference is taken of the stats of one pool at two moments")
        if earlier.seconds >= self.seconds:
            raise ValueError("a difference is taken as later - earlier, and these are the other way round")
        return replace(self, seconds=self.seconds - earlier.seconds, counts=self.counts - earlier.counts)

    # ---- counts ------------------------------------------------------------------------------------------------

    @property
    def num_envs(self) -> int:
        """The number of lanes of the pool."""
        return sum(len(block) for block in self.blocks)

    @property
    def steps(self) -> int:
        """The number of answers of all lanes, resets included."""
        return int(self.counts.workers[:, c.STAT_STEPS].sum())

    @property
    def episodes(self) -> int:
        """The number of resets, by the caller and by autoreset."""
        return int(self.counts.workers[:, c.STAT_EPISODES].sum())

    @property
    def ended_episodes(self) -> int:
        """The number of episodes that were terminated or truncated."""
        return int(self.counts.episodes[:, c.SUM_ENDED].sum())

    @property
    def mean_return(self) -> float | None:
        """The mean return of the episodes that have ended; None if none has."""
        return self._per_episode(c.SUM_RETURN)

    @property
    def mean_length(self) -> float | None:
        """The mean length of the episodes that have ended; None if none has."""
        return self._per_episode(c.SUM_LENGTH)

    def _per_episode(self, what: int) -> float | None:
        ended = self.ended_episodes
        return float(self.counts.episodes[:, what].sum()) / ended if ended else None

    @property
    def batches(self) -> int:
        """The number of batches that the caller received."""
        return int(self.counts.pool[c.POOL_BATCHES])

    @property
    def restarts(self) -> int:
        """The number of envs that were replaced."""
        return int(self.counts.pool[c.POOL_RESTARTS])

    @property
    def steps_per_second(self) -> float:
        """The mean rate over this time."""
        return self.steps / self.seconds

    # ---- times -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> list[float]:
        """The fraction of the time in which each worker was stepping."""
        # A worker counts a pass when it ends, though it may have begun before the earlier of two moments.
        return [min(1.0, float(ns) * NS / self.seconds) for ns in self.counts.workers[:, c.STAT_BUSY_NS]]

    @property
    def waits(self) -> float:
        """The seconds in which the caller waited for answers, or stepped envs itself."""
        return float(self.counts.pool[c.POOL_WAIT_NS]) * NS

    @property
    def sleeping(self) -> float:
        """The fraction of the workers' waits for requests that ended in a sleep, from which they had to be woken."""
        sleeps, passes = (int(self.counts.workers[:, i].sum()) for i in (c.STAT_SLEEPS, c.STAT_PASSES))
        return min(1.0, sleeps / max(1, passes))

    @property
    def workers(self) -> list[WorkerStats]:
        """The figures of each worker."""
        rows = zip(self.blocks, self.counts.workers, self.counts.step_times, self.busy, strict=True)
        return [
            WorkerStats(
                index, block, int(row[c.STAT_STEPS]), busy, int(row[c.STAT_PASSES]),
                float(row[c.STAT_WAKE_NS]) * NS / max(1, int(row[c.STAT_PASSES])),
                quantile(times, 0.5), quantile(times, 0.99),
            )
            for index, (block, row, times, busy) in enumerate(rows)
        ]  # fmt: skip

    @property
    def median(self) -> float:
        """The median time of a step of one env, autoresets included; exact to an eighth."""
        return quantile(self.counts.step_times.sum(axis=0), 0.5)

    @property
    def p99(self) -> float:
        """The 99th percentile of the time of a step of one env, autoresets included; exact to an eighth."""
        return quantile(self.counts.step_times.sum(axis=0), 0.99)

    @property
    def envs(self) -> list[EnvStats]:
        """The envs that have stepped. An env with several lanes is listed once, by its first lane."""
        ids = [env_id for block in self.blocks for env_id in block]
        return [
            EnvStats(env_id, int(steps), float(ns) * NS / int(steps), float(longest) * NS)
            for env_id, (steps, ns, longest) in zip(ids, self.counts.lanes, strict=True)
            if steps
        ]

    @property
    def slowest_env(self) -> EnvStats | None:
        """The env with the longest mean time of a step; None if none has stepped."""
        return max(self.envs, key=lambda env: env.mean, default=None)

    @property
    def shares(self) -> Shares:
        """The parts of the caller's time."""
        pool, workers = self.counts.pool, self.counts.workers
        total = self.seconds / NS
        wait, caller, copying = (float(pool[i]) for i in (c.POOL_WAIT_NS, c.POOL_CALLER_NS, c.POOL_COPY_NS))
        infos = min(float(pool[c.POOL_INFO_NS]), copying)
        stragglers = min(float(pool[c.POOL_STRAGGLER_NS]), wait)
        # A wait for all workers is their mean time, and the stragglers' part on top of it.
        waking = float(pool[c.POOL_WAKE_NS]) + float(workers[:, c.STAT_WAKE_NS].mean())
        waking = min(waking, wait - stragglers)
        stepping = wait - stragglers - waking
        busy = max(1.0, float(workers[:, c.STAT_BUSY_NS].sum()))
        resets = stepping * min(1.0, float(workers[:, c.STAT_RESET_NS].sum()) / busy)
        own = max(0.0, total - wait - caller - copying)
        parts = (stepping - resets, resets, stragglers, waking, copying - infos, infos, own, caller)
        return Shares(*(part / sum(parts) for part in parts)) if sum(parts) else Shares(0, 0, 0, 0, 0, 0, 0, 1)

    # ---- words -------------------------------------------------------------------------------------------------

    @property
    def verdict(self) -> str:
        """A diagnosis in words: what takes the time, and what would help."""
        return diagnosis(self)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        slowest = self.slowest_env
        return {
            "backend": self.backend, "num_envs": self.num_envs, "batch_size": self.batch_size,
            "seconds": self.seconds, "steps": self.steps, "steps_per_second": self.steps_per_second,
            "batches": self.batches, "episodes": self.episodes, "ended_episodes": self.ended_episodes,
            "mean_return": self.mean_return, "mean_length": self.mean_length, "restarts": self.restarts,
            "shares": dict(vars(self.shares)), "sleeping": self.sleeping, "median": self.median, "p99": self.p99,
            "workers": [dict(vars(worker)) for worker in self.workers],
            "slowest_env": None if slowest is None else dict(vars(slowest)),
            "verdict": self.verdict,
        }  # fmt: skip

    def __str__(self) -> str:
        return "\n\n".join([self._head(), self._share_table(), self._worker_table(), self._tail()])

    def _head(self) -> str:
        workers = plural(len(self.blocks), "worker")
        return (
            f"{self.num_envs} envs, {self.backend} with {workers}, batches of {self.batch_size}: {self.steps:,} steps "
            f"in {duration(self.seconds)}, {self.steps_per_second:,.0f} steps/s"
        )

    def _share_table(self) -> str:
        per_batch = self.seconds / max(1, self.batches)
        rows = [("where the time goes", "share", "per batch")]
        for name, share in vars(self.shares).items():
            rows.append((LABELS[name], f"{share:.1%}", duration(share * per_batch) if self.batches else ""))
        return _aligned(rows)

    def _worker_table(self) -> str:
        rows = [("worker", "envs", "busy", "passes", "waking", "median step", "99th percentile")]
        workers = self.workers
        for w in workers[:MOST_ROWS]:
            ids = f"{w.env_ids[0]}..{w.env_ids[-1]}" if len(w.env_ids) > 1 else str(w.env_ids[0])
            times = (duration(w.waking), duration(w.median), duration(w.p99))
            rows.append((str(w.index), ids, f"{w.busy:.0%}", f"{w.passes:,}", *times))
        if len(workers) > 1:
            mean = sum(self.busy) / len(workers)
            rows.append(("all", "", f"{mean:.0%}", "", "", duration(self.median), duration(self.p99)))
        more = len(workers) - MOST_ROWS
        return _aligned(rows) + (f"\n({more} more workers are in the last line only)" if more > 0 else "")

    def _tail(self) -> str:
        lines = []
        slowest, times = self.slowest_env, [env.mean for env in self.envs]
        if slowest is not None and len(times) > 1:
            mean, usual, longest = map(duration, (slowest.mean, float(np.median(times)), slowest.longest))
            lines.append(
                f"slowest env: {slowest.env_id}, {mean} a step on average against {usual}; its longest took {longest}"
            )
        if self.mean_return is not None and self.mean_length is not None:
            lines.append(
                f"episodes: {self.ended_episodes:,} ended, of {self.mean_length:,.1f} steps and a return of "
                f"{self.mean_return:,.4g} on average"
            )
        if self.restarts:
            lines.append(f"restarts: {self.restarts:,}")
        return "\n".join([*lines, self.verdict])


def quantile(times: Array, q: float) -> float:
    """Return the seconds that a fraction `q` of the steps took at most, from a row of `step_times`; 0 without steps."""
    up_to = np.cumsum(times)
    if not len(up_to) or not up_to[-1]:
        return 0.0
    wanted = q * float(up_to[-1])
    place = int(np.searchsorted(up_to, wanted))
    inside = (wanted - float(up_to[place] - times[place])) / float(times[place])
    return float(EDGES[place] + inside * (EDGES[place + 1] - EDGES[place]))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lay out columns as wide as their widest entry, the first aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
