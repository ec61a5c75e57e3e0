"""A deadline: the moment at which a wait ends."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

CLOSE_TIMEOUT = 3.0  # seconds that a close gives to envs, where the user says nothing
LONGEST = 1e9  # seconds, 31 years: longer times do not fit into the clock's 64 bits


@dataclass(frozen=True)
class Deadline:
    """`seconds` is what the user asked for (None: for ever), `at_ns` the moment on the monotonic clock (-1: never)."""

    seconds: float | None
    at_ns: int

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """The deadline so many seconds from now. Raises ValueError for what is no span of time."""
        if seconds is None:
            return NEVER
        if not isinstance(seconds, int | float | np.number) or math.isnan(seconds) or seconds < 0:
            raise ValueError(f"a timeout is a number of seconds of at least 0, or None for none; found {seconds!r}")
        if seconds > LONGEST:
            return NEVER
        return cls(float(seconds), time.monotonic_ns() + int(float(seconds) * 1e9))

    @property
    def left(self) -> float | None:
        """Seconds that are left, 0.0 when it has passed, None for never."""
        return None if self.at_ns < 0 else max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    @property
    def passed(self) -> bool:
        """Whether the moment is over."""
        return self.left == 0.0


NEVER = Deadline(None, -1)
NOW = Deadline(0.0, 0)  # one that has passed: to look, and not to wait
