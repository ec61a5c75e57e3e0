"""Watches the worker processes of one pool: learns of their deaths, and what the twin sleeps on while they step."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection

from shoal.backends.processes import ProcessWorker, closed_descriptor
from shoal.support.limits import start_thread

LOOK_AT_MEMORY = 1.0  # seconds between two looks at the workers' memory


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
