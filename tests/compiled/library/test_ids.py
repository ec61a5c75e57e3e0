"""Ids and classes of the library."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

import shoal
from compiled.library.kit import ours
from shoal import compiled
from shoal.compiled import library


@pytest.mark.parametrize("env_id", library.ids())
def test_an_id_is_a_class_that_runs(env_id: str) -> None:
    assert issubclass(library.find(env_id), compiled.Env)
    env = ours(env_id)
    obs, info = env.reset(seed=0)
    assert env.observation_space.contains(obs)
    assert info == {}
    env.action_space.seed(0)
    for _ in range(50):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert env.observation_space.contains(obs)
        if terminated or truncated:
            env.reset()


@pytest.mark.parametrize("env_id", library.ids())
def test_an_env_begins_again_with_its_seed(env_id: str) -> None:
    env = ours(env_id)
    env.action_space.seed(1)
    actions = [env.action_space.sample() for _ in range(30)]

    def play() -> list[str]:
        seen = [str(env.reset(seed=7)[0])]
        for action in actions:
            obs, reward, terminated, _, _ = env.step(action)
            seen.append(f"{obs} {reward}")
            if terminated:
                seen.append(str(env.reset()[0]))
        return seen

    assert play() == play()


def test_gymnasiums_ids_are_gymnasiums() -> None:
    for env_id in library.ids():
        assert env_id.startswith("shoal/") or env_id == "Taxi-v3" or env_id in gymnasium.registry


def test_a_wrong_id_says_which_was_meant() -> None:
    with pytest.raises(LookupError, match=r"'CartPole-v2' is no env of .*: did you mean 'CartPole-v1'\?"):
        library.find("CartPole-v2")
    with pytest.raises(LookupError, match="there are CartPole-v1, Pendulum-v1"):
        library.find("Doom")


def test_lanes_of_plain_python() -> None:
    """Classes of the library run on every other backend, agents as lanes."""
    with shoal.Pool(library.find("shoal/Orchard-v0"), 2, backend="serial", env_kwargs={"num_agents": 4}) as pool:
        first = pool.reset(seed=0)
        assert first.obs.shape == (8, 64, 64)
        batch = pool.step(np.ones(8, np.int64))
        assert batch.reward.shape == (8,)
        assert not batch.terminated.any()
