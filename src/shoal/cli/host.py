"""Starts a contender in its own process, talks to it under a deadline, and ends it for good."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from shoal.cli.contenders import Contender, Opened, Tally
from shoal.cli.work import Work
from shoal.support import processes

CLOSE_PATIENCE = 10.0


class ContenderLost(Exception):
    """A contender is out: `word` is "failed" or "skipped", the message says why."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(reason)
        self.word = word


class ContenderProcess:
    """The handle on one guest process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        # A session of its own: Ctrl-C reaches only us, and the whole of it can be found again.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli.guest", str(theirs.fileno())],
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
        """Send a command; the answer is for `answer`."""
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise self._gone() from error

    def answer(self, patience: float) -> Any:
        """Return the answer to the last command, or raise ContenderLost when none comes in time."""
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
        """Build the contender over there and remember which processes it brought along."""
        self.ask("open", contender, work)
        opened: Opened = self.answer(patience)
        self._seen.update(processes.descendants(self._process.pid))
        return opened

    def close_runner(self) -> None:
        """Close the contender but keep its process, in which it may be opened again."""
        self.ask("close")
        self.answer(CLOSE_PATIENCE)

    def end(self, gently: bool = True) -> None:
        """Close the contender if it can still listen, then kill all that is left of it."""
        if gently:
            with contextlib.suppress(ContenderLost):
                self.close_runner()
        self._seen.update(processes.descendants(self._process.pid))
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        # Twice, for one that was being forked while we looked.
        for _ in range(2):
            self._seen.update(processes.descendants(self._process.pid))
            for process in self._seen:
                if processes.alive(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        self._log.close()

    def __enter__(self) -> ContenderProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(gently=kind is None)

    def _gone(self) -> ContenderLost:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ContenderLost("failed", "its process hung up")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = self._last_words()
        return ContenderLost("failed", f"its process died ({how}){': ' + last if last else ''}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else ""


def run_together(hosts: Sequence[ContenderProcess], warm: float, seconds: float, patience: float) -> float:
    """Let all hosts step at the same time; return their steps per second, added up."""
    for host in hosts:
        host.ask("run", warm, seconds)
    tallies: list[Tally] = [host.answer(patience) for host in hosts]
    return sum(tally.steps / tally.seconds for tally in tallies)
