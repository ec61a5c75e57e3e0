"""Waits of whole pools: `prepare`, and workers that stand still for a while."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import shoal
from shoal.errors import PoolClosed
from shoal.native import layout

pytestmark = pytest.mark.timeout(120)
ACTIONS = np.zeros(8, np.int64)


@pytest.mark.parametrize("backend", ["serial", "threads", "processes", "hybrid"])
def test_prepare_changes_nothing_but_the_time(backend: str) -> None:
    with shoal.Pool("CartPole-v1", 8, backend=backend, num_workers=1 if backend == "serial" else 2) as pool:
        plain = [pool.reset(seed=0).obs.copy(), *(pool.step(ACTIONS).obs.copy() for _ in range(20))]
        pool.prepare()
        prepared = [pool.reset(seed=0).obs.copy()]
        for _ in range(20):
            pool.prepare(within=0.0)
            pool.prepare()
            prepared.append(pool.step(ACTIONS).obs.copy())
        np.testing.assert_array_equal(plain, prepared)
        pool.send(ACTIONS)
        pool.prepare()  # while envs step
        assert len(pool.recv().env_id) == 8
        for wrong in (-1.0, 1.0, float("nan"), "soon"):
            with pytest.raises((ValueError, TypeError), match="within"):
                pool.prepare(wrong)  # type: ignore[arg-type]
    with pytest.raises(PoolClosed):
        pool.prepare()


def test_a_worker_that_stands_still_is_waited_for_and_not_taken_for_the_usual() -> None:
    stands_s, stops = 0.2, 3
    with shoal.Pool("CartPole-v1", 8, backend="processes", num_workers=2) as pool:
        pool.reset(seed=0)
        pid = pool.workers[1].pid
        assert pid is not None
        for turn in range(90):
            if turn % 30 == 10:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(stands_s, os.kill, (pid, signal.SIGCONT)).start()
            assert len(pool.step(ACTIONS).reward) == 8
        idle = pool._slab.array("stats")[:, layout.STAT_IDLE_NS]
        assert (idle < stands_s / stops * 1e9).all()
        assert pool.stats().batches >= 90
