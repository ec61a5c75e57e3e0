"""Envs for the tests of the TorchRL face. Workers import this module: nothing heavy may be imported here."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SMALL = spaces.Box(-1.0, 1.0, (1,), np.float32)
SPACES: dict[str, spaces.Space[Any]] = {
    "scalar": spaces.Box(-1.0, 1.0, (), np.float32),
    "float64": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "half-bounded": spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([1.0, np.inf], np.float32)),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "frames": spaces.Box(0, 255, (4, 8, 6), np.uint8),
    "int32": spaces.Box(-5, 5, (2,), np.int32),
    "bool": spaces.Box(0, 1, (2,), np.bool_),
    "float16": spaces.Box(-1.0, 1.0, (2,), np.float16),
    "discrete": spaces.Discrete(5),
    "different ranges": spaces.MultiDiscrete([3, 5]),
    "one range": spaces.MultiDiscrete([3, 3]),
    "one range, two axes": spaces.MultiDiscrete([[3, 3], [3, 3]]),
    "binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(a=spaces.Box(-1.0, 1.0, (2,)), b=spaces.Dict(c=spaces.Discrete(3), d=spaces.MultiBinary(2))),
    "tuple": spaces.Tuple([spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (2,))]),
}
OBSERVATIONS = SPACES | {
    "large": spaces.Box(0, 255, (4, 128, 128), np.uint8),
    "state": spaces.Dict(state=spaces.Box(-1.0, 1.0, (2,))),
}


class SampleEnv(gymnasium.Env[Any, Any]):
    """Observations are drawn by the env's own seed; the reward is a sum over the action; it ends at odd times."""

    def __init__(self, observation: str = "", action: str = ""):
        # Spaces of its own: samples are drawn by them.
        self.observation_space = copy.deepcopy(OBSERVATIONS[observation] if observation else SMALL)
        self.action_space = copy.deepcopy(SPACES[action] if action else SMALL)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1 << 30)))
        self.left = int(self.np_random.integers(2, 7))
        return self.observation_space.sample(), {"left": np.int64(self.left)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        flat = np.asarray(spaces.flatten(self.action_space, action), np.float64)
        reward = float((flat * np.arange(1, len(flat) + 1)).sum())
        over, cut = self.left == 0 and reward > 1, self.left == 0 and reward <= 1
        info = {"left": np.int64(self.left), "pair": np.array([self.left, 1.5])}
        return self.observation_space.sample(), reward, over, cut, info


class WaitingEnv(gymnasium.Env[Any, Any]):
    """Waits for a gate, which is a file, where its action is 5 or more; ends after three steps."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(10)

    def __init__(self, gate: str = "") -> None:
        self.gate = gate

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        ends = time.monotonic() + 60
        while action >= 5 and not os.path.exists(self.gate) and time.monotonic() < ends:
            time.sleep(0.01)
        self.count += 1
        return np.full(1, self.count, np.float32), float(action), self.count == 3, False, {}


class OptionsEnv(SampleEnv):
    """Its first observation is what the options of its reset say."""

    def __init__(self) -> None:
        super().__init__("unbounded")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(2, (options or {}).get("start", -1.0), np.float32), {}
