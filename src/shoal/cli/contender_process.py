"""Runs a contender in its own process: sends it commands with a time limit, and ends it with all its children.

In a process of its own a contender has its own interpreter lock and memory, and can crash or hang without harm to
others. This module is the main module there, and workers that a contender starts by spawn or forkserver import it again
as theirs. Their start must stay quick, so what takes long to import is imported inside functions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from shoal.support import processes
from shoal.support.usage import Skip

if TYPE_CHECKING:
    from shoal.cli.contenders import Contender, Opened, Runner, Tally
    from shoal.cli.work import Work

CLOSE_PATIENCE = 10.0


class ContenderLost(Exception):
    """A contender cannot go on: `word` is "failed" or "skipped", the message says why."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(reason)
        self.word = word


class ContenderProcess:
    """The process of one contender, which runs `main`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        # In a session of its own Ctrl-C does not reach it, and all its processes can be found.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.contender_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._pipe = Connection(ours.detach())
        self._seen: set[processes.Process] = set()

    def ask(self, command: str, *arguments: Any) -> None:
        """Send a command; `answer` returns the answer."""
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise self._gone() from error

    def answer(self, patience: float) -> Any:
        """Return the answer to the last command. Raises ContenderLost if none comes in time."""
        deadline = time.monotonic() + patience
        while not self._pipe.poll(0.05):
            if self._process.poll() is not None and not self._pipe.poll(0):
                raise self._gone()
            if time.monotonic() > deadline:
                raise ContenderLost("failed", f"no answer within {patience:g} s")
        try:
            word, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        except Exception as error:
            raise ContenderLost("failed", f"its answer could not be read: {error}") from error
        if word != "ok":
            raise ContenderLost(word, value)
        return value

    def open(self, contender: Contender, work: Work, patience: float) -> Opened:
        """Build the contender in the process, and remember the processes that it has started."""
        self.ask("open", contender, work)
        opened: Opened = self.answer(patience)
        self._seen.update(processes.descendants(self._process.pid))
        return opened

    def close_runner(self) -> None:
        """Close the contender but keep its process, where it may be opened again."""
        self.ask("close")
        self.answer(CLOSE_PATIENCE)

    def end(self, gently: bool = True) -> None:
        """Close the contender, if `gently`, then kill its process and all that it has started."""
        if gently:
            with contextlib.suppress(ContenderLost):
                self.close_runner()
        self._seen.update(processes.descendants(self._process.pid))
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        # Twice, because a process may be forked during the first search.
        for _ in range(2):
            self._seen.update(processes.descendants(self._process.pid))
            processes.kill(process for process in self._seen if processes.alive(process))
        self._log.close()

    def _gone(self) -> ContenderLost:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ContenderLost("failed", "its process hung up")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()[:200]}" if lines else ""
        return ContenderLost("failed", f"its process died ({how}){last}")


# ---- in that process ---------------------------------------------------------------------------------------------


class ContenderCommands:
    """The commands, one method for each, and the runner that they share."""

    runner: Runner

    def open(self, contender: Contender, work: Work) -> Opened:
        """Build the runner and reset it. The import of its library does not count."""
        from shoal.cli.contenders import Opened

        if contender.runner.requires:
            importlib.import_module(contender.runner.requires)
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
        self.runner.run(warm)
        return self.runner.run(seconds)

    def close(self) -> None:
        """Close the runner. The process stays, and may open another."""
        runner = self.runner
        del self.runner  # so that the next start does not wait for its end
        runner.close()


def main() -> None:
    """Answer each `(command, arguments)` with `(word, value)` until the other end is closed, then leave at once."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    pipe, commands = Connection(descriptor), ContenderCommands()
    with contextlib.suppress(EOFError):
        while True:
            command, arguments = pipe.recv()
            answer: tuple[str, Any]
            try:
                answer = ("ok", getattr(commands, command)(*arguments))
            except Skip as reason:
                answer = ("skipped", str(reason))
            except Exception as error:
                answer = ("failed", f"{type(error).__name__}: {error}")
            pipe.send(answer)
    # Threads or atexit handlers of a library might wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
