"""The VecEnv on a pool, and what the `make_vec_env` of both dialects needs to make its envs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.dialects.base import PoolFace, open_pool
from shoal.dialects.vec_env import Indices, StepReturn, VecEnv
from shoal.envs import wrapper_layers
from shoal.envs.adapt import adapt
from shoal.errors import BadCall, BadEnv, NothingPending
from shoal.memory.answers import Ready
from shoal.memory.messages import RESTART_INFO

__all__ = ["PoolVecEnv", "as_list", "check_maker", "make_one"]


class PoolVecEnv(PoolFace, VecEnv):  # type: ignore[override]
    """A pool as a VecEnv.

    Args:
        env, num_envs, pool_options: as for `shoal.Pool`. Autoreset is always "same_step".
    """

    _already_stepping: type[Exception] = BadCall
    _not_stepping: type[Exception] = NothingPending

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        self.pool = open_pool(env, num_envs, pool_options, "a VecEnv", "same_step")
        try:
            specs = self.pool.specs
            super().__init__(self.pool.num_envs, specs.single_observation_space, specs.single_action_space)
            self.metadata = {**specs.metadata, **self.metadata}
        except BaseException:
            self.pool.close()
            raise
        self.waiting = False  # whether step_async was called, and step_wait was not
        self._bits = isinstance(self.action_space, spaces.MultiBinary)

    @property
    def envs(self) -> list[Any]:
        """The envs that live in this process."""
        return self.pool.local_envs

    def reset(self) -> Any:
        """Reset all envs, with the seeds and options that were set; their observations."""
        self.waiting = self._late = False  # pool.reset drops what is under way
        options = [one or None for one in self._options]
        batch = self.pool.reset(seed=self._seeds, options=options if any(options) else None)
        self.reset_infos = [batch.info.get(env_id, {}) for env_id in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return batch.obs

    def step(self, actions: Any) -> StepReturn:
        """Step all envs: obs, rewards, dones, infos."""
        if self._splits_step(PoolVecEnv):
            return super().step(actions)
        if self.waiting or self._late:
            self._begin()
        return self._result(self._exchange(self._as_bits(actions) if self._bits else actions))

    def step_async(self, actions: Any) -> None:
        """Start a step."""
        self._begin()
        self.pool.send(self._as_bits(actions) if self._bits else actions)
        self.waiting = True

    @staticmethod
    def _as_bits(actions: Any) -> Any:
        """Turn 0.0 and 1.0, which policies of Stable-Baselines3 return for a space of bits, into integers."""
        array = np.asarray(actions)
        whole = array.dtype.kind == "f" and bool(((array == 0) | (array == 1)).all())
        return array.astype(np.int8) if whole else array

    def step_wait(self) -> StepReturn:
        """The result of the step that was started."""
        if not self.waiting and not self.closed:
            raise self._not_stepping("step_wait was called without step_async before it")
        self.waiting = False
        return self._result(self._collect(self.pool.wait))

    def _begin(self) -> None:
        if self.waiting:
            raise self._already_stepping("step_async was called twice: call step_wait before the next step")
        self._drop_late()

    def _result(self, ready: Ready) -> StepReturn:
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for env_id, found in ready.infos.items():
            info = infos[env_id]
            if dones[env_id]:
                found = dict(found)
                info.update(found.pop("final_info"))
                info["TimeLimit.truncated"] = bool(truncated[env_id] and not terminated[env_id])
                info["terminal_observation"] = found.pop("final_obs")
                if RESTART_INFO in found:
                    info[RESTART_INFO] = found.pop(RESTART_INFO)
                self.reset_infos[env_id] = found
            else:
                info.update(found)
                info["TimeLimit.truncated"] = False
        return obs, reward.astype(np.float32), dones, infos

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""
        return self._apply(wrapper_layers.get_attr, indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env to the same value."""
        ids = sorted(set(self._ids(indices)))
        if ids:
            self.pool.set_attr(attr_name, [value] * len(ids), ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, through its wrappers."""
        if method_name in ("step", "reset", "close"):
            raise BadCall(f"env_method: use the VecEnv's own {method_name}, which keeps the envs in step")
        return self._apply(wrapper_layers.call_method, indices, method_name, *method_args, **method_kwargs)

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have this attribute."""
        return all(self._apply(wrapper_layers.has_attr, None, attr_name))

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Whether each env is wrapped in this class."""
        return self._apply(wrapper_layers.is_wrapped, indices, wrapper_layers.name_of(wrapper_class))

    def _apply(self, function: Callable[..., Any], indices: Indices, *args: Any, **kwargs: Any) -> list[Any]:
        ids = self._ids(indices)
        rounds = [ids] if len(set(ids)) == len(ids) else [[i] for i in ids]  # an env that is named twice is asked twice
        return [value for each in rounds if each for value in self.pool.apply(function, *args, env_ids=each, **kwargs)]

    def _ids(self, indices: Indices) -> list[int]:
        """Env ids; negative ones are counted from the end. Raises IndexError for an env that is not there."""
        ids = [int(i) for i in self._get_indices(indices)]
        for i in ids:
            if not -self.num_envs <= i < self.num_envs:
                raise IndexError(f"there is no env {i}: there are envs 0 to {self.num_envs - 1}")
        return [i % self.num_envs for i in ids]

    def close(self) -> None:
        """Close all envs and end all workers. May be called again, and at any time."""
        self.waiting = False
        super().close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pool!r})"


def as_list(env_fns: Any) -> list[Any]:
    """Env functions as a list. Raises TypeError for anything else, such as an id."""
    if isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        raise TypeError(
            f"expected a list of functions that make one env each, found {env_fns!r}; for an id: make_vec_env"
        )
    return list(env_fns)


def check_maker(env_id: Any) -> None:
    """Raise BadEnv unless it is an id, or a function or class."""
    if not isinstance(env_id, str) and not callable(env_id):
        raise BadEnv(
            f"expected an id, or a function or class that makes an env, found {env_id!r}; an env that is made already "
            "cannot stand for several"
        )


def make_one(env_id: Any, env_kwargs: Mapping[str, Any]) -> Any:
    """Make one env, by its id (with images, if it can render them) or by a function or class."""
    if not isinstance(env_id, str):
        return adapt(env_id(**env_kwargs))
    try:
        return gymnasium.make(env_id, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:  # an env that does not render
        return gymnasium.make(env_id, **env_kwargs)
