"""Looks, once in the life of a pool, whether its workers are worth what they cost."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from shoal.errors import SlowPoolWarning
from shoal.observe.diagnosis import slower_than_serial
from shoal.observe.stats import PoolStats
from shoal.support.frames import caller_level

WARM_UP = 512  # batches before what is measured begins
REVIEWED = 2048  # batches that are measured


class Review:
    """Takes the place of `handed` of a pool's frames until it has seen enough batches; then it may warn, and leaves.

    Args:
        frames: a shoal.memory.answers.Frames.
        stats: reads the pool's figures. It must not keep the pool alive.
    """

    def __init__(self, frames: Any, stats: Callable[[], PoolStats]):
        self._frames, self._stats, self._handed = weakref.ref(frames), stats, frames.handed
        self._batches = 0
        self._earlier: PoolStats | None = None
        frames.handed = self

    def __call__(self) -> None:
        self._handed()
        self._batches += 1
        if self._batches == WARM_UP:
            self._earlier = self._stats()
        elif self._batches == WARM_UP + REVIEWED:
            frames = self._frames()
            if frames is not None:
                frames.handed = self._handed
            if self._earlier is not None and (text := slower_than_serial(self._stats() - self._earlier)):
                warnings.warn(f"{text}.", SlowPoolWarning, stacklevel=caller_level())
