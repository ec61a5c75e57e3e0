"""What a kernel is told: a table of numbers and addresses. Kernels of all kinds, and `native/task.h`, read it alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BEGINS", "FRAME_FIELDS", "KINDS_OF_LEAVES", "LANE_FIELDS", "LEAVES", "PLACES", "TALLY", "Task"]

LANE_FIELDS = ("requested", "answered", "op", "slots", "done_ns", "ended", "run_return", "run_length")
FRAME_FIELDS = ("reward", "terminated", "truncated", "began", "status", "episode_return", "episode_length")
# resets: all begin an episode, rather than step. slot: the frame to write into. limit: of an episode, 0 for none.
NUMBERS = ("resets", "slot", "now_ns", "lanes", "frames", "mode", "limit", "env")
ENV_FIELDS = ("states", "seeds", "episodes", "rngs", "failed", "saved_states", "saved_rngs")
PLACES = {name: i for i, name in enumerate((*NUMBERS, *LANE_FIELDS, *FRAME_FIELDS, *ENV_FIELDS))}
# Then, for each leaf of the larger one of the two spaces: where its action, observation and last observation lie, and
# where there is room for the action in 64 bits.
LEAVES = len(PLACES)
KINDS_OF_LEAVES = ("action", "obs", "final", "wide")
BEGINS = 128  # in `status`, for who calls it: an episode was begun, and nothing stepped
# What is counted, on a cache line for each thread: lanes answered, episodes begun, all status bits, envs that failed;
# and which env the kernel is at, and in which phase.
TALLY = ("answered", "began", "status", "failed", "env", "phase")


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
