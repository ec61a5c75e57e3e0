"""What the system says when it has no room, in words that say which limit was reached."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterator

from shoal.errors import ShoalError, StartError

LIMIT_OF_PROCESSES = "the limit of processes and threads is reached (ulimit -u, or pids.max of the control group)"
_HINTS = {
    errno.EAGAIN: LIMIT_OF_PROCESSES,
    errno.EMFILE: "this process has too many open files (ulimit -n)",
    errno.ENFILE: "the system has too many open files",
    errno.ENOMEM: "the system has too little memory",
}


def explain(error: OSError) -> str:
    """Say which limit was reached, or else what the system says."""
    return _HINTS.get(error.errno or 0, str(error))


@contextlib.contextmanager
def limits_named(what: str) -> Iterator[None]:
    """Around what needs room: raises a StartError that says which limit was reached, in place of the system's error."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ShoalError) or error.errno not in _HINTS:
            raise
        raise StartError(f"could not {what}: {explain(error)}; use fewer workers, or raise the limit") from error


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises StartError if there is no room for it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise StartError(f"could not start a thread: {LIMIT_OF_PROCESSES}") from error
