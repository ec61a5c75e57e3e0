"""The tree of errors that Shoal raises.

ShoalError
├── EnvError            an env raised; also an instance of the env's own exception type
├── WorkerDied          a worker process is gone
├── CannotSnapshot      an env whose state cannot be saved, or a snapshot that does not fit
├── StepTimeout         a deadline passed (also a TimeoutError)
├── BadAction           wrong number, shape, type or range of actions, or wrong env ids (also a ValueError)
├── BadObservation      an env's observation does not fit its own space (also a ValueError)
├── SpaceMismatch       envs of one pool have different spaces (also a RuntimeError)
├── BadEnv              what was given cannot be made into envs: not picklable, ... (also a TypeError, a ValueError)
├── StartError          the workers could not be started (also a RuntimeError)
├── PoolClosed          use after close
├── BadCall             a call or set_attr that makes no sense (also a ValueError)
├── CallPending         a call came while these envs are still busy
├── NothingPending      recv without a send
├── ResetNeeded         a step for an env whose episode is over, or that was never reset
├── WrongProcess        use in a forked child of the process that made the pool
└── ConcurrentUse       two threads used one pool at the same time

And two warnings. SlowEnvWarning: a wait without a limit has taken ten seconds. SlowCoreWarning: the C core is missing.

A message says what happened, in which env, what was expected, what was found, and what to do next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import gymnasium.error

__all__ = [
    "BadAction",
    "BadCall",
    "BadEnv",
    "BadObservation",
    "CallPending",
    "CannotSnapshot",
    "ConcurrentUse",
    "EnvError",
    "NothingPending",
    "PoolClosed",
    "ResetNeeded",
    "ShoalError",
    "SlowCoreWarning",
    "SlowEnvWarning",
    "SpaceMismatch",
    "StartError",
    "StepTimeout",
    "WorkerDied",
    "WrongProcess",
]


class ShoalError(Exception):
    """Base of everything that Shoal raises."""


class EnvError(ShoalError):
    """An env raised. Made by :func:`env_error`, which adds the env's own exception type as a base.

    Attributes:
        env_id: which env.
        worker: index of the worker that ran it.
        during: what it was doing: "constructor", "step", "reset", "call", ...
        remote_traceback: the traceback as text, from the process where it happened.
        original: the env's own exception, or None where it could not be pickled.
    """

    env_id: int = -1
    worker: int = -1
    during: str = ""
    remote_traceback: str = ""
    original: BaseException | None = None
    packed: Any = None  # as it came from where the env lives
    _text: str = ""

    def __str__(self) -> str:
        # Not Exception.__str__: a base such as KeyError or OSError would write it in its own way.
        return self._text

    def __repr__(self) -> str:
        return f"EnvError({self._text.partition(chr(10))[0]!r})"

    def __reduce__(self) -> Any:
        # The class was made for this one error: pickle would not find it. The original may not load, and stays here.
        state = {name: value for name, value in vars(self).items() if name != "original"}
        return _revive, (next(iter(type(self).__bases__[1:]), None), self.args, state)


class WorkerDied(ShoalError):
    """A worker process is gone.

    Attributes:
        worker: its index.
        pid: its process id.
        exitcode: as in multiprocessing: negative for a signal. None when not known.
        env_ids: the envs that were lost with it.
        env_id: the one that it was running, None where it was running none.
        memory: its resident memory in bytes when that was last looked at, None when it never was.
        dump: the Python stack at a crash, as faulthandler has written it, "" for none.
        node: the machine that it was on, "" for this one.
    """

    def __init__(
        self,
        message: str,
        worker: int,
        pid: int | None,
        exitcode: int | None,
        env_ids: Sequence[int],
        env_id: int | None = None,
        memory: int | None = None,
        dump: str = "",
        node: str = "",
    ):
        super().__init__(message)
        self.worker, self.pid, self.exitcode, self.env_ids = worker, pid, exitcode, list(env_ids)
        self.env_id, self.memory, self.dump, self.node = env_id, memory, dump, node

    def __reduce__(self) -> Any:
        return WorkerDied, (
            self.args[0], self.worker, self.pid, self.exitcode, self.env_ids, self.env_id, self.memory, self.dump,
            self.node,
        )  # fmt: skip


class CannotSnapshot(ShoalError, TypeError):
    """The state of some envs cannot be saved, or a snapshot does not fit this pool. `env_ids` are those envs."""

    def __init__(self, message: str, env_ids: Sequence[int] = ()):
        super().__init__(message)
        self.env_ids = list(env_ids)


class SlowEnvWarning(RuntimeWarning):
    """A wait without a limit takes long."""


class SlowCoreWarning(RuntimeWarning):
    """Shoal's C core is missing, so that its slower Python twin runs. `shoal.native.MISSING` says why."""


class StepTimeout(ShoalError, TimeoutError):
    """A deadline passed before the envs answered. `env_ids` are those that did not."""

    def __init__(self, message: str, env_ids: Sequence[int] = ()):
        super().__init__(message)
        self.env_ids = list(env_ids)


class BadAction(ShoalError, ValueError):
    """An action, or an env id that came with it, does not fit. Nothing was sent."""


class BadCall(ShoalError, ValueError):
    """A call of the envs that cannot be carried out. Nothing was sent."""


class BadObservation(ShoalError, ValueError):
    """An observation does not fit the env's own observation space."""


class SpaceMismatch(ShoalError, RuntimeError):
    """Envs of one pool must have the same spaces."""


class BadEnv(ShoalError, TypeError, ValueError):
    """What was given cannot be made into envs."""


class StartError(ShoalError, RuntimeError):
    """The workers could not be started. Nothing was left running."""


class PoolClosed(ShoalError, RuntimeError):
    """The pool was used after close."""


class CallPending(ShoalError, RuntimeError):
    """The call needs envs that are still busy with an earlier one."""


class NothingPending(ShoalError, RuntimeError):
    """There is nothing to wait for."""


class ResetNeeded(ShoalError, gymnasium.error.ResetNeeded, AssertionError):
    """An env was stepped that must be reset first. Gymnasium raises one or the other of its bases there."""


class WrongProcess(ShoalError, RuntimeError):
    """The pool belongs to another process: it was made before this one was forked."""


class ConcurrentUse(ShoalError, RuntimeError):
    """Two threads used one pool at the same time."""


def env_error(
    original_type: type[BaseException] | None,
    original: BaseException | None,
    *,
    env_id: int,
    worker: int,
    during: str,
    summary: str,
    remote_traceback: str,
    hint: str = "",
) -> EnvError:
    """Make an EnvError that `except TheEnvsOwnType` catches as well.

    Args:
        original_type: type of the env's exception, None where it could not be brought here.
        original: the exception itself, None where it could not be brought here.
        summary: its last line, such as "ValueError: bad joint".
        hint: what else is to be said, such as that it happens all the time.
    """
    error = _both(original_type)
    if original is not None:
        _copy_attributes(original, error)
    text = f"env {env_id} raised in {during} (worker {worker}): {summary}{hint}\n\n{remote_traceback.rstrip()}"
    # Into the dict itself: the env's type may have a __setattr__ of its own.
    vars(error).update(
        env_id=env_id, worker=worker, during=during, remote_traceback=remote_traceback, original=original, _text=text
    )
    return error


def _both(original_type: type[BaseException] | None) -> EnvError:
    """An empty EnvError that is an instance of the given type too, where Python allows the two as bases."""
    if original_type is None or issubclass(original_type, EnvError) or not issubclass(original_type, Exception):
        # SystemExit and KeyboardInterrupt too: an env that wants to leave must not take the caller along.
        return EnvError()
    try:
        namespace: dict[str, Any] = {"__module__": "shoal", "__doc__": EnvError.__doc__}
        combined: Any = type("EnvError", (EnvError, original_type), namespace)
    except Exception:
        return EnvError()
    # __new__ without __init__: the env's type may want arguments that we cannot know. Its own __new__ first, which
    # OSError insists on; then the plain one, on which MemoryError insists.
    for new in (original_type.__new__, Exception.__new__):
        with contextlib.suppress(Exception):
            error: EnvError = new(combined)
            return error
    return EnvError()


def _copy_attributes(original: BaseException, error: EnvError) -> None:
    """All that code which catches the original's type may ask it for."""
    vars(error).update(vars(original))
    object.__setattr__(error, "args", original.args)
    for cls in type(original).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(Exception):  # not set, or read only
                    object.__setattr__(error, name, getattr(original, name))


def _revive(original_type: type[BaseException] | None, args: tuple[Any, ...], state: dict[str, Any]) -> EnvError:
    error = _both(original_type)
    object.__setattr__(error, "args", args)
    vars(error).update(state)
    return error
