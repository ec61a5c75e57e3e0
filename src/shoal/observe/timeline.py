"""Notes which env stepped when, batch by batch, from what workers write down anyway: the time line of a profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.memory.slab import Slab
from shoal.native import counters as c

MOST_LANES = 512  # above that, a bar is a worker's pass, and not a step of one env


@dataclass(frozen=True)
class Bar:
    """A step of one env, or a worker's pass over all its envs (`env` is -1); times in ns, of the monotonic clock."""

    worker: int
    env: int
    start: int
    end: int


@dataclass
class Timeline:
    """What happened between the first note and the last.

    Attributes:
        bars: steps of envs, or passes of workers.
        caller: when the caller was outside of the pool: (start, end), once for each batch.
        start, end: the first and the last moment.
    """

    bars: list[Bar] = field(default_factory=list)
    caller: list[tuple[int, int]] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.caller[0][0] if self.caller else 0

    @property
    def end(self) -> int:
        return max([bar.end for bar in self.bars] + [end for _, end in self.caller], default=0)


class Recorder:
    """Call `note` between the end of a batch and the next send, and `timeline` has what happened.

    An env answers at most once between two notes that are taken so, and the slab has when it answered last and how long
    all its steps took: what has grown is the step. The pool itself does nothing for it.

    Args:
        slab: the pool's.
        blocks: the env ids of each worker.
    """

    def __init__(self, slab: Slab, blocks: Sequence[Sequence[int]]):
        self._done, self._lanes, self._stats = (slab.array(name) for name in ("done_ns", "lane_stats", "stats"))
        self._blocks = [np.asarray(block, np.int64) for block in blocks]
        self._worker_of = {int(env): worker for worker, block in enumerate(blocks) for env in block}
        self._seen_done, self._seen_lanes = self._done.copy(), self._lanes.copy()
        self._seen_busy = self._stats[:, c.STAT_BUSY_NS].copy()
        self.timeline = Timeline()

    def note(self, work: Callable[[], object] | None = None) -> None:
        """Note what has been answered since the last call; then do the caller's `work`, and note how long it took."""
        began = time.monotonic_ns()
        steps, passes = self._steps(), self._passes()
        if self.timeline.caller:  # what was done before the first note belongs to no batch of the time line
            self.timeline.bars += steps if steps and len(self._done) <= MOST_LANES else passes
        if work is not None:
            work()
        self.timeline.caller.append((began, time.monotonic_ns()))

    def _steps(self) -> list[Bar]:
        """The steps of single envs since they were last looked at; none where workers count no steps of single envs."""
        lanes, done = self._lanes.copy(), self._done.copy()
        more = lanes[:, c.LANE_STEPS] > self._seen_lanes[:, c.LANE_STEPS]
        # A worker may be about to write one of the two: such an env is looked at again next time.
        stepped = np.flatnonzero(more & (done > self._seen_done))
        took = lanes[:, c.LANE_NS] - self._seen_lanes[:, c.LANE_NS]
        self._seen_lanes[stepped], self._seen_done[stepped] = lanes[stepped], done[stepped]
        return [Bar(self._worker_of[env], env, int(done[env] - took[env]), int(done[env])) for env in stepped.tolist()]

    def _passes(self) -> list[Bar]:
        """The passes of workers since they were last looked at, as far as they are over."""
        busy = self._stats[:, c.STAT_BUSY_NS].copy()
        took, self._seen_busy = busy - self._seen_busy, busy
        ends = [int(self._done[block].max()) for block in self._blocks]
        return [Bar(w, -1, end - int(took[w]), end) for w, end in enumerate(ends) if took[w] > 0 and end > 0]
