"""Turns envs of the old `gym` into Gymnasium envs.

An old env returns four values from step and a bare observation from reset, and has a method `seed`. `gym` itself is not
imported: an env is recognized by its methods, and a space by the name of its type.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from shoal.envs.wrapper_layers import ForeignEnv
from shoal.errors import BadEnv
from shoal.support.checks import truth


def is_old(env: Any) -> bool:
    """Whether an env is written for the old `gym`: its spaces come from there, or its reset takes no seed."""
    if isinstance(env, gymnasium.Env) or not all(hasattr(env, name) for name in ("step", "reset", "action_space")):
        return False
    given = [getattr(env, name, None) for name in ("observation_space", "action_space")]
    if any(space is not None and not isinstance(space, Space) for space in given):
        return True
    try:
        return "seed" not in _reset_takes(env)
    except (TypeError, ValueError):
        return False


def _reset_takes(env: Any) -> set[str]:
    """Which of "seed" and "options" the env's reset takes."""
    parameters = inspect.signature(env.reset).parameters
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in ("seed", "options") if everything or name in parameters}


def modern_space(space: Any) -> Space[Any]:
    """The Gymnasium space that equals a space of the old `gym`. Raises BadEnv if there is none."""
    if isinstance(space, Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(np.asarray(space.low), np.asarray(space.high), dtype=space.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.asarray(space.nvec))
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Tuple":
        return spaces.Tuple([modern_space(part) for part in space.spaces])
    if kind == "Dict":
        return spaces.Dict({key: modern_space(part) for key, part in space.spaces.items()})
    raise BadEnv(f"{space!r}, a {type(space).__module__}.{kind}, is no space that Shoal knows")


class OldGymEnv(ForeignEnv):
    """An env of the old `gym`, from 0.9 to 0.26, as a Gymnasium env.

    `done` becomes `terminated`, or `truncated` where the info says "TimeLimit.truncated". A seed for reset goes to the
    env's own `seed` method if its reset takes none.
    """

    def __init__(self, env: Any):
        super().__init__(env)
        self.observation_space = modern_space(env.observation_space)
        self.action_space = modern_space(env.action_space)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        modes = self.metadata.pop("render.modes", None)  # its name until gym 0.22
        if modes is not None:
            self.metadata.setdefault("render_modes", list(modes))
        self.render_mode = getattr(env, "render_mode", None)
        if self.render_mode is None and "rgb_array" in self.metadata.get("render_modes", ()):
            self.render_mode = "rgb_array"
        self._takes = _reset_takes(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and an info."""
        given: dict[str, Any] = {"seed": seed, "options": options}
        arguments = {name: value for name, value in given.items() if name in self._takes and value is not None}
        if seed is not None and "seed" not in self._takes and hasattr(self.env, "seed"):
            self.env.seed(seed)
        result = self.env.reset(**arguments)
        # Since gym 0.26 it returns (observation, info). Any other pair is an observation.
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        return result if pair else (result, {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and turn its four values into Gymnasium's five."""
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise TypeError(f"step must return (obs, reward, done, info), got {result!r:.200}")
        if len(result) == 5:
            return result
        observation, reward, done, info = result
        cut = bool(info.get("TimeLimit.truncated", False)) if isinstance(info, dict) else False
        over = truth("done", done)
        return observation, reward, over and not cut, over and cut, info

    def render(self) -> Any:
        """An image, if the env can make one."""
        if "mode" in inspect.signature(self.env.render).parameters:
            return self.env.render(mode=self.render_mode or "human")
        return self.env.render()
