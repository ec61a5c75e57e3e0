"""What a command runs: an env by name, the number of envs, and the actions that they get."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
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
        with refusing(f"cannot import {module_name!r} of {name!r}"):
            module = importlib.import_module(module_name)
        found = getattr(module, attribute, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
        # "module:Name-v0" is an id of Gymnasium, too: it imports the module before it makes the env.
        if attribute not in gymnasium.registry:
            raise UsageError(f"{module_name!r} has no callable and registers no env {attribute!r}")
    return functools.partial(gymnasium.make, name)


def look_here(*names: str) -> None:
    """Let Python find modules in the current folder, as the user expects; an installed command does not do so."""
    if any(":" in name for name in names) and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def check_batch_size(batch_size: int | None, num_envs: int) -> None:
    if batch_size and batch_size > num_envs:
        raise UsageError(f"a batch of {batch_size} is more than {num_envs} envs")


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
    with refusing(f"{name!r} could not be built"):
        env = make()
    if not hasattr(env, "action_space") or not hasattr(env, "reset"):
        raise UsageError(f"{name!r} gave a {type(env).__name__}, which is no Gymnasium env")
    with contextlib.closing(env), refusing(f"{name!r} could not be reset"):
        env.reset(seed=seed)
        return Work(name, num_envs, env.action_space, seed)


@contextlib.contextmanager
def refusing(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error into a UsageError of one sentence. Without `kinds`, any error, and the sentence names its type."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or not isinstance(error, kinds or Exception):
            raise
        text = first_line(str(error)) or "no message"
        typed = not kinds and not isinstance(error, gymnasium.error.Error)
        raise UsageError(f"{what}: {type(error).__name__ + ': ' if typed else ''}{text}") from error


def first_line(text: str) -> str:
    """Return the first line of a message."""
    return text.strip().partition("\n")[0]
