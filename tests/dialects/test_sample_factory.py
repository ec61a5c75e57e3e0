"""The Sample Factory face: what its function makes, and, where Sample Factory is installed, what its wrappers see."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from dialects.sb3_envs import RGB
from envs import CountEnv
from shoal.dialects.sample_factory import BatchedEnv, make_env


def counting(env: Any, seed: int) -> list[int]:
    """The seeds that envs have, as their first observations say."""
    found, info = env.reset(seed=seed)
    assert info == {}
    return [int(row[0]) for row in found]


def test_an_env_that_is_a_batch() -> None:
    with BatchedEnv(CountEnv, 3, backend="serial") as env:
        assert isinstance(env, gymnasium.Env)
        assert (env.num_agents, env.is_multiagent) == (3, True)
        assert env.observation_space == CountEnv().observation_space
        assert counting(env, 4) == [4, 5, 6]
        obs, rewards, terminated, truncated, info = env.step(np.zeros(3, np.int32))
        assert (obs.shape, rewards.tolist(), info) == ((3, 3), [1, 1, 1], {})
        assert not (terminated | truncated).any()


def test_seeds_of_batches_do_not_overlap() -> None:
    gymnasium.register("Counting-v0", CountEnv)
    try:
        for batch, seeds in ((0, [0, 1, 2]), (2, [6, 7, 8])):
            env = make_env("Counting-v0", SimpleNamespace(env_agents=3))
            assert counting(env, batch) == seeds
            env.close()
        assert make_env("Counting-v0").num_agents == 1
    finally:
        del gymnasium.registry["Counting-v0"]


def test_it_can_be_rendered() -> None:
    with BatchedEnv(RGB, 2, backend="serial") as env:
        env.reset(seed=0)
        assert env.render_mode == "rgb_array"
        assert env.render().ndim == 3


def test_sample_factorys_wrappers_see_all_agents() -> None:
    theirs = pytest.importorskip("sample_factory.algo.utils.make_env", reason="Sample Factory is not installed")
    env = theirs.BatchedVecEnv(make_env("CartPole-v1", SimpleNamespace(env_agents=3)))
    assert (env.num_agents, env.is_multiagent) == (3, True)
    obs, _ = env.reset()
    assert tuple(obs["obs"].shape) == (3, 4)
    env.close()
