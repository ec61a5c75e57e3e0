"""`shoal.make`: one call from an env to a vector env in the API of the caller's choice."""

from __future__ import annotations

from typing import Any

from gymnasium.envs.registration import EnvSpec

from shoal.adapters.gymnasium import find_spec
from shoal.dialects.gymnasium import VectorEnv, with_spec

__all__ = ["make"]

_APIS = {"gymnasium": VectorEnv}


def make(env: Any, num_envs: int | None = None, *, api: str = "gymnasium", **options: Any) -> Any:
    """Many envs as one.

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env, or a list of such, one per env.
        num_envs: how many; left out when a list was given.
        api: whose words the result speaks; "gymnasium" gives a `gymnasium.vector.VectorEnv`.
        **options: as for `shoal.Pool`: backend, num_workers, autoreset, copy, env_kwargs, ...
    """
    if api not in _APIS:
        raise ValueError(f"api: expected one of {', '.join(map(repr, _APIS))}, found {api!r}")
    envs = _APIS[api](env, num_envs, **options)
    if isinstance(env, str | EnvSpec):
        with_spec(envs, find_spec(env) if isinstance(env, str) else env)
    return envs
