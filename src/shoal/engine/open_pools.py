"""The pools of this process that are open: closed when the interpreter leaves, and given up in a forked child."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from shoal.errors import PoolClosed, WrongProcess

_pools: weakref.WeakSet[Any] = weakref.WeakSet()


def add(pool: Any, closes_last: bool) -> None:
    """A pool was opened.

    Exit handlers run last in, first out.

    Args:
        closes_last: close it before a package leaves that was imported for it, such as Ray.
    """
    _pools.add(pool)
    if closes_last:
        atexit.unregister(_close_all)
        atexit.register(_close_all)


def discard(pool: Any) -> None:
    """A pool was closed."""
    _pools.discard(pool)


def _close_all() -> None:
    for pool in list(_pools):
        pool.shut(1.0, PoolClosed("the interpreter is leaving"))


def _disown_all() -> None:
    """In a forked child: the pools are the parent's."""
    for pool in list(_pools):
        pool.disown(
            WrongProcess(f"this pool belongs to process {os.getppid()}, of which this one is a fork: make a pool here")
        )
    _pools.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
