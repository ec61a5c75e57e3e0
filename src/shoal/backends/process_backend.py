"""The backends "processes" and "hybrid": blocks of envs in worker processes, and the thread that watches over these."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing import connection
from typing import Any

if sys.platform == "win32":
    raise ImportError("worker processes need Linux, macOS or WSL")

from shoal.backends import launch
from shoal.backends.backend import Backend, BackendSetup
from shoal.backends.base import BlockSpec, Worker, pickle_blocks
from shoal.backends.inline import InlineWorker
from shoal.backends.processes import ProcessWorker, closed_descriptor
from shoal.envs.functions import registry_additions
from shoal.memory.slab import Slab
from shoal.support import processes
from shoal.support.limits import start_thread
from shoal.support.system import system

LOOK_AT_MEMORY = 1.0  # seconds between two looks at the workers' memory


class ProcessBackend(Backend):
    """Each block of envs has a process of its own."""

    name = "processes"
    isolates = recycles = True
    inline_blocks = 0  # how many blocks the caller steps itself

    def __init__(self, setup: BackendSetup):
        super().__init__(setup)
        self._processes: list[ProcessWorker] = []
        self._supervisor: Supervisor | None = None
        self._bell: PipesBell | None = None
        self._pickled: dict[int, list[bytes]] = {}
        self._registry: bytes | None = None

    def prepare(self, blocks: Sequence[BlockSpec]) -> None:
        self._pickled, self._registry = pickle_blocks(blocks[self.inline_blocks :]), registry_additions()

    def new_worker(self, block: BlockSpec) -> Worker:
        if block.index < self.inline_blocks:
            return InlineWorker(block, self.setup.interrupts)
        return self._new_process(block, self.setup.start_method)

    def new_successor(self, block: BlockSpec) -> Worker:
        # By now this process has threads, and a fork would inherit locks that they hold.
        method = self.setup.start_method
        return self._new_process(block, system.start_methods[0] if method == "fork" else method)

    def _new_process(self, block: BlockSpec, start_method: str) -> ProcessWorker:
        worker = ProcessWorker(replace(block, env_fns=self._pickled[block.index]), self._registry, start_method)
        # A fork inherits the channels to those before it, which must not outlive the caller there.
        worker.inherited = [other.connection for other in self._processes]
        return worker

    @property
    def shares_slab(self) -> bool:
        return bool(self._processes)

    def make_bell(self) -> Any:
        if not self._processes:
            return super().make_bell()
        self._bell = PipesBell(self._processes)
        return self._bell

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        if self._processes:
            self._supervisor = Supervisor(self._processes, wake_pool)

    def added(self, worker: Worker) -> None:
        if isinstance(worker, ProcessWorker):
            self._processes.append(worker)
            if self._supervisor is not None:
                self._supervisor.watch(worker)

    def removed(self, worker: Worker) -> None:
        if isinstance(worker, ProcessWorker):
            if self._supervisor is not None:
                self._supervisor.forget(worker)
            if worker in self._processes:
                self._processes.remove(worker)

    def dead(self) -> Sequence[Worker]:
        return () if self._supervisor is None else self._supervisor.dead()

    def stop_watching(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.close()

    def end_descendants(self, workers: Sequence[Worker]) -> None:
        sessions = [worker.session for worker in workers if isinstance(worker, ProcessWorker)]
        processes.end_sessions(dict(session for session in sessions if session is not None))

    def close(self) -> None:
        if self._bell is not None:
            self._bell.close()
        launch.tidy()


class HybridBackend(ProcessBackend):
    """The caller steps the first block itself, while worker processes step the others.

    A caller that sleeps while others work is a core that does nothing.
    """

    name = "hybrid"
    isolates = limits_steps = False
    inline_blocks = 1


class PipesBell:
    """The twin's bell of the pool: sleeps on all the workers' channels at once."""

    def __init__(self, workers: Sequence[ProcessWorker]):
        self._workers = workers
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full, which is as good; or closed, by another thread
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
        self._reader, self._writer = closed_descriptor(self._reader), closed_descriptor(self._writer)


class Supervisor:
    """A thread that sleeps until a worker process ends, then wakes the pool. It also notes the workers' memory."""

    def __init__(self, workers: Sequence[ProcessWorker], wake_pool: Callable[[], None]):
        self._watched = {worker.sentinel: worker for worker in workers}
        self._wake_pool = wake_pool
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        self._leaving = False
        self._dead: list[ProcessWorker] = []
        self._thread = threading.Thread(target=self._watch, name="shoal-supervisor", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            os.close(self._reader)
            os.close(self._writer)
            raise

    def watch(self, worker: ProcessWorker) -> None:
        """Watch over one more."""
        with self._lock:
            self._watched[worker.sentinel] = worker
        os.write(self._writer, b"!")

    def forget(self, worker: ProcessWorker) -> None:
        """Do not watch over it any more: it is about to leave, or was heard of already."""
        with self._lock:
            self._watched = {key: other for key, other in self._watched.items() if other is not worker}
            self._dead = [other for other in self._dead if other is not worker]
        os.write(self._writer, b"!")

    def dead(self) -> list[ProcessWorker]:
        """Those that ended without being asked to, until they are forgotten."""
        with self._lock:
            return list(self._dead)

    def _watch(self) -> None:
        look = time.monotonic()
        while not self._leaving:
            with self._lock:
                watched = dict(self._watched)
            ended = connection.wait([*watched, self._reader], LOOK_AT_MEMORY)
            if self._reader in ended:
                os.read(self._reader, 4096)
            with self._lock:
                # A descriptor may have gone to another worker while we slept: compare before believing it.
                gone = [watched[fd] for fd in watched if fd in ended and self._watched.get(fd) is watched[fd]]
                self._watched = {fd: worker for fd, worker in self._watched.items() if worker not in gone}
                self._dead += gone
                left = list(self._watched.values())
            if gone:
                self._wake_pool()
            if time.monotonic() >= look:
                look = time.monotonic() + LOOK_AT_MEMORY
                for worker in left:
                    worker.look_at_memory()

    def close(self) -> None:
        """Stop watching; called before the workers are asked to leave."""
        self._leaving = True
        os.write(self._writer, b"!")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
