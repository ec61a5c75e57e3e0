"""What runs in a worker process: builds its envs, maps the slab, then steps until told to leave."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import queue
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

if sys.platform == "win32":
    raise ImportError("worker processes need Linux, macOS or WSL")

import cloudpickle

from shoal import native
from shoal.backends.life import Life
from shoal.backends.mail import bad_spaces, pack, pack_summary, unpack_command
from shoal.envs.functions import install_registry
from shoal.errors import StartError
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.packed_errors import dumps, loads, pack_error
from shoal.memory.slab import Slab
from shoal.ranks import hide_forked_mpi
from shoal.support import processes
from shoal.support.copies_of_process import Home
from shoal.support.limits import start_thread
from shoal.support.system import system
from shoal.worker.base import WorkerChannel
from shoal.worker.building import BuildError
from shoal.worker.measurement import probe

HEAD = struct.Struct("=qQ")  # of a crash log: the env that is being built, -1 for none; the main thread's ident
DING = b""  # an empty message: the twin's doorbell
STACK_SIGNAL = system.stack_signal


@dataclass(frozen=True)
class Assignment:
    """What a worker is told at its start."""

    index: int
    start: int
    env_fns: list[bytes]  # pickled, one per env
    environ: Mapping[str, str]
    registry: bytes | None
    kind: str  # "native" or "twin": both sides must speak the same
    mark: str  # what all its descendants carry in their environment


class ConnectionBell:
    """The twin's bell: an empty message in the side channel."""

    def __init__(self, connection: Connection, send: Callable[[bytes], None]):
        self._connection, self._send = connection, send

    def ring(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the other side is gone, and will be missed
            self._send(DING)

    def sleep(self, timeout: float | None) -> None:
        self._connection.poll(timeout)


class Outbox:
    """Sends to the caller without ever waiting for it.

    A caller that waits for more answers does not read; a worker that waited for it to read would never give them.
    So what does not fit into the channel at once is left to a thread.
    """

    SMALL = 8192  # fits whenever the channel calls itself writable

    def __init__(self, connection: Connection):
        self._connection, self.home = connection, Home()
        self._writable = select.poll()
        self._writable.register(connection.fileno(), select.POLLOUT)
        self._lock = threading.Lock()
        self._waiting = 0  # messages that the thread still has
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, data: bytes) -> None:
        self.home.check("an env")  # what a copy of this process says would be taken for ours
        with self._lock:
            if not self._waiting and len(data) <= self.SMALL and self._writable.poll(0):
                self._connection.send_bytes(data)
                return
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._drain, name="shoal-outbox", daemon=True)
                self._thread.start()
        self._queue.put(data)

    def _drain(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._connection.send_bytes(data)
            except OSError:
                return  # the caller is gone; the main thread learns it by itself
            with self._lock:
                self._waiting -= 1

    def close(self) -> None:
        """Wait until everything is sent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def main(connection: Connection, assignment: bytes, crash_log: int) -> None:
    """The process's life.

    Args:
        crash_log: where the Python stack goes when the process crashes, or is asked for it; after HEAD.
    """
    # Where it is on already, as after a fork, `enable` alone would not take signals back that something else handles.
    faulthandler.disable()
    faulthandler.enable(file=crash_log)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=crash_log, all_threads=True)
        # Only the thread below takes the signal: it would cut short a sleep of native code in an env's thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, which then closes this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        start_thread(threading.Thread(target=_leave_with_caller, args=(connection.fileno(),), daemon=True))
    except StartError as error:
        connection.send_bytes(dumps(error))
        return
    # An error in the channel means that the caller is gone, or has closed it: there is nothing left to say.
    try:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _work(connection, cloudpickle.loads(assignment), crash_log)
    finally:
        processes.end_descendants()  # multiprocessing would wait for its own; the caller ends those that have left us


def _leave_with_caller(fd: int) -> None:
    """End this process when the caller's end of the channel closes, whatever the main thread is doing."""
    if STACK_SIGNAL is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
    system.wait_for_hangup(fd)
    # After an orderly close too, when this process has said all: give the main thread a moment to leave by itself.
    threading.Event().wait(0.1)
    try:
        processes.end_descendants()
        own = processes.identify(os.getpid())
        if own is not None and os.environ.get(processes.MARK):
            processes.end_sessions({os.environ[processes.MARK]: own})
    finally:
        os._exit(0)


def _work(connection: Connection, assignment: Assignment, crash_log: int) -> None:
    os.environ.clear()
    hide_forked_mpi()
    os.environ.update(assignment.environ)
    processes.start_session(assignment.mark)
    if assignment.kind != native.KIND:
        raise RuntimeError(f"the worker has the {native.KIND} core and the caller the {assignment.kind} one")
    life = _ProcessLife(connection, assignment, crash_log)
    life.announce(-1)
    try:
        install_registry(assignment.registry)
        loaded: dict[bytes, Callable[[], Any]] = {}
        for data in assignment.env_fns:
            if data not in loaded:
                loaded[data] = loads(data)
    except Exception as error:
        life.say(BuildError(assignment.start, pack_error(error, "loading its env function")))
        return
    life.live(assignment.index, assignment.start, [loaded[data] for data in assignment.env_fns])
    life.outbox.close()


class _ProcessLife(Life):
    """The worker's end of the side channel."""

    def __init__(self, connection: Connection, assignment: Assignment, crash_log: int):
        self._connection, self._crash_log = connection, crash_log
        self._index, self._start = assignment.index, assignment.start
        self.outbox = Outbox(connection)
        self._mail: Any = None
        self._read = 0  # commands read so far, against mail[0] sent

    def announce(self, env_id: int) -> None:
        os.pwrite(self._crash_log, HEAD.pack(env_id, threading.get_ident()), 0)

    def say(self, message: Any) -> None:
        self.outbox.home.check("an env")
        is_summary = isinstance(message, BlockSummary)
        self._connection.send_bytes(pack_summary(message, self._start) if is_summary else dumps(message))

    def wait_for_slab(self, envs: list[Any]) -> tuple[Slab, int, StepperConfig, WorkerChannel] | None:
        message = self._loaded(self._connection.recv_bytes())
        if message[0] == "probe":  # it is only measured
            try:
                self.say(probe(envs, [functools.partial(_built, data) for data in message[1]]))
            except BaseException as error:
                self.say(BuildError(0, pack_error(error, "step or reset")))
        if message[0] in ("probe", "close", "failed"):
            return None
        _, layout, config, first_lane = message
        try:
            handle = reduction.recv_handle(self._connection)
        except RuntimeError:  # what came has no descriptor with it: the caller could not send one, and has given up
            return None
        slab = Slab.attach(layout, handle)
        self._mail = memoryview(slab.array("mail")[self._index])  # which is read after each wait
        bell = ConnectionBell(self._connection, self.outbox.send)
        return slab, first_lane, config, WorkerChannel(self._post, self.read_mail, bell, bell)

    def _loaded(self, data: bytes) -> Any:
        """A message of the start; ("failed",) where the spaces in it do not load, which the caller is told."""
        try:
            return loads(data)
        except Exception as error:
            self.say(bad_spaces(self._start, error))
            return ("failed",)

    def _post(self, message: Any) -> None:
        """Send to the caller; what cannot be sent arrives as an error that says so."""
        self.outbox.send(pack(message))

    def next_command(self) -> Any:
        while self._connection.poll(0) if native.KIND == "twin" else self._mail[0] != self._read:
            data = self._connection.recv_bytes()
            if data != DING:
                self._read = (self._read + 1) & 0xFFFFFFFF
                return unpack_command(data)
        return None


def _built(env_fn: bytes) -> Any:
    return loads(env_fn)()


if __name__ == "__main__":
    sys.exit("this module is run by shoal's process backend")
