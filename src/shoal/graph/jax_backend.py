"""The backend "jax": one functional env, stepped for all lanes at once on a device.

It lies beside the package `jax`, which needs JAX: what the backend can do is asked on machines without it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.backends.inline import RowsBackend
from shoal.envs.batched import BatchedEnv


class JaxBackend(RowsBackend):
    """Its state stays on the device; answers are copied from there."""

    name = "jax"

    @staticmethod
    def make_envs(env: Any, num_envs: int, kwargs: Mapping[str, Any]) -> BatchedEnv:
        from shoal.graph.jax.pool_envs import make_envs

        return make_envs(env, num_envs, kwargs)
