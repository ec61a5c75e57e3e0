"""Pickles of envs that are made already, wrappers included.

A wrapper often passes on whatever it does not have itself (`__getattr__`) to the env inside of it. Pickle asks an
object that it has just made, and that is still empty, for `__setstate__`. Such a wrapper looks for its env to ask it,
has none yet, passes that on to its env as well, and so on without end. TF-Agents' wrappers do this. Here the state of
such an object is put back by a function, so that nothing is asked of it while it is empty.
"""

from __future__ import annotations

import copyreg
import io
from typing import Any

import cloudpickle
import numpy as np

NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]
ASKED = ("__reduce__", "__reduce_ex__", "__getstate__")  # a class with one of its own knows how it is pickled
ASKED_IF_THERE = ("__setstate__", "__getnewargs__", "__getnewargs_ex__", "__slots__")


def dumps(value: Any) -> bytes:
    """Pickle an object with its envs; `cloudpickle.loads` reads it."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if _passes_on(type(obj)):
            return NEW_OBJECT, (type(obj),), obj.__dict__, None, None, _put_back
        if isinstance(obj, np.random.Generator):  # the old gym's own kind of it does not load with newer NumPys
            return type(obj), (obj.bit_generator,)
        return super().reducer_override(obj)


def _passes_on(kind: type) -> bool:
    """Whether objects of a class answer for another one, and are pickled as any object: their attributes, by name."""
    if kind.__module__ == "builtins" or issubclass(kind, type) or not hasattr(kind, "__getattr__"):
        return False
    usual = all(getattr(kind, name, None) is getattr(object, name, None) for name in ASKED)
    plain = kind.__new__ is object.__new__ and getattr(kind, "__dictoffset__", 0) != 0
    return usual and plain and not any(hasattr(kind, name) for name in ASKED_IF_THERE)


def _put_back(obj: Any, state: dict[str, Any]) -> None:
    obj.__dict__.update(state)
