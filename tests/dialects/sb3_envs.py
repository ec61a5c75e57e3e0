"""Envs for the tests of the SB3 face. Workers import this module: nothing heavy may be imported here."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs import SPACES, CountEnv, InfoEnv, SpaceEnv

RGB = partial(CountEnv, render_mode="rgb_array")

IMAGES = spaces.Dict(
    camera=spaces.Box(0, 255, (8, 6, 3), np.uint8),
    speed=spaces.Box(-1.0, 1.0, (2,), np.float32),
)


def short(env_id: str, steps: int = 9) -> Any:
    """A registered env whose episodes are cut short, so that truncations are seen."""
    return partial(gymnasium.make, env_id, max_episode_steps=steps)


ENVS: dict[str, Any] = {
    "CartPole": short("CartPole-v1", 14),
    "Pendulum": short("Pendulum-v1"),
    "FrozenLake": short("FrozenLake-v1"),
    "dict": partial(SpaceEnv, SPACES["dict"]),
    "tuple": partial(SpaceEnv, SPACES["tuple"]),
    "image": partial(SpaceEnv, SPACES["image"]),
    "image, channels first": partial(SpaceEnv, spaces.Box(0, 255, (3, 8, 6), np.uint8)),
    "images": partial(SpaceEnv, IMAGES),
    "discrete": partial(SpaceEnv, SPACES["discrete"]),
    "number": partial(SpaceEnv, SPACES["box 0-d"]),
    "multi binary": partial(SpaceEnv, SPACES["multi binary"], SPACES["multi discrete"]),
    "infos": InfoEnv,
    "counting": CountEnv,
    "counting, truncated": partial(CountEnv, truncates=True),
}


class NoteworthyEnv(CountEnv):
    """The infos of its steps are always the same: what VecEnvs and autoreset say in theirs, for one."""

    def __init__(self, note: dict[str, Any], length: int = 3):
        super().__init__(length)
        self.note = note

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed, options=options)[0], {"fresh": 1}

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], dict(self.note))


class SeedOnlyEnv(CountEnv):
    """Its reset takes no options, which SB3 passes only if there are some."""

    def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed)


class TallyEnv(CountEnv):
    """Counts how often it was asked."""

    asked = 0

    def ask(self, step: int = 1) -> int:
        """One more, or `step` more."""
        self.asked += step
        return self.asked


class SumEnv(SpaceEnv):
    """Its reward is the sum of its action, of whatever type that is."""

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return (obs, float(np.sum(action)), *rest)


def boxed(high: float = 1.0, n: int = 3) -> SpaceEnv:
    """Observations up to `high`, and `n` actions."""
    return SpaceEnv(spaces.Box(-high, high, (2,), np.float32), spaces.Discrete(n))


def tally() -> Any:
    """One of them in two wrappers."""
    return gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.TimeLimit(TallyEnv(), 9))


class UnsendableEnv(CountEnv):
    """Has an attribute that cannot leave its process."""

    def __init__(self) -> None:
        super().__init__()
        self.secret = (number for number in range(3))


class FragileEnv(CountEnv):
    """Raises, or ends its process, in the step with action 3."""

    def __init__(self, dies: bool = False):
        super().__init__(50)
        self.dies = dies

    def step(self, action: Any) -> Any:
        if int(action) == 3:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad joint")
        return super().step(action)


class TroubledEnv(gymnasium.Env[Any, Any]):
    """For training: fails in one of its own ways at one step of its life, in the first of its lives."""

    def __init__(self, flag: str, dies: bool):
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.flag, self.dies = flag, dies
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 20 and not os.path.exists(self.flag):
            with open(self.flag, "w"):
                pass
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad joint")
        return self.np_random.random(2, np.float32), float(action), self.steps % 11 == 0, False, {}


class NanEnv(gymnasium.Env[Any, Any]):
    """Action 0.25 makes its reward NaN, 0.5 its observation NaN, 0.75 infinite; -1 makes its resets NaN."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.first = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.full(2, self.first, np.float32), {}

    def step(self, action: Any) -> Any:
        deed = float(np.asarray(action)[0])
        self.first = np.nan if deed == -1 else 0.0
        obs = np.array([0.0, {0.5: np.nan, 0.75: np.inf}.get(deed, 0.0)], np.float32)
        return obs, np.nan if deed == 0.25 else 0.0, deed == -1, False, {}


class ReachEnv(gymnasium.Env[Any, Any]):
    """A goal to walk to, for hindsight: dicts of observation, achieved and desired goal."""

    def __init__(self, discrete: bool):
        box = spaces.Box(-2.0, 2.0, (2,), np.float32)
        self.observation_space = spaces.Dict(observation=box, achieved_goal=box, desired_goal=box)
        self.action_space = spaces.Discrete(4) if discrete else spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.discrete = discrete

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        way = np.array([(1, 0), (-1, 0), (0, 1), (0, -1)][int(action)]) if self.discrete else action
        self.at = np.clip(self.at + 0.3 * np.asarray(way), -2, 2).astype(np.float32)
        reward = float(self.compute_reward(self.at, self.goal, {}))
        return self._observation(), reward, reward == 0, self.steps >= 6, {"is_success": reward == 0}

    def _observation(self) -> Any:
        return {"observation": self.at.copy(), "achieved_goal": self.at.copy(), "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        """0 at the goal, -1 elsewhere; for one, or for a batch."""
        return -(np.linalg.norm(np.asarray(achieved) - desired, axis=-1) > 0.4).astype(np.float32)
