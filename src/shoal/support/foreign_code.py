"""Runs code of objects that are not Shoal's, as pickling and loading does, so that it raises nothing but Exceptions.

An object may say how it is pickled, and what is called when it is loaded: `sys.exit`, say. That would end a thread
without a word, or the caller.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
RAISING_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # those of which programs have handlers that raise


class NotAnException(Exception):
    """What was raised was no Exception, but SystemExit, say."""


def guarded(act: Callable[..., T], *args: Any) -> T:
    """Return `act(*args)`. Raises Exceptions only, and what the program's own signal handlers raise, as Ctrl-C does."""
    handlers = _python_handlers()
    raised: list[BaseException] = []  # by a handler

    def handle(number: int, frame: Any) -> Any:
        try:
            return handlers[number](number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        for number in handlers:
            signal.signal(number, handle)
        # Within here, and nowhere else, an interrupt is one of `raised`, or comes from `act`.
        try:
            return act(*args)
        except Exception:
            raise
        except BaseException as error:
            if any(error is one for one in raised):
                raise
            # Written down by the module that expects texts to fail as well.
            raise NotAnException("".join(traceback.format_exception_only(error)).strip()) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _python_handlers() -> dict[int, Callable[[int, Any], Any]]:
    """The handlers that may run in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in RAISING_SIGNALS}
    return {number: handler for number, handler in found.items() if callable(handler)}
