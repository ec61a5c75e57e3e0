"""A worker dies while there is no room for another one: it is tried again, or the pool is closed; no wait hangs."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv
from faults.kit import assert_usable, eventually, in_thread, no_descriptor, open_pool
from shoal import Pool
from shoal.backends.processes import ProcessWorker
from shoal.engine import workers as engine_workers
from shoal.support.limits import LIMIT_OF_PROCESSES

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)


def killed(pool: Pool) -> None:
    """Kill the second worker, and wait until the pool could know of it."""
    pid = pool.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pool.workers[1].state == "dead", seconds=20)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("backend", ["processes", "hybrid"])
def test_a_restart_without_a_descriptor_is_tried_again(backend: str, start_method: str) -> None:
    with open_pool(CountEnv, 4, backend, on_error="restart", start_method=start_method) as pool:
        pool.reset(seed=0)
        with no_descriptor() as over:
            killed(pool)
            with in_thread(lambda: pool.step(ZEROS)) as outcome:
                tries = pool._scheduler._recovery.restarts
                eventually(lambda: tries.counts[3] > 0 and len(tries._caused["worker 1"]) > 1, seconds=20)
                assert not outcome
                over.set()
        assert outcome[0].info[3]["shoal_restart"]["cause"] == "died", outcome
        assert_usable(pool)


def test_a_restart_that_never_gets_a_descriptor_closes_the_pool() -> None:
    with open_pool(CountEnv, 4, on_error="restart", max_restarts=3) as pool:
        pool.reset(seed=0)
        with no_descriptor():
            killed(pool)
            with pytest.raises(shoal.StartError, match=r"too many open files \(ulimit -n\)"):
                pool.step(ZEROS)
        with pytest.raises(shoal.PoolClosed, match="too many open files"):
            pool.recv()


def test_a_restart_without_a_thread_closes_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise shoal.StartError(f"could not start a thread: {LIMIT_OF_PROCESSES}")

    with open_pool(CountEnv, 4, on_error="restart") as pool:
        pool.reset(seed=0)
        monkeypatch.setattr(engine_workers, "start_thread", refuse)
        killed(pool)
        with pytest.raises(shoal.StartError, match="could not start a thread: the limit"):
            pool.step(ZEROS)
        with pytest.raises(shoal.PoolClosed, match="could not start a thread"):
            pool.recv()


@pytest.mark.parametrize("where", ["reap", "death"])
def test_whatever_fails_in_a_recovery_closes_the_pool(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody waits for lanes that nobody has."""
    whole = getattr(ProcessWorker, where)
    with open_pool(CountEnv, 4, on_error="restart") as pool:

        def fails(worker: Any) -> Any:
            if pool.closed:
                return whole(worker)
            raise OSError(24, "Too many open files", "/proc")

        pool.reset(seed=0)
        monkeypatch.setattr(ProcessWorker, where, fails)
        killed(pool)
        with pytest.raises(shoal.StartError, match=r"could not be replaced: OSError.*'/proc'"):
            pool.step(ZEROS)
        with pytest.raises(shoal.PoolClosed, match="could not be replaced"):
            pool.recv()


def test_a_replacement_that_fails_says_which_limit_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:

    def fails(worker: Any, deadline: Any) -> Any:
        raise OSError(24, "Too many open files")

    with open_pool(CountEnv, 4, on_error="restart", max_restarts=2) as pool:
        pool.reset(seed=0)
        with monkeypatch.context() as patch:
            patch.setattr(ProcessWorker, "launch", fails)
            killed(pool)
            with pytest.raises(
                shoal.StartError, match="worker 1 could not be started again: this process has too many"
            ):
                pool.step(ZEROS)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("backend", ["processes", "hybrid"])
def test_a_start_with_few_descriptors_says_so_wherever_they_run_out(
    backend: str, start_method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_pool(CountEnv, 4, backend, start_method=start_method):
        pass  # the launcher is there
    for descriptors in range(50):
        with no_descriptor(but=descriptors):
            try:
                pool = open_pool(CountEnv, 4, backend, start_method=start_method)
            except shoal.StartError as error:
                said = str(error)
            else:
                break
        assert "too many open files (ulimit -n)" in said
    with pool:
        assert_usable(pool)
    assert descriptors > 5
    assert capfd.readouterr().err == "", "workers whose pool is given up leave without a word"
