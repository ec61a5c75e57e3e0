"""Packs exceptions and objects in a worker for the caller, also exceptions that cannot be pickled."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from shoal.errors import EnvError, env_error
from shoal.support.foreign_code import guarded


def dumps(message: Any) -> bytes:
    """Pickle by the fast standard module, or, for classes that only this process has, by value with cloudpickle."""
    try:
        return guarded(pickle.dumps, message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return guarded(cloudpickle.dumps, message)  # type: ignore[no-any-return]


def loads(data: bytes) -> Any:
    """Load what was pickled. Raises nothing but Exceptions, whatever the loaded objects do."""
    return guarded(cloudpickle.loads, data)


@dataclass(frozen=True)
class PackedError:
    """An exception as a worker sends it: the parts that could be pickled, and in any case its text."""

    exception: bytes | None
    exception_type: bytes | None
    summary: str
    traceback: str
    during: str

    def unpack(self, env_id: int, worker: int, hint: str = "") -> EnvError:
        """The error for the caller to raise."""
        original = _loads(self.exception)
        original_type = type(original) if original is not None else _loads(self.exception_type)
        head = f"env {env_id} raised in {self.during} (worker {worker}): {self.summary}{hint}"
        attributes = {
            "env_id": env_id, "worker": worker, "during": self.during, "remote_traceback": self.traceback,
            "original": original, "packed": self, "_text": f"{head}\n\n{self.traceback.rstrip()}",
        }  # fmt: skip
        try:
            return guarded(env_error, original_type, attributes, (), original)
        except Exception:  # the env's type does not let itself be made, or looked at
            return env_error(None, attributes)


def pack_error(error: BaseException, during: str) -> PackedError:
    """Pack an exception. Call this where it was caught: the traceback is formatted here."""
    summary = _formatted(traceback.format_exception_only, error).strip()
    text = _formatted(traceback.format_exception, error)
    return PackedError(_dumps_checked(error), _dumps_checked(type(error)), summary, text, during)


def _formatted(how: Any, error: BaseException) -> str:
    try:
        return "".join(guarded(how, error))
    except Exception:  # it cannot be written down, and its type's name is what is left
        return f"{type(error).__name__}: <what it says cannot be had>"


def _dumps_checked(value: Any) -> bytes | None:
    """Pickle a value; None if it does not load again, as many exceptions with several arguments do not."""
    try:
        data: bytes = guarded(cloudpickle.dumps, value)
        loads(data)
        return data
    except Exception:
        return None


def _loads(data: bytes | None) -> Any:
    try:
        return None if data is None else loads(data)
    except Exception:
        return None
