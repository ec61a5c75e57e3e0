"""Envs as variables of a TensorFlow graph: a whole batch, or a single one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar, cast

import gymnasium
import numpy as np
import tensorflow as tf

from shoal.errors import BadAction, BadEnv
from shoal.graph.host import Arrays, FlatBatch, GraphHost, kept_errors, own_errors
from shoal.pool import Pool
from shoal.spaces.leaves import assemble, get_path

_CPU = "CPU:0"  # where callbacks run, and the only device that has every type
_BATCH_ENV = ("step", "reset", "__len__", "observation_space", "action_space")
_thread = threading.local()
_F = TypeVar("_F", bound=Callable[..., Any])


def as_written(method: _F) -> _F:
    """Keep autograph from converting a method that has nothing to convert."""
    return cast(_F, tf.autograph.experimental.do_not_convert(method))


def _eager_errors() -> AbstractContextManager[None]:
    """Raise the envs' own errors from a call outside any graph. Within one, errors go on to the graph's caller."""
    return own_errors() if tf.executing_eagerly() else contextlib.nullcontext()


def _refuse(message: str) -> NoReturn:
    """Raise BadAction in a form that `own_errors` finds again: autograph wraps errors that are raised in tracing."""
    with kept_errors():
        raise BadAction(message)
    raise AssertionError("not reached")


class _InGraph:
    """The variables of envs in a graph, and the callbacks that fill them."""

    def __init__(self, envs: Any, single: bool = False):
        # GraphHost refuses what has neither a pool nor a batch env's methods, and wrappers around a pool.
        host: Any = GraphHost(envs) if _is_on_pool(envs) or not _is_batch(envs) else _BatchEnvHost(envs)
        self._envs, self._host = envs, host
        self._lead = () if single else (host.num_envs,)  # the axes before those of one env
        self.observation_space, self.action_space = host.observation_space, host.action_space
        self._types, action_types = host.types("TensorFlow", tf.as_dtype)
        with tf.device(_CPU):
            self._observ = self._variables("observ", host.obs_leaves, self._types)
            self._action = self._variables("action", host.action_leaves, action_types)
            self.reward = _variable("reward", self._lead, tf.float32)
            # True at first: no episode is under way.
            self.done = _variable("done", self._lead, tf.bool, True)
            self.terminated, self.truncated = (_variable(n, self._lead, tf.bool) for n in ("terminated", "truncated"))
        self._answer = [*self._observ, self.reward, self.terminated, self.truncated]
        self.observ = host.nest(self._observ)
        self.action = assemble(self.action_space, self._action)
        self.pool: Pool | None = getattr(host, "pool", None)

    def _variables(self, name: str, leaves: Any, types: Any) -> list[Any]:
        return [_variable(name, self._lead + leaf.shape, kind) for leaf, kind in zip(leaves, types, strict=True)]

    @as_written
    def step(self, action: Any) -> tuple[Any, Any, Any]:
        """Step with an action that is nested as the action space is, and put action and answer into the variables.

        Returns:
            (observ, reward, done): the new values, which the variables hold too.
        """
        with _eager_errors(), tf.device(_CPU), tf.name_scope("step"):
            given, stored = self._both_forms(action)
            answer = self._call(self._on_step, given, [variable.dtype for variable in self._answer])
            *observ, reward, terminated, truncated = answer
            done = tf.logical_or(terminated, truncated)
            for tensor, variable in zip((*answer, done), (*self._answer, self.done), strict=True):
                tensor.set_shape(variable.shape)
                variable.assign(tensor, read_value=False)
            with tf.control_dependencies([reward]):  # if it raises, nothing is assigned
                for tensor, variable in zip(stored, self._action, strict=True):
                    variable.assign(tensor, read_value=False)
            return self._host.nest(observ), reward, done

    simulate = step

    def close(self) -> None:
        """Close the envs."""
        if hasattr(self._envs, "close"):
            self._envs.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._envs!r})"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _both_forms(self, action: Any) -> tuple[list[Any], list[Any]]:
        """Return the leaves of an action as the pool is to check them, and in the types of the variables."""
        given, stored = [], []
        with kept_errors():
            values = self._host.flat_actions(action)
        for leaf, variable, value in zip(self._host.action_leaves, self._action, values, strict=True):
            tensor = tf.convert_to_tensor(value, dtype_hint=variable.dtype)
            if not tensor.shape.is_compatible_with(variable.shape):
                _refuse(f"actions{leaf.name}: expected shape {variable.shape}, found {tensor.shape}")
            cast_one = tensor if tensor.dtype == variable.dtype else tf.cast(tensor, variable.dtype)
            safe = np.can_cast(tensor.dtype.as_numpy_dtype, leaf.dtype, "safe")
            given.append(cast_one if safe else tensor)
            stored.append(cast_one)
        return given, stored

    def _call(self, callback: Callable[..., Any], given: list[Any], types: list[Any]) -> list[Any]:
        """Call back after all earlier callbacks, those inside loops and branches included.

        TensorFlow orders ops by the variables they touch. Every callback reads the reward before and writes it after.
        """
        with tf.control_dependencies([self.reward.value()]):
            found = tf.numpy_function(callback, given, types)
        return list(found) if isinstance(found, list | tuple) else [found]

    def _restart(self, indices: Any = None) -> Any:
        """Reset these envs (None: all), and update just their rows."""
        with _eager_errors(), tf.device(_CPU), tf.name_scope("reset"):
            ids = None if indices is None else _as_ids(indices)
            given = [] if ids is None else [ids]
            *observ, reward = self._call(self._on_reset, given, [*self._types, tf.float32])
            lead = self._lead if ids is None else (ids.shape[0],)
            off = tf.zeros(self._lead if ids is None else tf.shape(ids), tf.bool)
            with tf.control_dependencies([reward]):  # if it raises, nothing is assigned
                for tensor, variable in zip((*observ, reward), (*self._observ, self.reward), strict=True):
                    tensor.set_shape([*lead, *variable.shape[len(self._lead) :]])
                    _update(variable, ids, tensor)
                for flag in (self.done, self.terminated, self.truncated):
                    _update(flag, ids, off)
            return self._host.nest(observ)

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def _on_step(self, *actions: Any) -> Any:
        _remember_thread()
        return self._host.step(*actions)

    def _on_reset(self, ids: Any = None) -> Any:
        if ids is not None and len(ids) == 0:
            obs: Arrays = tuple(np.zeros((0, *leaf.shape), leaf.dtype) for leaf in self._host.obs_leaves)
        else:
            obs = self._host.reset(ids)
        return (*obs, np.zeros(self._host.num_envs if ids is None else len(ids), np.float32))


class InGraphBatchEnv(_InGraph):
    """A batch of envs in a graph.

    Args:
        batch_env: a Pool, an object that has one as `pool` (a vector env of `shoal.make`), or a batch env: an object
            with `len`, the spaces of one env, `step(actions) -> (observ, reward, done, infos)` and `reset(indices)`.
            Its spaces hold numbers only: BadEnv names the part that does not.

    With `autoreset="disabled"`, call `reset(indices)` for an env between the end of an episode and its next step. With
    "next_step" the pool does that itself in place of the next step: reward 0, done False, observ the first of the new
    episode. With "same_step" observ is that already when done is True. `reset(indices)` works in every mode.

    Attributes:
        observ, action: variables [n, ...] in the types of the spaces, nested as those are.
        reward: variable float32 [n].
        done, terminated, truncated: variables bool [n]; done is True before the first reset as well. An episode of
            a batch env is truncated if its info says so under "TimeLimit.truncated".
        batch_size: n, which `len` gives too.
        pool: the pool, None for a batch env that has none.
        observation_space, action_space: of one env.
    """

    def __init__(self, batch_env: Any):
        super().__init__(batch_env)
        self.batch_size: int = self._host.num_envs

    def __len__(self) -> int:
        return self.batch_size

    @as_written
    def reset(self, indices: Any = None) -> Any:
        """Reset these envs (None: all), and update just their rows: observ, reward 0, done False.

        Args:
            indices: integers [k], each once, in any order; k may be 0.

        Returns:
            their first observations [k, ...], in the order of `indices`.
        """
        return self._restart(indices)


class InGraphEnv(_InGraph):
    """One env in a graph: as InGraphBatchEnv, without the first axis.

    Args:
        env: an env, an id, a spec, a function or class that makes one, which gets a serial pool of its own, with
            autoreset="disabled"; or a pool, vector env or batch env with exactly one env in it.

    Attributes:
        observ, action: variables in the shapes and types of the spaces, nested as those are.
        reward: variable float32 [].
        done, terminated, truncated: variables bool []; done is True before the first reset as well.
        pool: the pool, None for a batch env that has none.
        observation_space, action_space: of the env.
    """

    def __init__(self, env: Any):
        own = not _is_batch(env)
        envs = _pool_of_one(env) if own else env
        try:
            super().__init__(envs, single=True)
            if self._host.num_envs != 1:
                raise BadEnv(f"expected one env, found {self._host.num_envs} in {env!r}: use InGraphBatchEnv")
        except BaseException:
            if own:
                envs.close()
            raise

    @as_written
    def reset(self) -> Any:
        """Reset the env, and return its first observation; reward is 0 then, and done False."""
        return self._restart()

    def _on_step(self, *actions: Any) -> Any:
        return [array[0] for array in super()._on_step(*(np.asarray(action)[None] for action in actions))]

    def _on_reset(self, ids: Any = None) -> Any:
        return [array[0] for array in super()._on_reset(ids)]


def _remember_thread() -> None:
    """Let Python keep its record of this thread, which is TensorFlow's, from one callback to the next.

    Otherwise Python makes a new record in each callback, at a cost of some 15 us. Such threads are few, and live as
    long as the process.
    """
    if not hasattr(_thread, "known"):
        _thread.known = True
        ctypes.pythonapi.PyGILState_Ensure()  # for good: it is not paired with a release


def _variable(name: str, shape: tuple[int, ...], kind: Any, value: Any = 0) -> Any:
    return tf.Variable(np.full(shape, value, tf.as_dtype(kind).as_numpy_dtype), trainable=False, name=name)


def _update(variable: Any, ids: Any, values: Any) -> None:
    """Assign a variable, or some of its rows."""
    if ids is None:
        variable.assign(values, read_value=False)
    elif 0 not in variable.shape:  # the op refuses to update nothing
        variable.scatter_nd_update(ids[:, None], values)


def _as_ids(indices: Any) -> Any:
    ids = tf.convert_to_tensor(indices)
    if ids.shape.rank == 1 and ids.shape[0] == 0:
        return tf.zeros([0], tf.int64)  # an empty list has no type of its own
    if not ids.dtype.is_integer:
        _refuse(f"expected the indices of envs, found {ids.dtype.name}; of a mask: tf.where(mask)[:, 0]")
    if ids.shape.rank not in (None, 1):
        _refuse(f"expected indices of shape [k], found {ids.shape}")
    return tf.cast(ids, tf.int64)


# ---- what a graph stands on ------------------------------------------------------------------------------------


class _BatchEnvHost(FlatBatch):
    """A batch env, with the methods of a GraphHost that are used here."""

    def __init__(self, batch_env: Any):
        super().__init__(len(batch_env), batch_env.observation_space, batch_env.action_space)
        self._batch_env = batch_env

    def step(self, *actions: Any) -> Arrays:
        with kept_errors():
            observ, reward, done, infos = self._batch_env.step(assemble(self.action_space, actions))
            cut = np.array([isinstance(info, dict) and bool(info.get("TimeLimit.truncated")) for info in infos])
            ended = np.asarray(done, np.bool_)
            return (*self._leaves(observ), np.array(reward, np.float32), ended & ~cut, ended & cut)

    def reset(self, ids: Any = None) -> Arrays:
        with kept_errors():
            return self._leaves(self._batch_env.reset(None if ids is None else np.asarray(ids)))

    def _leaves(self, observ: Any) -> Arrays:
        """Copy the leaves: a batch env may use its arrays again."""
        return tuple(np.array(get_path(observ, leaf.path), leaf.dtype) for leaf in self.obs_leaves)


def _is_batch(envs: Any) -> bool:
    """Say whether it is many envs: a pool, an object with a pool, or a batch env."""
    return _is_on_pool(envs) or (not isinstance(envs, type) and all(hasattr(envs, name) for name in _BATCH_ENV))


def _is_on_pool(envs: Any) -> bool:
    return isinstance(envs, Pool) or isinstance(getattr(envs, "pool", None), Pool)


def _pool_of_one(env: Any) -> Pool:
    old_gym = hasattr(env, "step") and not callable(env)
    made = isinstance(env, gymnasium.Env) or old_gym
    return Pool([lambda: env] if made else env, None if made else 1, backend="serial", autoreset="disabled")


# ---- functions that raise the envs' own errors ---------------------------------------------------------------


class _Function:
    """A `tf.function` that raises the envs' own errors when it is called. All else is the `tf.function`'s."""

    def __init__(self, graph: Any):
        self._graph = graph
        functools.update_wrapper(self, graph.python_function)

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_errors():
            return self._graph(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Function(self._graph.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a `tf.function`, with or without its options, that raises the errors of envs in it as they are.

    After a plain `tf.function`, or around a whole program, `own_errors` does the same.
    """
    if func is None:
        return functools.partial(function, **options)
    return _Function(tf.function(func, **options))
