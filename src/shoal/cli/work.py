"""What a command runs: an env by name, the number of envs, and the actions that they get."""

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

# Enough different actions that an env does not run in a cycle, and few enough to sample quickly.
ACTION_ROWS = 64
# Kept, so that actions can be sampled before a constructor is timed.
_sampled: dict[tuple[str, int, int], list[Any]] = {}


def env_fn(name: str) -> EnvFn:
    """Return the function behind a Gymnasium id or a `module:callable` path.

    All contenders get this same function, so that all envs have the same wrappers.
    """
    module_name, colon, attribute = name.partition(":")
    if colon:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UsageError(f"cannot import {module_name!r} of {name!r}: {_describe(error)}") from error
        found = getattr(module, attribute, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        # "module:Name-v0" is an id of Gymnasium, too: it imports the module before it makes the env.
        if attribute not in gymnasium.registry:
            raise UsageError(f"{module_name!r} has no callable and registers no env {attribute!r}")
    return functools.partial(gymnasium.make, name)


def as_python(name: str) -> tuple[list[str], str]:
    """Return the Python code for an env's name: lines of imports, and an expression."""
    module, colon, attribute = name.partition(":")
    if colon and attribute.isidentifier():
        return [f"from {module} import {attribute}"], attribute
    return [], repr(name)  # "module:Name-v0" is an id, too


@dataclass(frozen=True)
class Work:
    """`num_envs` copies of `env`, stepped with sampled actions."""

    env: str
    num_envs: int
    action_space: gymnasium.Space[Any]
    seed: int = 0

    def env_fn(self) -> EnvFn:
        """Return the function that builds one env."""
        return env_fn(self.env)

    def actions(self, lanes: int | None = None) -> list[Any]:
        """Return ACTION_ROWS batches of actions for `lanes` envs; None for all envs."""
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
    """Build, reset and close the env once. Raises UsageError with one sentence if that fails."""
    make = env_fn(name)
    try:
        env = make()
    except Exception as error:
        raise UsageError(f"{name!r} could not be built: {_describe(error)}") from error
    if not hasattr(env, "action_space") or not hasattr(env, "reset"):
        raise UsageError(f"{name!r} gave a {type(env).__name__}, which is no Gymnasium env")
    try:
        env.reset(seed=seed)
        return Work(name, num_envs, env.action_space, seed)
    except Exception as error:
        raise UsageError(f"{name!r} could not be reset: {_describe(error)}") from error
    finally:
        env.close()


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else "no message"
    return text if isinstance(error, gymnasium.error.Error) else f"{type(error).__name__}: {text}"
