"""Types and constants in single precision: floats of 32 bits, for the CPU and for GPUs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition, cleared_bytes
from shoal.compiled.rebuild import may_raise

PRECISIONS = ("double", "single")
MOST_COLUMNS = 32


def narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the same type with floats of 32 bits."""
    if dtype.fields:
        fields = [(name, narrow(dtype[name].base), dtype[name].shape) for name in dtype.fields]
        return np.dtype(fields, align=True)
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def narrow_constant(value: Any) -> Any:
    """Make floats of 32 bits, so that arithmetic with them has no more: Python's own floats have 64."""
    if isinstance(value, float):  # numpy's float64 is one too
        return np.float32(value)
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(np.float32)
    if isinstance(value, tuple):
        return tuple(narrow_constant(one) for one in value)
    return value


def has_columns(definition: Definition) -> bool:
    """Say whether each field of a state has an array of its own: not if some are arrays, which lanes index."""
    names = definition.dtype.names or ()
    return all(definition.dtype[name].shape == () for name in names) and len(names) <= MOST_COLUMNS


def narrow_definition(definition: Definition) -> Definition:
    """Return the same class in single precision."""
    dtype = narrow(definition.dtype)
    defaults = np.zeros((), dtype)
    for name in dtype.names or ():
        defaults[name] = definition.defaults[name]
    cleared = cleared_bytes(dtype, definition.params)
    return dataclasses.replace(definition, dtype=dtype, defaults=defaults, cleared=cleared, single=True)


def in_columns(definition: Definition) -> bool:
    """Say whether the CPU steps many lanes of such a class at once: one that may raise is stepped lane by lane."""
    functions = (definition.reset, definition.step, definition.observe)
    alone = definition.single and definition.num_agents == 1
    return alone and has_columns(definition) and not any(map(may_raise, functions))
