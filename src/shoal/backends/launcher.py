"""The launcher: a process that starts the caller's workers, reports how they end, and ends them after the caller.

It runs no code of an env, so nothing that an env does can keep it from its work: a worker that holds the interpreter's
lock or is stopped is ended too when the caller is gone. Requests come over a socket pair, which needs no file.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing import process, util
from multiprocessing.connection import Connection

if sys.platform == "win32":
    raise ImportError("worker processes need Linux, macOS or WSL")

from shoal.support import processes, shared_warnings
from shoal.support.system import system

REPORT = struct.Struct("=i")  # first a pid, or an errno with a minus; later an exit code, with a minus for a signal
LEAVE = 0.5  # seconds that workers have to leave by themselves when the caller is gone


class Launcher:
    """Serves one caller until that is gone."""

    def __init__(self, requests: socket.socket, caller: int):
        self._requests, self._caller = requests, caller
        self._reports: dict[int, int] = {}  # by the pids of workers that are our children: where to tell their ends
        self._marks: dict[int, str] = {}
        self._channels: dict[int, int] = {}  # the inodes of their channels
        self._forked: dict[int, tuple[int, str]] = {}  # workers that the caller has forked: pid and mark by pidfd
        self._caller_fd = -1  # where the system has no such thing, the socket tells as well
        with contextlib.suppress(OSError):
            self._caller_fd = system.open_process(caller)
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._handlers = {
            signal.SIGCHLD: signal.signal(signal.SIGCHLD, lambda *_: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_IGN),  # the caller's end is what counts
        }
        self._own = [requests.fileno(), self._woken, wake]
        shared_warnings.share()

    def serve(self) -> None:
        """Carry out requests until the caller is gone, then end what is left of its workers."""
        poller = select.poll()
        for fd in (self._requests.fileno(), self._woken, self._caller_fd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while os.getppid() == self._caller:
            ready = {fd for fd, _ in poller.poll()}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._caller_fd in ready:
                break
            if self._requests.fileno() in ready and not self._take_request():
                break
        with contextlib.suppress(OSError):  # nothing more was asked for
            self._requests.setblocking(False)
            while self._take_request(only_watch=True):
                continue
        self._end_all()

    def _take_request(self, only_watch: bool = False) -> bool:
        """Carry out one request, unless only those count that start nothing. False when the channel is closed."""
        data, fds = system.receive_request(self._requests)
        if not data:
            return False
        method, mark, rest = pickle.loads(data)
        if method == "watch":
            [fd], self._forked = fds, {fd: one for fd, one in self._forked.items() if not _ended(fd)}
            self._forked[fd] = rest, mark
            return True
        report = fds[0]
        if only_watch:
            return True
        try:
            pid = self._fork(rest, fds) if method == "forkserver" else _spawn(mark, rest, fds)
        except OSError as error:
            _tell(report, -(error.errno or 1))
            os.close(report)
        else:
            self._reports[pid], self._marks[pid], self._channels[pid] = report, mark, os.fstat(fds[1]).st_ino
            _tell(report, pid)
        for fd in fds[1:]:
            os.close(fd)
        return True

    def _fork(self, modules: list[str], fds: list[int]) -> int:
        for name in modules:  # what most workers need is imported once
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            for fd in (*self._own, self._caller_fd, fds[0], *self._reports.values(), *self._forked):
                if fd >= 0:
                    os.close(fd)
            shared_warnings.say_once()
            code = run_letter(*fds[1:])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Tell the caller how workers ended, and end the processes that they have left behind."""
        ended: dict[int, int] = {}  # exit codes by reports
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in self._reports:
                    del self._marks[pid], self._channels[pid]
                    ended[self._reports.pop(pid)] = os.waitstatus_to_exitcode(status)
        if ended:
            self._end_orphans()
        for report, code in ended.items():
            _tell(report, code)
            os.close(report)

    def _end_orphans(self) -> None:
        """End children of ours that are no workers, and that no worker which still runs has started.

        We inherit them as a subreaper, also where they have a session of their own and no mark.
        """
        for pid in processes.children(os.getpid()):
            if pid not in self._reports and not self._is_of_a_worker(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _is_of_a_worker(self, pid: int) -> bool:
        """Whether a process that we have inherited was started by a worker that still runs.

        A child that was forked without exec has no mark, but the worker's open files.
        """
        marks, channels = self._marks.values(), self._channels.values()
        return processes.belongs(pid, self._reports, marks) or processes.holds(pid, channels)

    def _end_all(self) -> None:
        """The caller is gone: its workers leave, or are ended, with all that they have started."""
        deadline = time.monotonic() + LEAVE
        marks = [*self._marks.values(), *(mark for _, mark in self._forked.values())]
        while (self._reports or not all(map(_ended, self._forked))) and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        for pid in self._reports:
            os.kill(pid, signal.SIGKILL)
        for fd in self._forked:
            with contextlib.suppress(OSError):
                system.signal_process(fd, signal.SIGKILL)
        for pid in list(self._reports):
            os.waitpid(pid, 0)
        self._reports, self._marks, self._channels = {}, {}, {}
        for _ in range(5):  # they may start others while they are being ended
            self._end_orphans()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    continue
        processes.end_marked(marks)


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _tell(report: int, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller does not listen any more
        os.write(report, REPORT.pack(number))


def _spawn(mark: str, environ: dict[str, str], fds: list[int]) -> int:
    """Start a new interpreter, with the caller's environment as it is now."""
    os.environ.clear()
    os.environ.update(environ, **{processes.MARK: mark})
    return start_interpreter("run_spawned", fds[1:])


def start_interpreter(function: str, fds: list[int], *more: int) -> int:
    """Start a Python that calls this function of this module with these descriptors and numbers; returns its pid."""
    numbers = ", ".join(map(str, (*fds, *more)))
    code = f"import sys; sys.path[:] = {search_path()!r}; from {__name__} import {function}; {function}({numbers})"
    if working_directory() is None:  # numpy needs one to be imported
        code = f"import os; os.chdir('/'); {code}"
    command = [sys.executable, *util._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
    return util.spawnv_passfds(os.fsencode(sys.executable), command, fds)


def working_directory() -> str | None:
    """The working directory; None if it was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None


def search_path() -> list[str]:
    """Where modules are looked for, also after a change of the working directory."""
    here = process.ORIGINAL_DIR  # type: ignore[attr-defined]
    return [here if not entry and here else entry for entry in sys.path]


@dataclass(frozen=True)
class Preparation:
    """What a worker has in common with its caller, apart from the script: that is not imported."""

    name: str
    path: list[str]
    arguments: list[str]
    directory: str | None  # None if it was removed
    key: bytes
    start_method: str | None

    @classmethod
    def of_this_process(cls, name: str) -> Preparation:
        """As the caller is now."""
        key = bytes(process.current_process().authkey)
        return cls(
            name, search_path(), sys.argv, working_directory(), key, multiprocessing.get_start_method(allow_none=True)
        )

    def apply(self) -> None:
        """In the worker."""
        sys.path, sys.argv = self.path, self.arguments
        with contextlib.suppress(OSError):  # an env that needs it will say so
            os.chdir(self.directory or ".")
        process.current_process().authkey = self.key
        if self.start_method is not None:
            multiprocessing.set_start_method(self.start_method, force=True)


def run_spawned(*fds: int) -> None:
    """Be a worker, in an interpreter of its own."""
    os._exit(run_letter(*fds))


def run_letter(channel: int, crash_log: int, letter: int) -> int:
    """Be a worker, as the letter says. Returns the exit code."""
    with open(letter, "rb") as file:
        file.seek(0)
        preparation, assignment = pickle.load(file)
    preparation.apply()
    return run(preparation.name, Connection(channel), assignment, crash_log)


def run(name: str, channel: Connection, assignment: bytes, crash_log: int) -> int:
    """Be a worker, in a process that was just made for it. Returns its exit code."""
    from shoal.backends.worker_main import main

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    worker = process.BaseProcess(target=main, args=(channel, assignment, crash_log), name=name)
    worker.__dict__.update(_start_method=None, _parent_pid=os.getppid())
    code: int = worker._bootstrap()  # type: ignore[attr-defined]
    return code


def be_launcher(fd: int, caller: int) -> None:
    """Serve this caller until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    system.inherit_orphans()
    system.continue_without_parent()  # one that is stopped sees that the caller is gone
    with contextlib.suppress(OSError):
        os.setsid()  # signals to the caller's group are for the caller
    Launcher(socket.socket(fileno=fd), caller).serve()
