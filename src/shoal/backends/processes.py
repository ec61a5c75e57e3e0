"""A worker process as the caller sees it: its channel, its death, its memory and its end."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe, connection, reduction
from typing import Any

if sys.platform == "win32":
    raise ImportError("worker processes need Linux, macOS or WSL")

import cloudpickle

from shoal import native
from shoal.backends.base import BlockSpec, Worker
from shoal.backends.launch import WorkerProcess, WorkerStart, start_process
from shoal.backends.mail import bad_spaces, pack_command, unpack
from shoal.backends.worker_main import (
    DING,
    HEAD,
    STACK_SIGNAL,
    Assignment,
    ConnectionBell,
)
from shoal.errors import WorkerDied
from shoal.memory.messages import StepperConfig
from shoal.memory.packed_errors import dumps
from shoal.memory.slab import Slab
from shoal.ranks import without_launcher
from shoal.support import processes
from shoal.support.deadline import Deadline
from shoal.support.foreign_code import guarded
from shoal.support.system import system
from shoal.worker.measurement import Probe

GRACE = 1.0  # seconds from a request to leave until SIGTERM, and from that until SIGKILL
STACK_LINES = 24  # of a Python stack that goes into a message


class ProcessWorker(Worker):
    """One process that builds and steps a block of envs."""

    isolated = recyclable = True

    def __init__(
        self, block: BlockSpec, registry: bytes | None, start_method: str, environ: Mapping[str, str] | None = None
    ):
        super().__init__(block)
        self._mark = uuid.uuid4().hex
        # A worker of an MPI rank is no rank itself.
        variables = {**without_launcher(os.environ), **(environ or {})}
        assignment = Assignment(
            block.index, block.start, list(block.env_fns), variables, registry, native.KIND, self._mark
        )
        self._assignment, self._environ = dumps(assignment), variables
        self._start_method = start_method
        self._process: WorkerProcess | None = None
        self._pid: int | None = None
        self._self: processes.Process | None = None  # tells it from a later process of the same pid
        self.inherited: Sequence[connection.Connection] = ()  # channels to other workers, which a fork must close
        self._descendants: list[processes.Process] = []  # as they were when we ended it
        self._crash_log, self._crash_log_seen = system.anonymous_file("shoal-crash-log"), HEAD.size
        os.write(self._crash_log, HEAD.pack(-1, 0))
        try:
            self.connection, self._child_end = Pipe(duplex=True)  # the two ends of the side channel
        except OSError:
            os.close(self._crash_log)
            raise
        self._mail: Any = None
        self._death: WorkerDied | None = None
        self._ring: Callable[[int], None] = lambda index: None
        self._oom_kills = processes.oom_kills()
        self.torn = False  # set here while a message is on its way, and for good when that was cut off

    @property
    def state(self) -> str:
        if self._state in ("starting", "running") and self._process is not None and not self._process.alive:
            return "dead"
        return self._state

    @property
    def pid(self) -> int | None:
        return None if self._state in ("closed", "restarting") else self._pid

    @property
    def bell(self) -> ConnectionBell:
        return ConnectionBell(self.connection, self.connection.send_bytes)

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends."""
        assert self._process is not None
        return self._process.sentinel

    def launch(self, deadline: Deadline) -> None:
        others = [channel.fileno() for channel in (*self.inherited, self.connection) if not channel.closed]
        start = WorkerStart(
            f"shoal-{self.index}", self._mark, self._child_end, self._crash_log, self._assignment, self._environ, others
        )
        self._process = start_process(self._start_method, start, deadline)
        self._child_end.close()
        self._assignment, self._environ, self.inherited = b"", {}, ()
        self._pid = self._process.pid
        self._self = processes.identify(self._pid)

    @property
    def session(self) -> tuple[str, processes.Process] | None:
        """How its descendants are found: the mark in their environment, and the process that headed their session."""
        return None if self._self is None else (self._mark, self._self)

    def ask_for_measurement(self, others: Sequence[bytes] = ()) -> None:
        """Have its first env measured instead of attaching it to a slab: `measured` waits for it.

        `others` are pickled functions of envs to be stepped beside it.
        """
        self._send_raw(cloudpickle.dumps(("probe", list(others))))

    def measured(self, deadline: Deadline) -> Probe:
        """What a step of its first env costs, and some of its answers."""
        probe: Probe = self._first_words(deadline)
        return probe

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        assert slab.fd is not None
        assert self._process is not None
        try:
            data = guarded(cloudpickle.dumps, ("attach", slab.layout, config, self.start))
        except Exception as error:  # they came from other processes, or from the caller
            raise bad_spaces(self.start, error).error.unpack(self.start, self.index) from error
        self._send_raw(data)
        reduction.send_handle(self.connection, slab.fd, self._process.pid)
        self._mail, self._stats = slab.array("mail")[self.index], slab.array("stats")[self.index]

    def attached(self, deadline: Deadline) -> None:
        self._first_words(deadline)
        self._state = "running"
        self.look_at_memory()  # what it starts with

    def use_ringer(self, ring: Callable[[int], None]) -> None:
        self._ring = ring

    def send(self, *message: Any) -> None:
        data = pack_command(message)
        with self._untorn():
            # Told before it is sent: a message that is larger than the channel goes only while the worker reads.
            self._mail[0] += 1
            self._wake()
            self.connection.send_bytes(data)

    def _send_raw(self, data: bytes) -> None:
        with self._untorn():
            self.connection.send_bytes(data)

    @contextlib.contextmanager
    def _untorn(self) -> Iterator[None]:
        """Around all that reads or writes whole messages: an interrupt cuts one in two, and nothing that follows would
        be understood."""
        if self.torn:
            raise self.cut()
        self.torn = True
        try:
            yield
        except (EOFError, OSError):  # also in the middle of a message
            self.torn = False
            raise self.death() from None
        self.torn = False

    def cut(self) -> WorkerDied:
        """The error for a channel that can no longer be used."""
        message = f"the channel to worker {self.index} (pid {self.pid}) was cut by an interrupt"
        return WorkerDied(message, self.index, self.pid, None, self.env_ids)

    def _wake(self) -> None:
        if native.KIND == "native":  # the twin's worker sleeps on the channel itself
            self._ring(self.index)

    def receive(self, deadline: Deadline) -> Any:
        if self._death is not None and self._state == "restarting":
            raise self.death()
        while True:
            ready = connection.wait([self.connection, self.sentinel], deadline.left)
            if not ready:
                raise self._timed_out(deadline)
            # Messages first: a worker may have said why it leaves.
            if self.connection in ready or self.connection.poll(0):
                with self._untorn():
                    data = self.connection.recv_bytes()
                if data != DING:
                    return unpack(data)
            else:
                raise self.death()

    def drain(self) -> None:
        """Take in what lies in the channel without waiting: the twin's bell rings there."""
        with contextlib.suppress(WorkerDied, OSError):
            while self.connection.poll(0):
                with self._untorn():
                    data = self.connection.recv_bytes()
                if data != DING:
                    self._file(unpack(data))

    @property
    def building(self) -> int | None:
        env_id = self._crash_log_head()[0]
        return None if env_id < 0 else env_id

    def _crash_log_head(self) -> tuple[int, int]:
        env_id, main_thread = HEAD.unpack(os.pread(self._crash_log, HEAD.size, 0))
        return env_id, main_thread

    def look_at_memory(self) -> None:
        pid = self.pid
        found = None if pid is None else processes.resident(pid)
        if found is not None:
            self.memory = found
            self.memory_at_start = self.memory_at_start or found

    def condemn(self, why: str) -> None:
        self.condemned = why
        if self._pid is not None:
            # What it has forked and let go is not found once it is gone.
            self._descendants = processes.descendants(self._pid)
        self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def death(self) -> WorkerDied:
        if self._death is None:
            self._death = self._describe_death()
        return copy.copy(self._death)  # each has a traceback of its own

    def _describe_death(self) -> WorkerDied:
        assert self._process is not None
        ended, code = self._process.join(GRACE), self._process.exitcode
        envs = f"env {self.start}" if len(self.env_ids) == 1 else f"envs {self.start} to {self.stop - 1}"
        message = f"worker {self.index} (pid {self.pid}, {envs}) {self.condemned or _describe_exit(ended, code)}"
        if code == -signal.SIGKILL and not self.condemned:
            found = processes.oom_kills()
            certain = found is not None and self._oom_kills is not None and found > self._oom_kills
            message += (
                "; the kernel has ended processes here because memory ran out: use fewer envs, or recycle_after"
                if certain
                else "; if nobody else has sent it: the system does so when memory runs out"
            )
        if self.at_work is not None and not self.condemned:
            message += f"; it was running env {self.at_work}"
        if self.memory:
            message += f"; its memory was {self.memory / 2**20:.0f} MiB when last seen"
        dump = self._read_crash_log(self._crash_log_seen)
        if dump:
            message += "\n\n" + _shorten(dump, "Current thread")
        return WorkerDied(
            message, self.index, self.pid, code, self.env_ids, self.at_work, memory=self.memory, dump=dump
        )

    def stack(self) -> str:
        """What its main thread is doing, as faulthandler writes it; "" if it does not say so at once."""
        if STACK_SIGNAL is None or self._process is None or not self._process.alive:
            return ""
        main_thread = self._crash_log_head()[1]
        if not main_thread:
            return ""  # it has not begun, and the signal would end it
        own = f"Thread 0x{main_thread:016x}"
        before = os.fstat(self._crash_log).st_size
        self._process.signal(STACK_SIGNAL)
        seen = before
        for _ in range(50):
            time.sleep(0.02)
            size = os.fstat(self._crash_log).st_size
            if size == seen > before:
                self._crash_log_seen = size
                return _shorten(self._read_crash_log(before), own)
            seen = size
        return ""

    def _read_crash_log(self, start: int) -> str:
        return os.pread(self._crash_log, 1 << 16, start).decode(errors="replace").strip()

    def reap(self) -> None:
        """After its death: end what it has started, take in what it still had to say, give up all descriptors."""
        self.death()
        self._kill()  # it may only have lost its channel, or its forkserver
        if self._self is not None:
            deadline = Deadline.after(GRACE)
            while processes.alive(self._self) and not deadline.passed:
                time.sleep(0.001)
        self.drain()
        processes.kill(self._descendants)
        if self.session is not None:
            processes.end_sessions(dict([self.session]))
        self._state = "restarting"
        self._release()

    def _release(self) -> None:
        if self._process is not None:
            self._process.close()
        self._child_end.close()
        self.connection.close()
        self._crash_log = closed_descriptor(self._crash_log)

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state in ("closed", "restarting"):
            return []
        self.ask_to_close()
        errors: list[tuple[int, Any]] | None = None
        try:
            if self._process is not None:
                errors = self._close_errors(deadline)
                if errors is None and self.explains and deadline.passed and self._process.alive:
                    self.hung = self.describe_hang()
                self._state = "closed"
                self._force_out(deadline)
                processes.kill(self._descendants)
        finally:
            self._state = "closed"
            self._release()
        return errors or []

    def ask_to_close(self) -> None:
        if self._state in ("closing", "closed", "restarting") or self._process is None:
            return
        running, self._state = self._state == "running", "closing"
        if not self._writable():
            return  # it does not read, and will be forced
        with contextlib.suppress(WorkerDied, OSError):
            if running:
                self.send("close")
            else:
                self._send_raw(cloudpickle.dumps(("close",)))

    def _writable(self) -> bool:
        """Whether a small message can be sent without waiting."""
        poller = select.poll()
        poller.register(self.connection.fileno(), select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poller.poll(0))

    def _close_errors(self, deadline: Deadline) -> list[tuple[int, Any]] | None:
        """What its envs raised in close; None from a worker that is dead or stuck."""
        with contextlib.suppress(Exception):
            while True:
                message = self.receive(deadline)
                if isinstance(message, tuple) and message[0] == "closed":
                    return message[1]  # type: ignore[no-any-return]
                self._file(message)  # of answers that were not taken yet
        return None

    def _force_out(self, deadline: Deadline) -> None:
        """Wait, then SIGTERM, then SIGKILL: bounded whatever the env does."""
        assert self._process is not None
        left = deadline.left
        self._process.join(GRACE if left is None else min(left, GRACE))
        if self._process.alive and self._pid is not None:
            self._descendants = processes.descendants(self._pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._process.alive:
                return
            self._process.signal(number)
            self._process.join(GRACE)

    def abandon(self) -> None:
        self._state = "closed"
        self.connection.close()


def closed_descriptor(fd: int) -> int:
    """Close a descriptor, if it is one; returns what stands for none."""
    if fd >= 0:
        os.close(fd)
    return -1


def _describe_exit(ended: bool, code: int | None) -> str:
    if not ended:
        return "closed its channel and does not leave"
    if code is None:
        return "has ended, the system does not say how"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hints = {
            "SIGSEGV": "; most likely native code of the env crashed",
            "SIGBUS": "; most likely native code of the env crashed, or /dev/shm or the disk is full",
            "SIGABRT": "; most likely native code of the env gave up",
        }
        return f"was ended by {name}{hints.get(name, '')}"
    return f"left with exit code {code}"


def _shorten(dump: str, thread: str) -> str:
    """The stack of the thread that matters, down to where Shoal calls the env."""
    start = max(dump.rfind(thread), 0)
    fatal = dump[: dump.find("\n")] + "\n" if dump.startswith("Fatal") else ""
    lines = dump[start:].split("\n\n")[0].splitlines()
    own = itertools.takewhile(lambda line: "shoal/backends/" not in line, lines)
    return fatal + "\n".join(itertools.islice(own, STACK_LINES))
