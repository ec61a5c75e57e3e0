"""One env in a process or a thread of its own, asked through promises: `ExternalProcess`."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.dialects.base import ClosedByWith
from shoal.engine.commands import Call
from shoal.envs.old_gym import OldGymEnv
from shoal.envs.wrapper_layers import get_attr
from shoal.errors import BadCall, EnvError, PoolClosed, ShoalError, WorkerDied
from shoal.memory.copies import own_copy
from shoal.pool import Pool
from shoal.support.checks import check_choice
from shoal.support.deadline import Deadline

__all__ = ["Async", "ExternalProcess", "Promise", "four_values_too"]

_BACKENDS: dict[str, Literal["processes", "threads"]] = {"process": "processes", "thread": "threads"}


class Promise:
    """A result that an ExternalProcess is still working on. Call it to wait for the result, as often as you like.

    Args of a call:
        timeout: seconds to wait; None for as long as it takes.

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

    Raises:
        EnvError: the constructor raised; also an instance of the type that it raised.
    """

    def __init__(self, constructor: Any, strategy: Literal["process", "thread"] = "process"):
        check_choice("strategy", strategy, tuple(_BACKENDS))
        self._strategy = strategy
        self._fault: ShoalError | None = None
        self._asked: deque[Promise] = deque()  # those with results that were not fetched yet, oldest first
        self._index = 0  # the id of the env in error messages
        self._pool = Pool(constructor, 1, backend=_BACKENDS[strategy], num_workers=1, autoreset="disabled")

    @property
    def observation_space(self) -> Space[Any]:
        """Of the env; also after close."""
        return self._pool.single_observation_space

    @property
    def action_space(self) -> Space[Any]:
        """Of the env; also after close."""
        return self._pool.single_action_space

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

    @property
    def _shares_memory(self) -> bool:
        return self._strategy == "thread"

    def _ask(self, act: _Act, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Promise:
        self._check_usable()
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
            self._fetch(next(iter(self._asked), promise), deadline)

    def _fetch(self, oldest: Promise, deadline: Deadline) -> None:
        if oldest._call is not None:
            try:
                [oldest._value] = self._pool.finish_call(oldest._call, deadline.left)
            except EnvError as error:  # first: it may be an instance of those below as well
                oldest._error = error
            except (WorkerDied, PoolClosed) as error:
                self._break(error)
                return
            oldest._call = None
        if self._asked and self._asked[0] is oldest:  # unless another thread has closed the process meanwhile
            self._asked.popleft()

    def _break(self, error: ShoalError) -> None:
        """Note that the process is gone: every promise that was not kept raises this error, and so do new calls."""
        # A copy: what the caller adds to the error that it is handed, must not show in later ones.
        fault = self._fault = self._fault or copy.copy(error)
        for promise in list(self._asked):
            if promise._call is not None:
                promise._error, promise._call = copy.copy(fault), None
        self._asked.clear()

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise copy.copy(self._fault)  # a copy, with a traceback of its own

    def close(self, timeout: float | None = 5.0) -> None:
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


def four_values_too(env: Any) -> Any:
    """Wrap an env that is no Gymnasium env: it may return four values from step, and yet have a modern reset."""
    return env if isinstance(env, gymnasium.Env) else OldGymEnv(env)
