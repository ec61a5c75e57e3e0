"""Ends a child that an env has forked and that comes back from the env, as a second caller or worker.

An env that forks and forgets to end the child runs everything that follows twice. The child is an accident: it is
ended without any clean-up, as that would be of what the parent still uses.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NoReturn

EXIT_CODE = 70  # "internal software error" in sysexits.h


class Home:
    """The process that something belongs to."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self, what: str) -> None:
        """End this process if it is a forked copy of that one; `what` has forked."""
        if os.getpid() != self._pid:
            end_copy(what)


def end_copy(what: str) -> NoReturn:
    """End this process, which `what` has forked."""
    text = (
        f"shoal: {what} has forked, and its child (pid {os.getpid()}) came back as a second copy of process "
        f"{os.getppid()}. The child is ended here, and the other goes on. End the child in the env, by os._exit\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(EXIT_CODE)


class EndsCopy:
    """Stands in the place of whatever a forked copy could use: each use ends the copy."""

    def __init__(self, what: str):
        self._what = what

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        end_copy(self._what)

    def __getattr__(self, name: str) -> NoReturn:
        end_copy(vars(self)["_what"])
