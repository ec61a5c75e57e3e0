"""Carries exceptions and objects from where an env runs to the caller, also those that refuse to be pickled."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from shoal.errors import EnvError, env_error

__all__ = ["PackedError", "dumps", "pack_error"]


def dumps(message: Any) -> bytes:
    """Pickle fast where possible, and by value where the class exists only over there (a script's own classes)."""
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return cloudpickle.dumps(message)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PackedError:
    """An exception on its way: the parts that could be pickled, and its text in any case."""

    exception: bytes | None
    exception_type: bytes | None
    summary: str
    traceback: str
    during: str

    def unpack(self, env_id: int, worker: int, hint: str = "") -> EnvError:
        """The error to raise at the caller's."""
        original = _loads(self.exception)
        original_type = type(original) if original is not None else _loads(self.exception_type)
        error = env_error(
            original_type,
            original,
            env_id=env_id,
            worker=worker,
            during=self.during,
            summary=self.summary,
            remote_traceback=self.traceback,
            hint=hint,
        )
        vars(error)["packed"] = self
        return error


def pack_error(error: BaseException, during: str) -> PackedError:
    """Take an exception apart. Call it where the exception was caught: the traceback is formatted here."""
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return PackedError(_dumps_checked(error), _dumps_checked(type(error)), summary, text, during)


def _dumps_checked(value: Any) -> bytes | None:
    """Pickled, if it also loads again: many exceptions with several arguments pickle well and load badly."""
    try:
        data: bytes = cloudpickle.dumps(value)
        cloudpickle.loads(data)
        return data
    except Exception:
        return None


def _loads(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return cloudpickle.loads(data)
    except Exception:
        return None
