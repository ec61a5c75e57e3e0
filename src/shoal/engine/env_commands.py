"""The commands of a pool to its envs: calls, attributes, frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.engine.commands import Call
from shoal.engine.scheduler import Scheduler
from shoal.errors import BadCall, ShoalError
from shoal.support.checks import Ids, check_ids
from shoal.support.deadline import NEVER, Deadline

_RESERVED = ("reset", "step", "close")  # what must go through the pool's own methods


class EnvCommands:
    """The part of a pool that talks to its envs one by one, and steps none."""

    num_envs: int
    turn: Any
    _fault: ShoalError | None
    _scheduler: Scheduler

    def call(
        self, name: str, *args: Any, env_ids: Any = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, through its wrappers; a plain attribute is returned as it is.

        Raises:
            EnvError: with the env's own exception type, AttributeError included; the pool goes on.
            CallPending: one of the envs is still busy with a step.
            WorkerDied: the worker died over it. With on_error="restart" the pool goes on, and the envs' next step
                tells of their restart.
        """
        deadline = Deadline.after(timeout)
        with self.turn:
            return self._scheduler.commands.finish(self.start_call(name, args, kwargs, env_ids, deadline), deadline)

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""
        return self.call(name, env_ids=env_ids)

    def apply(self, function: Callable[..., Any], *args: Any, env_ids: Any = None, **kwargs: Any) -> list[Any]:
        """What `function(env, ...)` returns for each env, run where the env lives. Raises what `call` does."""
        with self.turn:
            return self._scheduler.commands.finish(self.start_apply(function, args, kwargs, env_ids), NEVER)

    def set_attr(self, name: str, values: Any, env_ids: Any = None) -> None:
        """Set an attribute of each env: a list or tuple gives each its own, anything else goes to all."""
        with self.turn:
            self._check_usable()
            ids = self._ids(env_ids)
            each = list(values) if isinstance(values, list | tuple) else [values] * len(ids)
            if len(each) != len(ids):
                raise BadCall(f"set_attr: expected {len(ids)} values, one per env, found {len(each)}")
            self.finish_call(self._scheduler.start_call(ids, "set", lambda rows: (name, [each[row] for row in rows])))

    def render(self, env_ids: Any = None) -> list[Any]:
        """A frame of each env, as its render mode says."""
        return self.call("render", env_ids=env_ids)

    def start_call(self, name: str, args: Any, kwargs: Any, env_ids: Any = None, deadline: Deadline = NEVER) -> Call:
        """The first half of `call`: starts it and returns what `finish_call` needs."""
        if not isinstance(name, str) or name in _RESERVED:
            raise BadCall(f"call of {name!r}: expected the name of a method; use the pool's own {name} instead")
        with self.turn:
            self._check_usable()
            return self._scheduler.start_call(self._ids(env_ids), "call", lambda rows: (name, args, kwargs), deadline)

    def start_apply(self, function: Callable[..., Any], args: Any, kwargs: Any, env_ids: Any = None) -> Call:
        """The first half of `apply`: starts it and returns what `finish_call` needs."""
        if not callable(function):
            raise BadCall(f"apply: expected a function that takes an env, found {function!r}")
        with self.turn:
            self._check_usable()
            return self._scheduler.start_call(self._ids(env_ids), "apply", lambda rows: (function, args, kwargs))

    def finish_call(self, call: Call, timeout: float | None = None) -> list[Any]:
        """The second half of `call` and of `apply`: waits for the results. Several may be under way, in any order."""
        with self.turn:
            self._check_usable()
            return self._scheduler.commands.finish(call, Deadline.after(timeout))

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _ids(self, env_ids: Any) -> Ids:
        return np.arange(self.num_envs) if env_ids is None else check_ids(env_ids, self.num_envs)
