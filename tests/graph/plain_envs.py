"""Envs of the tests of torch, in a module without it: a worker imports the module that its env's class is from."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs import CountEnv, FailEnv


class SteadyEnv(gymnasium.Env[Any, Any]):
    """Always answers the same, as what checks operators by calling them again and again expects."""

    observation_space = spaces.Dict(a=spaces.Box(0.0, 1.0, (2,), np.float32), b=spaces.Discrete(3))
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.full(2, 0.25, np.float32), "b": 2}, {}

    def step(self, action: Any) -> Any:
        return {"a": np.full(2, 0.5, np.float32), "b": 1}, 1.5, False, False, {}


class ThirdEnv(FailEnv):
    """Raises a KeyError in a step with action 3."""

    def __init__(self) -> None:
        super().__init__(error=KeyError("no such joint"), length=1000)


class PictureEnv(CountEnv):
    """A CountEnv whose pictures are filled with the step."""

    def __init__(self, size: int = 50_000, dtype: Any = np.uint8):
        super().__init__(length=1000)
        self.observation_space = spaces.Box(0, 255, (size,), dtype)

    def _observation(self) -> Any:
        return np.full(self.observation_space.shape, self.steps, self.observation_space.dtype)
