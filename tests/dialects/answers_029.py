"""What vector envs of Gymnasium 0.29 answer, as facts: envs of every kind, and all that their steps return, in words.

Run with Gymnasium 0.29.1 it writes `answers_029.json`, which the tests of the dialect compare with:

    python tests/dialects/answers_029.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

RECORD = Path(__file__).with_suffix(".json")
STEPS = 6


def kinds_of_info(t: int, number: int) -> dict[str, dict[str, Any]]:
    """Infos of step t of an env, by kind."""
    return {
        "none": {},
        "numbers": {"whole": t, "half": t / 2, "even": t % 2 == 0, "small": np.float32(t), "byte": np.uint8(t)},
        "objects": {"text": f"step {t}", "nothing": None, "flag": np.bool_(t % 2), "list": [t, "a"]},
        "arrays": {"row": np.arange(t + 1), "image": np.full((2, 2), t, np.uint8), "zero": np.array(1.5)},
        "nested": {"outer": {"inner": {"n": t}, "x": 0.5}, "episode": {"r": np.array([t * 1.0])}},
        "some": {"mine": t} if number % 2 == t % 2 else {},
        "mixed": {"value": 1 if (number + t) % 2 else 0.5, "thing": "text" if number else np.ones(2)},
    }


SPACES: dict[str, Any] = {
    "vector": spaces.Box(-100, 100, (2,), np.float32),
    "double": spaces.Box(-100, 100, (1,), np.float64),
    "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
    "choice": spaces.Discrete(100),
    "dict": spaces.Dict(place=spaces.Box(-9, 99, (2,), np.float32), inside=spaces.Dict(mode=spaces.Discrete(100))),
    "tuple": spaces.Tuple([spaces.Box(-9, 99, (1,), np.float32), spaces.MultiBinary(3)]),
}


def fill(space: Any, value: int) -> Any:
    """An element of a space in which everything is this number."""
    if isinstance(space, spaces.Dict):
        return {key: fill(part, value) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(fill(part, value) for part in space.spaces)
    if isinstance(space, spaces.Discrete):
        return value
    return np.full(space.shape, value % 2 if isinstance(space, spaces.MultiBinary) else value, space.dtype)


class Told(gymnasium.Env):  # type: ignore[type-arg]
    """Counts its steps. Every second episode is truncated, and one lasts two steps more than the env's number."""

    def __init__(self, space: str, kind: str, number: int):
        self.observation_space, self.action_space = SPACES[space], spaces.Discrete(3)
        self.kind, self.number = kind, number
        self.t = self.total = self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.episode = 0, self.episode + 1
        self.total += 10
        return fill(self.observation_space, self.total % 90), dict(kinds_of_info(0, self.number)[self.kind])

    def step(self, action: Any) -> Any:
        self.t, self.total = self.t + 1, self.total + int(action)
        over = self.t >= 2 + self.number
        info = kinds_of_info(self.t, self.number)[self.kind]
        ends = over and self.episode % 2 == 0, over and self.episode % 2 == 1
        return fill(self.observation_space, self.total % 90), self.total / 2, *ends, info


CASES = [(space, "numbers", 3) for space in SPACES] + [("vector", kind, 3) for kind in kinds_of_info(0, 0)]
CASES += [("dict", "nested", 1), ("image", "arrays", 5), ("double", "some", 7)]


def described(value: Any) -> Any:
    """A value in words and numbers that JSON keeps: with types, and dicts in their order."""
    if isinstance(value, np.ndarray):
        parts = [described(one) for one in value.tolist()] if value.dtype == object else value.tolist()
        return ["array", value.dtype.name, list(value.shape), parts]
    if isinstance(value, dict):
        return ["dict", [[key, described(part)] for key, part in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [described(part) for part in value]]
    if isinstance(value, np.generic):
        return ["number", value.dtype.name, value.item()]
    return [type(value).__name__, value]


def conversation(envs: Any) -> list[Any]:
    """All that a vector env answers to a reset, to some steps, and to another reset."""
    found = [described(envs.reset(seed=3))]
    for t in range(STEPS):
        answer = envs.step(np.arange(t, t + envs.num_envs) % 3)
        found.append(described(tuple(answer)))
    return [*found, described(envs.reset(seed=[1] * envs.num_envs, options={}))]


def name(case: tuple[str, str, int]) -> str:
    """What a case is called in the record."""
    return "-".join(map(str, case))


def env_fns(case: tuple[str, str, int]) -> list[Any]:
    """The functions that make the envs of a case."""
    space, kind, count = case
    return [lambda number=number: Told(space, kind, number) for number in range(count)]


if __name__ == "__main__":
    assert gymnasium.__version__ == "0.29.1", gymnasium.__version__
    record: dict[str, Any] = {}
    for case in CASES:
        for kind in ("SyncVectorEnv", "AsyncVectorEnv"):
            vector_envs = getattr(gymnasium.vector, kind)(env_fns(case))
            record.setdefault(name(case), {})[kind] = conversation(vector_envs)
            vector_envs.close()
    assert all(answers["SyncVectorEnv"] == answers["AsyncVectorEnv"] for answers in record.values())
    RECORD.write_text(json.dumps({key: answers["SyncVectorEnv"] for key, answers in record.items()}) + "\n")
