"""The pool with the answers of Gymnasium 0.29, for scripts of that age, over the Gymnasium 1.x that is installed.

    envs = shoal.make("CartPole-v1", 8, api="gymnasium029")
    envs = shoal.dialects.gymnasium029.SyncVectorEnv(env_fns)   # or AsyncVectorEnv

What differs from Gymnasium 1.x: an env whose episode ends is reset within the same step. Its row of the observations is
the first of the next episode; the last one is `infos["final_observation"][i]`, and the last info
`infos["final_info"][i]`. In infos, numbers are arrays; everything else is an object as the env gave it, or None, in an
array of objects. `infos["_key"]` says which envs gave the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.vector_env import AutoresetMode

from shoal.dialects import gymnasium as newer
from shoal.errors import SpaceMismatch
from shoal.memory.infos import stacked_numbers

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "VectorEnv"]


class _OldAnswers:
    """What all classes here change in those of `shoal.dialects.gymnasium`; it stands before them among the bases."""

    is_vector_env = True
    num_envs: int

    def _join_infos(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        numbers = stacked_numbers(infos, self.num_envs)
        if numbers is not None:
            return numbers
        joined: dict[str, Any] = super()._join_infos(  # type: ignore[misc]
            {env_id: _with_old_names(info) for env_id, info in infos.items()}
        )
        return joined

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        """Add the info of one env to those of all, as Gymnasium 0.29 does."""
        for key, value in env_info.items():
            mask = f"_{key}"
            if key not in vector_infos:
                kind = type(value)
                is_number = kind in (int, float, bool) or issubclass(kind, np.number)
                empty = np.zeros(self.num_envs, kind) if is_number else np.full(self.num_envs, None, object)
                vector_infos[key], vector_infos[mask] = empty, np.zeros(self.num_envs, np.bool_)
            vector_infos[key][env_num], vector_infos[mask][env_num] = value, True
        return vector_infos

    def _take_spaces(self, observation_space: Space[Any] | None, action_space: Space[Any] | None) -> None:
        """Check the spaces that the caller expects; 0.29 let them be given."""
        envs: Any = self
        envs.metadata = dict(envs.pool.specs.metadata)  # without the mode, of which 0.29 knew one
        given = {"observation": observation_space, "action": action_space}
        for name, space in given.items():
            if space is not None and space != getattr(envs, f"single_{name}_space"):
                envs.close()
                raise SpaceMismatch(
                    f"Some environments have an {name} space different from `{space}`. In order to batch {name}s, the "
                    f"{name} spaces from all environments must be equal."
                )


def _with_old_names(info: dict[str, Any]) -> dict[str, Any]:
    """The info of one env, with what the old episode left behind under the names of 0.29, at the end."""
    if "final_obs" not in info:
        return info
    rest = {key: value for key, value in info.items() if key not in ("final_obs", "final_info")}
    return {**rest, "final_observation": info["final_obs"], "final_info": info["final_info"]}


class VectorEnv(_OldAnswers, newer.VectorEnv):
    """As `shoal.dialects.gymnasium.VectorEnv`, with the answers of Gymnasium 0.29. Its autoreset is "same_step".

    Args:
        env, num_envs, copy: as for `shoal.dialects.gymnasium.VectorEnv`.
        **pool_options: options of a `shoal.Pool`: num_workers, on_error, step_timeout, ...
    """

    _api, _mode = "a vector env of Gymnasium 0.29", "same_step"

    def __init__(self, env: Any, num_envs: int | None = None, *, copy: bool = True, **pool_options: Any):
        pool_options.setdefault("autoreset", self._mode)
        super().__init__(env, num_envs, copy=copy, **pool_options)
        self._take_spaces(None, None)


class SyncVectorEnv(_OldAnswers, newer.SyncVectorEnv):
    """Drop-in for `gymnasium.vector.SyncVectorEnv` of Gymnasium 0.29: the envs live in the caller's process.

    Args:
        env_fns: a list of functions that make one env each.
        observation_space, action_space: those of one env, which they must have; None for the first env's.
        copy: whether arrays are the caller's own.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        copy: bool = True,
    ):
        super().__init__(env_fns, copy=copy, autoreset_mode=AutoresetMode.SAME_STEP)
        self._take_spaces(observation_space, action_space)


class AsyncVectorEnv(_OldAnswers, newer.AsyncVectorEnv):  # type: ignore[misc]
    """Drop-in for `gymnasium.vector.AsyncVectorEnv` of Gymnasium 0.29: the envs live in worker processes.

    The other arguments are those of `shoal.dialects.gymnasium.AsyncVectorEnv`.

    Args:
        env_fns, observation_space, action_space, copy: as for SyncVectorEnv.
        shared_memory, daemon: accepted, and without effect.
        context: how processes are started: the pool's `start_method`.
        **pool_options: options of a `shoal.Pool`: num_workers, on_error, step_timeout, ...
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        observation_space: Space[Any] | None = None,
        action_space: Space[Any] | None = None,
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        **pool_options: Any,
    ):
        super().__init__(
            env_fns,
            shared_memory,
            copy,
            context,
            daemon,
            worker,
            autoreset_mode=AutoresetMode.SAME_STEP,
            **pool_options,
        )
        self._take_spaces(observation_space, action_space)
