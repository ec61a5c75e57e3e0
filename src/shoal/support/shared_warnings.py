"""Warnings once, not once for each worker: processes that were forked from one share what each of them has said."""

from __future__ import annotations

import mmap
import struct
import warnings
from typing import Any

SLOTS = 4096
_seen: Any = None  # hashes of warnings, in memory that forked processes share


def share() -> None:
    """Make the memory; called in a process before it forks those that share it."""
    global _seen
    if _seen is None:
        _seen = mmap.mmap(-1, SLOTS * 8)


def say_once() -> None:
    """Say only what no other process has said; called in each of the forked ones.

    Python itself shows a warning once for each place in a process. Workers are parts of one program to their user.
    """
    if _seen is None:
        return
    show = warnings.showwarning

    def show_new(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **kwargs: Any) -> None:
        if _is_new(f"{category.__name__}:{filename}:{lineno}:{message}"):
            show(message, category, filename, lineno, *rest, **kwargs)

    warnings.showwarning = show_new


def _is_new(text: str) -> bool:
    """Note a text. Two processes that come at the same moment may both find it new, which does no harm."""
    import hashlib  # which takes a moment, and most workers warn of nothing

    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest()
    first = struct.unpack("<Q", digest)[0] % SLOTS
    for i in range(SLOTS):
        at = (first + i) % SLOTS * 8
        found = _seen[at : at + 8]
        if found == digest:
            return False
        if found == bytes(8):
            _seen[at : at + 8] = digest
            return True
    return True  # there is no room left
