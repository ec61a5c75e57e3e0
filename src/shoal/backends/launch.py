"""Starts worker processes: by default a launcher forks itself, with its imports done; spawn and fork on request.

A worker never imports the caller's main script: env functions are pickled by value. So a script needs no
`if __name__ == "__main__"` for Shoal's sake, sixteen workers do not import a learning framework sixteen times, and
nothing of the caller's own multiprocessing set-up is touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

if sys.platform == "win32":
    raise ImportError("worker processes need Linux, macOS or WSL")

from shoal.backends.launcher import REPORT, Preparation, run, start_interpreter
from shoal.errors import StartError, StepTimeout
from shoal.support import processes
from shoal.support.deadline import NOW, Deadline
from shoal.support.limits import explain
from shoal.support.system import system

PRELOAD = ["numpy", "gymnasium", "gymnasium.envs.classic_control", "cloudpickle", "shoal.backends.worker_main"]


@dataclass(frozen=True)
class WorkerStart:
    """What a worker process is started with.

    Attributes:
        mark: what all its descendants carry in their environment.
        channel: its end of the side channel.
        crash_log: a descriptor, see worker_main.
        assignment: pickled, see worker_main.
        environ: the variables of a new interpreter.
        inherited: descriptors of the caller's that a forked worker must close.
    """

    name: str
    mark: str
    channel: Connection
    crash_log: int
    assignment: bytes
    environ: dict[str, str]
    inherited: Sequence[int]


class WorkerProcess:
    """A worker process that was started: who it is, and how it ended.

    Args:
        report: where the launcher tells its end; -1 for one that this process has forked itself.
        lifeline: becomes readable when it ends, for one that was forked where the system has no pidfds; else -1.
    """

    def __init__(self, pid: int, report: int, lifeline: int = -1):
        self.pid, self._report, self._lifeline = pid, report, lifeline
        self.exitcode: int | None = None  # negative for a signal; None while it runs, or where that is not known
        self._ended = False
        # Held while descriptors are used, not while they are waited for: one thread may ask for the state of a worker
        # that another one closes, and a number that was given back soon stands for another file.
        self._lock = threading.RLock()
        self.pidfd = -1
        self._known: processes.Process | None = None  # tells it from a later one of the same pid, for want of a pidfd
        try:
            self.pidfd = system.open_process(pid)
            self._known = processes.identify(pid) if self.pidfd < 0 else None
        except OSError as error:
            if report < 0 and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # nothing else would tell its end

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends."""
        return self.pidfd if self.pidfd >= 0 else max(self._report, self._lifeline)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not self.join(0)

    def join(self, timeout: float) -> bool:
        """Wait for its end; whether it came."""
        deadline = Deadline.after(timeout)
        while not self._ended and not self._look(deadline) and not deadline.passed:
            time.sleep(0.001)  # where the kernel tells of no end, or the launcher is gone, all that helps is to look
        return self._ended

    def _look(self, deadline: Deadline) -> bool:
        """Wait until there may be something to see, then see. Another thread may close this meanwhile."""
        if (watched := self.sentinel) >= 0:
            _readable(watched, deadline)
        with self._lock:
            if not self._ended:
                self._ended = self._read_report() if self._report >= 0 else self._reap()
            return self._ended

    def _read_report(self) -> bool:
        if not _readable(self._report, NOW):
            return False
        data = os.read(self._report, REPORT.size)
        if data:
            [self.exitcode] = REPORT.unpack(data)
        return bool(data) or self._is_gone()  # without a word the launcher itself is gone

    def _reap(self) -> bool:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # something else has taken note of its end, or the caller ignores SIGCHLD
            return self._is_gone()
        if pid:
            self.exitcode = os.waitstatus_to_exitcode(status)
        return bool(pid)

    def _is_gone(self) -> bool:
        return _readable(self.pidfd, NOW) if self.pidfd >= 0 else not _exists(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to this very process, which the pid alone would not tell from a later one."""
        with self._lock, contextlib.suppress(OSError):
            if self.pidfd >= 0:
                system.signal_process(self.pidfd, number)
            elif not self._ended and self._known is not None and processes.alive(self._known):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            for fd in (self._report, self.pidfd, self._lifeline):
                if fd >= 0:
                    os.close(fd)
            self._report = self.pidfd = self._lifeline = -1


def _readable(fd: int, deadline: Deadline) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    left = deadline.left
    return bool(poller.poll(None if left is None else left * 1000))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's
    return True


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; takes note of its end."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:  # its end was noted
        return True


class _LauncherLink:
    """The caller's side of its launcher, which is started with the first request, and again when it is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._former: list[int] = []  # pids of launchers that are not used any more, until their ends are noted
        self._stuck: list[socket.socket] = []  # of launchers that do not answer; closing one would end their workers

    def request(self, message: Any, fds: Sequence[int], deadline: Deadline) -> None:
        """Send a request with descriptors."""
        data = pickle.dumps(message)
        if not self._lock.acquire(timeout=-1 if deadline.left is None else deadline.left):
            raise StepTimeout("the launcher of worker processes was busy with other starts for too long")
        try:
            for attempt in (1, 2):
                if self._socket is None:
                    self._start()
                assert self._socket is not None
                try:
                    self._socket.settimeout(deadline.left)
                    system.send_request(self._socket, data, fds)
                    return
                except (BrokenPipeError, ConnectionResetError):  # it is gone
                    self._forget()
                    if attempt == 2:
                        raise
        finally:
            self._lock.release()

    def _start(self) -> None:
        ours, theirs = system.request_channel()
        # Ctrl-C on a terminal reaches the launcher too, which ignores it as soon as it can, and must not see it before.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self._pid = start_interpreter("be_launcher", [theirs.fileno()], os.getpid())
        except BaseException:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._socket = ours

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._former.append(self._pid)  # its end cannot always be noted at once: its channel is closed before

    def tidy(self) -> None:
        """Let no launcher that was killed stay in the table of processes."""
        with self._lock:
            self._former = [pid for pid in self._former if not _has_ended(pid)]
            if self._socket is not None and _has_ended(self._pid):
                self._socket.close()
                self._socket = None

    def give_up(self) -> None:
        """It does not answer: the next request is for a new one."""
        with self._lock:
            if self._socket is not None:
                self._stuck.append(self._socket)
                self._former.append(self._pid)
                self._socket = None

    def renewed(self) -> _LauncherLink:
        """In a forked child: a link of its own. The parent's end of the channel is for the parent alone."""
        for one in (self._socket, *self._stuck):
            if one is not None:
                one.close()
        return _LauncherLink()


_link = _LauncherLink()


def _renew_link() -> None:
    global _link
    _link = _link.renewed()


system.after_fork(_renew_link)


def tidy() -> None:
    """Forget a launcher that was killed, when workers are closed."""
    _link.tidy()


def start_process(method: str, start: WorkerStart, deadline: Deadline) -> WorkerProcess:
    """Start a worker process. It is ended when this process ends, and may itself have children.

    Raises:
        StartError: the system has no room for it.
        StepTimeout: the launcher did not answer in time.
    """
    try:
        return _fork(start, deadline) if method == "fork" else _launch(method, start, deadline)
    except OSError as error:
        if isinstance(error, StepTimeout | StartError):
            raise
        raise StartError(f"could not start the process {start.name}: {explain(error)}; use fewer workers") from error


def _launch(method: str, start: WorkerStart, deadline: Deadline) -> WorkerProcess:
    letter = system.anonymous_file("shoal-assignment")
    answer, report = -1, -1
    try:
        with open(letter, "wb", closefd=False) as file:
            pickle.dump((Preparation.of_this_process(start.name), start.assignment), file)
        answer, report = os.pipe()
        fds = [report, start.channel.fileno(), start.crash_log, letter]
        _link.request((method, start.mark, start.environ if method == "spawn" else PRELOAD), fds, deadline)
        os.close(report)
        report = -1
        return WorkerProcess(_pid_from(answer, start.name, deadline), answer)
    except BaseException:
        if answer >= 0:
            os.close(answer)
        raise
    finally:
        if report >= 0:
            os.close(report)
        os.close(letter)


def _pid_from(answer: int, name: str, deadline: Deadline) -> int:
    if not _readable(answer, deadline):
        _link.give_up()
        raise StepTimeout(f"the launcher of worker processes did not start {name} in time: it is stopped, or starved")
    data = os.read(answer, REPORT.size)
    if not data:
        raise StartError(f"the launcher of worker processes ended before it had started {name}")
    [pid] = REPORT.unpack(data)
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return int(pid)


def _fork(start: WorkerStart, deadline: Deadline) -> WorkerProcess:
    util._flush_std_streams()  # type: ignore[attr-defined]
    lifeline, held = (-1, -1) if system.has_pidfds else os.pipe()  # the worker holds one end as long as it lives
    pid = os.fork()
    if not pid:
        code = 1
        try:
            for fd in (*start.inherited, *([lifeline] if lifeline >= 0 else [])):
                os.close(fd)
            code = run(start.name, start.channel, start.assignment, start.crash_log)
        finally:
            os._exit(code)
    worker = None
    if held >= 0:
        os.close(held)
    try:
        worker = WorkerProcess(pid, -1, lifeline)
        if worker.pidfd >= 0:
            _link.request(("watch", start.mark, pid), [worker.pidfd], deadline)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the caller ignores SIGCHLD
            os.waitpid(pid, 0)
        if worker is not None:
            worker.close()
        raise
    return worker
