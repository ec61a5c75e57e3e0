"""The backend "batched": one env object that steps all lanes at once, in its own threads.

Such an env is a vector env of any kind that `envs.adapt` knows, or a `shoal.group.GroupEnv`. Some registered ids have
one that gives the same results as many envs of the id (`registry.register_batches`); "auto" takes these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.envs.registration import EnvSpec

from shoal.backends import registry
from shoal.backends.inline import BatchedBackend
from shoal.envs.adapt import adapt
from shoal.envs.functions import find_spec
from shoal.envs.group import is_group
from shoal.errors import BadEnv

MAKERS = "Pass a function that takes num_envs and makes a vector env, or use another backend"


class NoBatch(Exception):
    """Why the envs of an id cannot be made as one batch."""


class BatchNativeBackend(BatchedBackend):
    """All envs are one object, which the caller steps; that object has threads of its own."""

    name = "batched"
    one_worker = False  # its threads count as workers
    writes_infos = True

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        return cores

    @classmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        try:
            make = batch_maker(env, kwargs, exact=False)
        except NoBatch as error:
            raise BadEnv(f'backend="batched" cannot make {env!r:.100} as one batch: {error}. {MAKERS}') from None
        return functools.partial(_make, make, num_envs, num_workers)


def batch_maker(env: Any, kwargs: Mapping[str, Any], exact: bool = True) -> Callable[..., Any]:
    """What makes so many envs as one object, called with `num_envs` and, where it takes that, `num_threads`.

    Args:
        exact: the results must be those of the envs of the id, one by one.

    Raises:
        NoBatch: it can only be made one by one.
    """
    if isinstance(env, str | EnvSpec):
        spec = find_spec(env) if isinstance(env, str) else env
        find = registry.find_batch(spec.entry_point)
        if find is None:
            raise NoBatch("there is no batch of these envs")
        found: Callable[..., Any] = find(spec, dict(kwargs), exact)
        return found
    if not callable(env):
        raise NoBatch(f"expected an id or a function, found {type(env).__name__}")
    return functools.partial(env, **kwargs)


def is_batch_maker(env: Any) -> bool:
    """Whether this is a class, or one with some of its arguments, that says that it makes many envs as one."""
    return bool(getattr(getattr(env, "func", env), "__shoal_batched__", False))


def _make(make: Callable[..., Any], num_envs: int, num_threads: int | None) -> Any:
    known = inspect.signature(make).parameters
    threads = {"num_threads": num_threads} if num_threads is not None and "num_threads" in known else {}
    env = adapt(make(num_envs=num_envs, **threads))
    if not is_group(env):
        raise BadEnv(f"{env!r:.100} is one env, and no batch of them. {MAKERS}")
    if env.num_lanes != num_envs:
        raise BadEnv(f"{env!r:.100} has {env.num_lanes} lanes, and {num_envs} envs were asked for")
    return env
