"""The backends "ray" and "mpi": blocks of envs in hosts that live elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shoal.backends import registry
from shoal.backends.backend import Backend, BackendSetup, EnvRequest, EnvSource
from shoal.backends.base import BlockSpec, Worker, split
from shoal.backends.inline import build_batched
from shoal.backends.process_backend import pickle_blocks
from shoal.backends.threads import EventBell
from shoal.envs.functions import EnvFn, registry_additions
from shoal.memory.slab import Slab
from shoal.remote.dispatcher import Dispatcher
from shoal.remote.transport import make_transport
from shoal.remote.worker import RemoteWorker, pack_assignment


class RemoteBackend(Backend):
    """Each block of envs has a host, to which a transport carries messages."""

    isolates = takes_options = closes_last = True

    def __init__(self, setup: BackendSetup):
        super().__init__(setup)
        self._transport = make_transport(self.name, setup.options, setup.num_envs, setup.num_workers)
        self.num_workers = self._transport.num_workers
        try:
            self._local = registry.find(self._transport.local_backend)
            self._dispatcher = Dispatcher(self._transport)
        except BaseException:
            self._transport.close()
            raise
        self._pickled: dict[int, list[bytes]] = {}
        self._registry: bytes | None = None

    @classmethod
    def gather(cls, request: EnvRequest) -> EnvSource:
        local = request.backend_options.get("local_backend")
        if registry.is_batched(local):
            # Each host makes its own block as one env; how many hosts there are is not known yet.
            return EnvSource(request, (), request.batched_count)
        return super().gather(request)

    @classmethod
    def spin_times(cls, num_workers: int, cores: int) -> tuple[int, int]:
        return 0, 0  # a message takes longer than any wait should spin

    def check_opened(self, on_error: str, step_timeout: float | None) -> None:
        self._local.check_limits(on_error if self._local.batched else "raise", None, None)
        if step_timeout is not None and on_error == "restart" and not self._transport.ends_hung_envs:
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
            functools.partial(build_batched, self._local.name, env, stop - start, kwargs, self._transport.local_workers)
            for start, stop in split(source.count, self.num_workers)
        ]

    def prepare(self, blocks: Sequence[BlockSpec]) -> None:
        self._pickled, self._registry = pickle_blocks(blocks), registry_additions()

    def new_worker(self, block: BlockSpec) -> Worker:
        local = {"backend": self._transport.local_backend, "workers": self._transport.local_workers}
        assignment = pack_assignment(block.index, block.start, self._pickled[block.index], self._registry, local)
        return RemoteWorker(block.index, block.start, block.stop, assignment, self._dispatcher)

    def make_bell(self) -> EventBell:
        return EventBell()

    def prompt(self, inline: Any) -> Callable[[], int]:
        return self._dispatcher.ring

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        self._dispatcher.watch(slab, wake_pool, step_timeout)

    def added(self, worker: Worker) -> None:
        assert isinstance(worker, RemoteWorker)
        self._dispatcher.enlist(worker)

    def removed(self, worker: Worker) -> None:
        assert isinstance(worker, RemoteWorker)
        self._dispatcher.forget(worker)

    def dead(self) -> Sequence[Worker]:
        return self._dispatcher.dead()

    def close(self) -> None:
        self._dispatcher.close()


class RayBackend(RemoteBackend):
    """Hosts are actors of a Ray cluster."""

    name = "ray"


class MpiBackend(RemoteBackend):
    """Hosts are ranks of an MPI job, which serve (`shoal.serve`)."""

    name = "mpi"
