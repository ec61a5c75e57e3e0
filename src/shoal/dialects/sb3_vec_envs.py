"""Drop-ins for Stable-Baselines3's two VecEnvs: envs in this process, and envs in worker processes."""

from __future__ import annotations

import copy
import multiprocessing
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import spaces

from shoal.dialects.base import as_list, in_turn
from shoal.dialects.vec_env import Indices, PoolVecEnv, StepReturn, VecEnv
from shoal.memory.answers import Ready

_BUFFERS = ("keys", "buf_obs", "buf_rews", "buf_dones", "buf_infos")


class DummyVecEnv(PoolVecEnv):
    """Drop-in for SB3's: the envs live in this process, in `envs`, and are stepped one after another in `step_wait`.

    Args:
        env_fns: one function per env.
        pool_options: as for `shoal.Pool`.

    Attributes:
        actions: those of the last `step_async`.
        keys, buf_obs, buf_rews, buf_dones, buf_infos: the last answers, as SB3's class keeps them, for subclasses with
            a `step_wait` of their own. They are made when one is first asked for.

    Raises:
        IndexError: there are no functions.
    """

    _quotes = True
    actions: Any

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **pool_options: Any):
        pool_options.setdefault("backend", "serial")
        self._made_by = as_list(env_fns), pool_options
        if not self._made_by[0]:
            raise IndexError("the list of env functions is empty: at least one env is needed")
        super().__init__(*self._made_by[:1], **pool_options)
        self.metadata = self.pool.specs.metadata
        self._last_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> StepReturn:
        return self._step_now(self.actions)

    step = VecEnv.step

    @property
    def envs(self) -> Any:
        """The envs. One that is put into the list takes the place of the other."""
        return self.pool.local_envs

    @envs.setter
    def envs(self, envs: Sequence[Any]) -> None:
        self.pool.local_envs[:] = envs

    def reset(self) -> Any:
        obs = super().reset()
        if "buf_obs" in self.__dict__:
            self._keep_obs(obs)
        return OrderedDict(obs) if isinstance(obs, dict) else obs  # as SB3's class has it

    def _result(self, ready: Ready) -> StepReturn:
        obs, rewards, dones, self._last_infos = super()._result(ready)
        if "buf_obs" in self.__dict__:
            self._keep_obs(obs)
            self.buf_rews[:], self.buf_dones[:] = rewards, dones
            self.buf_infos[:] = copy.deepcopy(self._last_infos)
        return OrderedDict(obs) if isinstance(obs, dict) else obs, rewards, dones, self._last_infos

    def __reduce__(self) -> Any:
        """A copy makes envs of its own, and goes on from the same state."""
        kept = {name: value for name, value in vars(self).items() if name not in ("pool", "_convert", "_made_by")}
        return _revived, (type(self), cloudpickle.dumps(self._made_by), self.pool.snapshot(), kept)

    def __getattr__(self, name: str) -> Any:
        if name not in _BUFFERS or "_last_infos" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._make_buffers()
        return self.__dict__[name]

    @in_turn
    def _make_buffers(self) -> None:
        space = self.observation_space
        self.keys: list[Any] = [None]
        if isinstance(space, spaces.Dict | spaces.Tuple):
            self.keys = list(space.spaces) if isinstance(space, spaces.Dict) else list(range(len(space.spaces)))
        last = self.pool.last_answer()
        parts = {None: last.obs} if self.keys == [None] else {key: last.obs[key] for key in self.keys}
        self.buf_obs = OrderedDict((key, np.array(part)) for key, part in parts.items())
        self.buf_rews = np.array(last.reward, np.float32)
        self.buf_dones = np.array(last.terminated | last.truncated)
        self.buf_infos = copy.deepcopy(self._last_infos)

    def _keep_obs(self, obs: Any) -> None:
        for key in self.keys:
            self.buf_obs[key][:] = obs if key is None else obs[key]

    def _save_obs(self, env_idx: int, obs: Any) -> None:
        """Put an env's observation into the buffers."""
        for key in self.keys:
            self.buf_obs[key][env_idx] = obs if key is None else obs[key]

    def _obs_from_buf(self) -> Any:
        """A batch of the observations in the buffers."""
        obs = copy.deepcopy(self.buf_obs)
        if isinstance(self.observation_space, spaces.Tuple):
            return tuple(obs.values())
        return obs[None] if self.keys == [None] else obs

    def _get_target_envs(self, indices: Indices) -> list[Any]:
        return [self.envs[i] for i in self._get_indices(indices)]


class SubprocVecEnv(PoolVecEnv):
    """Drop-in for SB3's: the envs live in worker processes, several to each. Rewards are float64, infos a tuple.

    Args:
        env_fns: one function per env.
        start_method: "forkserver" (default), "spawn" or "fork".
        pool_options: as for `shoal.Pool`: num_workers, on_error="restart", step_timeout, ...; with backend="hybrid" the
            caller steps some of the envs itself, which is faster and not isolated.
    """

    _quotes, _reward_type = True, np.float64

    def __init__(self, env_fns: Sequence[Callable[[], Any]], start_method: str | None = None, **pool_options: Any):
        multiprocessing.get_context(start_method)  # refuses what it does not know, as in SB3
        super().__init__(as_list(env_fns), start_method=start_method, **{"backend": "processes", **pool_options})

    def reset(self) -> Any:
        obs = super().reset()
        self.reset_infos = tuple(self.reset_infos)  # type: ignore[assignment] # as SB3's class has it
        return obs

    def _result(self, ready: Ready) -> StepReturn:
        self.reset_infos = list(self.reset_infos)
        obs, rewards, dones, infos = super()._result(ready)
        self.reset_infos = tuple(self.reset_infos)  # type: ignore[assignment]
        return obs, rewards, dones, tuple(infos)


def _revived(cls: type[DummyVecEnv], made_by: bytes, snapshot: Any, kept: dict[str, Any]) -> DummyVecEnv:
    """A DummyVecEnv that was pickled or copied."""
    env_fns, options = cloudpickle.loads(made_by)
    venv = cls.__new__(cls)
    DummyVecEnv.__init__(venv, env_fns, **options)
    venv.pool.restore(snapshot)
    vars(venv).update(copy.deepcopy(kept))
    return venv
