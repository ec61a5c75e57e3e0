"""Counts in the slab what one worker does, as the C core does it (counters.h). The counters are rows of `layout`.

Each counter has one writer, which adds without a lock. Readers may be in another process, and may see figures that are
a moment old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.native import layout
from shoal.native.twin_spinning import learn

__all__ = ["WorkerCounters", "bucket", "bucket_edges", "flat"]

Array = npt.NDArray[Any]

globals().update(layout.CONSTANTS)  # so that `counters.STAT_AT` is `layout.STAT_AT`
QUICK_STEP_NS = 20_000  # envs that take no longer, on average, are not timed one by one
MOST_LATE = 256  # passes that are not counted yet
POSTED_NS = 2  # in a worker's row of `worker_bells`, read as int64: since when a request waits

if TYPE_CHECKING:

    def __getattr__(name: str) -> int: ...


def flat(array: Array) -> Any:
    """All items of an array in one row, as a memoryview: it reads and writes a number in a fifth of an array's time."""
    return memoryview(array.reshape(-1))  # type: ignore[arg-type]


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
    """What one worker counts in Python; its lanes are `start` up to `stop`."""

    def __init__(self, slab: Any, worker: int, start: int = 0, stop: int = 0):
        self.stats: Array = slab.array("stats")[worker]
        self._stats, self._sums = flat(self.stats), flat(slab.array("episode_sums")[worker])
        self._times = flat(slab.array("step_times")[worker])
        lanes = slab.array("lane_stats")
        self._lanes, self._start = flat(lanes), start
        self._own = lanes[start:stop]
        self._late: list[int] = []  # what passes took that are not counted yet
        self.slow, self._count = True, stop - start
        slab.late_counters.add(self)
        self._bell = flat(slab.array("worker_bells").view(np.int64)[worker])
        self._idle_since = self._idle_until = 0

    def waited(self, slept: bool) -> None:
        """A wait has ended: learn how long it was from the end of the last pass to the next request."""
        stats, posted = self._stats, self._bell[POSTED_NS]
        stats[layout.STAT_SLEEPS] += slept
        if not posted or posted == self._idle_until or not self._idle_since:
            return  # a message, or the first request
        self._idle_until = posted
        usual, spread = stats[layout.STAT_IDLE_NS], stats[layout.STAT_IDLE_SPREAD_NS]
        usual, spread = learn(usual, spread, max(0, posted - self._idle_since))
        stats[layout.STAT_IDLE_NS], stats[layout.STAT_IDLE_SPREAD_NS] = usual, spread

    def waking(self, now_ns: int) -> int:
        """How long a request has waited for the pass that begins now while there was nothing else to do.

        Asked in passes without any lane too: a request that came during the last pass may have been answered by it.
        """
        posted: int = self._bell[POSTED_NS]
        if not posted:
            return 0
        self._bell[POSTED_NS] = 0
        return max(0, now_ns - max(posted, self._idle_since))

    def step(self, lane: int, ns: int) -> None:
        """One env has stepped, an autoreset included; `lane` is its first."""
        lanes, at = self._lanes, lane * layout.LANE_WIDTH
        lanes[at + layout.LANE_STEPS] += 1
        lanes[at + layout.LANE_NS] += ns
        if ns > lanes[at + layout.LANE_LONGEST_NS]:
            lanes[at + layout.LANE_LONGEST_NS] = ns
        self._times[bucket(ns)] += 1

    def settle(self) -> None:
        """Count the passes that were only noted; called before the counters are read."""
        late, self._late = self._late, []
        if late:
            count, longest = self._count, self._own[:, layout.LANE_LONGEST_NS]
            self._stats[layout.STAT_STEPS] += count * len(late)
            self._stats[layout.STAT_PASSES] += len(late)
            self._stats[layout.STAT_BUSY_NS] += sum(late)
            self._own[:, layout.LANE_STEPS] += len(late)
            self._own[:, layout.LANE_NS] += sum(late) // count
            np.maximum(longest, max(late) // count, out=longest)
            for took in late:
                self._times[bucket(took // count)] += count

    def episodes(self, count: int, returns: float, lengths: float) -> None:
        """Episodes have ended: the sums of their returns and lengths."""
        self._sums[layout.SUM_ENDED] += count
        self._sums[layout.SUM_RETURN] += returns
        self._sums[layout.SUM_LENGTH] += lengths

    def passed(self, steps: int, waking_ns: int, began_ns: int, now_ns: int) -> None:
        """A pass that had something to do is over; the worker is busy with no env."""
        stats = self._stats
        stats[layout.STAT_STEPS] += steps
        stats[layout.STAT_PASSES] += 1
        stats[layout.STAT_WAKE_NS] += waking_ns
        stats[layout.STAT_BUSY_NS] += now_ns - began_ns
        stats[layout.STAT_SINCE_NS], stats[layout.STAT_AT] = now_ns, 0
        self._idle_since = now_ns

    def passed_over(self, steps: int, waking_ns: int, began_ns: int, now_ns: int, clocks: list[int] | None) -> None:
        """A pass over the envs from the first on is over; its steps are not counted yet.

        Args:
            clocks: when the first one began and when each one was done. None after a quick pass: the steps count as
                equally long, since to time each takes about a microsecond, and a pass over all is only noted.
        """
        took = now_ns - began_ns
        self.slow = took > QUICK_STEP_NS * steps
        if clocks is None and steps == self._count:
            stats = self._stats
            stats[layout.STAT_SINCE_NS] = self._idle_since = now_ns
            stats[layout.STAT_AT] = 0
            self._late.append(took)
            if self.slow or len(self._late) > MOST_LATE:
                self.settle()
        elif steps:
            for i in range(steps):
                self.step(self._start + i, took // steps if clocks is None else clocks[i + 1] - clocks[i])
            self.passed(steps, waking_ns, began_ns, now_ns)
