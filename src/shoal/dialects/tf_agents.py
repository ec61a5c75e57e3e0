"""The pool as a PyEnvironment of TF-Agents: drop-ins for `BatchedPyEnvironment` and `ParallelPyEnvironment`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

# TF-Agents is written for Keras 2. TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
try:
    from tf_agents.environments import py_environment
    from tf_agents.specs import array_spec
    from tf_agents.trajectories import time_step as ts
    from tf_agents.utils import nest_utils
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f'api="tf_agents" needs TF-Agents: {install("tf-agents")}') from error

import numpy as np

from shoal.dialects.time_steps import TimeStepFace
from shoal.envs.functions import pickle_env_fns
from shoal.envs.time_steps import has_specs, quicken, slow_down
from shoal.errors import BadEnv, SpaceMismatch
from shoal.support.checks import spread_seed

__all__ = ["BatchedPyEnvironment", "ParallelPyEnvironment", "PoolPyEnvironment", "quicken", "slow_down"]


def _make_spec(shape: Any, dtype: Any, minimum: Any, maximum: Any, name: str) -> Any:
    if minimum is None or maximum is None or np.dtype(dtype).kind == "b":  # TF-Agents has no bounds for bools
        return array_spec.ArraySpec(shape, dtype, name)
    return array_spec.BoundedArraySpec(shape, dtype, minimum, maximum, name)


class PoolPyEnvironment(TimeStepFace, py_environment.PyEnvironment):  # type: ignore[misc]
    """Many envs as one batched PyEnvironment, for drivers, TFPyEnvironment and replay buffers.

    Args:
        env, num_envs: as for `shoal.Pool`: PyEnvironments, dm_env environments and Gymnasium envs, by a function that
            makes one, a class, a Gymnasium id, or a list of them.
        **pool_options: as for `shoal.Pool`.
    """

    _make_spec = staticmethod(_make_spec)
    batched = True

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        try:
            self._open(env, num_envs, pool_options)
        except SpaceMismatch as error:
            raise ValueError(str(error)) from error  # as TF-Agents says it
        self._seeds: list[int | None] | None = None
        super().__init__()

    batch_size = property(attrgetter("pool.num_envs"), doc="The number of envs.")

    @property
    def envs(self) -> list[Any]:
        """The envs of this process, and for each env of a worker a stand-in that asks the worker."""
        local = self.pool.local_envs if self.pool.plan.backend in ("serial", "hybrid") else []
        found = [env.env if self._all_have_specs else env for env in local]
        return found + [RemoteEnv(self.pool, i) for i in range(len(local), self.pool.num_envs)]

    def time_step_spec(self) -> ts.TimeStep:
        """Of one env."""
        step_type = array_spec.ArraySpec((), np.int32, name="step_type")
        return ts.TimeStep(step_type, self.reward_spec(), self.discount_spec(), self.observation_spec())

    def _reset(self) -> ts.TimeStep:
        seeds, self._seeds = self._seeds, None
        return ts.TimeStep(*self._first_step(seeds))

    def _step(self, action: Any) -> ts.TimeStep:
        return ts.TimeStep(*self._next_step(action))

    def seed(self, seed: Any) -> list[Any]:
        """Seed the envs: an int gives env i `seed + i`, a list gives each its own.

        PyEnvironments that can are seeded at once, Gymnasium envs at the next reset.
        """
        seeds = spread_seed(seed, np.arange(self.batch_size))
        if not self._all_have_specs:
            self._seeds = seeds
            return [None] * len(seeds)
        return [self.pool.apply(_seed, one, env_ids=[i])[0] for i, one in enumerate(seeds)]

    def get_info(self) -> Any:
        """The infos of the last TimeStep: those of PyEnvironments stacked, those of other envs as a tuple of dicts."""
        if not self._all_have_specs:
            return tuple(self.infos.get(i, {}) for i in range(self.batch_size))
        return nest_utils.stack_nested_arrays(self.pool.call("get_info"))

    def render(self, mode: str = "rgb_array") -> Any:
        """An image of each env, stacked."""
        if mode != "rgb_array":
            raise NotImplementedError(f'a batch can be rendered as "rgb_array" only, not as {mode!r}')
        return np.stack(self.pool.render())

    def get_state(self) -> Any:
        """The state of all envs, their random generators included, for `set_state`."""
        return self.pool.snapshot(), self._current_time_step, self.infos

    def set_state(self, state: Any) -> None:
        """Continue from a state that `get_state` returned."""
        snapshot, time_step, infos = state
        self.pool.restore(snapshot)
        self._current_time_step, self.infos = time_step, infos

    def start(self) -> None:
        """Does nothing: the envs were made by the constructor."""


class BatchedPyEnvironment(PoolPyEnvironment):
    """Drop-in for TF-Agents' BatchedPyEnvironment.

    Args:
        envs: PyEnvironments, made already or to be made by a function, or Gymnasium ids; or one function or id, with
            `num_envs` among the options.
        multithreading: False steps all envs in this thread, one after another. True lets Shoal choose the fastest
            backend: worker processes get pickled copies of envs that are made already, and `envs` gives access to the
            copies. Pass `backend="threads"` if the envs must stay in this process.
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(self, envs: Any, multithreading: bool = True, **pool_options: Any):
        if isinstance(envs, list | tuple):
            if not envs:
                raise ValueError("envs must be a list or tuple of at least one env, found an empty one")
            batched = [i for i, env in enumerate(envs) if getattr(env, "batched", False)]
            if batched:
                raise ValueError(f"envs {batched} are already batched: give the single ones in them")
            envs = [functools.partial(_made, env, i) if has_specs(env) else env for i, env in enumerate(envs)]
        elif has_specs(envs):
            raise ValueError(f"envs must be a list or tuple, found one env: {envs!r}")
        pool_options.setdefault("backend", _backend_for(envs) if multithreading else "serial")
        super().__init__(envs, **pool_options)


class ParallelPyEnvironment(PoolPyEnvironment):
    """Drop-in for TF-Agents' ParallelPyEnvironment: envs in worker processes, several in each.

    Args:
        env_constructors: functions that make an env, or Gymnasium ids.
        start_serially: accepted, and without effect: workers start together, and each makes its envs one by one.
        blocking: step the envs one after another, in one worker.
        flatten: accepted, and without effect: arrays are always sent flat.
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[[], Any] | str],
        start_serially: bool = True,
        blocking: bool = False,
        flatten: bool = False,
        **pool_options: Any,
    ):
        wrong = [i for i, make in enumerate(env_constructors) if not (callable(make) or isinstance(make, str))]
        if wrong:
            raise TypeError(
                f"env_constructors {wrong} cannot be called: give functions that make an env, not the envs themselves"
            )
        if blocking:
            pool_options.setdefault("num_workers", 1)
        pool_options.setdefault("backend", "processes")
        super().__init__(list(env_constructors), **pool_options)


class RemoteEnv:
    """Stands for an env in a worker. Its attributes are read, and its methods run, in the worker."""

    def __init__(self, pool: Any, env_id: int):
        self._pool, self._env_id = pool, env_id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._pool.call(name, *args, env_ids=[self._env_id], **kwargs)[0]

        return call if self._pool.apply(_is_method, name, env_ids=[self._env_id])[0] else call()

    def __repr__(self) -> str:
        return f"RemoteEnv({self._env_id} of {self._pool!r})"


def _made(env: Any, env_id: int) -> Any:
    """The env, or in a worker process a copy of it. A worker loads equal pickles once, so the id makes them differ."""
    return env


def _backend_for(envs: Any) -> str:
    """The backend for envs that are made already: "threads" if they cannot be pickled."""
    made = [env for env in envs if getattr(env, "func", None) is _made] if isinstance(envs, list) else []
    try:
        pickle_env_fns(made)
    except BadEnv:
        return "threads"
    return "auto"


def _is_method(env: Any, name: str) -> bool:
    return callable(getattr(env, name))


def _seed(env: Any, seed: Any) -> Any:
    return env.env.seed(seed)
