"""What goes on beside the pools of a soak: another thread that uses the pool, and other callers that are killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from faults.kit import LoadsBadly, children
from shoal import BadCall, CallPending, ConcurrentUse, Pool, StepTimeout, WorkerDied

TAG = "SHOAL_SOAK"  # an environment variable of everything that a soak starts
OPENING = threading.Lock()  # held by a thread that must be able to open something, or that keeps all from doing so
CALL_TIMEOUT = 5.0  # a call is no step: nothing else ends one to a worker that is stopped
GONE = 20.0  # seconds that what a killed caller has left behind has to go; two are promised on a machine that is idle


def is_tagged(pid: int, tag: str) -> bool:
    """Whether it was started with this tag, by whomever, and whoever its parent is now."""
    with contextlib.suppress(OSError):
        return f"{TAG}={tag}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def tagged(tag: str) -> set[int]:
    """All processes that were started with this tag."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and is_tagged(int(name), tag)}


# ---- another thread ------------------------------------------------------------------------------------------


class Intruder(threading.Thread):
    """Uses another thread's pool at random moments: it is refused, or gets the right answer.

    It does nothing that would change what the envs answer: so each row can still be foretold.
    """

    # Another thread is inside, answers are due, or a fault has hit the worker that was asked.
    REFUSALS = (ConcurrentUse, CallPending, WorkerDied, StepTimeout)

    def __init__(self, pool: Pool, seed: int, may_drop: bool):
        super().__init__(name="intruder", daemon=True)
        self.pool, self.random = pool, random.Random(seed)
        self.crosses = any(worker.pid is not None for worker in pool.workers)  # whether calls are pickled
        self.acts = [self.look, self.call, self.call_with_what_cannot_be_loaded, *[self.drop] * may_drop]
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self._stop_it = threading.Event()

    def run(self) -> None:
        while not self._stop_it.wait(self.random.expovariate(20.0)):
            act = self.random.choice(self.acts)
            try:
                act()
                self.done[act.__name__] += 1
            except self.REFUSALS as error:
                self.done[type(error).__name__] += 1
            except BaseException as error:
                self.problems.append(f"{act.__name__} from another thread: {type(error).__name__}: {error}")
                return

    def stop(self) -> None:
        self._stop_it.set()
        self.join()

    def look(self) -> None:
        repr(self.pool), self.pool.stats(), self.pool.workers, self.pool.pending
        assert not self.pool.closed

    def call(self) -> None:
        value = self.random.random()
        assert self.pool.call("echo", value, timeout=CALL_TIMEOUT) == [value] * self.pool.num_envs

    def call_with_what_cannot_be_loaded(self) -> None:
        why = ""
        try:
            self.pool.call("echo", LoadsBadly(), timeout=CALL_TIMEOUT)
        except BadCall as error:
            why = str(error)
        assert ("not at home here" in why) == self.crosses, why

    def drop(self) -> None:
        """Nothing is pending while nobody is inside."""
        self.pool.drop_pending(timeout=CALL_TIMEOUT)


# ---- another caller ------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from faults.soak import FAULTS, SoakEnv
from shoal import Pool
pool = Pool(SoakEnv, 4, backend="processes", num_workers=2, start_method={method!r})
pool.reset(seed=0)
pool.send([4 * FAULTS.index({fault!r})] * 4)
time.sleep({pause})
print("ready", flush=True)
time.sleep(1000)
"""
HARM = ("", "hang", "hang with the lock", "child", "child that runs away", "child that hides")


class KilledCaller(threading.Thread):
    """A program with a pool that is killed, at its start or while its envs misbehave: nothing of it may stay."""

    def __init__(self, seed: int):
        super().__init__(name="killed caller", daemon=True)
        self.random, self.tag = random.Random(seed), uuid.uuid4().hex
        self.method = self.random.choice(("forkserver", "spawn", "fork"))
        self.fault = self.random.choice(HARM)
        if self.method == "fork" and self.fault == "child that hides":
            self.fault = "child"  # a worker that was forked is not the launcher's child, and neither are its own
        self.stopped = self.random.choice(("nothing", "workers", "launcher"))
        self.early = self.random.random() < 0.25
        self.problems: list[str] = []

    @property
    def kind(self) -> str:
        """What is done to it, in words."""
        if self.early:
            return f"{self.method}, at the start"
        return f"{self.method}, {self.stopped} stopped, {self.fault or 'no fault'}"

    def run(self) -> None:
        try:
            self._live_and_die()
        except BaseException as error:
            self.problems.append(f"caller that is killed, {self.kind}: {type(error).__name__}: {error}")

    def _live_and_die(self) -> None:
        text = PROGRAM.format(
            tests=str(Path(__file__).resolve().parents[1]), method=self.method, fault=self.fault,
            pause=self.random.random() / 2,
        )  # fmt: skip
        with OPENING:
            process = subprocess.Popen(
                [sys.executable, "-c", text], env={**os.environ, TAG: self.tag}, text=True, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            if self.early:
                time.sleep(3 * self.random.random())
            else:
                self._wait_until_ready(process)
                self._stop_some(process.pid)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._see_all_gone()

    def _wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            if line == "ready\n":
                return
            said.append(line)
        raise AssertionError("it ended: " + "".join(said))

    def _stop_some(self, pid: int) -> None:
        with OPENING:
            launchers = {child for child in children(pid) if _is_launcher(child)}
            workers = tagged(self.tag) - launchers - {pid}
        until = time.monotonic() + GONE
        while not all(os.getsid(one) == one for one in launchers) and time.monotonic() < until:
            time.sleep(0.02)  # it has not begun to serve
        for one in {"nothing": set(), "workers": workers, "launcher": launchers}[self.stopped]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGSTOP)

    def _see_all_gone(self) -> None:
        until = time.monotonic() + GONE
        while True:
            with OPENING:
                left = tagged(self.tag)
                told = {one: _command(one)[-80:] for one in left}
            if not left:
                return
            if time.monotonic() > until:
                _kill_all(left)
                raise AssertionError(f"left behind: {told}")
            time.sleep(0.1)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def _is_launcher(pid: int) -> bool:
    return "import be_launcher" in _command(pid)


def _kill_all(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def told(counts: Counter[Any]) -> str:
    """Counts in words."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
