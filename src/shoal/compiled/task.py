"""The table of numbers and addresses that a kernel works with; `native/task.h` reads the same table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BEGINS", "FRAME_FIELDS", "LANE_FIELDS", "PLACES", "TALLY", "Task", "extras_place", "leaf_place"]

LANE_FIELDS = ("requested", "answered", "op", "slots", "done_ns", "ended", "run_return", "run_length")
FRAME_FIELDS = ("reward", "terminated", "truncated", "began", "status", "episode_return", "episode_length")
# resets: 1 if all envs begin an episode instead of stepping. slot: the frame to write into. limit: steps of an episode,
# 0 for no limit.
NUMBERS = ("resets", "slot", "now_ns", "lanes", "frames", "mode", "limit", "env")
ENV_FIELDS = ("states", "seeds", "episodes", "rngs", "failed", "saved_states", "saved_rngs")
PLACES = {name: i for i, name in enumerate((*NUMBERS, *LANE_FIELDS, *FRAME_FIELDS, *ENV_FIELDS))}
# Then, for each leaf of the larger one of the two spaces: the addresses of its action, its observation, its last
# observation, and of room for the action in 64 bits.
LEAVES = len(PLACES)
KINDS_OF_LEAVES = ("action", "obs", "final", "wide")
BEGINS = 128  # in `status`, for the kernel's caller: an episode was begun, and the env was not stepped
# What a kernel counts, on a cache line for each thread: lanes answered, episodes begun, all status bits, envs that
# failed; and the env that it is at, and the phase.
TALLY = ("answered", "began", "status", "failed", "env", "phase")


def leaf_place(kind: str, index: int) -> int:
    """Return the place of a leaf's address in the table."""
    return LEAVES + len(KINDS_OF_LEAVES) * index + KINDS_OF_LEAVES.index(kind)


def extras_place(leaves: int) -> int:
    """Return the place after the leaves, of which there are so many."""
    return LEAVES + len(KINDS_OF_LEAVES) * max(leaves, 1)


class Task:
    """The table, and the arrays that its addresses point to."""

    def __init__(self, leaves: int):
        self.table = np.zeros(extras_place(leaves), np.int64)
        self._arrays: dict[int, Any] = {}
        self._extras = len(self.table)

    def number(self, name: str, value: int) -> None:
        """Set a number."""
        self.table[PLACES[name]] = value

    def array(self, name: str, array: npt.NDArray[Any] | None, offset: int = 0) -> None:
        """Set the address of an array, `offset` bytes from its beginning; a name such as "obs.0" is that of a leaf."""
        kind, _, leaf = name.partition(".")
        place = leaf_place(kind, int(leaf)) if leaf else PLACES[name]
        self.table[place] = 0 if array is None else array.ctypes.data + offset
        self._arrays[place] = array

    def copy(self, extras: int = 0) -> Task:
        """Return another one with the same entries, and places for so many more arrays after them."""
        other = Task(0)
        other.table = np.concatenate([self.table, np.zeros(extras, np.int64)])
        other._arrays, other._extras = dict(self._arrays), len(self.table)
        return other

    def extra(self, index: int, array: npt.NDArray[Any]) -> None:
        """Set the address of one of the arrays after the others."""
        self.table[self._extras + index] = array.ctypes.data
        self._arrays[self._extras + index] = array
