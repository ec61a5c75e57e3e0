"""Where a warning points: at the caller's line, not at one of Shoal's own."""

from __future__ import annotations

import sys


def caller_level() -> int:
    """Return how many frames the first one outside of Shoal lies above the caller of this: for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "shoal":
        level, frame = level + 1, frame.f_back
    return level
