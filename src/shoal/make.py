"""`shoal.make`: one call from an env to a vector env in the API of the caller's choice."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal, overload

from gymnasium.envs.registration import EnvSpec

from shoal.dialects.gymnasium import with_spec
from shoal.envs.functions import find_spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.dialects.agents import BatchedParallelEnv
    from shoal.dialects.baselines import BaselinesVecEnv
    from shoal.dialects.dm_env import BatchedEnvironment
    from shoal.dialects.gymnasium import VectorEnv
    from shoal.dialects.gymnasium029 import VectorEnv as OldVectorEnv
    from shoal.dialects.sample_factory import BatchedEnv
    from shoal.dialects.tf_agents import PoolPyEnvironment
    from shoal.dialects.tianshou import PoolVectorEnv
    from shoal.dialects.torchrl import ShoalEnv
    from shoal.dialects.vec_env import PoolVecEnv
    from shoal.options import PoolKeywords

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


@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["gymnasium"] = ..., **options: Unpack[PoolKeywords]
) -> VectorEnv: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["gymnasium029"], **options: Unpack[PoolKeywords]
) -> OldVectorEnv: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["sb3"], **options: Unpack[PoolKeywords]
) -> PoolVecEnv: ...
@overload
def make(env: Any, num_envs: int | None = None, *, api: Literal["baselines"], **options: Any) -> BaselinesVecEnv: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["tf_agents"], **options: Unpack[PoolKeywords]
) -> PoolPyEnvironment: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["dm_env"], **options: Unpack[PoolKeywords]
) -> BatchedEnvironment: ...
@overload
def make(env: Any, num_envs: int | None = None, *, api: Literal["tianshou"], **options: Any) -> PoolVectorEnv: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["sample_factory"], **options: Unpack[PoolKeywords]
) -> BatchedEnv: ...
@overload
def make(
    env: Any, num_envs: int | None = None, *, api: Literal["agents"], **options: Unpack[PoolKeywords]
) -> BatchedParallelEnv: ...
@overload
def make(env: Any, num_envs: int | None = None, *, api: Literal["torchrl"], **options: Any) -> ShoalEnv: ...
@overload
def make(env: Any, num_envs: int | None = None, *, api: str, **options: Any) -> Any: ...
def make(env: Any, num_envs: int | None = None, *, api: str = "gymnasium", **options: Any) -> Any:
    """Make many envs as one vector env, in the API of your choice.

        envs = shoal.make("CartPole-v1", num_envs=64)
        obs, info = envs.reset(seed=0)
        obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
        envs.close()

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env (Gymnasium's, the old gym's, dm_env's,
            PettingZoo's, PufferLib's, a PyEnvironment of TF-Agents, a `shoal.compiled.Env`), or a list with one for
            each env. Arguments for the env itself go into `env_kwargs`.
        num_envs: how many. Leave it out if you pass a list, or a plan that says it.
        api: the API of the result: "gymnasium" (a `gymnasium.vector.VectorEnv`), "gymnasium029" (the same with the
            answers of Gymnasium 0.29), "sb3" (a VecEnv of Stable-Baselines3), "torchrl" (an EnvBase), "tf_agents" (a
            batched PyEnvironment), "dm_env" (batched TimeSteps, without TensorFlow), "tianshou" (one of its vector
            envs), "sample_factory" (a batched env), "agents" (PettingZoo's parallel API, with a row for each env) or
            "baselines" (a VecEnv of OpenAI Baselines). `shoal.dialects` has drop-ins under each library's own names.
        **options: the most used ones; `help(shoal.options.PoolOptions)` has all of them, by topic.

            How to run: `backend` ("auto" measures and chooses; "serial", "threads", "processes", "hybrid", ...),
            `num_workers`, `isolate`, `plan` (what `shoal.tune` found). `envs.pool.plan` says what was chosen, and why.
            Episodes: `autoreset` ("next_step", "same_step", "disabled"), `seed`, `infos`.
            Faults: `on_error` ("raise" or "restart"), `step_timeout`, `recycle_after`, `check_nan`.
            Memory: `copy` (True here: arrays are yours; False lends views, which the next steps overwrite).
            The env: `env_kwargs`.

    Returns:
        the vector env; its `pool` is the `shoal.Pool` under it.

    Raises:
        BadEnv: `env` cannot be made into envs.
        ValueError, TypeError: an option, or `api`, is not what it may be; the text says what is.
        EnvError: an env's constructor raised; all that was started is undone.
        SpaceMismatch: envs of the list have different spaces.
        StartError: workers could not be started.
        ImportError: the library of `api` is not installed; the text has the line that installs it.
    """
    if api not in _APIS:
        raise ValueError(f"api: expected one of {', '.join(map(repr, _APIS))}, found {api!r}")
    module, name = _APIS[api]
    envs = getattr(importlib.import_module(module), name)(env, num_envs, **options)
    if isinstance(env, str | EnvSpec) and api.startswith("gymnasium"):
        with_spec(envs, find_spec(env) if isinstance(env, str) else env)
    return envs
