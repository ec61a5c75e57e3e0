"""What a pool tells about itself while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

__all__ = ["PoolStats", "WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """One worker: `pid` is None for threads and for the caller's own block."""

    index: int
    pid: int | None
    env_ids: list[int]
    state: str


@dataclass(frozen=True)
class PoolStats:
    """Counts since the pool was made.

    Attributes:
        steps: answers of all lanes, resets included.
        episodes: resets, asked for or automatic.
        seconds: since the start.
        busy: for each worker, the fraction of that time in which it was stepping.
    """

    steps: int
    episodes: int
    seconds: float
    busy: list[float]

    @property
    def steps_per_second(self) -> float:
        """On average since the start."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0

    @classmethod
    def read(cls, stats: npt.NDArray[Any], began_ns: int) -> PoolStats:
        """From the slab's field."""
        seconds = max((time.monotonic_ns() - began_ns) / 1e9, 1e-9)
        busy = [float(ns) / 1e9 / seconds for ns in stats[:, 1]]
        return cls(int(stats[:, 0].sum()), int(stats[:, 2].sum()), seconds, busy)
