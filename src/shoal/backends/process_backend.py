"""The backends "processes" and "hybrid": blocks of envs in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shoal.backends.backend import Backend, BackendSetup
from shoal.backends.base import BlockSpec, Worker
from shoal.backends.inline import InlineWorker
from shoal.backends.launch import DEFAULT_START_METHOD
from shoal.backends.processes import ProcessWorker
from shoal.backends.supervisor import PipesBell, Supervisor
from shoal.envs.functions import pickle_env_fns, registry_additions
from shoal.memory.slab import Slab
from shoal.support import processes


class ProcessBackend(Backend):
    """Each block of envs has a process of its own."""

    name = "processes"
    isolates = recycles = True

    def __init__(self, setup: BackendSetup):
        super().__init__(setup)
        self._processes: list[ProcessWorker] = []
        self._supervisor: Supervisor | None = None
        self._bell: PipesBell | None = None
        self._pickled: dict[int, list[bytes]] = {}
        self._registry: bytes | None = None

    def prepare(self, blocks: Sequence[BlockSpec]) -> None:
        self._pickled, self._registry = pickle_blocks(self._travelling(blocks)), registry_additions()

    def _travelling(self, blocks: Sequence[BlockSpec]) -> Sequence[BlockSpec]:
        """The blocks that another process steps."""
        return blocks

    def new_worker(self, block: BlockSpec) -> Worker:
        return self._new_process(block, self.setup.start_method)

    def new_successor(self, block: BlockSpec) -> Worker:
        # By now this process has threads, and a fork would inherit locks that they hold.
        method = self.setup.start_method
        return self._new_process(block, DEFAULT_START_METHOD if method == "fork" else method)

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


class HybridBackend(ProcessBackend):
    """The caller steps the first block itself, while worker processes step the others.

    A caller that sleeps while others work is a core that does nothing.
    """

    name = "hybrid"
    isolates = limits_steps = False

    @classmethod
    def spin_times(cls, num_workers: int, cores: int) -> tuple[int, int]:
        return (0, 0) if num_workers > 2 * cores else (300_000, 300_000)

    def _travelling(self, blocks: Sequence[BlockSpec]) -> Sequence[BlockSpec]:
        return blocks[1:]

    def new_worker(self, block: BlockSpec) -> Worker:
        return InlineWorker(block, self.setup.interrupts) if block.index == 0 else super().new_worker(block)


def pickle_blocks(blocks: Sequence[BlockSpec]) -> dict[int, list[bytes]]:
    """The env functions of each block as bytes, by the block's index. What several envs share is pickled once.

    Raises:
        BadEnv: an env function cannot be pickled.
    """
    env_fns = [env_fn for block in blocks for env_fn in block.env_fns]
    pickled = iter(pickle_env_fns(env_fns, blocks[0].start if blocks else 0))
    return {block.index: [next(pickled) for _ in block.env_fns] for block in blocks}
