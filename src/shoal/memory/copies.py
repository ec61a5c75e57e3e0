"""Copies of values that users hand in or get: infos, actions and objects."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_PLAIN = frozenset((bool, int, float, str, type(None)))


def own_copy(value: Any) -> Any:
    """Copy the containers and arrays in a value; other objects stay the same ones."""
    if type(value) is dict:
        return {key: item if type(item) in _PLAIN else own_copy(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        kept = copy.copy(value)
        for key, item in value.items():
            kept[key] = own_copy(item)  # not by `update`, which means something else to a Counter
        return kept
    if type(value) in (list, tuple):
        return type(value)(own_copy(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(own_copy(item) for item in value)
    return value
