"""What runs beside the envs for the tianshou dialect. Workers import this module, so it imports nothing of tianshou."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import Space, spaces

EnvFn = Callable[[], Any]


class Anything(Space[Any]):
    """A space of any objects. They travel as the env returned them."""

    def contains(self, x: Any) -> bool:
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything)

    def __repr__(self) -> str:
        return "Anything()"


class AsReturned(gymnasium.Env[Any, Any]):
    """An env whose observations and rewards travel as objects, whatever its spaces say; its actions too.

    An observation is a pair: that of the env, and its reward, which is an array where the env has several agents.
    """

    def __init__(self, env: Any):
        self.env = env
        self.observation_space, self.action_space = Anything(), Anything()
        self.metadata = getattr(env, "metadata", {})
        self.render_mode = getattr(env, "render_mode", None)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        answer = self.env.reset(**kwargs)
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise AssertionError("The environment does not adhere to the Gymnasium's API.")
        return (answer[0], None), answer[1]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return (observation, reward), 0.0, terminated, truncated, info

    def close(self) -> None:
        self.env.close()


class MakeEnv:
    """Makes the env of a function: as it is, or as an `AsReturned`.

    Args:
        as_objects: whether it is an `AsReturned` in any case; None for tianshou's PettingZooEnv, of which the spaces do
            not say what it returns, and for actions that are dicts or tuples, which tianshou gives as a list.
    """

    def __init__(self, env_fn: EnvFn, as_objects: bool | None):
        self.env_fn, self.as_objects = env_fn, as_objects

    def __call__(self) -> Any:
        env = self.env_fn()
        as_objects = self.as_objects
        if as_objects is None:
            nested = isinstance(getattr(env, "action_space", None), spaces.Dict | spaces.Tuple)
            as_objects = nested or _is_pettingzoo_env(env)
        return AsReturned(env) if as_objects else env


def _is_pettingzoo_env(env: Any) -> bool:
    """Whether it is a PettingZooEnv of tianshou, which is not imported for that."""
    return any(
        kind.__name__ == "PettingZooEnv" and kind.__module__.startswith("tianshou.") for kind in type(env).__mro__
    )


def own_env(env: Any) -> Any:
    """The env that the user's function made."""
    return env.env if isinstance(env, AsReturned) else env


def reset_env(env: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Reset an env with any arguments."""
    answer: tuple[Any, dict[str, Any]] = own_env(env).reset(**kwargs)
    return answer


def render_env(env: Any, kwargs: dict[str, Any]) -> Any:
    """Render an env."""
    return own_env(env).render(**kwargs)


def set_env_attr(env: Any, key: str, value: Any) -> None:
    """Set an attribute of the innermost env."""
    setattr(own_env(env).unwrapped, key, value)


def get_of_innermost(env: Any, key: str) -> Any:
    """An attribute of the innermost env, as tianshou's DummyVectorEnv reads it."""
    return getattr(own_env(env).unwrapped, key)


def get_or_none(env: Any, key: str) -> Any:
    """An attribute of the outermost env, None where it has none: as tianshou's SubprocVectorEnv reads it."""
    return getattr(own_env(env), key, None)


def get_of_outermost(env: Any, key: str) -> Any:
    """An attribute of the outermost env, as tianshou's RayVectorEnv reads it."""
    return getattr(own_env(env), key)


def seed_in_place(env: Any, seed: int | None) -> Any:
    """Seed an env and its innermost action space, as tianshou's DummyVectorEnv does."""
    env = own_env(env)
    env.unwrapped.action_space.seed(seed)
    try:
        return env.seed(seed)
    except (AttributeError, NotImplementedError):
        env.reset(seed=seed)
        return [seed]


def seed_in_worker(env: Any, seed: int | None) -> Any:
    """Seed an env by its own method, or else by a reset, with its action space: as tianshou's SubprocVectorEnv does."""
    env = own_env(env)
    if hasattr(env, "seed"):
        return env.seed(seed)
    env.action_space.seed(seed=seed)
    env.reset(seed=seed)
    return None


def seed_in_actor(env: Any, seed: int | None) -> Any:
    """Seed an env by its own method, or else by a reset, as tianshou's RayVectorEnv does."""
    env = own_env(env)
    if hasattr(env, "seed"):
        return env.seed(seed)
    env.reset(seed=seed)
    return None
