"""An env as a pickle, for envs that cannot be saved as data. A pickle that is known to lose state is refused."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import cloudpickle
import numpy as np
from gymnasium.utils import EzPickle

from shoal.state import datafile
from shoal.state.constants import ADVICE, ATOMS
from shoal.state.datafile import CannotSave
from shoal.state.layers import GENERATORS, attributes, class_names, layers_of, possessive


def pickle_env(env: Any, reason: str) -> bytes:
    """The whole env as bytes, which were loaded once as a check.

    Args:
        reason: why it cannot be saved as data.

    Raises:
        CannotSave: it cannot be pickled either, or the pickle loses state.
    """
    file = io.BytesIO()
    pickler = _CheckingPickler(file)
    try:
        pickler.dump(env)
        pickler.check()
        loaded = layers_of(cloudpickle.loads(file.getvalue()))
        lost = _lost(layers_of(env), loaded)
    except CannotSave as error:
        raise CannotSave(f"{reason}; it cannot be pickled instead, as {error}: {ADVICE}", final=True) from None
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CannotSave(f"{reason}; it cannot be pickled instead ({cause}): {ADVICE}", final=True) from error
    if lost:
        raise CannotSave(f"{reason}; it cannot be pickled instead, as that loses {lost}: {ADVICE}", final=True)
    return file.getvalue()


class _CheckingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and checks every object that it pickles."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._arrays: list[tuple[str, Any]] = []
        self._buffers: list[bytearray] = []

    def persistent_id(self, value: Any) -> None:
        """Called for each object that is pickled."""
        if isinstance(value, EzPickle) and _keeps_arguments_only(type(value)):
            name = type(value).__name__
            raise CannotSave(
                f"{name} is a gymnasium.utils.EzPickle, of which pickle keeps the constructor's arguments alone"
            )
        if isinstance(value, np.ndarray):
            self._arrays.append((f"an array of {value.dtype} {value.shape}", value))
        elif isinstance(value, bytearray):
            self._buffers.append(value)

    def check(self) -> None:
        """Refuse arrays that share their memory with something: they would come back without it."""
        for name, array in self._arrays:
            datafile.check_owner(array, name)
            if any(datafile.memory_owner(array) is buffer for buffer in self._buffers):
                raise CannotSave(f"{name} lies in the memory of a bytearray of the env", final=True)
        datafile.check_overlap(self._arrays)


def _keeps_arguments_only(kind: Any) -> bool:
    own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    return kind.__getstate__ is EzPickle.__getstate__ and not own


def _lost(layers: list[Any], loaded: list[Any]) -> str:
    """What a class's own way of pickling leaves out or changes, among what is easily compared; "" if nothing."""
    if class_names(layers) != class_names(loaded):
        return "its wrappers"
    for i, pair in enumerate(zip(layers, loaded, strict=True)):
        before, after = map(attributes, pair)
        for name, value in before.items():
            if name not in after or _comparable(value) not in (None, _comparable(after[name])):
                return f"{possessive(layers, i)} attribute {name!r}"
    return ""


def _comparable(value: Any) -> Any:
    """A simple value in a form that == compares, unlike arrays and nan; None for other values."""
    if not isinstance(value, (*ATOMS, *GENERATORS, np.generic, np.ndarray)):
        return None
    with contextlib.suppress(CannotSave):
        encoded = datafile.encode(value)
        return json.dumps(encoded.document), [array.tobytes() for array in encoded.arrays]
    return None
