"""What a kernel is told: a table of numbers and addresses. Kernels of all kinds, and `native/task.h`, read it alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native.layout import MARK_BEGINS as BEGINS
from shoal.native.layout import TALLY, TASK
from shoal.native.layout import TASK_FRAME_FIELDS as FRAME_FIELDS
from shoal.native.layout import TASK_LANE_FIELDS as LANE_FIELDS
from shoal.native.layout import TASK_LEAF as KINDS_OF_LEAVES
from shoal.native.layout import TASK_LEAVES as LEAVES

__all__ = ["BEGINS", "FRAME_FIELDS", "KINDS_OF_LEAVES", "LANE_FIELDS", "LEAVES", "PLACES", "TALLY", "Task"]

PLACES = {name: place for place, name in enumerate(TASK)}


class Task:
    """The table, and the arrays whose addresses are in it."""

    def __init__(self, leaves: int):
        self.table = np.zeros(LEAVES + len(KINDS_OF_LEAVES) * max(leaves, 1), np.int64)
        self._arrays: dict[int, Any] = {}
        self._extras = len(self.table)

    def number(self, name: str, value: int) -> None:
        """Set a number."""
        self.table[PLACES[name]] = value

    def array(self, name: str, array: npt.NDArray[Any] | None, offset: int = 0) -> None:
        """Set the address of an array, `offset` bytes from its beginning; of a leaf where the name is "obs.0" or so."""
        kind, _, leaf = name.partition(".")
        place = PLACES[name] if not leaf else LEAVES + len(KINDS_OF_LEAVES) * int(leaf) + KINDS_OF_LEAVES.index(kind)
        self.table[place] = 0 if array is None else array.ctypes.data + offset
        self._arrays[place] = array

    def copy(self, extras: int = 0) -> Task:
        """Another one with the same entries, and places for so many more arrays behind them."""
        other = Task(0)
        other.table = np.concatenate([self.table, np.zeros(extras, np.int64)])
        other._arrays, other._extras = dict(self._arrays), len(self.table)
        return other

    def extra(self, index: int, array: npt.NDArray[Any]) -> None:
        """Set the address of an array behind the others."""
        self.table[self._extras + index] = array.ctypes.data
        self._arrays[self._extras + index] = array
