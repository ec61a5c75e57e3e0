"""Whether Python's global interpreter lock is on. Free-threaded builds run without it, unless a module asks for it."""

from __future__ import annotations

import sys


def gil_enabled() -> bool:
    """Whether only one thread runs Python at a time."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
