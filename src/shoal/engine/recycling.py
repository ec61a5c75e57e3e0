"""Worker processes that have grown too much: which they are, and which of them may be replaced now."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.engine.workers import Workers

LOOK_EVERY = 0.02  # seconds between two looks at a worker's memory; each worker has its turn


class Recycling:
    """Looks at the memory of one worker after another.

    Attributes:
        leaving: the workers that are to be replaced as soon as they have nothing to do.

    Args:
        most: bytes that a worker may grow by; None for any.
    """

    def __init__(self, most: int | None, workers: Workers):
        self.leaving: set[int] = set()
        self._most, self._workers = most, workers
        self._next_look = 0.0
        self._looked_at = -1
        self._heavy: set[int] = set()  # workers that have grown too much

    def look(self, is_away: Callable[[int], bool]) -> bool:
        """Look at the next worker, if it is time to; whether there is any that has grown too much."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY
            self._looked_at = (self._looked_at + 1) % len(self._workers)
            worker = self._workers[self._looked_at]
            if worker.recyclable and not is_away(worker.index):
                worker.look_at_memory()
                if worker.growth > (self._most or 0):
                    self._heavy.add(worker.index)
        return bool(self._heavy)

    def may_leave(self, indices: set[int]) -> bool:
        """An episode of these workers has ended: let those of them that have grown too much leave. Whether there are
        any."""
        due = self._heavy & indices
        self._heavy -= due
        self.leaving |= due
        return bool(due)

    def forget(self, index: int) -> None:
        """The worker is being replaced."""
        self._heavy.discard(index)
        self.leaving.discard(index)
