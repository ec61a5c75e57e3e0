"""Envs whose every number is known, and advantages computed slowly, in plain Python, lane by lane."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counting(gymnasium.Env[Any, Any]):
    """Shows (episode, step); episodes of 3, 4, 5, ... steps end by turns by termination and truncation."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, raises_at: int = 0):
        self.episode, self.at, self.steps, self.raises_at = -1, 0, 0, raises_at

    def _obs(self) -> Any:
        return np.array([self.episode, self.at], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        self.steps += 1
        if self.steps == self.raises_at:
            raise RuntimeError("as it was told")
        over = self.at >= 3 + self.episode
        return self._obs(), float(self.at + action), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


class Nested(gymnasium.Env[Any, Any]):
    """Has parts of every kind in its spaces. Right is the action that the observation names."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "wanted": spaces.Discrete(3, start=5),
            "numbers": spaces.Box(-1, 1, (2,), np.float64),
            "switches": spaces.MultiBinary(2),
        }
    )
    action_space = spaces.Dict({"choice": spaces.Discrete(3, start=5), "amount": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self._obs(), {}

    def _obs(self) -> Any:
        self.wanted = int(self.np_random.integers(5, 8))
        numbers = self.np_random.uniform(-1, 1, 2)
        camera = np.full((12, 12, 3), 10 * self.wanted, np.uint8)
        return {"camera": camera, "wanted": self.wanted, "numbers": numbers, "switches": np.array([1, 0], np.int8)}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.at += 1
        reward = float(action["choice"] == self.wanted) - 0.1 * float(np.abs(action["amount"]).sum())
        return self._obs(), reward, False, self.at == 10, {}


class Recall(gymnasium.Env[Any, Any]):
    """Shows a bit in its first observation only, and rewards the action that repeats it at the end."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.bit, self.at = int(self.np_random.integers(2)), 0
        return np.array([2 * self.bit - 1, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        over = self.at == 4
        reward = (1.0 if action == self.bit else -1.0) if over else 0.0
        return np.array([0, self.at / 4], np.float32), reward, over, False, {}


def slow_advantages(
    reward: Any, terminated: Any, truncated: Any, valid: Any, values: Any, next_values: Any, gamma: float, trace: float
) -> Any:
    """Follow the definition: from each step on, sum discounted differences up to the end of its episode."""
    steps, lanes = reward.shape
    found = np.zeros((steps, lanes))
    for lane in range(lanes):
        for first in range(steps):
            weight = 1.0
            for t in range(first, steps):
                if not valid[t, lane]:
                    break
                after = 0.0 if terminated[t, lane] else next_values[t, lane]
                found[first, lane] += weight * (reward[t, lane] + gamma * after - values[t, lane])
                if terminated[t, lane] or truncated[t, lane]:
                    break
                weight *= gamma * trace
    return found
