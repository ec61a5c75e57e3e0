"""The main module of a contender's process: it answers commands from a pipe until the pipe is closed.

In a process of its own a contender has its own interpreter lock and memory, and can crash or hang without harm to
others. Imports stay inside functions: workers that a contender starts by spawn or forkserver import this module again
as their main module, and their start must stay quick.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.cli.contenders import Contender, Opened, Runner, Tally
    from shoal.cli.work import Work


class ContenderCommands:
    """The commands, one method for each, and the runner that they share."""

    def __init__(self) -> None:
        self.runner: Runner | None = None

    def open(self, contender: Contender, work: Work) -> Opened:
        """Build the runner and reset it. The import of its library does not count."""
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
        """Step for `warm` seconds, in which caches fill, and then for the time that counts."""
        if self.runner is None:
            raise RuntimeError("no contender is open")
        self.runner.run(warm)
        return self.runner.run(seconds)

    def close(self) -> None:
        """Close the runner. The process stays, and may open another."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


def serve(pipe: Connection) -> None:
    """Answer each `(command, arguments)` with `(word, value)` until the other end is closed."""
    from shoal.support.usage import Skip

    commands = ContenderCommands()
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            answer = ("ok", getattr(commands, command)(*arguments))
        except Skip as reason:
            answer = ("skipped", str(reason))
        except Exception as error:
            answer = ("failed", f"{type(error).__name__}: {error}")
        pipe.send(answer)


def main() -> None:
    """Serve the descriptor that the command line names, then leave at once."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    serve(Connection(descriptor))
    # Threads or atexit handlers of a library might wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
