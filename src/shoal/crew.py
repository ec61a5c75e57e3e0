"""The workers of one pool as a whole: hired together, given one slab, dismissed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.adapters.gymnasium import EnvFn, pickle_env_fns, registry_additions
from shoal.backends.base import Worker, split
from shoal.backends.inline import InlineWorker, SilentBell
from shoal.backends.processes import PipesBell, ProcessWorker, Supervisor
from shoal.backends.threads import EventBell, ThreadWorker
from shoal.block import StepperConfig, Summary
from shoal.deadline import Deadline
from shoal.errors import StartError
from shoal.slab import Slab

__all__ = ["BACKENDS", "Crew"]

BACKENDS = ("serial", "threads", "processes", "hybrid")


class Crew:
    """Workers that own contiguous blocks of envs.

    Args:
        env_fns: one per env.
        backend: one of BACKENDS.
        count: how many workers; under hybrid the caller is one of them.
    """

    def __init__(self, env_fns: Sequence[EnvFn], backend: str, count: int, start_method: str):
        self.blocks = split(len(env_fns), count)
        self._backend = backend
        self.workers: list[Worker] = []
        self._supervisor: Supervisor | None = None
        self._pool_bell: Any = SilentBell()
        try:
            self._hire(env_fns, start_method)
        except OSError as error:
            self.dismiss(Deadline.after(0))
            raise StartError(f"could not make channels to {count} workers: {error}; use fewer workers") from error
        self.processes = [worker for worker in self.workers if isinstance(worker, ProcessWorker)]
        self.inline = next((worker for worker in self.workers if isinstance(worker, InlineWorker)), None)

    def _hire(self, env_fns: Sequence[EnvFn], start_method: str) -> None:
        pickled: list[bytes] = []
        registry = None
        if self._backend in ("processes", "hybrid"):
            own = self.blocks[0][1] if self._backend == "hybrid" else 0
            pickled = [b""] * own + pickle_env_fns(env_fns[own:], own)
            registry = registry_additions()
        for index, (start, stop) in enumerate(self.blocks):
            if self._backend == "threads":
                worker: Worker = ThreadWorker(index, start, stop, env_fns[start:stop])
            elif self._backend == "serial" or (self._backend == "hybrid" and index == 0):
                worker = InlineWorker(index, start, stop, env_fns[start:stop])
            else:
                worker = ProcessWorker(index, start, stop, pickled[start:stop], registry, start_method)
            self.workers.append(worker)

    @property
    def shared(self) -> bool:
        """Whether the slab must be visible to other processes."""
        return bool(self.processes)

    def build(self, deadline: Deadline) -> list[Summary]:
        """Start all workers and wait until their envs are built."""
        try:
            for worker in self.workers:
                self._launch(worker)
            # The caller's own block last, while the others build theirs.
            order = sorted(self.workers, key=lambda worker: worker is self.inline)
            summaries = {worker.index: worker.built(deadline) for worker in order}
        except OSError as error:
            if hasattr(error, "env_id"):
                raise  # the env's own
            raise StartError(
                f"could not start {len(self.workers)} workers: {error}; use fewer workers, or raise the limit "
                "that it names"
            ) from error
        return [summaries[worker.index] for worker in self.workers]

    def _launch(self, worker: Worker) -> None:
        if isinstance(worker, ProcessWorker):
            # A fork inherits the channels to those before it, which must not outlive the caller there.
            worker.launch([other.connection.fileno() for other in self.processes if other is not worker])
        else:
            worker.launch()

    def attach(self, slab: Slab, config: StepperConfig, deadline: Deadline) -> None:
        """Give the slab to everybody; afterwards they wait for requests."""
        if self.processes:
            self._pool_bell = PipesBell(self.processes)
        elif self._backend == "threads":
            self._pool_bell = EventBell()
        for worker in self.workers:
            worker.attach(slab, config, self._pool_bell)
        for worker in self.workers:
            worker.attached(deadline)

    def bells(self) -> tuple[list[Any], Any]:
        """What the twin rings (one per worker) and sleeps on."""
        return [worker.bell for worker in self.workers], self._pool_bell

    def watch(self, ring: Callable[[int], None], cry: Callable[[], None]) -> None:
        """Begin to watch over the processes. `ring` wakes a worker, `cry` the pool."""
        for worker in self.workers:
            if isinstance(worker, ProcessWorker | ThreadWorker):
                worker.use_ringer(ring)
        if self.processes:
            self._supervisor = Supervisor(self.processes, cry)

    @property
    def dead(self) -> list[ProcessWorker]:
        """Processes that ended without being asked to."""
        return [] if self._supervisor is None else list(self._supervisor.dead)

    def owner_of_lanes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [lanes]: the worker of each lane."""
        sizes = [stop - start for start, stop in self.blocks]
        return np.repeat(np.arange(len(self.blocks), dtype=np.int32), sizes)

    def dismiss(self, deadline: Deadline) -> list[tuple[int, Any]]:
        """Close all envs and end all workers; the errors of envs' close, by env id."""
        if self._supervisor is not None:
            self._supervisor.close()
            self._supervisor = None
        for worker in self.workers:
            with contextlib.suppress(Exception):
                worker.ask_to_close()
        errors = [error for worker in self.workers for error in worker.close(deadline)]
        if isinstance(self._pool_bell, PipesBell):
            self._pool_bell.close()
            self._pool_bell = SilentBell()
        return errors

    def abandon(self) -> None:
        """In a forked child: give up the descriptors, leave the workers to the process that owns them."""
        for worker in self.workers:
            worker.abandon()
