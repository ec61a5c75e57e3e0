"""The backends "ray" and "mpi": blocks of envs in hosts that live elsewhere.

The dispatcher is the thread that carries messages between a pool's slab and these hosts.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.backends import registry
from shoal.backends.backend import Backend, BackendSetup, EnvRequest, EnvSource
from shoal.backends.base import BlockSpec, Worker, pickle_blocks, split
from shoal.backends.inline import build_batched
from shoal.backends.threads import EventBell
from shoal.envs.functions import EnvFn, registry_additions
from shoal.memory.slab import Slab
from shoal.remote.transport import HostLost, make_transport
from shoal.remote.wire import is_words, pack_words
from shoal.remote.worker import RemoteWorker

LARGE = 1 << 18  # bytes; the dispatcher's thread writes longer answers, so that the thread that brought them is free


class RemoteBackend(Backend):
    """Each block of envs has a host, to which a transport carries messages.

    One thread, the dispatcher, calls the remote workers of the pool. All work for it waits in one queue. So the thread
    never waits for a caller and callers never wait for it, and an interrupt in the caller's thread cannot cut a message
    in two.
    """

    isolates = takes_options = closes_last = True
    writes_infos = False  # a host sends them as notes

    def __init__(self, setup: BackendSetup):
        super().__init__(setup)
        self.transport = make_transport(self.name, setup.options, setup.num_envs, setup.num_workers)
        self.num_workers = self.transport.num_workers
        self._pickled: dict[int, list[bytes]] = {}
        self._registry: bytes | None = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: dict[int, RemoteWorker] = {}
        self._dead: list[RemoteWorker] = []
        self._wake_pool: Callable[[], None] = lambda: None
        self._peek_every: float | None = None
        self._requested: npt.NDArray[np.uint64] | None = None
        self._thread = threading.Thread(target=self._main, name="shoal-dispatcher", daemon=True)
        try:
            self._local = registry.find(self.transport.local_backend)
            self._thread.start()
        except BaseException:
            self.transport.close()
            raise

    @classmethod
    def gather(cls, request: EnvRequest) -> EnvSource:
        local = request.backend_options.get("local_backend")
        if registry.is_batched(local):
            # Each host makes its own block as one env; how many hosts there are is not known yet.
            return EnvSource(request, (), request.batched_count)
        return super().gather(request)

    @classmethod
    def spin_times(cls) -> tuple[int, int]:
        return 0, 0  # a message takes longer than any wait should spin

    def check_opened(self, on_error: str, step_timeout: float | None) -> None:
        self._local.check_limits(on_error if self._local.batched else "raise", None, None)
        if step_timeout is not None and on_error == "restart" and not self.transport.ends_hung_envs:
            raise ValueError(
                f'step_timeout with on_error="restart": backend="{self.name}" cannot end an env that hangs in a rank; '
                'use backend_options={"local_backend": "processes"}, or on_error="raise"'
            )

    def env_fns_of(self, source: EnvSource) -> Sequence[EnvFn]:
        if not self._local.batched:
            return source.env_fns
        assert self.num_workers is not None
        env, kwargs = source.request.env, source.request.kwargs
        return [
            functools.partial(build_batched, self._local.name, env, stop - start, kwargs, self.transport.local_workers)
            for start, stop in split(source.count, self.num_workers)
        ]

    def prepare(self, blocks: Sequence[BlockSpec]) -> None:
        self._pickled, self._registry = pickle_blocks(blocks), registry_additions()

    def new_worker(self, block: BlockSpec) -> Worker:
        local = {"backend": self.transport.local_backend, "workers": self.transport.local_workers}
        # The first message to a host: which envs it builds, and how it runs them.
        build = pack_words("build", block.index, block.start, self._pickled[block.index], self._registry, local)
        return RemoteWorker(block, build, self)

    def make_bell(self) -> EventBell:
        return EventBell()

    # ---- for any thread: these return at once ------------------------------------------------------------------

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        """Hosts that take long are asked every quarter of `step_timeout` what they are doing."""
        self._requested, self._wake_pool = slab.array("requested"), wake_pool
        if step_timeout is not None:
            self._peek_every = step_timeout / 4
            self._work.put((lambda: None,))  # the thread waits for work without a limit until now
        if self._dead:
            wake_pool()

    def added(self, worker: Worker) -> None:
        """Serve this worker from now on, in place of an earlier one of its index."""
        assert isinstance(worker, RemoteWorker)
        self._workers[worker.index] = worker

    def removed(self, worker: Worker) -> None:
        self._dead = [other for other in self._dead if other is not worker]

    def dead(self) -> Sequence[Worker]:
        return list(self._dead)

    def prompt(self, inline: Any) -> Callable[[], int]:
        return self._ring

    def _ring(self) -> int:
        """Have new requests posted to the hosts. Returns 0: the caller steps none of the lanes itself.

        The sequence numbers are copied here, in the thread that increases them, so lanes that are requested together
        are posted together.
        """
        if self._requested is not None:
            self._work.put((self._post_requests, self._requested.copy()))
        return 0

    def call(self, worker: RemoteWorker, act: Callable[..., None], *args: Any) -> None:
        """Have the thread call a method of a worker."""
        self._work.put((self._try, worker, "could not be asked", act, *args))

    def deliver(self, worker: RemoteWorker, data: Any) -> None:
        """Take a message of a worker's host, or the notice that the host is lost.

        The calling thread writes rows itself if they are few, since waking the dispatcher takes longer than that. The
        notice of a loss is queued, after all that the host has answered before.
        """
        if isinstance(data, HostLost):
            self._work.put((self.lose, worker, data))
            return
        what = worker, "has sent what cannot be read", worker.take, data
        if len(data) > LARGE or is_words(data):
            self._work.put((self._try, *what))
        else:
            self._try(*what)

    def close(self) -> None:
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
                        self._try(worker, "could not be asked", worker.peek)
            try:
                work = self._work.get(timeout=left)
            except queue.Empty:
                continue
            if work is None:
                return
            work[0](*work[1:])

    def _post_requests(self, requested: npt.NDArray[np.uint64]) -> None:
        for worker in list(self._workers.values()):
            self._try(worker, "could not be asked", worker.post_requests, requested)

    def _try(self, worker: RemoteWorker, failed: str, act: Callable[..., None], *args: Any) -> None:
        """Call a method of a worker. An error loses its host, but not this thread, which the other hosts need."""
        try:
            act(*args)
        except Exception as error:
            self.lose(worker, HostLost(f"{failed}: {type(error).__name__}: {error}"))

    def lose(self, worker: RemoteWorker, lost: HostLost) -> None:
        running = worker.state in ("starting", "running")
        worker.lose(lost)
        if running:
            self._dead.append(worker)
            self._wake_pool()


class RayBackend(RemoteBackend):
    """Hosts are actors of a Ray cluster."""

    name = "ray"


class MpiBackend(RemoteBackend):
    """Hosts are ranks of an MPI job, which serve (`shoal.serve`)."""

    name = "mpi"
