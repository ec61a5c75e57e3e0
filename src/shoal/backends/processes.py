"""Worker processes, and the supervisor that learns of their deaths."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe, connection, process, reduction
from typing import Any

import cloudpickle

from shoal import native
from shoal.backends.base import Worker
from shoal.backends.launch import start_process
from shoal.backends.mail import unpack
from shoal.backends.worker_main import DING, Assignment, ConnectionBell, main
from shoal.block import StepperConfig, Summary
from shoal.deadline import Deadline
from shoal.errors import WorkerDied
from shoal.measurement import Measurement
from shoal.remote import dumps
from shoal.slab import Slab

__all__ = ["PipesBell", "ProcessWorker", "Supervisor"]

GRACE = 1.0  # seconds from a request to leave until SIGTERM, and from that until SIGKILL


class ProcessWorker(Worker):
    """One process that builds and steps a block of envs."""

    isolated = True

    def __init__(
        self, index: int, start: int, stop: int, env_fns: Sequence[bytes], registry: bytes | None, start_method: str
    ):
        super().__init__(index, start, stop)
        assignment = Assignment(index, start, list(env_fns), dict(os.environ), registry, native.KIND)
        self._assignment = dumps(assignment)
        self._start_method = start_method
        self._process: process.BaseProcess | None = None
        self._connection, self._child_end = Pipe(duplex=True)
        self._mail: Any = None
        self._ring: Callable[[int], None] = lambda index: None
        self._state = "starting"
        self.torn = False  # set here while a message is on its way, and for good when that was cut off

    @property
    def state(self) -> str:
        if self._state in ("starting", "running") and self._process is not None and not self._process.is_alive():
            return "dead"
        return self._state

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._state == "closed" else self._process.pid

    @property
    def bell(self) -> ConnectionBell:
        return ConnectionBell(self._connection, self._connection.send_bytes)

    @property
    def connection(self) -> connection.Connection:
        """The caller's end of the side channel."""
        return self._connection

    @property
    def sentinel(self) -> int:
        """Becomes readable when the process ends."""
        assert self._process is not None
        return self._process.sentinel

    def launch(self, inherited: Sequence[int] = ()) -> None:
        to_close = [*inherited, self._connection.fileno()] if self._start_method == "fork" else []
        self._process = start_process(
            self._start_method, f"shoal-{self.index}", main, self._child_end, self._assignment, to_close
        )
        self._child_end.close()
        self._assignment = b""

    def built(self, deadline: Deadline) -> Summary:
        summary: Summary = self._what_it_found(deadline)
        return summary

    def probe(self, deadline: Deadline) -> Measurement:
        """Have its first env measured instead of attaching it to a slab."""
        self._send_raw(cloudpickle.dumps(("probe",)))
        measurement: Measurement = self._what_it_found(deadline)
        return measurement

    def _what_it_found(self, deadline: Deadline) -> Any:
        """Its answer while it is being started, or the error of the env that it names instead."""
        answer = self.receive(deadline)
        if isinstance(answer, tuple):
            env_id, error = answer
            raise error.unpack(env_id, self.index)
        return answer

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        assert slab.fd is not None
        assert self._process is not None
        self._send_raw(cloudpickle.dumps(("attach", slab.layout, config)))
        reduction.send_handle(self._connection, slab.fd, self._process.pid)
        self._mail = slab.array("mail")[self.index]

    def attached(self, deadline: Deadline) -> None:
        self.receive(deadline)
        self._state = "running"

    def use_ringer(self, ring: Callable[[int], None]) -> None:
        """How the pool rings this worker when it has commands without a request."""
        self._ring = ring

    def send(self, *message: Any) -> None:
        data = cloudpickle.dumps(message)
        with self._untorn():
            # Told before it is sent: a message that is larger than the channel goes only while somebody reads.
            self._mail[0] += 1
            self._wake()
            self._connection.send_bytes(data)

    def _send_raw(self, data: bytes) -> None:
        with self._untorn():
            self._connection.send_bytes(data)

    @contextlib.contextmanager
    def _untorn(self) -> Iterator[None]:
        """Around all that reads or writes whole messages: an interrupt cuts one in two, and nothing that follows would
        be understood."""
        if self.torn:
            raise self.cut()
        self.torn = True
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.torn = False
            raise self.death() from None
        self.torn = False

    def cut(self) -> WorkerDied:
        """Why nobody can talk to it any more."""
        message = f"the channel to worker {self.index} (pid {self.pid}) was cut by an interrupt"
        return WorkerDied(message, self.index, self.pid, None, self.env_ids)

    def _wake(self) -> None:
        # The twin's worker sleeps on the channel itself.
        if native.KIND == "native":
            self._ring(self.index)

    def receive(self, deadline: Deadline) -> Any:
        while True:
            ready = connection.wait([self._connection, self.sentinel], deadline.left)
            if not ready:
                raise self._timed_out(deadline)
            # Messages first: a worker may have said why it leaves.
            if self._connection in ready or self._connection.poll(0):
                with self._untorn():
                    data = self._connection.recv_bytes()
                if data != DING:
                    return unpack(data)
            else:
                raise self.death()

    def drain(self) -> None:
        """Take in what lies in the channel without waiting: the twin's bell rings there."""
        with contextlib.suppress(WorkerDied, OSError):
            while self._connection.poll(0):
                with self._untorn():
                    data = self._connection.recv_bytes()
                if data != DING:
                    self._file(unpack(data))

    def death(self) -> WorkerDied:
        """What became of the process, in words."""
        assert self._process is not None
        self._process.join(GRACE)
        code = self._process.exitcode
        envs = f"env {self.start}" if len(self.env_ids) == 1 else f"envs {self.start} to {self.stop - 1}"
        message = f"worker {self.index} (pid {self.pid}, {envs}) {_describe_exit(code)}"
        return WorkerDied(message, self.index, self.pid, code, self.env_ids)

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state == "closed":
            return []
        self.ask_to_close()
        self._state = "closed"
        errors: list[tuple[int, Any]] = []
        if self._process is None:
            self._child_end.close()
            self._connection.close()
        else:
            try:
                errors = self._last_words(deadline)
            finally:
                self._force_out(deadline)
                self._process.close()
                self._connection.close()
        return errors

    def ask_to_close(self) -> None:
        if self._state in ("closing", "closed") or self._process is None:
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
        poller.register(self._connection.fileno(), select.POLLOUT)
        return any(event & select.POLLOUT for _, event in poller.poll(0))

    def _last_words(self, deadline: Deadline) -> list[tuple[int, Any]]:
        """What its envs raised in close. A worker that is dead or stuck has none."""
        with contextlib.suppress(Exception):
            while True:
                message = self.receive(deadline)
                if isinstance(message, tuple) and message[0] == "closed":
                    return message[1]  # type: ignore[no-any-return]
        return []

    def _force_out(self, deadline: Deadline) -> None:
        """Wait, then SIGTERM, then SIGKILL: bounded whatever the env does."""
        assert self._process is not None
        left = deadline.left
        self._process.join(GRACE if left is None else min(left, GRACE))
        for end in (self._process.terminate, self._process.kill):
            if self._process.exitcode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                end()
            self._process.join(GRACE)

    def abandon(self) -> None:
        self._state = "closed"
        self._connection.close()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its channel and does not leave"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hints = {
            "SIGKILL": "; the system kills so when memory runs out",
            "SIGSEGV": "; native code of the env crashed",
            "SIGABRT": "; native code of the env gave up",
        }
        return f"was ended by {name}{hints.get(name, '')}"
    return f"left with exit code {code}"


class PipesBell:
    """The twin's bell of the pool: sleeps on all the workers' channels at once."""

    def __init__(self, workers: Sequence[ProcessWorker]):
        self._workers = workers
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def sleep(self, timeout: float | None) -> None:
        channels = [worker.connection for worker in self._workers]
        for ready in connection.wait([*channels, self._reader], timeout):
            if ready == self._reader:
                os.read(self._reader, 4096)
        for worker in self._workers:
            worker.drain()

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._reader)
        os.close(self._writer)


class Supervisor:
    """A thread that sleeps on the workers' sentinels and cries out when one ends."""

    def __init__(self, workers: Sequence[ProcessWorker], cry: Callable[[], None]):
        self._watched = {worker.sentinel: worker for worker in workers}
        self._cry = cry
        self._reader, self._writer = os.pipe()
        self.dead: list[ProcessWorker] = []
        self._thread = threading.Thread(target=self._watch, name="shoal-supervisor", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            ended = connection.wait([*self._watched, self._reader])
            if self._reader in ended:
                return
            self.dead += [self._watched.pop(sentinel) for sentinel in ended if isinstance(sentinel, int)]
            self._cry()

    def close(self) -> None:
        """Stop watching; called before the workers are asked to leave."""
        os.write(self._writer, b"!")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
