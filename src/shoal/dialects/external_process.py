"""One env in a process or a thread of its own, asked through promises: `ExternalProcess`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.engine.commands import Call
from shoal.envs.old_gym import OldGymEnv
from shoal.envs.wrapper_layers import get_attr
from shoal.errors import (
    BadCall,
    EnvError,
    PoolClosed,
    ShoalError,
    WorkerDied,
)
from shoal.pool import Pool
from shoal.support.checks import check_choice
from shoal.support.copies import own_copy
from shoal.support.deadline import Deadline

__all__ = ["Async", "ExternalProcess", "Promise", "four_values_too"]

_BACKENDS: dict[str, Literal["processes", "threads"]] = {"process": "processes", "thread": "threads"}


@dataclass(eq=False)
class _Answer:
    """What was asked of a process, and what has come of it: `call` is None as soon as that is known."""

    name: str
    call: Call | None
    value: Any = None
    error: Exception | None = None


class Promise:
    """A result that is still being worked on. Call it to wait for it: as often as you like, it stays the same.

    Args:
        timeout: seconds to wait; None for as long as it takes.

    Raises:
        EnvError: the env raised; also an instance of the env's own exception type.
        WorkerDied: the process is gone.
        PoolClosed: the process was closed before.
        StepTimeout: it is not done yet, and may be waited for again.
    """

    def __init__(self, process: ExternalProcess, answer: _Answer):
        self._process, self._answer = process, answer

    def __call__(self, timeout: float | None = None) -> Any:
        return self._process._settle(self._answer, timeout)

    def __repr__(self) -> str:
        answer = self._answer
        state = "pending" if answer.call is not None else "kept" if answer.error is None else "broken"
        return f"Promise({answer.name!r}, {state})"


@dataclass(frozen=True)
class _Act:
    """Calls a method of the env, where the env lives; a plain attribute is returned as it is.

    Attributes:
        own: whether the caller shares this process's memory, and must get arrays that the env does not change later.
    """

    name: str
    own: bool

    @property
    def __name__(self) -> str:  # how errors call it
        return self.name

    def __call__(self, env: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = get_attr(four_values_too(env) if self.name in ("step", "reset") else env, self.name)
        value = value(*args, **kwargs) if callable(value) else value
        return own_copy(value) if self.own else value


@dataclass(frozen=True)
class _Look(_Act):
    """Reads an attribute: (whether it is a method, which cannot travel, or else its value)."""

    def __call__(self, env: Any, /, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        value = get_attr(env, self.name)
        if inspect.isroutine(value):
            return True, None
        return False, own_copy(value) if self.own else value


class ExternalProcess:
    """One env in a process, or a thread, of its own. Its attributes and methods are reached by name.

    For one thread at a time. What is asked of it is carried out in the order in which it was asked.

    Args:
        constructor: a function or class that makes the env, or an id; called over there.
        strategy: "process" or "thread".

    Raises:
        EnvError: the constructor raised; also an instance of the type that it raised.
    """

    def __init__(self, constructor: Any, strategy: Literal["process", "thread"] = "process"):
        check_choice("strategy", strategy, tuple(_BACKENDS))
        self._strategy = strategy
        self._fault: ShoalError | None = None
        self._asked: deque[_Answer] = deque()  # whose results have not been fetched, oldest first
        self._index = 0  # what errors call the env
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
        """Itself: what is in it cannot come here."""
        return self

    # ---- asking ------------------------------------------------------------------------------------------------

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
        """An attribute of the env, asked for over there each time; a method can be called, and is waited for.

        Names that begin with an underscore are not: many tools try some. `call` gives those too.
        """
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}; of its env: call({name!r})")
        is_method, value = self._ask(_Look(name, self._shares_memory), (), {})()
        return functools.partial(self._call_and_wait, name) if is_method else value

    def _call_and_wait(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, *args, **kwargs)()

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
        answer = _Answer(act.name, call._replace(ids=np.array([self._index])))
        self._asked.append(answer)
        return Promise(self, answer)

    def _settle(self, answer: _Answer, timeout: float | None) -> Any:
        """Wait for an answer, and return or raise what it says.

        Those before it are fetched as well: they are there by then, and a death that follows must not take them along.
        """
        deadline = Deadline.after(timeout)
        while answer.call is not None:
            self._fetch(next(iter(self._asked), answer), deadline)
        if answer.error is not None:
            raise answer.error.with_traceback(None)  # without those of earlier times
        return answer.value

    def _fetch(self, oldest: _Answer, deadline: Deadline) -> None:
        call = oldest.call
        if call is not None:
            try:
                [oldest.value] = self._pool.finish_call(call, deadline.left)
            except EnvError as error:  # first: it may be an instance of those below as well
                oldest.error = error
            except (WorkerDied, PoolClosed) as error:
                self._break(error)
                return
            oldest.call = None
        if self._asked and self._asked[0] is oldest:  # unless another thread has closed us meanwhile
            self._asked.popleft()

    def _break(self, error: ShoalError) -> None:
        """Nothing can be asked any more, and what was asked will never be answered."""
        fault = self._fault = self._fault or error
        for answer in list(self._asked):
            if answer.call is not None:
                answer.error, answer.call = copy.copy(fault), None
        self._asked.clear()

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise copy.copy(self._fault)  # each has a traceback of its own

    # ---- end ---------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = 5.0) -> None:
        """Close the env and end its process: asks, and after `timeout` seconds forces. May be called again.

        Promises that were not kept by then raise PoolClosed.

        Raises:
            EnvError: the env raised in its close; the process is ended all the same.
        """
        self._fault = PoolClosed("this ExternalProcess is closed: make a new one")
        try:
            self._pool.close(timeout)
        finally:
            self._break(self._fault)

    def __enter__(self) -> ExternalProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("an ExternalProcess is running, and cannot be copied or pickled: pass its constructor instead")

    def __repr__(self) -> str:
        pid = self._pool.workers[0].pid
        where = "closed" if self._pool.closed else self._strategy if pid is None else f"{self._strategy} {pid}"
        return f"ExternalProcess({self.observation_space}, {self.action_space}, {where})"


Async = ExternalProcess  # as it was called later


def four_values_too(env: Any) -> Any:
    """An env that is no Gymnasium one may have a modern reset and four values from step: see both ways."""
    return env if isinstance(env, gymnasium.Env) else OldGymEnv(env)
