"""Backends with one env object that steps all lanes at once, in the caller's thread."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from shoal.backends import registry
from shoal.backends.backend import EnvRequest, EnvSource
from shoal.backends.inline import SerialBackend
from shoal.envs.batched import BatchedEnv, RowsEnv


class BatchedBackend(SerialBackend):
    """One inline worker with one env, which has all lanes."""

    batched = True

    @classmethod
    @abstractmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        """What makes the one env that steps all lanes."""

    @classmethod
    def gather(cls, request: EnvRequest) -> EnvSource:
        count = request.batched_count
        env_fn = cls.env_fn(request.env, count, request.kwargs, request.num_workers)
        return EnvSource(request, [env_fn], count)


class RowsBackend(BatchedBackend):
    """A batched backend of which the envs are a `BatchedEnv`."""

    @staticmethod
    @abstractmethod
    def make_envs(env: Any, num_envs: int, kwargs: Mapping[str, Any]) -> BatchedEnv:
        """Make so many envs as one object."""

    @classmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        return functools.partial(cls._rows, env, num_envs, kwargs)

    @classmethod
    def _rows(cls, *args: Any) -> RowsEnv:
        return RowsEnv(cls.make_envs(*args))


def build_batched(name: str, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Any:
    """Make the env of a batched backend: for a host elsewhere, which gets this function by its name."""
    kind = registry.find(name)
    assert issubclass(kind, BatchedBackend)
    return kind.env_fn(env, num_envs, kwargs, num_workers)()
