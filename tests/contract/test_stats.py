"""pool.stats(): what it counts on every backend, differences, and what it says in words."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import SPACES, CountEnv, SpaceEnv
from shoal import Pool


class SleepEnv(CountEnv):
    """A CountEnv whose steps and resets take so many seconds."""

    def __init__(self, step: float = 0.0, reset: float = 0.0, **options: Any):
        super().__init__(**options)
        self._step, self._reset = step, reset

    def reset(self, **options: Any) -> Any:
        time.sleep(self._reset)
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        time.sleep(self._step)
        return super().step(action)


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


def run(pool: Pool, batches: int) -> shoal.PoolStats:
    """Step all envs so often; the stats of just that."""
    pool.reset(seed=0)
    before = pool.stats()
    for _ in range(batches):
        pool.step(zeros(pool.num_envs))
    return pool.stats() - before


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_everything_adds_up(backend: str, autoreset: Any) -> None:
    with Pool(partial(CountEnv, length=3), 7, backend=backend, num_workers=3, autoreset=autoreset) as pool:
        stats = run(pool, 12)
        assert (stats.steps, stats.batches, stats.restarts, stats.num_envs) == (7 * 12, 12, 0, 7)
        assert [env.steps for env in stats.envs] == [12] * 7
        assert [env.env_id for env in stats.envs] == list(range(7))
        assert [worker.env_ids for worker in stats.workers] == [worker.env_ids for worker in pool.workers]
        assert [worker.passes for worker in stats.workers] == [12] * len(pool.workers)
        assert sum(worker.steps for worker in stats.workers) == stats.steps
        assert stats.ended_episodes == 7 * (3 if autoreset == "next_step" else 4)
        assert stats.mean_length == 3
        assert sum(vars(stats.shares).values()) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in vars(stats.shares).values())


def test_returns_are_those_of_the_batches(backend: str) -> None:
    with Pool(partial(CountEnv, length=3), 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        returns = []
        for _ in range(9):
            batch = pool.step(zeros(3))
            returns += batch.episode_return[batch.terminated | batch.truncated].tolist()
        stats = pool.stats()
        assert stats.ended_episodes == len(returns) > 0
        assert stats.mean_return == pytest.approx(np.mean(returns))


def test_partial_batches_count_as_well(backend: str) -> None:
    with Pool(CountEnv, 5, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.async_reset(seed=0)
        for _ in range(20):
            batch = pool.recv()
            pool.send(zeros(2), batch.env_id)
        stats = pool.stats()
        assert stats.batches == 20
        assert stats.shares.stragglers == 0
        assert "batches of 2" in str(stats)


def test_one_env(backend: str) -> None:
    with Pool(CountEnv, 1, backend=backend) as pool:
        stats = run(pool, 11)
        assert [env.steps for env in stats.envs] == [11]
        assert stats.shares.stragglers == 0
        assert "slowest env" not in str(stats)


def test_nested_spaces_take_the_long_way_and_count_alike(backend: str) -> None:
    with Pool(partial(SpaceEnv, SPACES["dict"], SPACES["tuple"]), 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        before = pool.stats()
        for _ in range(3):
            pool.step(pool.action_space.sample())
        stats = pool.stats() - before
        assert (stats.steps, stats.batches) == (9, 3)
        assert stats.shares.pool > 0


def test_the_slowest_env_is_found(backend: str) -> None:
    envs = [partial(SleepEnv, 0.1 if i == 5 else 0.0) for i in range(7)]
    with Pool(envs, backend=backend, num_workers=3) as pool:
        slowest = run(pool, 3).slowest_env
        assert slowest is not None
        assert slowest.env_id == 5
        assert slowest.longest >= slowest.mean >= 0.1


@pytest.mark.parametrize("parallel", ["threads", "processes", "hybrid"])
def test_waiting_for_a_slow_env_is_waiting_for_stragglers(parallel: Any) -> None:
    envs = [partial(SleepEnv, 0.1 if i == 3 else 0.0) for i in range(4)]
    with Pool(envs, backend=parallel, num_workers=4) as pool:
        stats = run(pool, 4)
        # Three of four workers wait for the last: 0.075 s in each batch, less if they themselves are late.
        assert stats.shares.stragglers * stats.seconds > 0.1
        assert stats.shares.stragglers < 1


def test_the_callers_own_work_is_counted(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        before = pool.stats()
        for _ in range(12):
            pool.step(zeros(3))
            time.sleep(0.005)
        stats = pool.stats() - before
        assert stats.shares.caller * stats.seconds >= 12 * 0.005


def test_the_callers_time_counts_until_now(backend: str) -> None:
    with Pool(CountEnv, 2, backend=backend) as pool:
        start = pool.stats()
        time.sleep(0.02)
        stats = pool.stats() - start
        assert stats.shares.caller * stats.seconds >= 0.02


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_resets_are_told_from_steps(backend: str, autoreset: Any) -> None:
    make = partial(SleepEnv, reset=0.02, length=1)
    with Pool(make, 1, backend=backend, autoreset=autoreset) as pool:
        stats = run(pool, 8)
        assert stats.shares.resets > stats.shares.envs
        assert stats.workers[0].busy * stats.seconds >= (4 if autoreset == "next_step" else 8) * 0.02


def test_faces_that_take_only_a_step_count_what_they_copy() -> None:
    envs = shoal.make(partial(SpaceEnv, spaces.Box(0, 1, (500, 500), np.float32)), 2, backend="serial")
    envs.reset(seed=0)
    before = envs.pool.stats()
    for _ in range(3):
        envs.step(envs.action_space.sample())
    assert (envs.pool.stats() - before).shares.copying > 0
    envs.close()


class TalkingEnv(CountEnv):
    """Returns texts as infos at each step, which have no arrays."""

    texts = {f"key {i}": f"text {i}" for i in range(100)}

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], self.texts)


def test_the_verdict_names_infos_where_they_take_the_time() -> None:
    with shoal.make(TalkingEnv, 32, backend="serial") as envs:
        envs.reset(seed=0)
        before = envs.pool.stats()
        for _ in range(30):
            envs.step(zeros(32))
        stats = envs.pool.stats() - before
    assert "infos take" in stats.verdict


@pytest.mark.parametrize("where", ["serial", "processes"])
def test_infos_that_travel_are_counted(where: Any) -> None:
    with Pool(TalkingEnv, 4, backend=where) as pool:
        assert run(pool, 4).shares.infos > 0
    with Pool(CountEnv, 4, backend=where) as pool:
        assert run(pool, 4).shares.infos >= 0


@pytest.mark.parametrize("where", ["serial", "processes"])
def test_restarts_are_counted(where: Any) -> None:
    class Fragile(CountEnv):
        def step(self, action: Any) -> Any:
            if action == 1:
                raise RuntimeError("broken")
            return super().step(action)

    with Pool(Fragile, 3, backend=where, on_error="restart") as pool:
        pool.reset(seed=0)
        pool.step(np.array([0, 1, 0]))
        stats = pool.stats()
        assert stats.restarts == 1
        assert "restarts: 1" in str(stats)


def test_differences_are_of_one_pool_and_in_order() -> None:
    with Pool(CountEnv, 2, backend="serial") as pool, Pool(CountEnv, 3, backend="serial") as other:
        early = pool.stats()
        late = pool.stats()
        assert (late - early).steps == 0
        with pytest.raises(ValueError, match="later - earlier"):
            early - late
        with pytest.raises(TypeError, match="one pool"):
            late - other.stats()


def test_stats_of_a_pool_that_has_done_nothing(backend: str) -> None:
    with Pool(CountEnv, 2, backend=backend) as pool:
        stats = pool.stats()
        assert (stats.steps, stats.batches, stats.median, stats.p99) == (0, 0, 0.0, 0.0)
        assert stats.slowest_env is None
        assert stats.mean_return is stats.mean_length is None
        assert "too few" in str(stats)


def test_everything_is_plain_data_too(backend: str) -> None:
    with Pool(partial(CountEnv, length=2), 3, backend=backend, num_workers=2) as pool:
        stats = run(pool, 6)
        document = json.loads(json.dumps(stats.as_dict()))
        assert document["steps"] == 18
        assert document["shares"] == vars(stats.shares)
        assert [row["env_ids"] for row in document["workers"]] == stats.blocks
        assert document["slowest_env"]["steps"] == 6
        assert document["verdict"] == stats.verdict
