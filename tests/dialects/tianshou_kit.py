"""Envs for the tests of the tianshou dialect. Workers import this module: nothing of tianshou here."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SPACES: dict[str, spaces.Space[Any]] = {
    "float32": spaces.Box(-100, 100, (3,), np.float32),
    "float64": spaces.Box(-100, 100, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(1000),
    "dict": spaces.Dict({
        "index": spaces.Box(-100, 100, (1,), np.float32),
        "deep": spaces.Dict({"pair": spaces.Tuple([spaces.Box(0, 9, (2,), np.int64), spaces.Discrete(9)])}),
    }),
}  # fmt: skip


class Walk(gymnasium.Env[Any, Any]):
    """Walks at random, by its own generator, for a number of steps; `kind` is that of its observations.

    With a gate, which is a file, each step waits for it.
    """

    metadata = {"render_modes": ["ansi"]}
    speed = 1

    def __init__(self, kind: str = "float32", length: int = 4, gate: str = ""):
        self.kind, self.length, self.gate = kind, length, gate
        self.observation_space = SPACES[kind]
        self.action_space = spaces.Discrete(5)
        self.render_mode = "ansi"
        self.at = 0
        self.draw = 0

    def _observation(self) -> Any:
        self.draw = draw = int(self.np_random.integers(0, 9))
        if self.kind == "discrete":
            return 10 * self.at + draw
        if self.kind == "dict":
            pair = (np.array([draw, self.at % 9]), np.int64(self.at % 9))
            return {"index": np.array([draw], np.float32), "deep": {"pair": pair}}
        space = self.observation_space
        return np.full(space.shape, draw + self.at, space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None, lift: int = 0) -> Any:
        super().reset(seed=seed)
        self.at = lift + (options or {}).get("at", 0)
        return self._observation(), {"from": self.at} if self.at else {}

    def step(self, action: Any) -> Any:
        ends = time.monotonic() + 60
        while self.gate and not os.path.exists(self.gate) and time.monotonic() < ends:
            time.sleep(0.01)
        if action == 4:
            raise ValueError("four is refused")
        self.at += self.speed
        info = {"action": int(action), "why": "odd"} if action % 2 else {}
        return self._observation(), float(action), self.at >= self.length, self.at == 3, info

    def render(self, **kwargs: Any) -> Any:
        return f"at {self.at} {sorted(kwargs.items())}"


class Ragged(gymnasium.Env[Any, Any]):
    """Gives observations of any length and rewards that are arrays, whatever its spaces say."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Dict({"a": spaces.Discrete(3)})

    def __init__(self, length: int = 1):
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(self.length), {}

    def step(self, action: Any) -> Any:
        return np.full(self.length, action["a"]), np.array([1.0, 2.0]), False, False, {}


class Seeds(Walk):
    """Has a method `seed` of its own, as envs of the old gym had."""

    def seed(self, seed: int | None = None) -> Any:
        self.reset(seed=seed)
        return ["mine", seed]
