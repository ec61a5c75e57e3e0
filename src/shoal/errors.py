"""The errors that Shoal raises. All of them are ShoalErrors.

Making a pool:   BadEnv, SpaceMismatch, StartError
Using a pool:    BadAction, BadCall, CallPending, NothingPending, ResetNeeded, PoolClosed, WrongProcess, ConcurrentUse
Faults of envs:  EnvError, BadObservation, WorkerDied, StepTimeout, CannotSnapshot
Files:           DataError (a file cannot be used), BadSnapshot (that of a snapshot)
Warnings:        SlowEnvWarning (a wait without a limit has taken ten seconds), SlowCoreWarning (the C core is missing),
                SlowPoolWarning (one env after the other would be faster)

Many are also instances of the built-in type that fits (ValueError, TypeError, RuntimeError, TimeoutError), and an
EnvError is one of the env's own exception type. A message says what happened, in which env, what was expected, what was
found, and what to do next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import gymnasium.error

__all__ = [
    "BadAction", "BadCall", "BadEnv", "BadObservation", "BadSnapshot", "CallPending", "CannotSnapshot",
    "ConcurrentUse", "DataError", "EnvError", "NothingPending", "PoolClosed", "ResetNeeded", "ShoalError",
    "SlowCoreWarning", "SlowEnvWarning", "SlowPoolWarning", "SpaceMismatch", "StartError", "StepTimeout", "WorkerDied",
    "WrongProcess",
]  # fmt: skip


class ShoalError(Exception):
    """Base of all errors here.

    What to do: catch it where any error of Shoal's shall end in the same way.
    """


class EnvError(ShoalError):
    """An env raised; this is also an instance of the type that it raised. The other envs go on.

    What to do: mend the env by the traceback in the text, and reset it before its next step; or let it be replaced by
    `on_error="restart"`.

    Attributes:
        env_id: the env.
        worker: index of the worker that ran it.
        during: what the env was doing: "constructor", "step", "reset", "call", ...
        remote_traceback: the traceback as text, from the process where it happened.
        original: the env's own exception, or None if it could not be pickled.
        packed: the exception as the worker sent it.
    """

    env_id: int = -1
    worker: int = -1
    during: str = ""
    remote_traceback: str = ""
    original: BaseException | None = None
    packed: Any = None
    _text: str = ""

    def __str__(self) -> str:
        # Not Exception.__str__: a base such as KeyError or OSError has its own way to write messages.
        return self._text

    def __repr__(self) -> str:
        return f"EnvError({self._text.partition(chr(10))[0]!r})"

    def __reduce__(self) -> Any:
        # Pickle would not find the class, which was made for this one error. The original is left out: it may not load.
        state = {name: value for name, value in vars(self).items() if name != "original"}
        return env_error, (next(iter(type(self).__bases__[1:]), None), state, self.args)


class WorkerDied(ShoalError):
    """A worker process is gone: a crash of native code, a kill, `os._exit`. The pool is closed.

    What to do: read the signal, the env and the stack in the text, and make a new pool, perhaps with
    `on_error="restart"`; if memory ran out, with fewer envs, or `recycle_after`.

    Attributes:
        worker: its index.
        pid: its process id.
        exitcode: as in multiprocessing: negative for a signal. None if it is not known.
        env_ids: the envs that were lost with it.
        env_id: the env that it was running, None if it was running none.
        memory: its resident memory in bytes when that was last measured, None if it never was.
        dump: the Python stack at a crash, as faulthandler wrote it, "" for none.
        node: the machine that it ran on, "" for this one.
    """

    memory: int | None = None
    dump: str = ""
    node: str = ""

    def __init__(
        self,
        message: str,
        worker: int = -1,
        pid: int | None = None,
        exitcode: int | None = None,
        env_ids: Sequence[int] = (),
        env_id: int | None = None,
        **details: Any,
    ):
        super().__init__(message)
        self.worker, self.pid, self.exitcode, self.env_ids, self.env_id = worker, pid, exitcode, list(env_ids), env_id
        vars(self).update(details)  # memory, dump, node


class _OfSomeEnvs(ShoalError):
    def __init__(self, message: str, env_ids: Sequence[int] = ()):
        super().__init__(message)
        self.env_ids = list(env_ids)


class CannotSnapshot(_OfSomeEnvs, TypeError):
    """The state of the envs `env_ids` cannot be saved, or a snapshot does not fit this pool.

    What to do: give such envs the methods `get_state` and `set_state`; restore a snapshot into a pool of the same envs.
    """


class DataError(ShoalError, ValueError):
    """A file or a state is damaged, of another kind, or does not fit. Nothing of it was used.

    What to do: take another file, or the one that the text asks for.
    """


class BadSnapshot(CannotSnapshot, DataError):
    """A snapshot is damaged, does not fit this pool, or holds pickles that are not trusted.

    What to do: restore it into a pool of the same envs; if you trust the file, `restore(path, trusted=True)`.
    """


class StepTimeout(_OfSomeEnvs, TimeoutError):
    """The time was over before the envs `env_ids` answered.

    What to do: call `recv` again, give them more time, or let such envs be replaced by `on_error="restart"`.
    """


class SlowEnvWarning(RuntimeWarning):
    """A wait without a limit takes long, or a close had to give envs up. Its text names the envs, and where they hang.

    What to do: look at the stack in the text; set `step_timeout` or `start_timeout` to have an error instead.
    """


class SlowCoreWarning(RuntimeWarning):
    """Shoal's C core is missing, so that its slower Python twin runs. `shoal.native.MISSING` says why.

    What to do: install a wheel, or a C compiler and Shoal again.
    """


class SlowPoolWarning(RuntimeWarning):
    """The pool has measured that its workers cost more than they gain. Its text says what would be faster.

    What to do: pass the backend that the text names, or leave it to `backend="auto"`.
    """


class BadAction(ShoalError, ValueError):
    """An action, or an env id that came with it, does not fit. Nothing was sent.

    What to do: correct it and call again; the text says what was expected, and what was found.
    """


class BadCall(ShoalError, TypeError, ValueError):
    """The envs cannot carry out this call. Nothing was sent.

    What to do: correct it and call again; what is given to `call`, `apply` or `set_attr` must be picklable.
    """


class BadObservation(ShoalError, ValueError):
    """An observation does not fit the env's own observation space, or is not a number under `check_nan=True`.

    What to do: correct the env, or its space.
    """


class SpaceMismatch(ShoalError, RuntimeError):
    """Envs of one pool have different spaces.

    What to do: make them equal, for instance by a wrapper; `observation_mode="different"` lets bounds differ.

    Attributes:
        what: "observation" or "action".
        expected, found: the two spaces.
    """

    def __init__(self, message: str, what: str = "", expected: Any = None, found: Any = None):
        super().__init__(message)
        self.what, self.expected, self.found = what, expected, found


class BadEnv(ShoalError, TypeError, ValueError):
    """The argument `env` cannot be made into envs.

    What to do: pass an id, a spec, or a function or class that makes an env.
    """


class RenderModesDiffer(BadEnv, AssertionError):
    """The envs of a VecEnv have several render modes, which Stable-Baselines3 tells by an AssertionError."""


class StartError(ShoalError, RuntimeError):
    """The workers could not be started. Those that had started were ended.

    What to do: raise the limit that the text names (processes, descriptors, memory), or use fewer workers.
    """


class PoolClosed(ShoalError, RuntimeError):
    """The pool was used after it was closed, by the user or after an error that the text quotes.

    What to do: make a new one.
    """


class CallPending(ShoalError, RuntimeError):
    """The call needs envs that are still busy with an earlier one.

    What to do: receive their answers first.
    """


class NothingPending(ShoalError, RuntimeError):
    """There is nothing to wait for: fewer envs were sent to than the call waits for.

    What to do: send actions first, or receive with a smaller `min_batch`.
    """


class ResetNeeded(ShoalError, gymnasium.error.ResetNeeded, AssertionError):
    """An env was stepped that must be reset first. Gymnasium raises one or the other of the base classes for this.

    What to do: call `reset`, for all envs or for those that the text names.
    """


class WrongProcess(ShoalError, RuntimeError):
    """The pool belongs to the process that made it, and this one is a fork of that.

    What to do: make a pool in this process.
    """


class ConcurrentUse(ShoalError, RuntimeError):
    """Two threads used one pool at the same time.

    What to do: use it from one thread, or guard it with a lock.
    """


def env_error(
    original_type: type[BaseException] | None,
    attributes: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    original: BaseException | None = None,
) -> EnvError:
    """Make an EnvError that `except TheEnvsOwnType` catches as well; type and original are None if not pickled."""
    error = _both(original_type)
    object.__setattr__(error, "args", args)
    if original is not None:
        _copy_attributes(original, error)
    vars(error).update(attributes)  # by the dict itself: the env's type may have a __setattr__ of its own
    return error


def _both(original_type: type[BaseException] | None) -> EnvError:
    """An empty EnvError that is also an instance of the given type, if Python allows both as bases."""
    # SystemExit and KeyboardInterrupt are no Exceptions: an env that raises one must not end the caller.
    if original_type is None or issubclass(original_type, EnvError) or not issubclass(original_type, Exception):
        return EnvError()
    # __new__ without __init__, because the env's type may need arguments that are not known here. Its own __new__ comes
    # first, which OSError needs, then the plain one, which MemoryError needs.
    for new in (original_type.__new__, Exception.__new__):
        with contextlib.suppress(Exception):
            namespace: dict[str, Any] = {"__module__": "shoal", "__doc__": EnvError.__doc__}
            error: EnvError = new(type("EnvError", (EnvError, original_type), namespace))
            return error
    return EnvError()


def _copy_attributes(original: BaseException, error: EnvError) -> None:
    """Copy the attributes and slots that code which catches the original's type may read."""
    vars(error).update(vars(original))
    object.__setattr__(error, "args", original.args)
    for cls in type(original).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, MemberDescriptorType | GetSetDescriptorType) and not name.startswith("__"):
                with contextlib.suppress(Exception):  # not set, or read only
                    object.__setattr__(error, name, getattr(original, name))
