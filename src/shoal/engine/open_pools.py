"""The open pools of this process: closed when the interpreter leaves, and given up in a forked child."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from shoal.errors import PoolClosed, WrongProcess
from shoal.support.system import system

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def add(pool: Any, last: bool) -> None:
    """Close the pool when the interpreter leaves. `last`: before all handlers that are there by now."""
    _open.add(pool)
    if last:  # exit handlers run last in, first out
        atexit.unregister(_close_all)
        atexit.register(_close_all)


def discard(pool: Any) -> None:
    """The pool is closed."""
    _open.discard(pool)


def _close_all() -> None:
    for pool in list(_open):
        pool.shut(1.0, PoolClosed("the interpreter is leaving"))


def _disown_all() -> None:
    why = f"this pool belongs to process {os.getppid()}, of which this one is a fork: make a pool here"
    for pool in list(_open):
        pool.disown(WrongProcess(why))
    _open.clear()


atexit.register(_close_all)
system.after_fork(_disown_all)
