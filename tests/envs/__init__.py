"""Toy envs for the tests, deterministic in seed and actions: their results tell what they were given."""

from __future__ import annotations

import copy
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Options = dict[str, Any] | None
Start = tuple[Any, dict[str, Any]]
Result = tuple[Any, Any, bool, bool, dict[str, Any]]


def fingerprint(value: Any) -> float:
    """A number in [0, 1) that depends on every value, type, dtype and shape within."""
    return zlib.crc32(repr(_canonical(value)).encode()) / 2**32


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return ("dict", *((key, _canonical(item)) for key, item in sorted(value.items())))
    if isinstance(value, tuple):  # named tuples too: a graph is one
        return (type(value).__name__, *map(_canonical, value))
    if isinstance(value, np.ndarray | np.generic):
        return (type(value).__name__, str(value.dtype), value.shape, value.tolist())
    return (type(value).__name__, value)


class CountEnv(gymnasium.Env[Any, Any]):
    """Observation [seed, episode, step] as int64; reward `step + 100 * action`; ends after `length` steps.

    Its attributes and methods are for call, get_attr and set_attr; its frames are filled with the step.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7, "kind": "counting"}

    def __init__(self, length: int = 5, truncates: bool = False, render_mode: str | None = None):
        self.observation_space = spaces.Box(-1, 2**40, (3,), np.int64)
        self.action_space = spaces.Discrete(4)
        self.length, self.truncates, self.render_mode = length, truncates, render_mode
        self.value = "untouched"
        self.seed_given: int | None = -1
        self.options_given: Any = "never reset"
        self.episode, self.steps = -1, 0
        self.last_action: Any = None
        self.closes = 0

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        super().reset(seed=seed)
        if seed is not None:
            self.seed_given, self.episode = seed, -1
        self.options_given = options
        self.episode += 1
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Result:
        self.steps += 1
        self.last_action = action
        ended = self.steps >= self.length
        reward = self.steps + 100.0 * float(action)
        return self._observation(), reward, ended and not self.truncates, ended and self.truncates, {}

    def _observation(self) -> Any:
        return np.array([self.seed_given, self.episode, self.steps], np.int64)

    def render(self) -> Any:
        return np.full((2, 3, 3), self.steps, np.uint8)

    def add(self, a: int, b: int = 1) -> int:
        """Something to call, with and without keyword."""
        return a + b + self.steps

    def pid(self) -> int:
        """Where it lives."""
        return os.getpid()

    def complain(self) -> None:
        """A method that raises."""
        raise KeyError("no such fish")

    def close(self) -> None:
        self.closes += 1


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Any spaces: observations are samples, the reward is the action's fingerprint."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any] | None = None):
        # Own copies: the env samples from them, and envs of one process must not share a generator.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = spaces.Discrete(3) if action_space is None else copy.deepcopy(action_space)

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Result:
        luck = float(self.np_random.random())
        return self.observation_space.sample(), fingerprint(action), luck < 0.15, luck > 0.9, {}


class InfoEnv(gymnasium.Env[Any, Any]):
    """Infos of one of INFO_KINDS, present in some steps and not in others."""

    def __init__(self, kind: str = "everything"):
        self.observation_space = spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.make_info = INFO_KINDS[kind]

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {"fresh": True, **self._info()}

    def step(self, action: Any) -> Result:
        self.steps += 1
        luck = float(self.np_random.random())
        return self._observation(), luck, luck < 0.15, luck > 0.9, self._info()

    def _observation(self) -> Any:
        return self.np_random.random(2, np.float32)

    def _info(self) -> dict[str, Any]:
        return self.make_info(self.steps) if self.np_random.random() < 0.6 else {}


def _everything(step: int) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for name, make in INFO_KINDS.items():
        if make is not _everything:
            info |= {f"{name}_{key}": value for key, value in make(step).items()}
    return info


INFO_KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "empty": lambda step: {},
    "int": lambda step: {"value": step},
    "float": lambda step: {"value": step / 3},
    "bool": lambda step: {"value": step % 2 == 0},
    "none": lambda step: {"value": None},
    "str": lambda step: {"value": f"step {step}"},
    "numpy scalar": lambda step: {"f4": np.float32(step / 3), "i1": np.int8(step), "b": np.bool_(step % 2)},
    "array": lambda step: {"value": np.arange(6, dtype=np.float32).reshape(2, 3) * step},
    "0-d array": lambda step: {"value": np.array(step, np.int16)},
    "list": lambda step: {"value": [step, "x"]},
    "tuple": lambda step: {"value": (step, None)},
    "nested": lambda step: {"outer": {"inner": step, "deeper": {"deepest": np.ones(2) * step}}},
    "nested empty": lambda step: {"outer": {}},
    "changing keys": lambda step: {f"only_at_{step % 3}": step, "outer": {f"key_{step % 2}": step}},
    "everything": _everything,
}


class ReusedBufferEnv(gymnasium.Env[Any, Any]):
    """Gives the same array out every time, and changes it in place: [episode, step]."""

    def __init__(self, length: int = 3):
        self.observation_space = spaces.Box(0, 1000, (2,), np.float64)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.length = length
        self._buffer = np.zeros(2)
        self._buffer[0] = -1

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        super().reset(seed=seed)
        self._buffer[:] = self._buffer[0] + 1, 0
        return self._buffer, {}

    def step(self, action: Any) -> Result:
        action *= 2  # an env may do what it likes with its action: nobody else's array may change
        self._buffer[1] += 1
        return self._buffer, float(action.sum()), bool(self._buffer[1] >= self.length), False, {}


class ReusedInfoEnv(CountEnv):
    """A CountEnv that gives the same info dict out every time, with the same list and array in it."""

    def __init__(self, length: int = 3):
        super().__init__(length)
        self.info: dict[str, Any] = {"numbers": np.zeros(2), "list": [0], "inner": {}}

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, self._refilled(-1)

    def step(self, action: Any) -> Result:
        *result, _ = super().step(action)
        return (*result, self._refilled(self.steps))  # type: ignore[return-value]

    def _refilled(self, value: int) -> dict[str, Any]:
        self.info["numbers"][:] = self.info["list"][0] = self.info["inner"]["value"] = self.info["value"] = value
        return self.info


class GateEnv(CountEnv):
    """A CountEnv whose step with action 3 waits until the file `gate` is there: not for serial."""

    def __init__(self, gate: str | Path, length: int = 5, at_reset: bool = False):
        super().__init__(length)
        self.gate, self.at_reset = Path(gate), at_reset

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        if self.at_reset:
            self.wait()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Result:
        if int(action) == 3:
            self.wait()
        return super().step(action)

    def wait(self) -> str:
        """Returns "open" once it is, and gives up after a minute: a failed test must not leave it forever."""
        for _ in range(6000):
            if self.gate.exists():
                break
            time.sleep(0.01)
        return "open"


class FailEnv(CountEnv):
    """A CountEnv that raises `error` in its constructor, in reset, or in the step with action 3."""

    def __init__(self, where: str = "step", error: Exception | None = None, length: int = 5):
        super().__init__(length)
        self.where, self.error = where, error or ValueError("bad joint")
        if where == "constructor":
            raise self.error

    def reset(self, *, seed: int | None = None, options: Options = None) -> Start:
        if self.where == "reset":
            raise self.error
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Result:
        if self.where == "step" and int(action) == 3:
            raise self.error
        return super().step(action)


class EvenSpace(spaces.Space[int]):
    """A space that nobody knows: even numbers below `limit`."""

    def __init__(self, limit: int = 100, seed: int | None = None):
        self.limit = limit
        super().__init__(None, None, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> int:
        return 2 * int(self.np_random.integers(self.limit // 2))

    def contains(self, x: Any) -> bool:
        return isinstance(x, int) and 0 <= x < self.limit and x % 2 == 0

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EvenSpace) and other.limit == self.limit

    def __repr__(self) -> str:
        return f"EvenSpace({self.limit})"


SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "box 0-d": spaces.Box(-1.0, 1.0, (), np.float32),
    "box float64": spaces.Box(-1.0, 1.0, (2, 2), np.float64),
    "box unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "box float16": spaces.Box(-1.0, 1.0, (3,), np.float16),
    "box int64": spaces.Box(-(2**62), 2**62, (3,), np.int64),
    "box of nothing": spaces.Box(0.0, 1.0, (2, 0), np.float32),
    "box bool": spaces.Box(0, 1, (3,), np.bool_),
    "box int8": spaces.Box(-5, 5, (3,), np.int8),
    "image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete start": spaces.Discrete(5, start=-2),
    "discrete int32": spaces.Discrete(5, dtype=np.int32),
    "multi discrete": spaces.MultiDiscrete([2, 3, 5]),
    "multi discrete 2-d": spaces.MultiDiscrete([[2, 3], [5, 7]]),
    "multi discrete start": spaces.MultiDiscrete([2, 3], start=[-1, 10]),
    "multi binary": spaces.MultiBinary(4),
    "multi binary 2-d": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(min_length=0, max_length=6, charset="abcé鱼"),
    "dict": spaces.Dict(b=spaces.Discrete(3), a=spaces.Box(0.0, 1.0, (2,), np.float32)),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,), np.float64))),
    "nested": spaces.Dict(
        pair=spaces.Tuple((spaces.Dict(z=spaces.MultiBinary(2), y=spaces.Discrete(4)), spaces.Discrete(2))),
        image=spaces.Box(0, 255, (4, 4), np.uint8),
        word=spaces.Text(max_length=4),
    ),
    "deep": spaces.Tuple((spaces.Dict(a=spaces.Tuple((spaces.Dict(b=spaces.Discrete(2)),))),)),
    "empty dict": spaces.Dict({}),
    "graph": spaces.Graph(spaces.Box(0.0, 1.0, (2,), np.float32), spaces.Discrete(3)),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "sequence stacked": spaces.Sequence(spaces.Box(0.0, 1.0, (2,), np.float32), stack=True),
    "one of": spaces.OneOf((spaces.Discrete(3), spaces.Box(0.0, 1.0, (2,), np.float32))),
    "custom": EvenSpace(50),
    "dict with objects": spaces.Dict(
        graph=spaces.Graph(spaces.Discrete(3), None), number=spaces.Discrete(3), custom=EvenSpace(20)
    ),
}
