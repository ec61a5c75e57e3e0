"""PyEnvironments for the tests. What they answer is decided by the number that they are made with, and a seed."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from tf_agents.environments import py_environment
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

Pair = namedtuple("Pair", ["left", "right"])


class CountPyEnv(py_environment.PyEnvironment):
    """Counts its steps and its episodes. Episodes of env i last `length + i % 3` steps."""

    def __init__(self, number: int = 0, length: int = 3, truncates: bool = False, discount: float = 1.0):
        super().__init__()
        self.number, self.length, self.truncates, self.discount = number, length + number % 3, truncates, discount
        self.episode, self.count, self.given, self.closed = 0, 0, -1, False

    def action_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.int32, 0, 3, "action")

    def observation_spec(self) -> Any:
        return array_spec.BoundedArraySpec((4,), np.float32, -1, 1e6, "count")

    def observation(self, action: Any) -> Any:
        return np.array([self.given, self.episode, self.count, action], np.float32)

    def _reset(self) -> ts.TimeStep:
        self.episode, self.count = self.episode + 1, 0
        return ts.restart(self.observation(-1))

    def _step(self, action: Any) -> ts.TimeStep:
        if self._current_time_step.is_last():
            return self.reset()
        assert np.shape(action) == ()
        assert action.dtype == np.int32
        self.count += 1
        reward = self.count + 10.0 * float(action)
        if self.count < self.length:
            return ts.transition(self.observation(action), reward, self.discount)
        if self.truncates:
            return ts.truncation(self.observation(action), reward)
        return ts.termination(self.observation(action), reward)

    def seed(self, seed: Any) -> Any:
        self.given = int(seed) % 1000
        return [self.given]

    def get_info(self) -> Any:
        return {"count": np.int64(self.count), "where": np.array([self.number, self.episode])}

    def render(self, mode: str = "rgb_array") -> Any:
        return np.full((4, 5, 3), self.count, np.uint8)

    def close(self) -> None:
        self.closed = True


class NestedPyEnv(CountPyEnv):
    """Observations and actions are nested as specs may be: dicts, lists, tuples and named tuples, of all types."""

    def observation_spec(self) -> Any:
        return {
            "image": array_spec.BoundedArraySpec((2, 3), np.uint8, 0, 255, "image"),
            "parts": [
                array_spec.ArraySpec((), np.float64, "scalar"),
                Pair(array_spec.ArraySpec((2,), np.bool_, "flags"), array_spec.ArraySpec((), np.int64, "number")),
            ],
        }

    def action_spec(self) -> Any:
        return Pair(
            array_spec.BoundedArraySpec((2,), np.float32, -1, 1, "push"),
            [array_spec.BoundedArraySpec((), np.int32, 1, 3, "gear")],
        )

    def observation(self, action: Any) -> Any:
        return {
            "image": np.full((2, 3), self.count, np.uint8),
            "parts": [
                np.float64(self.episode + 0.1),
                Pair(np.array([self.count % 2, self.number % 2], np.bool_), np.int64(self.count - 5)),
            ],
        }

    def _step(self, action: Any) -> ts.TimeStep:
        if self._current_time_step.is_last():
            return self.reset()
        assert isinstance(action, Pair)
        assert isinstance(action.right, list)
        assert action.left.dtype == np.float32
        gear = action.right[0]
        assert gear.dtype == np.int32
        step = super()._step(np.int32(gear))
        return step._replace(reward=np.float32(step.reward + action.left.sum()))


class OtherSpecEnv(CountPyEnv):
    """Has the same spaces as a CountPyEnv, and another type of reward."""

    def reward_spec(self) -> Any:
        return array_spec.ArraySpec((), np.float64, "reward")


class RaisingEnv(CountPyEnv):
    def _step(self, action: Any) -> ts.TimeStep:
        if self.count == 2:
            raise KeyError("no such joint")
        return super()._step(action)


class VectorRewardEnv(CountPyEnv):
    def reward_spec(self) -> Any:
        return array_spec.ArraySpec((2,), np.float32, "reward")


class RandomEnv(CountPyEnv):
    """Draws its observations, and can be saved."""

    def __init__(self, number: int = 0):
        super().__init__(number, length=5)
        self.rng = np.random.default_rng(number)

    def observation(self, action: Any) -> Any:
        return self.rng.random(4).astype(np.float32)


class SavedEnv(CountPyEnv):
    """Says itself what must be kept of it."""

    def get_state(self) -> Any:
        return {"count": self.count, "episode": self.episode}

    def set_state(self, state: Any) -> None:
        self.count, self.episode = state["count"], state["episode"]


class MaskEnv(CountPyEnv):
    """Its action is a mask."""

    def action_spec(self) -> Any:
        return array_spec.ArraySpec((4,), np.bool_, "mask")

    def _step(self, action: Any) -> ts.TimeStep:
        assert action.dtype == np.bool_
        chosen = np.zeros(4, np.float32)
        chosen[action] = 1
        return ts.transition(chosen, 0.0)
