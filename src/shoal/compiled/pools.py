"""Pools for comparisons. `shoal.pool` stands above this package, so it hands its class down when it is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_makers: list[Callable[..., Any]] = []


def use(maker: Callable[..., Any]) -> None:
    """Make pools by this class from now on."""
    _makers[:] = [maker]


def make_pool(env: Any, num_envs: int, env_kwargs: Mapping[str, Any]) -> Any:
    """Make a pool of compiled envs."""
    return _makers[0](env, num_envs, backend="compiled", env_kwargs=env_kwargs)
