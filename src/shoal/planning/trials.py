"""Tries plans for "auto": pools of stand-ins, which take the time of the env's steps and return its answers.

What waking, meeting and other programs cost depends on the machine and the moment. It is a good part of batches that
take less than some milliseconds, and no constant says it. No env of the user's is built or stepped here.
"""

from __future__ import annotations

import functools
import random
import time
from typing import Any

from gymnasium.vector.utils import batch_space

from shoal.engine.scheduler import Scheduler
from shoal.options import PoolOptions
from shoal.planning.probe import Open, Recording, for_stand_ins, step_once
from shoal.support.deadline import NEVER
from shoal.worker.measurement import Measurement
from shoal.worker.stand_ins import Playback

LONGEST_BATCH = 2e-3  # seconds; of longer ones a hand-over is a small part, which is predicted well enough
WARM_UP = 0.03  # seconds of batches before those that count: waits learn how long they take
WINDOWS, WINDOW = 5, 0.012  # how often a plan is timed, and for how many seconds
TIMES = 64  # of steps that a stand-in repeats


class PlanTrials:
    """Runs pools of stand-ins for one env.

    Args:
        count: how many envs the pool will have.
        open_pool: builds a pool and closes it again.
    """

    def __init__(self, recording: Recording, measured: Measurement, count: int, options: PoolOptions, open_pool: Open):
        self._recording, self._count, self._options, self._open = recording, count, options, open_pool
        times = list(measured.wall)
        self._times = random.Random(0).choices(times, k=TIMES)
        # The mean of a draw differs from that of all.
        share = measured.mean * TIMES / (sum(self._times) or 1.0)
        self._times = [share * took for took in self._times]

    def seconds(self, backend: str, workers: int) -> float | None:
        """How long a batch of all stand-ins takes so; None where they cannot be run so."""
        spaces, answers = self._recording
        options = for_stand_ins(self._options, backend, workers)
        try:
            stand_in = functools.partial(Playback, spaces, answers, self._times)
            with self._open([stand_in] * self._count, options) as scheduler:
                return self._timed(scheduler)
        except Exception:  # too few processes or too little memory: the real pool will say so, if it needs as much
            return None

    def _timed(self, scheduler: Scheduler) -> float:
        ids, count, clock = scheduler.table.all_ids, self._count, time.perf_counter
        scheduler.reset(ids, [None] * count, [None] * count, NEVER)
        scheduler.wait_for(ids, NEVER)
        step: Any = step_once(scheduler, batch_space(self._recording.spaces[1], count))
        until = clock() + WARM_UP
        while clock() < until:
            step()
        rounds = []
        for _ in range(WINDOWS):
            batches, began = 0, clock()
            while (now := clock()) - began < WINDOW:
                step()
                batches += 1
            rounds.append((now - began) / batches)
        # Not the best: one that was lucky. Not the median: other programs that begin or end just now decide for long.
        return sorted(rounds)[1]
