"""Drives a pool as a training loop does: sampled actions, and a stand-in for the policy between two batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.pool import Pool


class PoolDriver:
    """Resets a pool and then steps it, in full or in partial batches as the pool has them.

    Args:
        actions: batches of actions, used in turn again and again.
        policy: what the caller does after it has received a batch; None for nothing.
    """

    def __init__(self, pool: Pool, actions: Sequence[Any], policy: Callable[[], object] | None = None, seed: int = 0):
        self.pool, self._policy = pool, policy
        self._actions = itertools.cycle(actions)
        if pool.batch_size < pool.num_envs:
            self._turn = self._partial_turn
            pool.async_reset(seed=seed)
        else:
            self._turn = self._full_turn
            pool.reset(seed=seed)

    def run(self, seconds: float) -> tuple[int, float]:
        """Take batches for about so long, at least one; return their number and the seconds that they took."""
        turn, clock, turns = self._turn, time.perf_counter, 0
        began = now = clock()
        while turns == 0 or now - began < seconds:
            turn()
            turns += 1
            now = clock()
        return turns, now - began

    def _full_turn(self) -> None:
        if self._policy is not None:
            self._policy()
        self.pool.step(next(self._actions))

    def _partial_turn(self) -> None:
        batch = self.pool.recv()
        if self._policy is not None:
            self._policy()
        self.pool.send(next(self._actions), batch.env_id)
