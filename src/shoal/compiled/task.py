"""The table of numbers and addresses that a kernel works with; `native/task.h` reads the same table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native.layout import TASK, TASK_LEAF, TASK_LEAVES


def place_of(name: str) -> int:
    """Return the place of a number or an address in the table; a name such as "obs.0" is that of a leaf."""
    kind, _, leaf = name.partition(".")
    return TASK_LEAVES + len(TASK_LEAF) * int(leaf) + TASK_LEAF.index(kind) if leaf else TASK.index(name)


def extras_place(leaves: int) -> int:
    """Return the place after the leaves, of which there are so many."""
    return TASK_LEAVES + len(TASK_LEAF) * max(leaves, 1)


class Task:
    """The table, and the arrays that its addresses point to."""

    def __init__(self, leaves: int):
        self.table = np.zeros(extras_place(leaves), np.int64)
        self._arrays: dict[str, Any] = {}

    def number(self, name: str, value: int) -> None:
        """Set a number."""
        self.table[place_of(name)] = value

    def array(self, name: str, array: npt.NDArray[Any] | None, offset: int = 0) -> None:
        """Set the address of an array, `offset` bytes from its beginning."""
        self.number(name, 0 if array is None else array.ctypes.data + offset)
        self._arrays[name] = array

    def copy(self, extras: Sequence[npt.NDArray[Any]]) -> Task:
        """Return another one with the same entries, and the addresses of more arrays after them."""
        other = Task(0)
        other.table = np.array([*self.table, *(array.ctypes.data for array in extras)], np.int64)
        other._arrays = {**self._arrays, **{f"extra.{i}": array for i, array in enumerate(extras)}}
        return other
