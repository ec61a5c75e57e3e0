"""The pool as a PyEnvironment of TF-Agents: drop-ins for `BatchedPyEnvironment` and `ParallelPyEnvironment`."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

# TF-Agents is written for Keras 2. TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
try:
    import gin
    import tensorflow as tf
    from tf_agents.environments import batched_py_environment, parallel_py_environment, py_environment
    from tf_agents.specs import array_spec
    from tf_agents.trajectories import time_step as ts
    from tf_agents.utils import nest_utils
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f'api="tf_agents" needs TF-Agents: {install("tf-agents")}') from error

import cloudpickle
import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from shoal.dialects.time_steps import Parts, TimeStepFace
from shoal.envs.exact_steps import TIME_STEP, GivenEnv, NoSpace, close_env, make_exact, reset_env, step_env
from shoal.envs.guarded_pickles import dumps
from shoal.envs.side_by_side import SideBySide
from shoal.envs.time_steps import TimeStepEnv, has_specs, quicken, slow_down
from shoal.errors import SpaceMismatch
from shoal.support.checks import spread_seed

__all__ = ["BatchedPyEnvironment", "ParallelPyEnvironment", "PoolPyEnvironment", "quicken", "slow_down"]

IN_THIS_PROCESS = ("serial", "threads")


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

    _make_spec, _own_specs = staticmethod(_make_spec), (array_spec.ArraySpec,)
    _lenient = False  # whether envs may be given, and may answer, what their specs do not allow
    batched = True

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        try:
            self._open(_exact(env, self._lenient), num_envs, _with_time_steps(pool_options))
        except SpaceMismatch as error:
            what = "action spec" if "action space" in str(error) else "time_step_spec"
            raise ValueError(f"All environments must have the same {what}: {error}") from error
        self._seeds: list[int | None] | None = None
        super().__init__()

    def _learn(self) -> None:
        super()._learn()
        self._same_type |= isinstance(self.pool.single_observation_space, NoSpace)  # then TimeSteps travel whole
        step_type = array_spec.ArraySpec((), np.int32, name="step_type")
        described = ts.TimeStep(step_type, self._specs.reward, self._specs.discount, self._specs.observation)
        # Only where the envs have specs: a worker imports this module, and so TensorFlow, to carry that out.
        own = self.pool.apply(_time_step_spec, env_ids=[0])[0] if self._all_have_specs else None
        self._time_step_spec = described if own is None else own

    batch_size = property(attrgetter("pool.num_envs"), doc="The number of envs.")

    @property
    def envs(self) -> Sequence[Any]:
        """The envs of this process, and for each env of a worker a stand-in that asks the worker."""
        local = self.pool.local_envs if self.pool.plan.backend in ("serial", "hybrid") else []
        found = [_own(env) for env in local]
        return found + [RemoteEnv(self.pool, i) for i in range(len(local), self.pool.num_envs)]

    def time_step_spec(self) -> ts.TimeStep:
        """Of one env."""
        return self._time_step_spec

    def _reset(self) -> ts.TimeStep:
        seeds, self._seeds = self._seeds, None
        return self._time_step(self._first_step(seeds))

    def _step(self, action: Any) -> ts.TimeStep:
        return self._time_step(self._next_step(action))

    def _time_step(self, parts: Parts) -> ts.TimeStep:
        """The batch of all envs; where TimeSteps of envs came whole, all are stacked as TF-Agents does it."""
        batch = ts.TimeStep(*parts)
        whole = {i: info[TIME_STEP] for i, info in self.infos.items() if TIME_STEP in info} if self.infos else {}
        if not whole:
            return batch
        return self._stacked([
            whole[i] if i in whole else tf.nest.map_structure(lambda array, i=i: array[i], batch)
            for i in range(self.batch_size)
        ])  # fmt: skip

    def _stacked(self, time_steps: list[ts.TimeStep]) -> ts.TimeStep:
        return nest_utils.stack_nested_arrays(time_steps)

    def seed(self, seed: Any) -> list[Any]:
        """Seed the envs: an int gives env i `seed + i`, a list gives each its own.

        PyEnvironments that can are seeded at once, Gymnasium envs at the next reset.
        """
        seeds = spread_seed(seed, np.arange(self.batch_size))
        if not self._all_have_specs:
            self._seeds = seeds
            return [None] * len(seeds)
        return self._seed_each(seeds)

    def _seed_each(self, seeds: Sequence[Any]) -> list[Any]:
        return [self.pool.apply(_seed, one, env_ids=[i])[0] for i, one in enumerate(seeds)]

    def get_info(self) -> Any:
        """The infos of the last TimeStep: those of PyEnvironments stacked, those of other envs as a tuple of dicts."""
        if not self._all_have_specs:
            return tuple(self.infos.get(i, {}) for i in range(self.batch_size))
        return nest_utils.stack_nested_arrays(self.pool.call("get_info"))

    def render(self, mode: str = "rgb_array") -> Any:
        """What all envs render in this mode, stacked: images for "rgb_array".

        Raises NotImplementedError where an env cannot.
        """
        if self._all_have_specs:
            return nest_utils.stack_nested_arrays(self.pool.apply(_render, mode))
        if mode != "rgb_array":
            raise NotImplementedError(f"Only rgb_array rendering mode is supported. Got {mode}")
        images = self.pool.render()
        if any(image is None for image in images):
            raise NotImplementedError('an env gave no image: make it with render_mode="rgb_array"')
        return np.stack(images)

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


class _DropIn(PoolPyEnvironment):
    """What the two drop-ins share: envs may be given, and may answer, what their specs do not allow."""

    _lenient = _quotes = True

    # TF-Agents' classes have these of their base class. What the envs say is in `time_step_spec`.
    reward_spec = py_environment.PyEnvironment.reward_spec
    discount_spec = py_environment.PyEnvironment.discount_spec


def _configured(theirs: Any, **given: Any) -> dict[str, Any]:
    """Arguments; what is not given is as gin says it for TF-Agents' class, or as the class has it."""
    bound = gin.get_bindings(theirs)
    defaults = {name: one.default for name, one in inspect.signature(theirs.__init__).parameters.items()}
    return {name: bound.get(name, defaults[name]) if value is None else value for name, value in given.items()}


class BatchedPyEnvironment(_DropIn):
    """Drop-in for TF-Agents' BatchedPyEnvironment.

    Args:
        envs: PyEnvironments, made already or to be made by a function, or Gymnasium ids; or one function or id, with
            `num_envs` among the options.
        multithreading: False steps all envs in this thread, one after another. True (the default) lets envs that are
            made already, and that wait, do so at the same time, by a thread for each; and it runs those that are still
            to be made in worker processes. With `backend="processes"` envs that are made already are pickled, workers
            get the copies, and `envs` gives access to these.
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(self, envs: Any, multithreading: bool | None = None, **pool_options: Any):
        threaded = _configured(batched_py_environment.BatchedPyEnvironment, multithreading=multithreading)
        multithreading = bool(threaded["multithreading"])
        if isinstance(envs, list | tuple):
            _check_made([(i, env) for i, env in enumerate(envs) if has_specs(env)])
            envs[0]  # of an empty list, TF-Agents raises IndexError
        elif not callable(envs) and not isinstance(envs, str):
            raise ValueError(f"envs must be a list or tuple.  Got: {envs}")
        made = isinstance(envs, list | tuple) and all(map(has_specs, envs))
        pool_options.setdefault("backend", "processes" if multithreading and not made else "serial")
        self._parallel_execution = multithreading  # TFPyEnvironment looks for it
        self._given = envs if made and pool_options["backend"] in IN_THIS_PROCESS else None
        self._calls = SideBySide(envs, multithreading) if made and pool_options["backend"] == "serial" else None
        if self._calls is not None:
            weakref.finalize(self, self._calls.close)
            envs = [functools.partial(_given_env, env, self._calls, i) for i, env in enumerate(envs)]
        elif isinstance(envs, list | tuple):
            envs = [Made(env, i) if has_specs(env) else env for i, env in enumerate(envs)]
        super().__init__(envs, **pool_options)

    def _learn(self) -> None:
        super()._learn()
        # What the pool is given where the envs take the user's own actions: any that it does not refuse.
        space, count = copy.deepcopy(self.pool.single_action_space), self.batch_size
        room: Any = create_empty_array(space, count)
        self._no_actions = concatenate(space, [space.sample()] * count, room)

    @property
    def envs(self) -> Sequence[Any]:
        """The envs as they were given, if they are in this process; else stand-ins that ask the workers."""
        return super().envs if self._given is None else self._given

    def _reset(self) -> ts.TimeStep:
        if self._calls is None:
            return super()._reset()
        with self.pool.turn:
            self._calls.begin(reset_env, [None] * self.batch_size)
            try:
                return super()._reset()
            finally:
                self._calls.end()

    def _step(self, action: Any) -> ts.TimeStep:
        rows = self._rows(action)
        if self._calls is None:
            return super()._step(action)
        with self.pool.turn:
            self._calls.begin(step_env, rows)
            try:
                time_step = super()._step(self._no_actions)
            finally:
                left = self._calls.end()
            if left:
                raise RuntimeError(f"envs {sorted(left)} were not stepped by their actions: restore them by set_state")
            return time_step

    def _rows(self, action: Any) -> list[Any]:
        """The action of each env."""
        if self.batch_size == 1:
            return [nest_utils.unbatch_nested_array(action)]
        plain = type(action) is np.ndarray and action.ndim
        rows = list(action) if plain else batched_py_environment.unstack_actions(action)
        if len(rows) != self.batch_size:
            raise ValueError(
                f"Primary dimension of action items does not match batch size: {len(rows)} vs. {self.batch_size}"
            )
        return rows

    def get_info(self) -> Any:
        """The infos of the last TimeStep: those of PyEnvironments stacked, those of other envs as a tuple of dicts."""
        return super().get_info() if self._calls is None else self._stacked(self._calls.all(methodcaller("get_info")))

    def render(self, mode: str = "rgb_array") -> Any:
        """What all envs render in this mode, stacked. Raises NotImplementedError where an env cannot."""
        if self._calls is None:
            return super().render(mode)
        return self._stacked(self._calls.all(methodcaller("render", mode)))

    def set_state(self, state: Any) -> None:
        """Continue from a state that `get_state` returned."""
        super().set_state(state)
        for i, env in enumerate(self.pool.local_envs if self._calls is not None else ()):
            env.use(self._calls, i)

    def close(self) -> None:
        """Close all envs and end all workers. May be called again."""
        if self._calls is None or self.pool.closed:
            return super().close()
        self._calls.begin(close_env, [None] * self.batch_size)
        try:
            super().close()
        finally:
            self._calls.end()
            self._calls.close()
        return None


def _given_env(env: Any, calls: SideBySide, index: int) -> GivenEnv:
    return GivenEnv(env, True).use(calls, index)


class ParallelPyEnvironment(_DropIn):
    """Drop-in for TF-Agents' ParallelPyEnvironment: envs in worker processes, several in each.

    Args:
        env_constructors: functions that make an env, or Gymnasium ids.
        start_serially: accepted, and without effect: workers start together, and each makes its envs one by one.
        blocking: step the envs one after another, in one worker.
        flatten: nest TimeSteps as the specs say, and not as the envs nest them. (Arrays are always sent flat.)
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(
        self,
        env_constructors: Sequence[Callable[[], Any] | str],
        start_serially: bool | None = None,
        blocking: bool | None = None,
        flatten: bool | None = None,
        **pool_options: Any,
    ):
        options = _configured(
            parallel_py_environment.ParallelPyEnvironment,
            start_serially=start_serially, blocking=blocking, flatten=flatten,
        )  # fmt: skip
        if not all(callable(make) or isinstance(make, str) for make in env_constructors):
            raise TypeError(
                "Found non-callable `env_constructors` in `ParallelPyEnvironment` __init__ call. Did you accidentally "
                f"pass in environment instances instead of constructors? Got: {env_constructors}"
            )
        env_constructors[0]  # of an empty list, TF-Agents raises IndexError
        if options["blocking"]:
            pool_options.setdefault("num_workers", 1)
        pool_options.setdefault("backend", "processes")
        self._flatten, self._parallel_execution = options["flatten"], True  # TFPyEnvironment looks for the second
        super().__init__(list(env_constructors), **pool_options)

    def _stacked(self, time_steps: list[ts.TimeStep]) -> ts.TimeStep:
        if not self._flatten:
            return super()._stacked(time_steps)
        flat = [tf.nest.flatten(time_step) for time_step in time_steps]
        arrays = [np.stack(parts) for parts in zip(*flat, strict=False)]
        return tf.nest.pack_sequence_as(self.time_step_spec(), arrays)

    def seed(self, seeds: Any) -> list[Any]:
        """Seed the envs: each gets its own of the list, as it is; an int gives env i `seeds + i`."""
        if not isinstance(seeds, Sequence | np.ndarray) or isinstance(seeds, str) or not self._all_have_specs:
            return super().seed(seeds)
        if len(seeds) != self.batch_size:
            raise ValueError(
                "Number of seeds should match the number of parallel_envs. "
                f"(expected {self.batch_size} seeds, found {len(seeds)})"
            )
        return self._seed_each(list(seeds))

    def render(self, mode: str = "rgb_array") -> Any:
        """An image of each env, stacked. Raises NotImplementedError for any mode but "rgb_array"."""
        if mode != "rgb_array":
            raise NotImplementedError(f"Only rgb_array rendering mode is supported. Got {mode}")
        if not self._all_have_specs:
            return super().render(mode)
        return nest_utils.stack_nested_arrays(self.pool.apply(_render_as_they_do))


# For code that asks by isinstance.
batched_py_environment.BatchedPyEnvironment.register(BatchedPyEnvironment)
parallel_py_environment.ParallelPyEnvironment.register(ParallelPyEnvironment)


class RemoteEnv:
    """Stands for an env in a worker. Its attributes are read, and its methods run, in the worker."""

    def __init__(self, pool: Any, env_id: int):
        self._pool, self._env_id = pool, env_id

    def access(self, name: str) -> Any:
        """An attribute of the env."""
        return self._pool.apply(_access, name, env_ids=[self._env_id])[0]

    def call(self, name: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Call a method of the env: a function that returns its result."""
        result = self._pool.apply(_call, name, args, kwargs, env_ids=[self._env_id])[0]
        return lambda: result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not self._pool.apply(_is_method, name, env_ids=[self._env_id])[0]:
            return self.access(name)
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)()

    def __repr__(self) -> str:
        return f"RemoteEnv({self._env_id} of {self._pool!r})"


class Made:
    """Gives an env that is made already, and in a worker process a copy of it.

    A worker loads equal pickles once, so the id makes them differ.
    """

    def __init__(self, env: Any, env_id: int):
        self._env, self._env_id = env, env_id

    def __call__(self) -> Any:
        return self._env

    def __reduce__(self) -> Any:
        return _load_made, (dumps(self._env), self._env_id)


def _load_made(pickled: bytes, env_id: int) -> Made:
    return Made(cloudpickle.loads(pickled), env_id)


def _check_made(envs: list[tuple[int, Any]]) -> None:
    """Raise ValueError where envs are batched, or where their specs differ."""
    batched = [(i, env) for i, env in envs if getattr(env, "batched", False)]
    if batched:
        raise ValueError(f"Some of the envs are already batched: {batched}")
    for name, what in (("action_spec", "action spec"), ("time_step_spec", "time_step_spec")):
        specs = [getattr(env, name)() for _, env in envs if hasattr(env, name)]
        if any(spec != specs[0] for spec in specs):
            raise ValueError(f"All environments must have the same {what}.  Saw: {specs}")


def _exact(env: Any, lenient: bool) -> Any:
    """What makes envs, so that it makes PyEnvironments whose TimeSteps arrive as they are."""
    if isinstance(env, list | tuple):
        done: dict[int, Any] = {}  # what is there many times stays one object, and is pickled once
        return [done.setdefault(id(one), _exact(one, lenient)) for one in env]
    compiled = isinstance(env, type) and hasattr(env, "__shoal_env__")
    is_env = not isinstance(env, type) and hasattr(env, "step")
    return functools.partial(make_exact, env, lenient) if callable(env) and not compiled and not is_env else env


def _with_time_steps(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a pool, so that infos which are a part of TimeSteps are never left out."""
    wanted = options.get("infos", "all")
    if wanted == "all" or (isinstance(wanted, str) and wanted != "drop"):
        return options
    return {**options, "infos": [*([] if wanted == "drop" else wanted), TIME_STEP, "discount"]}


# ---- in the worker ---------------------------------------------------------------------------------------------


def _own(env: Any) -> Any:
    """The env that its user knows."""
    return env.env if isinstance(env, TimeStepEnv) else env


def _time_step_spec(env: Any) -> Any:
    own = _own(env)
    return own.time_step_spec() if hasattr(own, "time_step_spec") else None


def _access(env: Any, name: str) -> Any:
    return getattr(_own(env), name)


def _call(env: Any, name: str, args: Any, kwargs: Any) -> Any:
    return getattr(_own(env), name)(*args, **kwargs)


def _is_method(env: Any, name: str) -> bool:
    return callable(getattr(_own(env), name))


def _seed(env: Any, seed: Any) -> Any:
    return _own(env).seed(seed)


def _render(env: Any, mode: str) -> Any:
    return _own(env).render(mode)


def _render_as_they_do(env: Any) -> Any:
    """In TF-Agents' processes: without a mode."""
    return _own(env).render()
