"""The pool as a batched env of Sample Factory, which takes one from the function that `register_env` is given.

    register_env("CartPole-v1", shoal.dialects.sample_factory.make_env)

Run it with `--batched_sampling=True --num_envs_per_worker=1 --worker_num_splits=1`, and with an argument of your own,
`--env_agents=16`. Nothing of Sample Factory is imported here.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import Any

import gymnasium

from shoal.dialects.base import PoolFace
from shoal.memory.answers import Ready

__all__ = ["BatchedEnv", "make_env"]


class BatchedEnv(PoolFace, gymnasium.Env[Any, Any]):  # type: ignore[misc]  # two ways to leave a `with`
    """Many envs as one env of many agents, which is what Sample Factory's batched sampling steps.

    The spaces are those of one env. When an episode ends, its env begins the next one in the same step; the infos of
    envs are left out, as Sample Factory makes nothing of them.

    Args:
        env, num_envs, pool_options: as for `shoal.Pool`. Autoreset is always "same_step".

    Attributes:
        seed_step: env i gets the seed `seed * seed_step + i`. Sample Factory seeds its batches with 0, 1, 2 and so on;
            with steps of their size they share no seed.
    """

    _api, _mode = "a batched env of Sample Factory", "same_step"
    is_multiagent = True
    seed_step = 1

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        _mend_wrappers()
        self._open(env, num_envs, {"infos": "drop", **pool_options})

    def _learn(self) -> None:
        specs = self.pool.specs
        self.num_agents = self.pool.num_envs
        self.observation_space, self.action_space = specs.single_observation_space, specs.single_action_space
        self.metadata, self.render_mode = specs.metadata, specs.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs: their observations."""
        first = seed * self.seed_step if isinstance(seed, int) else seed
        return self.pool.reset(seed=first, options=options).obs, {}

    def step(self, action: Any) -> Any:
        """Step all envs: observations, rewards, terminated, truncated, and no infos."""
        with self.pool.turn:
            ready: Ready = self._exchange(action)
            obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        return obs, reward, terminated, truncated, {}

    def render(self) -> Any:
        """The image of the first env."""
        return self.pool.render([0])[0]

    def close(self) -> None:
        """Close all envs and end all workers."""
        self.pool.close()


def _mend_wrappers() -> None:
    """Let a wrapper of Sample Factory say how many agents the env in it has.

    It relies on Gymnasium's wrappers to hand on attributes of their envs, and from Gymnasium 1.0 on they do not.
    """
    theirs = sys.modules.get("sample_factory.algo.utils.make_env")
    wrapper = getattr(theirs, "BatchedListToDictWrapper", None)
    for name in ("num_agents", "is_multiagent"):
        if wrapper is not None and not hasattr(wrapper, name):
            setattr(wrapper, name, property(attrgetter(f"env.{name}")))


def make_env(
    full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None, **pool_options: Any
) -> BatchedEnv:
    """Make the batched env of a worker of Sample Factory: `cfg.env_agents` envs of this id, one where that is not set.

    `functools.partial(make_env, backend=..., num_workers=...)` gives options of `shoal.Pool`; by default one process
    steps all envs, because Sample Factory has a process for each of its workers already.

    Args:
        full_env_name, cfg, env_config, render_mode: what Sample Factory passes.
        **pool_options: options of a `shoal.Pool`: num_workers, on_error, step_timeout, ...
    """
    agents = getattr(cfg, "env_agents", None) or 1
    kwargs = {} if render_mode is None else {"render_mode": render_mode}
    kwargs |= pool_options.pop("env_kwargs", None) or {}
    envs = BatchedEnv(full_env_name, agents, **{"backend": "serial", "env_kwargs": kwargs, **pool_options})
    envs.seed_step = agents
    return envs
