"""`compiled.check` and `compiled.port` find what differs, and say where."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.classic_control import CartPole

pytest.importorskip("numba", reason="compiled envs need numba")


class Steep(compiled.Env):
    """Plain Python calls pow for a square, and compiled code multiplies: some bits differ; small steps are lost."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)
    max_episode_steps = 5
    state = {"x": float}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = compiled.uniform(rng, 1e7, 2e7)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.x = state.x + 0.01 * action
        return (state.x - 1e7) * 1e6 % 7.0, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.x


def test_a_class_that_is_fine() -> None:
    found = compiled.check(CartPole, episodes=60)
    assert found.fine
    assert [one.names for one in found.comparisons] == [("compiled", "plain Python"), ("compiled", "single")]
    assert all(one.episodes >= 60 for one in found.comparisons)
    assert found.comparisons[0].worst == 0.0
    assert 0.0 < found.comparisons[1].worst < 1e-6
    assert "the same bits" in str(found)
    assert "left out" in str(found)


def test_the_first_difference_has_its_state_and_action() -> None:
    found = compiled.check(Steep, episodes=60)
    assert not found.fine
    [single] = [one for one in found.comparisons if one.names[1] == "single"]
    assert single.difference.startswith("env ")
    assert "by the action" in single.difference
    assert "from the state {x: 1" in single.difference
    assert "reward is" in single.difference


def copy(env: Any, state: Any) -> None:
    state.x, state.v, state.theta, state.omega = env.state


def test_a_port_from_its_beginning_to_its_end() -> None:
    env = gymnasium.make("CartPole-v1")
    first = compiled.port(env)
    assert not first.done
    assert "state" in first.state
    assert first.constants["gravity"] == 9.8
    assert "[ ] write a class that derives from shoal.compiled.Env" in str(first)
    assert "max_episode_steps = 500" in str(first)
    lacking = compiled.port(env, CartPole)
    assert "the env has no attribute 'x': give port a function copy(env, state)" in str(lacking)
    assert compiled.port(env, CartPole, copy).done

    class Heavier(CartPole):
        params = {**CartPole.params, "gravity": 9.9}

    wrong = compiled.port(env, Heavier, copy)
    assert not wrong.done
    assert "the observation is" in wrong.items[-1].text
    assert "by the action" in wrong.items[-1].text
