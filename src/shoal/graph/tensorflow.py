"""Envs inside of a TensorFlow graph: variables that hold their last answer, and ops that step and reset them.

    envs = InGraphBatchEnv(shoal.Pool("CartPole-v1", 64, autoreset="disabled"))

    @function
    def collect():
        envs.reset()
        for _ in tf.range(100):
            envs.step(policy(envs.observ))

A step is one callback into Python (`tf.numpy_function`), so it works in `tf.function`, `tf.while_loop` and `tf.cond`,
and eagerly, but not in what XLA compiles (`jit_compile=True`). Steps are carried out in the order in which they are
written, and none is left out, whether their results are used or not. Gradients do not flow through them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import gymnasium
import numpy as np

from shoal.errors import BadAction, BadEnv
from shoal.graph.host import Arrays, GraphHost, kept_errors, own_errors
from shoal.pool import Pool
from shoal.spaces.leaves import Leaf, array_leaves, assemble, get_path

try:
    import tensorflow as tf
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f"envs inside of a TensorFlow graph need TensorFlow: {install('tensorflow')}") from error

__all__ = ["Algorithm", "InGraphBatchEnv", "InGraphEnv", "Progress", "Summary", "function", "own_errors", "simulate"]

_CPU = "CPU:0"  # where callbacks are, and the only place that has every type
_BATCH_ENV = ("step", "reset", "__len__", "observation_space", "action_space")
_F = TypeVar("_F", bound=Callable[..., Any])
_thread = threading.local()


def _as_written(method: _F) -> _F:
    """Autograph has nothing to convert here."""
    return cast(_F, tf.autograph.experimental.do_not_convert(method))


# ---- envs ------------------------------------------------------------------------------------------------------


class _InGraph:
    """The variables, and the callbacks that fill them.

    Args:
        lead: the axes before those of one env: (number of envs,), or () for a single one.
    """

    def __init__(self, envs: Any, lead: tuple[int, ...] | None):
        host = _host_of(envs)
        self._envs, self._host = envs, host
        self._lead = (host.num_envs,) if lead is None else lead
        self.observation_space, self.action_space = host.observation_space, host.action_space
        self._types = [_known("observation", leaf) for leaf in host.obs_leaves]
        action_types = [_known("action", leaf) for leaf in host.action_leaves]
        with tf.device(_CPU):
            self._observ, self._action = (
                [_variable(name, self._lead + leaf.shape, kind) for leaf, kind in zip(leaves, types, strict=True)]
                for name, leaves, types in (
                    ("observ", host.obs_leaves, self._types),
                    ("action", host.action_leaves, action_types),
                )
            )
            self.reward = _variable("reward", self._lead, tf.float32)
            # True at first: no episode is under way.
            self.done = _variable("done", self._lead, tf.bool, True)
            self.terminated, self.truncated = (_variable(n, self._lead, tf.bool) for n in ("terminated", "truncated"))
        self._answer = [*self._observ, self.reward, self.terminated, self.truncated]
        self.observ = host.nest(self._observ)
        self.action = assemble(self.action_space, self._action)

    @_as_written
    def step(self, action: Any) -> tuple[Any, Any, Any]:
        """Step with an action that is nested as the action space is, and put action and answer into the variables.

        Returns:
            (observ, reward, done): the new values, for those who do not want to read the variables.
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

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _both_forms(self, action: Any) -> tuple[list[Any], list[Any]]:
        """The leaves of an action as the pool is to check them, and in the types of the variables."""
        given, stored = [], []
        for leaf, variable in zip(self._host.action_leaves, self._action, strict=True):
            try:
                value = get_path(action, leaf.path)
            except (KeyError, IndexError, TypeError) as error:
                _refuse(f"actions have no part {leaf.name}: expected a batch of {self.action_space}", error)
            tensor = tf.convert_to_tensor(value, dtype_hint=variable.dtype)
            if not tensor.shape.is_compatible_with(variable.shape):
                _refuse(f"actions{leaf.name}: expected shape {variable.shape}, found {tensor.shape}")
            cast_one = tensor if tensor.dtype == variable.dtype else tf.cast(tensor, variable.dtype)
            safe = np.can_cast(tensor.dtype.as_numpy_dtype, leaf.dtype, "safe")
            given.append(cast_one if safe else tensor)
            stored.append(cast_one)
        return given, stored

    def _call(self, callback: Callable[..., Any], given: list[Any], types: list[Any]) -> list[Any]:
        """Call back after all earlier callbacks, those inside of loops and branches included.

        TensorFlow orders ops by the variables they touch. Every callback reads the reward before and writes it after.
        """
        with tf.control_dependencies([self.reward.value()]):
            found = tf.numpy_function(callback, given, types)
        return list(found) if isinstance(found, list | tuple) else [found]

    def _restart(self) -> Any:
        *observ, reward = self._call(self._on_reset, [], [*self._types, tf.float32])
        with tf.control_dependencies([reward]):  # if it raises, nothing is assigned
            for tensor, variable in zip((*observ, reward), (*self._observ, self.reward), strict=True):
                tensor.set_shape(variable.shape)
                variable.assign(tensor, read_value=False)
            for flag in (self.done, self.terminated, self.truncated):
                flag.assign(tf.zeros(self._lead, tf.bool), read_value=False)
        return self._host.nest(observ)

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def _on_step(self, *actions: Any) -> Any:
        _stay()
        try:
            return self._host.exchange(actions)
        except BaseException:
            with kept_errors():  # here, as it would cost every step a microsecond
                raise

    def _on_reset(self) -> Any:
        return (*self._host.reset(), np.zeros(self._host.num_envs, np.float32))


class InGraphBatchEnv(_InGraph):
    """A batch of envs in a graph.

    Args:
        batch_env: a Pool, what stands on one and has it as `pool` (a vector env of `shoal.make`), or a batch env: it
            has `len`, the spaces of one env, `step(actions) -> (observ, reward, done, infos)` and `reset(indices)`.
            Its spaces hold numbers only: BadEnv names what does not.

    With `autoreset="disabled"` an env whose episode is over must be reset before its next step: `reset(indices)`. With
    "next_step" the pool does that itself in place of the next step: reward 0, done False, observ the first of the new
    episode. With "same_step" observ is that already when done is True. `reset(indices)` works in every mode.

    Attributes:
        observ, action: variables [n, ...] in the types of the spaces, nested as those are.
        reward: variable float32 [n].
        done, terminated, truncated: variables bool [n]; done is True before the first reset as well. Of a batch env's
            episodes those are truncated whose info says so under "TimeLimit.truncated".
        batch_size: n, which `len` gives too.
        pool: the pool, None for a batch env that has none.
        observation_space, action_space: of one env.
    """

    def __init__(self, batch_env: Any):
        super().__init__(batch_env, None)
        self.batch_size: int = self._host.num_envs
        self.pool: Pool | None = getattr(self._host, "pool", None)

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        return f"InGraphBatchEnv({self._envs!r})"

    @_as_written
    def reset(self, indices: Any = None) -> Any:
        """Reset these envs (None: all), and update just their rows: observ, reward 0, done False.

        Args:
            indices: integers [k], each once, in any order; k may be 0.

        Returns:
            their first observations [k, ...], in the order of `indices`.
        """
        with _eager_errors(), tf.device(_CPU), tf.name_scope("reset"):
            if indices is None:
                return self._restart()
            ids = _as_ids(indices)
            *observ, reward = self._call(self._on_reset_some, [ids], [*self._types, tf.float32])
            with tf.control_dependencies([reward]):  # if it raises, nothing is assigned
                at, off = ids[:, None], tf.zeros(tf.shape(ids), tf.bool)
                for rows, variable in zip((*observ, reward), (*self._observ, self.reward), strict=True):
                    rows.set_shape([ids.shape[0], *variable.shape[1:]])
                    if 0 not in variable.shape:  # an op would refuse to update nothing
                        variable.scatter_nd_update(at, rows)
                for flag in (self.done, self.terminated, self.truncated):
                    flag.scatter_nd_update(at, off)
            return self._host.nest(observ)

    def _on_reset_some(self, ids: Any) -> Any:
        reward = np.zeros(len(ids), np.float32)
        if len(ids) == 0:
            return (*(np.zeros((0, *leaf.shape), leaf.dtype) for leaf in self._host.obs_leaves), reward)
        return (*self._host.reset(ids), reward)


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
            super().__init__(envs, ())
            if self._host.num_envs != 1:
                raise BadEnv(f"expected one env, found {self._host.num_envs} in {env!r}: use InGraphBatchEnv")
        except BaseException:
            if own:
                envs.close()
            raise
        self.pool: Pool | None = getattr(self._host, "pool", None)

    def __repr__(self) -> str:
        return f"InGraphEnv({self._envs!r})"

    @_as_written
    def reset(self) -> Any:
        """Reset the env: its first observation, reward 0, done False. Returns the observation."""
        with _eager_errors(), tf.device(_CPU), tf.name_scope("reset"):
            return self._restart()

    def _on_step(self, *actions: Any) -> Any:
        return [array[0] for array in super()._on_step(*(np.asarray(action)[None] for action in actions))]

    def _on_reset(self) -> Any:
        return [array[0] for array in super()._on_reset()]


def _stay() -> None:
    """Let Python remember this thread, which is TensorFlow's, from one callback to the next.

    It would build its notion of a foreign thread anew in each callback, at a cost of some 15 us. They are few, and live
    as long as the process.
    """
    if not hasattr(_thread, "known"):
        _thread.known = True
        ctypes.pythonapi.PyGILState_Ensure()  # for good: not paired with a release


def _variable(name: str, shape: tuple[int, ...], kind: Any, value: Any = 0) -> Any:
    return tf.Variable(np.full(shape, value, tf.as_dtype(kind).as_numpy_dtype), trainable=False, name=name)


def _known(what: str, leaf: Leaf) -> Any:
    try:
        return tf.as_dtype(leaf.dtype)
    except TypeError as error:
        raise BadEnv(
            f"the {what} space{leaf.name} is of {leaf.dtype}, which TensorFlow does not have: cast it by a wrapper "
            "around the env"
        ) from error


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


class _BatchEnvHost:
    """A batch env with a GraphHost's methods."""

    pool = None

    def __init__(self, batch_env: Any):
        self._batch_env, self.num_envs = batch_env, len(batch_env)
        self.observation_space, self.action_space = batch_env.observation_space, batch_env.action_space
        self.obs_leaves = array_leaves("observation", self.observation_space, "a graph")
        self.action_leaves = array_leaves("action", self.action_space, "a graph")
        self.obs_types = [leaf.dtype for leaf in self.obs_leaves]

    def nest(self, leaves: Any) -> Any:
        return assemble(self.observation_space, leaves)

    def exchange(self, actions: Any) -> Arrays:
        observ, reward, done, infos = self._batch_env.step(assemble(self.action_space, actions))
        cut = np.array([isinstance(info, dict) and bool(info.get("TimeLimit.truncated")) for info in infos])
        ended = np.asarray(done, np.bool_)
        return (*self._leaves(observ), np.array(reward, np.float32), ended & ~cut, ended & cut)

    def reset(self, ids: Any = None) -> Arrays:
        with kept_errors():
            return self._leaves(self._batch_env.reset(None if ids is None else np.asarray(ids)))

    def _leaves(self, observ: Any) -> Arrays:
        """Copies: a batch env may use its arrays again."""
        return tuple(np.array(get_path(observ, leaf.path), leaf.dtype) for leaf in self.obs_leaves)


def _is_batch(envs: Any) -> bool:
    """Whether it is many envs: a pool, something on a pool, or a batch env."""
    return _is_on_pool(envs) or (not isinstance(envs, type) and all(hasattr(envs, name) for name in _BATCH_ENV))


def _is_on_pool(envs: Any) -> bool:
    return isinstance(envs, Pool) or isinstance(getattr(envs, "pool", None), Pool)


def _host_of(envs: Any) -> Any:
    # GraphHost refuses what is neither, and wrappers that know the pool below them.
    return GraphHost(envs) if _is_on_pool(envs) or not _is_batch(envs) else _BatchEnvHost(envs)


def _pool_of_one(env: Any) -> Pool:
    made = isinstance(env, gymnasium.Env) or (hasattr(env, "step") and not callable(env))  # one of the old gym's
    return Pool([lambda: env] if made else env, None if made else 1, backend="serial", autoreset="disabled")


# ---- loops -----------------------------------------------------------------------------------------------------


class Algorithm:
    """What `simulate` asks while it steps; override what you need. Anything else with these four methods will do.

    The methods are traced into the graph, once: what they learn they keep in `tf.Variable`s.
    """

    @_as_written
    def begin(self, indices: Any) -> None:
        """Episodes begin in these envs, int64 [k]; not called for none."""

    def perform(self, observ: Any) -> Any:
        """The actions for these observations [n, ...]."""
        raise NotImplementedError

    @_as_written
    def experience(self, observ: Any, action: Any, reward: Any, done: Any, next_observ: Any) -> None:
        """A step was made in all envs, [n, ...] each."""

    @_as_written
    def end(self, indices: Any) -> None:
        """Episodes have ended in these envs, int64 [k]; not called for none."""


class Progress(NamedTuple):
    """Of the episodes under way: `score`, the sum of rewards so far, float32 [n], and `length`, int32 [n]."""

    score: Any
    length: Any


class Summary(NamedTuple):
    """What `simulate` found.

    Attributes:
        episodes: how many have ended, int32 [].
        score: mean sum of rewards of those, float32 []; nan for none.
        length: their mean number of steps, float32 []; nan for none.
        state: of the episodes that have not ended: for the next call of `simulate`.
    """

    episodes: Any
    score: Any
    length: Any
    state: Progress


def simulate(env: InGraphBatchEnv, policy: Any, steps: Any, state: Progress | None = None) -> Summary:
    """Run all envs for so many steps, inside of a graph; envs whose episode is over are reset before the next step.

    Episodes go on from one call to the next, through the variables of `env`. The very first call resets all envs.

    Args:
        env: of a pool with autoreset="disabled" ("next_step" works too, as envs are reset before it would).
        policy: an Algorithm, or a function from observations to actions.
        steps: how many, an int or a tensor.
        state: `Summary.state` of the call before, so that scores are of whole episodes; else they count from here.

    Example:
        @function
        def collect(state):
            return simulate(envs, policy, 200, state)
    """
    if env.pool is not None and env.pool.autoreset == "same_step":
        raise ValueError('simulate resets envs itself, and the pool has autoreset="same_step": use "disabled"')
    algorithm = policy if hasattr(policy, "perform") else _Perform(policy)
    zeros = Progress(tf.zeros([len(env)], tf.float32), tf.zeros([len(env)], tf.int32))
    start = zeros if state is None else Progress(*state)

    def begin() -> None:
        indices = tf.where(env.done)[:, 0]
        env.reset(indices)
        algorithm.begin(indices)

    def end(done: Any) -> None:
        algorithm.end(tf.where(done)[:, 0])

    def advance(turn: Any, score: Any, length: Any, episodes: Any, scores: Any, lengths: Any) -> Any:
        fresh = env.done.read_value()
        tf.cond(tf.reduce_any(fresh), begin, _nothing)
        observ = tf.nest.map_structure(tf.convert_to_tensor, env.observ)
        action = algorithm.perform(observ)
        next_observ, reward, done = env.step(action)
        algorithm.experience(observ, action, reward, done, next_observ)
        tf.cond(tf.reduce_any(done), lambda: end(done), _nothing)
        score = tf.where(fresh, 0.0, score) + reward
        length = tf.where(fresh, 0, length) + 1
        episodes += tf.math.count_nonzero(done, dtype=tf.int32)
        scores += tf.reduce_sum(tf.where(done, score, 0.0))
        lengths += tf.reduce_sum(tf.where(done, length, 0))
        return turn + 1, score, length, episodes, scores, lengths

    steps = tf.cast(steps, tf.int32)
    none = tf.constant(0)
    _, score, length, episodes, scores, lengths = tf.while_loop(
        lambda turn, *_: turn < steps, advance, (none, *start, none, tf.constant(0.0), none)
    )
    count = tf.cast(episodes, tf.float32)
    return Summary(episodes, scores / count, tf.cast(lengths, tf.float32) / count, Progress(score, length))


class _Perform(Algorithm):
    def __init__(self, function: Callable[[Any], Any]):
        self._function = function

    def perform(self, observ: Any) -> Any:
        return self._function(observ)


def _nothing() -> None:
    """The other branch."""


# ---- errors ----------------------------------------------------------------------------------------------------


def _eager_errors() -> AbstractContextManager[None]:
    """Around a call outside of any graph. Within one, errors go on to whoever calls the graph, or traces it."""
    return own_errors() if tf.executing_eagerly() else contextlib.nullcontext()


def _refuse(message: str, cause: Exception | None = None) -> NoReturn:
    """Raise BadAction, in a form that outlives autograph, which has a wrapper of its own for errors in tracing."""
    with kept_errors():
        raise BadAction(message) from cause
    raise AssertionError("not reached")


class _Function:
    """A `tf.function` whose calls raise the envs' own errors. All else is the `tf.function`'s."""

    def __init__(self, graph: Any):
        self._graph = graph
        functools.update_wrapper(self, graph.python_function)

    @_as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_errors():
            return self._graph(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Function(self._graph.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`tf.function`, with or without its options, for graphs with envs in them: what an env raises comes out as it is.

    After a plain `tf.function`, or around a whole program, `own_errors` does the same.
    """
    if func is None:
        return functools.partial(function, **options)
    return _Function(tf.function(func, **options))
