"""The process in which one contender lives: takes commands over a pipe until told to close.

A process of its own keeps contenders out of each other's interpreter lock, memory and crashes, and
lets the host end one that hangs. Imports stay inside functions: workers that a contender starts by
spawn or forkserver import this module again as their main module, and should not pay for it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.cli.contenders import Contender, Opened, Runner, Tally
    from shoal.cli.work import Work


class Guest:
    """Holds the runner between commands; one method for each command."""

    def __init__(self) -> None:
        self.runner: Runner | None = None

    def open(self, contender: Contender, work: Work) -> Opened:
        """Build the runner and reset it; importing its library is not part of the time."""
        from importlib import import_module

        from shoal.cli.contenders import Opened
        from shoal.support import processes

        if contender.runner.requires:
            import_module(contender.runner.requires)
        work.actions()
        start = time.perf_counter()
        self.runner = contender.runner(work, **contender.options)
        self.runner.reset()
        seconds = time.perf_counter() - start
        pids = processes.workers(os.getpid())
        sizes, total = processes.pss(pids), processes.pss([os.getpid(), *pids])
        return Opened(
            seconds,
            workers=len(pids),
            worker_pss=sum(sizes) // len(sizes) if sizes else None,
            total_pss=sum(total) if total else None,
            note=self.runner.note(),
        )

    def run(self, warm: float, seconds: float) -> Tally:
        """Step untimed for a moment, so that caches and clocks are warm, then for the time."""
        if self.runner is None:
            raise RuntimeError("nothing is open")
        self.runner.run(warm)
        return self.runner.run(seconds)

    def close(self) -> None:
        """Close the runner; the process stays and may open another."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


def serve(pipe: Connection) -> None:
    """Answer each `(command, arguments)` with `(word, value)` until the host hangs up."""
    from shoal.support.usage import Skip

    guest = Guest()
    commands: dict[str, Callable[..., Any]]
    commands = {"open": guest.open, "run": guest.run, "close": guest.close}
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            answer = ("ok", commands[command](*arguments))
        except Skip as reason:
            answer = ("skipped", str(reason))
        except Exception as error:
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)


def main() -> None:
    """Serve the descriptor named on the command line, then leave without waiting for anybody."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
    # A peer's threads or atexit handlers might wait forever; the host has all it wanted.
    os._exit(0)


if __name__ == "__main__":
    main()
