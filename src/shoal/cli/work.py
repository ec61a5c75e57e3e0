"""What is being measured: an environment by name, how many of it, and the actions it is given."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.vector.utils import batch_space, iterate

from shoal.support.usage import UsageError

EnvFn = Callable[[], "gymnasium.Env[Any, Any]"]

# Enough distinct actions that an env cannot settle into a cycle, few enough to sample at once.
ACTION_ROWS = 64
# Sampled ahead of time by whoever times a constructor, so that sampling is no part of start-up.
_sampled: dict[tuple[str, int, int], list[Any]] = {}


def env_fn(name: str) -> EnvFn:
    """Return the function behind a Gymnasium id or a `module:callable` path.

    Everybody who is compared gets this same function, so that nobody saves a wrapper.
    """
    module_name, colon, attribute = name.partition(":")
    if colon:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UsageError(f"cannot import {module_name!r} of {name!r}: {_say(error)}") from error
        found = getattr(module, attribute, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        # "module:Name-v0" is also how Gymnasium spells an id whose module must be imported first.
        if attribute not in gymnasium.registry:
            raise UsageError(f"{module_name!r} has no callable and registers no env {attribute!r}")
    return functools.partial(gymnasium.make, name)


@dataclass(frozen=True)
class Work:
    """One cell of the matrix: `num_envs` copies of `env`, driven by sampled actions."""

    env: str
    num_envs: int
    action_space: gymnasium.Space[Any]
    seed: int = 0

    def env_fn(self) -> EnvFn:
        """Return the function that builds one env."""
        return env_fn(self.env)

    def actions(self, lanes: int | None = None) -> list[Any]:
        """Return ACTION_ROWS batches of actions for `lanes` envs (all of them unless told)."""
        lanes = lanes or self.num_envs
        key = (self.env, lanes, self.seed)
        if key not in _sampled:
            space = batch_space(self.action_space, lanes)
            space.seed(self.seed)
            _sampled[key] = [space.sample() for _ in range(ACTION_ROWS)]
        return list(_sampled[key])

    def lane_actions(self, limit: int = 4096) -> list[Any]:
        """Return the same actions one by one, as Gymnasium's SyncVectorEnv hands them to an env."""
        space = batch_space(self.action_space, self.num_envs)
        every = itertools.chain.from_iterable(iterate(space, row) for row in self.actions())
        return list(itertools.islice(every, limit))


def probe(name: str, num_envs: int = 1, seed: int = 0) -> Work:
    """Build the env once, look at it and let it go; say in one sentence what is wrong with it."""
    make = env_fn(name)
    try:
        env = make()
    except gymnasium.error.Error as error:
        raise UsageError(f"cannot make {name!r}: {_say(error)}") from error
    except Exception as error:
        raise UsageError(f"{name!r} could not be built: {_say(error)}") from error
    if not hasattr(env, "action_space") or not hasattr(env, "reset"):
        raise UsageError(f"{name!r} gave a {type(env).__name__}, which is no Gymnasium env")
    try:
        env.reset(seed=seed)
        return Work(name, num_envs, env.action_space, seed)
    except Exception as error:
        raise UsageError(f"{name!r} could not be reset: {_say(error)}") from error
    finally:
        env.close()


def _say(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return text if isinstance(error, gymnasium.error.Error) else f"{type(error).__name__}: {text}"
