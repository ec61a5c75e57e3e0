"""Pools of envs with many agents: every backend gives what one env after the other gives."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import shoal
from agent_envs import Crowd, Masked, Unequal
from contract.lane_driver import Driver

MODES = ("next_step", "same_step", "disabled")
SEEDS = [11, 5, 8]


def make_pool(env: Any, backend: str, count: int = 3, **options: Any) -> shoal.Pool:
    workers = None if backend == "serial" else 2
    return shoal.Pool(env, count, backend=backend, num_workers=workers, **options)  # type: ignore[arg-type]


def compare(batch: Any, drivers: list[Driver], size: int) -> None:
    for row, lane in enumerate(batch.env_id.tolist()):
        driver, at = drivers[lane // size], lane % size
        for name in ("reward", "terminated", "truncated", "began"):
            assert getattr(batch, name)[row] == getattr(driver.out, name)[at], (name, lane)
        assert batch.mask[row] == driver.out.present[at]
        assert np.array_equal(batch.obs[row], driver.out.obs[0][at])
        info = dict(batch.info.get(lane, {}))
        if driver.out.has_final[at]:
            assert np.array_equal(info.pop("final_obs"), driver.out.final[0][at])
        expected = dict(driver.infos[at]) if driver.infos else {}
        if info.get("final_info") == {}:
            del info["final_info"]
        assert info == expected


@pytest.mark.parametrize("mode", MODES)
def test_pools_say_what_lanes_say(backend: str, mode: str) -> None:
    size, rng = 4, np.random.default_rng(0)
    drivers = [Driver(Crowd(size), mode) for _ in SEEDS]
    with make_pool(functools.partial(Crowd, size), backend, autoreset=mode) as pool:
        assert pool.lane_names == [f"agent_{i}" for i in range(size)]
        assert (pool.num_envs, pool.lanes_per_env) == (12, 4)
        batch = pool.reset(seed=[seed for seed in SEEDS for _ in range(size)])
        for driver, seed in zip(drivers, SEEDS, strict=True):
            driver.reset(seed)
        compare(batch, drivers, size)
        ended = 0
        for _ in range(120):
            over = [not driver.lanes.env.agents for driver in drivers]
            if mode == "disabled" and any(over):
                for i in np.flatnonzero(over).tolist():
                    batch = pool.reset(np.arange(i * size, (i + 1) * size))
                    drivers[i].reset()
                    compare(batch, drivers, size)
            actions = rng.integers(0, 5, 12)
            batch = pool.step(actions)
            for i, driver in enumerate(drivers):
                driver.step(actions[i * size : (i + 1) * size])
            compare(batch, drivers, size)
            ended += int(batch.done.sum())
        assert ended > 30


def test_returns_and_lengths_are_those_of_each_agent(backend: str) -> None:
    size = 3
    with make_pool(functools.partial(Crowd, size), backend) as pool:
        batch = pool.reset(seed=1)
        returns, lengths = np.zeros(9), np.zeros(9, np.int64)
        for _ in range(80):
            batch = pool.step(np.ones(9, np.int64))
            returns[batch.began] = lengths[batch.began] = 0
            counted = batch.mask & ~batch.began
            returns += np.where(counted, batch.reward, 0)
            lengths += counted
            assert np.allclose(batch.episode_return[batch.done], returns[batch.done])
            assert (batch.episode_length[batch.done] == lengths[batch.done]).all()


def test_the_first_envs_that_are_ready(backend: str) -> None:
    size, drivers = 2, [Driver(Crowd(2), "next_step") for _ in range(5)]
    with make_pool(functools.partial(Crowd, size), backend, 5, batch_size=4) as pool:
        pool.async_reset(seed=[seed for seed in range(5) for _ in range(size)])
        for seed, driver in enumerate(drivers):
            driver.reset(seed)
        for turn in range(40):
            batch = pool.recv()
            assert len(batch.env_id) == 4
            compare(batch, drivers, size)
            for env in np.unique(batch.env_id // size).tolist():
                drivers[env].step(np.full(size, turn % 5))
            pool.send(np.full(4, turn % 5), batch.env_id)


def test_nested_observations_and_box_actions(backend: str) -> None:
    env = Masked()
    observations, _ = env.reset(seed=4)
    with make_pool(Masked, backend, 2) as pool:
        batch = pool.reset(seed=[4, 4, 5, 5])
        for _ in range(4):
            for lane, name in enumerate("xy"):
                for key, value in observations[name].items():
                    assert np.array_equal(batch.obs[key][lane], value)
            actions = pool.action_space.sample()
            observations, rewards, *_ = env.step({name: actions[lane] for lane, name in enumerate("xy")})
            batch = pool.step(actions)
            assert batch.reward[:2].tolist() == [rewards["x"], rewards["y"]]


def test_a_wrong_action_of_one_agent_is_an_error_of_its_env(backend: str) -> None:
    with make_pool(Unequal, backend, 2) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.EnvError, match=r"'small'.*n=2.*found 4") as caught:
            pool.step(np.array([1, 4, 0, 4, 4, 0]))
        assert isinstance(caught.value, shoal.BadAction)
        pool.reset()
        assert pool.step(np.array([1, 4, 0, 1, 4, 0])).reward.tolist() == [1, 4, 0, 1, 4, 0]


def test_calls_and_attributes_are_the_envs_own(backend: str) -> None:
    with make_pool(Crowd, backend, 2) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("length") == [12] * 8
        assert pool.call("action_space", "agent_1")[0].n == 5


def test_envs_that_are_lost_come_back(backend: str) -> None:
    with make_pool(Unequal, backend, 2, on_error="restart") as pool:
        pool.reset(seed=0)
        batch = pool.step(np.array([1, 4, 0, 4, 4, 0]))
        assert batch.truncated.tolist() == [False] * 3 + [True] * 3
        assert all("shoal_restart" in batch.info[lane] for lane in (3, 4, 5))
        batch = pool.step(np.array([1, 4, 0, 1, 4, 0]))
        assert batch.began.tolist() == [False] * 3 + [True] * 3


class Breaks(Crowd):
    """Raises where anybody does 4."""

    def step(self, actions: dict[str, Any]) -> Any:
        if 4 in actions.values():
            raise RuntimeError("too much")
        return super().step(actions)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_ends_only_what_was_going_on(backend: str, mode: str) -> None:
    """No agent's episode ends twice, and who is absent says nothing."""
    rng, lost = np.random.default_rng(0), 0
    with make_pool(Breaks, backend, autoreset=mode, on_error="restart", max_restarts=1000, copy=True) as pool:
        batch = pool.reset(seed=0)
        for i in range(120):
            lives = batch.mask & (batch.began | ~batch.done)
            over = ~lives.reshape(3, 4).any(axis=1)
            actions = rng.integers(0, 4, 12)
            if i % 5 == 0:
                actions[rng.integers(12)] = 4
            if mode == "disabled" and over.any():
                batch = pool.reset()
                continue
            batch = pool.step(actions)
            lost += len({lane // 4 for lane, info in batch.info.items() if "shoal_restart" in info})
            assert not (batch.done & ~lives).any()
            assert not (~batch.mask & (batch.done | batch.began | (batch.reward != 0) | batch.obs.any(axis=1))).any()
        assert lost == pool.stats().restarts > 3


def test_make_gives_a_vector_env_of_lanes(backend: str) -> None:
    workers = None if backend == "serial" else 2
    with shoal.make(Crowd, 2, backend=backend, num_workers=workers) as envs:
        obs, _ = envs.reset(seed=0)
        assert obs.shape == (8, 4)
        assert envs.num_envs == 8
        obs, *_ = envs.step(envs.action_space.sample())
        assert obs.shape == (8, 4)


def test_a_team_whose_episode_is_over_must_be_reset_where_the_caller_resets(backend: str) -> None:
    with make_pool(Masked, backend, 2, autoreset="disabled") as pool:
        pool.reset(seed=0)
        for _ in range(5):
            batch = pool.step(pool.action_space.sample())
        assert batch.truncated.all()
        with pytest.raises(shoal.ResetNeeded, match="reset"):
            pool.step(pool.action_space.sample())
        pool.reset()
        pool.step(pool.action_space.sample())


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_goes_on_where_it_was_taken(mode: str) -> None:
    rng = np.random.default_rng(0)
    with make_pool(functools.partial(Crowd, 3), "serial", 2, autoreset=mode) as pool:
        pool.reset(seed=3)
        for _ in range(4):
            pool.step(rng.integers(0, 5, 6))
        snapshot = pool.snapshot()
        actions = rng.integers(0, 5, (3, 6))

        def go_on() -> list[Any]:
            seen = []
            for one in actions:
                batch = pool.step(one)
                seen += [batch.obs.copy(), batch.reward.copy(), batch.mask.copy(), batch.began.copy()]
            return seen

        before = go_on()
        pool.restore(snapshot)
        assert all(map(np.array_equal, go_on(), before))
