"""Counters in the slab: where the time goes. The C core counts alike (counters.h); `observe.stats` reads them.

Each has one writer, which adds without a lock; whoever reads may be in another process, and sees figures that are a
moment old. All times are ns of the monotonic clock.

`stats`, int64, a row for each worker: STEPS (answers, resets included), BUSY_NS (from the start of a pass to its last
answer), EPISODES (begun), AT and SINCE_NS (which env it is busy with), PASSES (over its block, with something to do),
WAKE_NS (from a request to the start of its pass, as far as the worker had nothing else to do), RESET_NS (the part of
BUSY_NS that went into resets).

`episode_sums`, float64, a row for each worker: how many episodes have ended, the sum of their returns and lengths.

`step_times`, int64, a row for each worker: how many steps took how long, see `bucket`; autoresets count as steps,
resets that were asked for do not. An env that has several lanes makes one step for all of them.

`lane_stats`, int64, a row for each lane: how many steps its env has made, their time, and the longest. An env that has
several lanes counts in its first.

`pool_stats`, int64, one row: BEGAN_NS (when the pool was made), SINCE_NS (when the caller was last heard of), BATCHES,
CALLER_NS (outside of the pool's calls), WAIT_NS (in waits for answers, the caller's own block included),
STRAGGLER_NS (part of WAIT_NS: by how much sooner answers would have been there if all workers had been done at the same
time; counted where a wait takes all that is pending), WAKE_NS (part of WAIT_NS: from the last answer to the end of
the wait), COPY_NS (from the end of a wait until its answers were handed out), RESTARTS (envs that were replaced).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["WorkerCounters", "bucket", "bucket_edges"]

Array = npt.NDArray[Any]

(
    STAT_STEPS, STAT_BUSY_NS, STAT_EPISODES, STAT_AT, STAT_SINCE_NS, STAT_PASSES, STAT_WAKE_NS, STAT_RESET_NS,
) = range(8)  # fmt: skip
SUM_ENDED, SUM_RETURN, SUM_LENGTH = range(3)
LANE_STEPS, LANE_NS, LANE_LONGEST_NS = range(3)
LANE_STATS = 3
(
    POOL_BEGAN_NS, POOL_SINCE_NS, POOL_BATCHES, POOL_CALLER_NS, POOL_WAIT_NS, POOL_STRAGGLER_NS, POOL_WAKE_NS,
    POOL_COPY_NS, POOL_RESTARTS,
) = range(9)  # fmt: skip
# The same by name, for those who read a slab that another version of Shoal may have made.
COLUMNS = {
    "stats": ("steps", "busy_ns", "episodes", "at", "since_ns", "passes", "wake_ns", "reset_ns"),
    "episode_sums": ("ended", "return", "length"),
    "pool_stats": (
        "began_ns", "since_ns", "batches", "caller_ns", "wait_ns", "straggler_ns", "wake_ns", "copy_ns", "restarts",
    ),
}  # fmt: skip
TIME_BUCKETS = 136  # four for each power of two, up to 2**36 ns
POSTED_NS = 2  # in a worker's row of `worker_bells`, read as int64: since when a request waits


def bucket(ns: int) -> int:
    """Where a time is counted in a row of `step_times`."""
    if ns < 4:
        return 0
    power = ns.bit_length() - 3
    return min(4 * power + (ns >> power & 3), TIME_BUCKETS - 1)


def bucket_edges() -> Array:
    """float64 [TIME_BUCKETS + 1]: each bucket's shortest time, and the end of the last."""
    places = np.arange(TIME_BUCKETS + 1)
    edges: Array = (4.0 + places % 4) * 2.0 ** (places // 4)
    edges[0] = 0.0
    return edges


class WorkerCounters:
    """What one worker counts in Python."""

    def __init__(self, slab: Any, worker: int):
        self.stats: Array = slab.array("stats")[worker]
        self._sums, self._times = slab.array("episode_sums")[worker], slab.array("step_times")[worker]
        self._lanes = slab.array("lane_stats")
        self._bell = slab.array("worker_bells").view(np.int64)[worker]
        self._idle_since = 0

    def waking(self, now_ns: int) -> int:
        """How long a request has waited for the pass that begins now while there was nothing else to do.

        Asked in passes without any lane too: a request that came during the last pass may have been answered by it.
        """
        posted, self._bell[POSTED_NS] = int(self._bell[POSTED_NS]), 0
        return max(0, now_ns - max(posted, self._idle_since)) if posted else 0

    def step(self, lane: int, ns: int) -> None:
        """One env has stepped, an autoreset included; `lane` is its first."""
        row = self._lanes[lane]
        row[LANE_STEPS] += 1
        row[LANE_NS] += ns
        row[LANE_LONGEST_NS] = max(int(row[LANE_LONGEST_NS]), ns)
        self._times[bucket(ns)] += 1

    def episodes(self, count: int, returns: float, lengths: float) -> None:
        """Episodes have ended: the sums of their returns and lengths."""
        self._sums[SUM_ENDED] += count
        self._sums[SUM_RETURN] += returns
        self._sums[SUM_LENGTH] += lengths

    def passed(self, steps: int, waking_ns: int, began_ns: int, now_ns: int) -> None:
        """A pass that had something to do is over."""
        for place, more in (
            (STAT_STEPS, steps), (STAT_PASSES, 1), (STAT_WAKE_NS, waking_ns), (STAT_BUSY_NS, now_ns - began_ns),
        ):  # fmt: skip
            self.stats[place] += more
        self._idle_since = now_ns
