"""Contenders that misbehave, for the tests; imported by the processes in which they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shoal.cli.contenders import Runner, Tally
from shoal.cli.work import Work
from shoal.support.usage import Skip


class Steady(Runner):
    """Does nothing, and does it well."""

    def reset(self) -> None:
        pass

    def run(self, seconds: float) -> Tally:
        return Tally(100, 0.5)

    def close(self) -> None:
        pass


class Crashes(Steady):
    """Dies without a word in its first run."""

    def run(self, seconds: float) -> Tally:
        print("something is about to break", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Raises(Steady):
    """Cannot be started."""

    def reset(self) -> None:
        raise RuntimeError("no luck today")


class RaisesLater(Steady):
    """Runs once, then no more."""

    runs = 0

    def run(self, seconds: float) -> Tally:
        self.runs += 1
        if self.runs > 2:  # a warm-up and a timed run are one round
            raise RuntimeError("tired")
        return super().run(seconds)


class Hangs(Steady):
    """Never comes back from a run, and has a child that would outlive it."""

    def __init__(self, work: Work, pid_file: str) -> None:
        super().__init__(work)
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleeper, start_new_session=True)
        Path(pid_file).write_text(str(child.pid))

    def run(self, seconds: float) -> Tally:
        time.sleep(600)
        raise AssertionError


class HangsAtClose(Steady):
    """Works, but cannot let go."""

    def close(self) -> None:
        time.sleep(600)


class Declines(Steady):
    """Does not do this kind of work."""

    def reset(self) -> None:
        raise Skip("not my kind of work")


class Absent(Steady):
    """Needs what nobody has."""

    requires = "no_such_library_anywhere"


class ManyProcesses(Steady):
    """Would start a process for each env."""

    process_per_env = True


class Spins(Steady):
    """Must be opened anew for every round."""

    spins_when_idle = True

    def __init__(self, work: Work, log: str) -> None:
        super().__init__(work)
        self.log = log
        self._say("open")

    def _say(self, word: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{word}\n")

    def close(self) -> None:
        self._say("close")
