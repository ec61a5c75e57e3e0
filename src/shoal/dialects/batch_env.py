"""Batches of envs in the words of the old TensorFlow agents and of PlaNet: `BatchEnv` and `ExternalProcess`.

    from shoal.dialects.batch_env import BatchEnv, ExternalProcess

    batch = BatchEnv([ExternalProcess(make_env) for _ in range(8)], blocking=False)
    observ = batch.reset()
    observ, reward, done, infos = batch.step(actions)
    observ[done] = batch.reset(np.flatnonzero(done))   # no env is reset by itself

TensorFlow itself is not needed. A `shoal.Pool` or `shoal.make` is faster: here each env has a process of its own, and
its answers are sent as messages.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.dialects.base import ClosedByWith
from shoal.engine.commands import Call
from shoal.envs.adapt import adapt
from shoal.envs.old_gym import OldGymEnv
from shoal.envs.wrapper_layers import get_attr
from shoal.errors import BadAction, BadCall, BadEnv, BadObservation, EnvError, PoolClosed, SpaceMismatch, WorkerDied
from shoal.memory.copies import own_copy
from shoal.pool import Pool
from shoal.spaces.leaves import Kind, assemble, flatten, get_path, read_actions, write_observation
from shoal.support.checks import Ids, Seed, check_choice, check_ids, spread_seed, truth
from shoal.support.deadline import CLOSE_TIMEOUT, Deadline
from shoal.worker.building import identity_of, refuse_shared

__all__ = ["Async", "BatchEnv", "ExternalProcess", "Promise"]

_BACKENDS: dict[str, Literal["processes", "threads"]] = {"process": "processes", "thread": "threads"}
_SHORTEST = 1.0  # seconds that an env may take to close, however long the others took


class Promise:
    """A result that an ExternalProcess is still working on.

    Call it to wait for the result of `call`, named `name`, for at most `timeout` seconds, as often as you like.

    Raises:
        EnvError: the env raised; also an instance of the env's own exception type.
        WorkerDied: the process is gone.
        PoolClosed: the process was closed before.
        StepTimeout: it is not done yet, and may be waited for again.
    """

    def __init__(self, process: ExternalProcess, name: str, call: Call):
        self._process, self._name = process, name
        self._call: Call | None = call  # None as soon as the value or the error is known
        self._value: Any = None
        self._error: Exception | None = None

    def __call__(self, timeout: float | None = None) -> Any:
        self._process._settle(self, timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)  # without the traceback of an earlier call
        return self._value

    def __repr__(self) -> str:
        state = "pending" if self._call is not None else "kept" if self._error is None else "broken"
        return f"Promise({self._name!r}, {state})"


@dataclass(frozen=True)
class _Act:
    """Runs in the worker: calls a method of the env, or reads an attribute.

    Attributes:
        own: whether the caller shares this process's memory, and must get arrays that the env does not change later.
        look: only read: returns (whether it is a method, which cannot be sent, and the value of an attribute).
    """

    name: str
    own: bool
    look: bool = False

    @property
    def __name__(self) -> str:  # for error messages
        return self.name

    def __call__(self, env: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = get_attr(four_values_too(env) if self.name in ("step", "reset") else env, self.name)
        if self.look:
            value = (True, None) if inspect.isroutine(value) else (False, value)
        elif callable(value):
            value = value(*args, **kwargs)
        return own_copy(value) if self.own else value


class ExternalProcess(ClosedByWith):
    """One env in a process, or a thread, of its own. Its attributes and methods are reached by name.

    Only one thread may use it at a time. The env carries out calls in the order in which they were made.

    Args:
        constructor: a function or class that makes the env, or an id. It is called in the process.
        strategy: "process" or "thread".

    Attributes:
        observation_space, action_space: of the env; also after close.

    Raises:
        EnvError: the constructor raised; also an instance of the type that it raised.
    """

    def __init__(self, constructor: Any, strategy: Literal["process", "thread"] = "process"):
        check_choice("strategy", strategy, tuple(_BACKENDS))
        self._strategy, self._shares_memory = strategy, strategy == "thread"
        self._fault: Exception | None = None
        self._asked: deque[Promise] = deque()  # those with results that were not fetched yet, oldest first
        self._index = 0  # the id of the env in error messages
        self._pool = pool = Pool(constructor, 1, backend=_BACKENDS[strategy], num_workers=1, autoreset="disabled")
        self.observation_space, self.action_space = pool.single_observation_space, pool.single_action_space

    @property
    def unwrapped(self) -> ExternalProcess:
        """Itself: the env stays in its process."""
        return self

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Promise:
        """Start a call of a method of the env, "step" and "reset" included; a plain attribute is given as it is."""
        if not isinstance(name, str) or name == "close":
            raise BadCall(f"call of {name!r}: expected the name of a method; close() ends the env and its process")
        return self._ask(_Act(name, self._shares_memory), args, kwargs)

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step the env: (observation, reward, terminated, truncated, info), or the promise of it if not blocking."""
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True, **kwargs: Any) -> Any:
        """Reset the env: (observation, info), or the promise of it if not blocking. `seed` and `options` as usual."""
        promise = self.call("reset", **kwargs)
        return promise() if blocking else promise

    def __getattr__(self, name: str) -> Any:
        """An attribute of the env, read anew each time. A method can be called, and the call waits for its result.

        Names that begin with an underscore are refused, because many tools try some. `call` reaches those too.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}; of its env: call({name!r})")
        is_method, value = self._ask(_Act(name, self._shares_memory, look=True), (), {})()
        return (lambda *args, **kwargs: self.call(name, *args, **kwargs)()) if is_method else value

    def _ask(self, act: _Act, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Promise:
        if self._fault is not None:
            raise copy.copy(self._fault)  # a copy, with a traceback of its own
        if self._shares_memory:  # the caller may change its arrays before the env sees them
            args, kwargs = own_copy(args), own_copy(kwargs)
        try:
            call = self._pool.start_apply(act, args, kwargs)
        except (WorkerDied, PoolClosed) as error:
            self._break(error)
            raise
        promise = Promise(self, act.name, call._replace(ids=np.array([self._index])))
        self._asked.append(promise)
        return promise

    def _settle(self, promise: Promise, timeout: float | None) -> None:
        """Wait for a result. All earlier ones are fetched too, so that a death that follows does not lose them."""
        deadline = Deadline.after(timeout)
        while promise._call is not None:
            oldest = next(iter(self._asked), promise)
            if oldest._call is not None:
                try:
                    [oldest._value] = self._pool.finish_call(oldest._call, deadline.left)
                except EnvError as error:  # first: it may be an instance of those below as well
                    oldest._error = error
                except (WorkerDied, PoolClosed) as error:
                    self._break(error)
                    continue
                oldest._call = None
            if self._asked and self._asked[0] is oldest:  # unless another thread has closed the process meanwhile
                self._asked.popleft()

    def _break(self, error: Exception) -> None:
        """Note that the process is gone: every promise that was not kept raises this error, and so do new calls."""
        # A copy: what the caller adds to the error that it is handed, must not show in later ones.
        fault = self._fault = self._fault or copy.copy(error)
        for promise in list(self._asked):
            if promise._call is not None:
                promise._error, promise._call = copy.copy(fault), None
        self._asked.clear()

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Close the env and end its process, after `timeout` seconds by force. May be called again.

        Promises that were not kept by then raise PoolClosed.

        Raises:
            EnvError: the env raised in its close; the process has ended.
        """
        self._fault = PoolClosed("this ExternalProcess is closed: make a new one")
        try:
            self._pool.close(timeout)
        finally:
            self._break(self._fault)

    def __reduce__(self) -> Any:
        raise TypeError("an ExternalProcess is running, and cannot be copied or pickled: pass its constructor instead")

    def __repr__(self) -> str:
        pid = self._pool.workers[0].pid
        where = "closed" if self._pool.closed else self._strategy if pid is None else f"{self._strategy} {pid}"
        return f"ExternalProcess({self.observation_space}, {self.action_space}, {where})"


Async = ExternalProcess  # its later name


class BatchEnv(ClosedByWith):
    """A list of envs as one. It steps all and resets some; no env is reset by itself when its episode is over.

    Args:
        envs: envs that are made already, with equal spaces: Gymnasium's, those of the old `gym`, or ExternalProcesses.
        blocking: step them one after another. Otherwise ExternalProcesses work at the same time, while the other envs
            are stepped in turn.

    Raises:
        SpaceMismatch: an env has other spaces than the first.
        BadEnv: the list is empty, an item is no env, or an env is there twice.
    """

    def __init__(self, envs: Iterable[Any], blocking: bool = True):
        if isinstance(envs, str) or not isinstance(envs, Iterable):
            raise BadEnv(f"expected a list of envs that are made already, found {type(envs).__name__}: {envs!r:.100}")
        self._envs = list(envs)
        self.blocking = bool(blocking)
        self._closed = False
        if not self._envs:
            raise BadEnv("the list of envs is empty: at least one is needed")
        self._modern = [_checked(env, index) for index, env in enumerate(self._envs)]
        self.observation_space: Space[Any] = self._modern[0].observation_space
        self.action_space: Space[Any] = self._modern[0].action_space
        seen: dict[int, int] = {}
        for index, env in enumerate(self._modern):
            refuse_shared(seen, identity_of(env), index)
            for name in ("observation_space", "action_space"):
                found, expected = getattr(env, name), getattr(self, name)
                if found != expected:
                    raise SpaceMismatch(
                        f"env {index} has the {name} {found}, and env 0 has {expected}: they must be equal"
                    )
            if isinstance(env, ExternalProcess):
                env._index = index
        self._obs_leaves, self._action_leaves = flatten(self.observation_space), flatten(self.action_space)
        self._has_objects = any(leaf.kind is not Kind.ARRAY for leaf in self._action_leaves)

    def __len__(self) -> int:
        return len(self._envs)

    def __getitem__(self, index: int) -> Any:
        return self._envs[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._envs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the first env."""
        if name.startswith("__") or "_envs" not in self.__dict__:  # this object is being copied or unpickled
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self._envs[0], name)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"blocking={self.blocking}"
        return f"BatchEnv({len(self)} envs, {state}, {self.observation_space}, {self.action_space})"

    def step(
        self, actions: Any
    ) -> tuple[Any, npt.NDArray[np.float32], npt.NDArray[np.bool_], tuple[dict[str, Any], ...]]:
        """Step all envs.

        Args:
            actions: one for each env. A mapping is taken for a batch of a Dict space.

        Returns:
            observations, stacked leaf by leaf in the types of the space; rewards, float32 [n]; dones, bool [n]; and the
            infos, which have "TimeLimit.truncated" where an episode is over. The caller owns all of them.

        Raises:
            BadAction: an action does not fit. No env was stepped.
            EnvError: an env raised; an env of this process raises its own error. If not blocking, all envs have been
                stepped, else those before it.
        """
        self._check_open()
        each = self._read_actions(actions)
        ids = np.arange(len(self))
        results = self._carry_out(lambda index: self._begin(index, "step", each[index]), ids)
        rewards, dones = np.zeros(len(self), np.float32), np.zeros(len(self), np.bool_)
        observations, infos = [], []
        for index, result in enumerate(results):
            observation, rewards[index], terminated, truncated, info = _checked_result(index, result)
            dones[index] = terminated or truncated
            if dones[index]:
                info["TimeLimit.truncated"] = truncated and not terminated
            observations.append(observation)
            infos.append(info)
        return self._stacked(observations, ids), rewards, dones, tuple(infos)

    def reset(self, indices: Any = None, seed: Seed = None) -> Any:
        """Reset some envs (None: all), and return their observations, stacked in the order of `indices`.

        Args:
            indices: of different envs; the list may be empty.
            seed: an int gives env i `seed + i`; a list gives each of the indices its own.

        Raises:
            BadAction: an index does not fit. No env was reset.
        """
        self._check_open()
        ids = self._ids(indices)
        seeds = dict(zip(ids.tolist(), spread_seed(seed, ids), strict=True))
        given = {index: {} if one is None else {"seed": one} for index, one in seeds.items()}
        results = self._carry_out(lambda index: self._begin(index, "reset", **given[index]), ids)
        for index, result in zip(ids.tolist(), results, strict=True):
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"env {index}: reset must return (obs, info), got {result!r:.200}")
        return self._stacked([observation for observation, _ in results], ids)

    def _carry_out(self, begin: Callable[[int], Callable[[], Any]], ids: Ids) -> list[Any]:
        """The answers of these envs, in the order of `ids`. `begin` starts one, and returns a function that waits."""
        if self.blocking:
            return [_named(index, lambda: begin(index)()) for index in ids.tolist()]  # noqa: B023
        outcomes: dict[int, Any] = {}
        errors: dict[int, Exception] = {}

        def attempt(index: int, act: Callable[[], Any]) -> None:
            try:
                outcomes[index] = _named(index, act)
            except Exception as error:  # the answers of the other envs must still be fetched
                errors[index] = error

        for index in ids.tolist():
            attempt(index, functools.partial(begin, index))
        # The envs of this process are stepped while the other processes work.
        for index in sorted(outcomes, key=lambda index: isinstance(self._modern[index], ExternalProcess)):
            attempt(index, outcomes[index])
        for index in ids.tolist():
            if index in errors:
                raise errors[index]
        return [outcomes[index] for index in ids.tolist()]

    def _begin(self, index: int, name: str, /, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Start a call: an ExternalProcess works on it at once, an env of this process when the answer is asked for."""
        env = self._modern[index]
        if isinstance(env, ExternalProcess):
            return env.call(name, *args, **kwargs)
        return functools.partial(getattr(env, name), *args, **kwargs)

    def _stacked(self, observations: Sequence[Any], ids: Ids) -> Any:
        count = len(observations)
        values: list[Any] = [
            [] if leaf.kind is Kind.OBJECT else np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self._obs_leaves
        ]
        others = [value for value in values if isinstance(value, list)]
        for row, observation in enumerate(observations):
            try:
                objects = write_observation(self._obs_leaves, values, (row,), observation)
            except BadObservation as error:
                raise BadObservation(
                    f"env {ids[row]}: {error}; its observation_space must say what it returns"
                ) from None
            for column, value in zip(others, objects, strict=True):
                column.append(own_copy(value))
        for place, leaf in enumerate(self._obs_leaves):
            if leaf.kind is not Kind.ARRAY:
                values[place] = tuple(values[place] if leaf.kind is Kind.OBJECT else values[place].tolist())
        return assemble(self.observation_space, values)

    def _read_actions(self, actions: Any) -> list[Any]:
        """One action for each env, checked, of the space's own type, and copied."""
        all_ids = range(len(self))
        if isinstance(actions, Mapping):
            return self._read(actions, all_ids)
        each = list(actions) if isinstance(actions, Iterable) else None
        if each is None or len(each) != len(self):
            found = f"{actions!r:.100}" if each is None else len(each)
            raise BadAction(f"expected {len(self)} actions, one for each env, found {found}; no env was stepped")
        try:
            return self._read(self._as_batch(each), all_ids)
        except (BadAction, KeyError, IndexError, TypeError):
            pass  # one is wrong, or they do not fit into one array
        for index, action in enumerate(each):
            try:
                [each[index]] = self._read(self._as_batch([action]), [index])
            except (BadAction, KeyError, IndexError, TypeError) as error:
                raise BadAction(
                    f"the action at index {index} is {action!r}, which is not in {self.action_space}; no env was "
                    "stepped"
                ) from error
        return each

    def _as_batch(self, each: list[Any]) -> Any:
        return assemble(
            self.action_space, [[get_path(action, leaf.path) for action in each] for leaf in self._action_leaves]
        )

    def _read(self, batch: Any, ids: Sequence[int]) -> list[Any]:
        columns = read_actions(self._action_leaves, batch, ids, check="all")
        each = [assemble(self.action_space, [own_copy(column[row]) for column in columns]) for row in range(len(ids))]
        for index, action in zip(ids, each, strict=True):
            if self._has_objects and not self.action_space.contains(action):
                raise BadAction(f"actions[{index}] is {action!r}: expected one of {self.action_space}")
        return each

    def _ids(self, indices: Any) -> Ids:
        if indices is None:
            return np.arange(len(self))
        given = list(indices) if isinstance(indices, Iterable) else [indices]
        if not given:
            return np.zeros(0, np.int64)
        # One by one: numpy turns a True among numbers into a 1.
        for index in given:
            if isinstance(index, bool | np.bool_):
                raise BadAction(f"reset of indices {indices!r}: expected whole numbers, found {index!r}")
        try:
            return check_ids(given, len(self))
        except BadAction as error:
            raise BadAction(f"reset of indices {indices!r}: {error}") from None

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("this BatchEnv is closed: make a new one")

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Close all envs, also where one of them raises. May be called again.

        Args:
            timeout: seconds for all ExternalProcesses together. Then each has one more second, and is ended by force.

        Raises:
            Exception: the first error of an env's close, after all envs are closed.
        """
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(timeout)
        errors: list[BaseException] = []
        for index, env in enumerate(self._modern):
            try:
                if isinstance(env, ExternalProcess):
                    env.close(None if deadline.left is None else max(deadline.left, _SHORTEST))
                else:
                    _named(index, env.close)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _checked(env: Any, index: int) -> Any:
    """The env as a Gymnasium env. Raises BadEnv if it is no env."""
    if isinstance(env, ExternalProcess):
        return env
    found = env if isinstance(env, type) else adapt(env)
    missing = [name for name in ("step", "reset", "observation_space", "action_space") if not hasattr(found, name)]
    if missing or isinstance(found, type | gymnasium.vector.VectorEnv):
        what = f"it has no {', '.join(missing)}" if missing else "it is a class, or many envs already"
        raise BadEnv(f"env {index} is {env!r:.100}, which is no env: {what}; a BatchEnv takes envs made already")
    return four_values_too(found)


def _checked_result(index: int, result: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """The result of a step in plain types, with a copy of the info."""
    try:
        observation, reward, terminated, truncated, info = result
        if isinstance(result, tuple) and isinstance(info, dict) and not isinstance(reward, str | bytes):
            return observation, float(reward), truth("", terminated), truth("", truncated), own_copy(info)
    except (TypeError, ValueError):
        pass  # it has another length, or a part of it is no number
    raise TypeError(f"env {index}: step must return (obs, reward, terminated, truncated, info), got {result!r:.200}")


def _named(index: int, act: Callable[[], Any]) -> Any:
    """Call `act`. A note on an error says which env raised it, unless the error says so itself."""
    try:
        return act()
    except Exception as error:
        if not isinstance(error, EnvError) and hasattr(error, "add_note"):  # Python 3.10 has none
            error.add_note(f"this was env {index} of a BatchEnv")
        raise


def four_values_too(env: Any) -> Any:
    """Wrap an env that is no Gymnasium env: it may return four values from step, and yet have a modern reset."""
    return env if isinstance(env, gymnasium.Env) else OldGymEnv(env)
