"""Counts in the slab what one worker does, as the C core does it (counters.h). The counters are rows of `layout`.

Each counter has one writer, which adds without a lock. Readers may be in another process, and may see figures that are
a moment old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.native import layout

__all__ = ["WorkerCounters", "bucket", "bucket_edges"]

Array = npt.NDArray[Any]

globals().update(layout.CONSTANTS)  # so that `counters.STAT_AT` is `layout.STAT_AT`
POSTED_NS = 2  # in a worker's row of `worker_bells`, read as int64: since when a request waits

if TYPE_CHECKING:

    def __getattr__(name: str) -> int: ...


def bucket(ns: int) -> int:
    """Where a time is counted in a row of `step_times`."""
    if ns < 4:
        return 0
    power = ns.bit_length() - 3
    return min(4 * power + (ns >> power & 3), layout.TIME_BUCKETS - 1)


def bucket_edges() -> Array:
    """float64 [layout.TIME_BUCKETS + 1]: each bucket's shortest time, and the end of the last."""
    places = np.arange(layout.TIME_BUCKETS + 1)
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
        row[layout.LANE_STEPS] += 1
        row[layout.LANE_NS] += ns
        row[layout.LANE_LONGEST_NS] = max(int(row[layout.LANE_LONGEST_NS]), ns)
        self._times[bucket(ns)] += 1

    def episodes(self, count: int, returns: float, lengths: float) -> None:
        """Episodes have ended: the sums of their returns and lengths."""
        self._sums[layout.SUM_ENDED] += count
        self._sums[layout.SUM_RETURN] += returns
        self._sums[layout.SUM_LENGTH] += lengths

    def passed(self, steps: int, waking_ns: int, began_ns: int, now_ns: int) -> None:
        """A pass that had something to do is over."""
        self.stats[layout.STAT_STEPS] += steps
        self.stats[layout.STAT_PASSES] += 1
        self.stats[layout.STAT_WAKE_NS] += waking_ns
        self.stats[layout.STAT_BUSY_NS] += now_ns - began_ns
        self._idle_since = now_ns
