"""`shoal.make`: one call from an env to a vector env in the API of the caller's choice."""

from __future__ import annotations

import importlib
from typing import Any

from gymnasium.envs.registration import EnvSpec

from shoal.dialects.gymnasium import with_spec
from shoal.envs.functions import find_spec

__all__ = ["make"]

# A dialect is imported when `make` is called with its name.
_APIS = {
    "gymnasium": ("shoal.dialects.gymnasium", "VectorEnv"),
    "gymnasium029": ("shoal.dialects.gymnasium029", "VectorEnv"),
    "sb3": ("shoal.dialects.sb3", "PoolVecEnv"),
    "baselines": ("shoal.dialects.baselines", "BaselinesVecEnv"),
    "tf_agents": ("shoal.dialects.tf_agents", "PoolPyEnvironment"),
    "dm_env": ("shoal.dialects.dm_env", "BatchedEnvironment"),
    "tianshou": ("shoal.dialects.tianshou", "PoolVectorEnv"),
    "sample_factory": ("shoal.dialects.sample_factory", "BatchedEnv"),
    "agents": ("shoal.dialects.agents", "BatchedParallelEnv"),
    "torchrl": ("shoal.dialects.torchrl", "ShoalEnv"),
}


def make(env: Any, num_envs: int | None = None, *, api: str = "gymnasium", **options: Any) -> Any:
    """Make many envs as one vector env.

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env (Gymnasium's, the old gym's, dm_env's,
            PettingZoo's or a PyEnvironment of TF-Agents), or a list with one for each env.
        num_envs: how many. Leave it out if you pass a list.
        api: the API of the result: "gymnasium" (a `gymnasium.vector.VectorEnv`), "gymnasium029" (the same with the
            answers of Gymnasium 0.29), "sb3" (a VecEnv of Stable-Baselines3), "baselines" (one of OpenAI Baselines),
            "tf_agents" (a batched PyEnvironment), "dm_env" (batched TimeSteps, without TensorFlow), "tianshou" (one of
            its vector envs), "torchrl" (an EnvBase of TorchRL), "sample_factory" (a batched env of Sample Factory) or
            "agents" (PettingZoo's parallel API, with a row for each env).
        **options: as for `shoal.Pool`: backend, num_workers, autoreset, copy, env_kwargs, ...
    """
    if api not in _APIS:
        raise ValueError(f"api: expected one of {', '.join(map(repr, _APIS))}, found {api!r}")
    module, name = _APIS[api]
    envs = getattr(importlib.import_module(module), name)(env, num_envs, **options)
    if isinstance(env, str | EnvSpec) and api.startswith("gymnasium"):
        with_spec(envs, find_spec(env) if isinstance(env, str) else env)
    return envs
