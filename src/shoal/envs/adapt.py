"""Turns an env of any library that Shoal knows into a Gymnasium env, or into one with several lanes."""

from __future__ import annotations

from typing import Any

from shoal.envs.group import is_group
from shoal.envs.old_gym import OldGymEnv, is_old
from shoal.envs.pettingzoo import ParallelLanes, is_aec_env, is_parallel_env
from shoal.envs.puffer_envs import adapt_puffer_env, is_puffer_env
from shoal.envs.time_steps import TimeStepEnv, has_specs
from shoal.envs.vector_envs import as_lanes


def adapt(env: Any) -> Any:
    """The env itself if it is Gymnasium's, else a Gymnasium env around it, or one with a lane for each row or agent."""
    if is_group(env):
        return env
    if has_specs(env):
        return TimeStepEnv(env)
    lanes = as_lanes(env)
    if lanes is not None:
        return lanes
    if is_puffer_env(env):  # some look like PettingZoo's
        return adapt_puffer_env(env)
    if is_parallel_env(env) or is_aec_env(env):
        return ParallelLanes(env)
    return OldGymEnv(env) if is_old(env) else env
