"""The thread that carries messages between a pool's slab and the hosts of its envs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.memory.slab import Slab
from shoal.remote.transport import HostLost, Transport
from shoal.remote.wire import is_words
from shoal.remote.worker import RemoteWorker

LARGE = 1 << 18  # bytes; the dispatcher's thread writes longer answers, so that the thread that brought them is free


class Dispatcher:
    """Calls the remote workers of one pool in a thread of its own.

    All work for the thread waits in one queue. So the thread never waits for a caller and callers never wait for it,
    and an interrupt in the caller's thread cannot cut a message in two.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: dict[int, RemoteWorker] = {}
        self._dead: list[RemoteWorker] = []
        self._wake_pool: Callable[[], None] = lambda: None
        self._peek_every: float | None = None
        self._requested: npt.NDArray[np.uint64] | None = None
        self._thread = threading.Thread(target=self._main, name="shoal-dispatcher", daemon=True)
        self._thread.start()

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        """Begin to serve a pool that is ready.

        Args:
            slab: holds the lanes' requests.
            wake_pool: is called when a host is lost.
            step_timeout: hosts that take long are asked every quarter of it what they are doing.
        """
        self._requested, self._wake_pool = slab.array("requested"), wake_pool
        if step_timeout is not None:
            self._peek_every = step_timeout / 4
            self._work.put((lambda: None,))  # the thread waits for work without a limit until now
        if self._dead:
            wake_pool()

    def enlist(self, worker: RemoteWorker) -> None:
        """Serve this worker from now on, in place of an earlier one of its index."""
        self._workers[worker.index] = worker

    # ---- for any thread: these return at once ------------------------------------------------------------------

    def ring(self) -> int:
        """Have new requests posted to the hosts. Returns 0: the caller steps none of the lanes itself.

        The sequence numbers are copied here, in the thread that increases them, so lanes that are requested together
        are posted together.
        """
        if self._requested is not None:
            self._work.put((self._post_requests, self._requested.copy()))
        return 0

    def call(self, worker: RemoteWorker, act: Callable[..., None], *args: Any) -> None:
        """Have the thread call a method of a worker."""
        self._work.put((self._try, worker, act, *args))

    def deliver(self, worker: RemoteWorker, data: Any) -> None:
        """Take a message of a worker's host, or the notice that the host is lost.

        The calling thread writes rows itself if they are few, since waking the dispatcher takes longer than that. The
        notice of a loss is queued, after all that the host has answered before.
        """
        if isinstance(data, HostLost):
            self._work.put((self.lose, worker, data))
        elif len(data) > LARGE or is_words(data):
            self._work.put((self._take, worker, data))
        else:
            self._take(worker, data)

    def dead(self) -> list[RemoteWorker]:
        """The workers whose hosts were lost without being asked to close, and which were not forgotten."""
        return list(self._dead)

    def forget(self, worker: RemoteWorker) -> None:
        """Remove a worker from `dead`."""
        self._dead = [other for other in self._dead if other is not worker]

    def close(self) -> None:
        """End the thread and close the transport."""
        self._work.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.transport.close()

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        peeked = time.monotonic()
        while True:
            left = None
            if self._peek_every is not None:  # also while other hosts keep this thread busy
                left = peeked + self._peek_every - time.monotonic()
                if left <= 0:
                    peeked, left = time.monotonic(), self._peek_every
                    for worker in [one for one in list(self._workers.values()) if one.waiting]:
                        self._try(worker, worker.peek)
            try:
                work = self._work.get(timeout=left)
            except queue.Empty:
                continue
            if work is None:
                return
            work[0](*work[1:])

    def _post_requests(self, requested: npt.NDArray[np.uint64]) -> None:
        for worker in list(self._workers.values()):
            self._try(worker, worker.post_requests, requested)

    def _try(self, worker: RemoteWorker, act: Callable[..., None], *args: Any) -> None:
        """Call a method of a worker. An error loses its host, but not this thread, which the other hosts need."""
        try:
            act(*args)
        except Exception as error:
            self.lose(worker, HostLost(f"could not be asked: {type(error).__name__}: {error}"))

    def _take(self, worker: RemoteWorker, data: Any) -> None:
        try:
            worker.take(data)
        except Exception as error:
            self.lose(worker, HostLost(f"has sent what cannot be read: {type(error).__name__}: {error}"))

    def lose(self, worker: RemoteWorker, lost: HostLost) -> None:
        """Note that a worker's host is lost."""
        running = worker.state in ("starting", "running")
        worker.lose(lost)
        if running:
            self._dead.append(worker)
            self._wake_pool()
