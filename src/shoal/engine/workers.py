"""The workers of one pool as a whole: hired together, given one slab, replaced one by one, dismissed together."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal import native
from shoal.backends.base import Worker, split
from shoal.backends.inline import InlineWorker, SilentBell
from shoal.backends.launch import DEFAULT_START_METHOD
from shoal.backends.processes import PipesBell, ProcessWorker, Supervisor
from shoal.backends.threads import EventBell, ThreadWorker
from shoal.envs.batched import BATCHED
from shoal.envs.functions import EnvFn, pickle_env_fns, registry_additions
from shoal.errors import BadEnv, PoolClosed, ShoalError, SpaceMismatch, StartError
from shoal.memory.messages import BlockSummary, LaneGroup, StepperConfig
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.remote.dispatcher import REMOTE, Dispatcher, RemoteWorker, Transport, pack_assignment
from shoal.support import processes
from shoal.support.deadline import Deadline
from shoal.worker.single import refuse_shared

__all__ = ["BACKENDS", "Replacement", "Workers"]

AWAY = -1  # in the roster, instead of a process id: it is being replaced
BACKENDS = ("serial", "threads", "processes", "hybrid", *BATCHED, *REMOTE)


class Workers:
    """Workers that own contiguous blocks of envs.

    Attributes:
        blocks: the lanes of each worker, (start, stop): one for each env, until envs say that they have several.
        groups: what envs with several lanes have said, in their order; empty where all have one.

    Args:
        env_fns: one per env; under a batched backend, one that makes them all.
        backend: one of BACKENDS.
        count: how many workers; under hybrid the caller is one of them, and a batched backend has just the caller.
        start_timeout: seconds until a worker that is hired later must have built its envs.
        transport: carries messages to the workers that live elsewhere; the workers closes it.
        first: the number of the first env, and of its lane: other envs of the pool may be elsewhere.
        interrupts: whether Ctrl-C may come to the thread that steps the caller's own block.
    """

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        backend: str,
        count: int,
        start_method: str,
        start_timeout: float | None = None,
        transport: Transport | None = None,
        first: int = 0,
        interrupts: bool = True,
    ):
        self._first, self._interrupts = first, interrupts
        self._env_blocks = split(len(env_fns), 1 if backend in BATCHED else count)
        self.blocks = [(start + first, stop + first) for start, stop in self._env_blocks]
        self._dispatcher = None if transport is None else Dispatcher(transport)
        self.groups: list[LaneGroup] = []
        self._backend, self._start_method, self._start_timeout = backend, start_method, start_timeout
        self._all: list[Worker] = []
        self.processes: list[ProcessWorker] = []
        self.repairs: dict[int, Replacement] = {}
        self._lock = threading.RLock()  # close may come from another thread while a worker is being replaced
        self._closing = False
        self._supervisor: Supervisor | None = None
        self._pool_bell: Any = SilentBell()
        self._bells: list[Any] = []
        self._summaries: dict[int, BlockSummary] = {}
        self._pickled: list[bytes] = []
        self._registry: bytes | None = None
        try:
            self._hire(env_fns)
        except OSError as error:
            self.dismiss(Deadline.after(0))
            raise StartError(f"could not make channels to {count} workers: {error}; use fewer workers") from error
        except BaseException:
            if self._dispatcher is not None:
                self._dispatcher.close()
            raise
        self.inline = next((worker for worker in self._all if isinstance(worker, InlineWorker)), None)

    def _hire(self, env_fns: Sequence[EnvFn]) -> None:
        if self._backend in ("processes", "hybrid", *REMOTE):
            own = self._env_blocks[0][1] if self._backend == "hybrid" else 0
            self._pickled = [b""] * own + pickle_env_fns(env_fns[own:], own + self._first)
            self._registry = registry_additions()
        for index, (start, stop) in enumerate(self._env_blocks):
            if self._backend == "threads":
                self._all.append(ThreadWorker(index, *self.blocks[index], env_fns[start:stop]))
            elif self._backend in ("serial", *BATCHED) or (self._backend == "hybrid" and index == 0):
                self._all.append(InlineWorker(index, *self.blocks[index], env_fns[start:stop], self._interrupts))
            else:
                self._all.append(self._new_isolated(index, self._start_method))
                self._take_in(self._all[-1])

    def _new_isolated(self, index: int, start_method: str) -> ProcessWorker | RemoteWorker:
        """A worker that lives in another process, here or elsewhere."""
        start, stop = self._env_blocks[index]
        env_fns, first, last = self._pickled[start:stop], start + self._first, stop + self._first
        if self._dispatcher is None:
            return ProcessWorker(index, first, last, env_fns, self._registry, start_method)
        transport = self._dispatcher.transport
        local = {"backend": transport.local_backend, "workers": transport.local_workers}
        assignment = pack_assignment(index, first, env_fns, self._registry, local)
        return RemoteWorker(index, first, last, assignment, self._dispatcher)

    def _take_in(self, worker: Worker) -> None:
        """One more that must be looked after."""
        if isinstance(worker, ProcessWorker):
            self.processes.append(worker)
            if self._supervisor is not None:
                self._supervisor.watch(worker)
        elif isinstance(worker, RemoteWorker) and self._dispatcher is not None:
            self._dispatcher.enlist(worker)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Worker:
        return self._all[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    @property
    def prompt(self) -> Callable[[], int] | None:
        """To be called when lanes were asked for something, before it is waited for; None where bells do."""
        if self._dispatcher is not None:
            return self._dispatcher.ring
        return None if self.inline is None else self.inline.run

    @property
    def shared(self) -> bool:
        """Whether the slab must be visible to other processes."""
        return bool(self.processes)

    def build(self, deadline: Deadline) -> list[BlockSummary]:
        """Start all workers and wait until their envs are built."""
        try:
            for worker in self._all:
                self._launch(worker)
            # The caller's own block last, while the others build theirs.
            order = sorted(self._all, key=lambda worker: worker is self.inline)
            self._summaries = {worker.index: worker.built(deadline) for worker in order}
        except ShoalError:
            raise  # which may be an OSError too: a timeout is one, and an env's own may be
        except OSError as error:
            raise StartError(
                f"could not start {len(self._all)} workers: {error}; use fewer workers, or raise the limit "
                "that it names"
            ) from error
        summaries = [self._summaries[worker.index] for worker in self._all]
        if self._backend == "threads":
            seen: dict[int, int] = {}
            everybody = [identity for summary in summaries for identity in summary.identities]
            for env_id, identity in enumerate(everybody, self._first):
                refuse_shared(seen, identity, env_id)
        self._settle(summaries)
        return summaries

    def _settle(self, summaries: Sequence[BlockSummary]) -> None:
        """Give each worker the lanes that its envs have."""
        self.groups = [lanes for summary in summaries for lanes in summary.lanes]
        if not self.groups:
            return
        if not all(summary.lanes for summary in summaries):
            raise BadEnv("some envs have several lanes, and others are single ones: give each kind a pool of its own")
        sizes = [sum(lanes.size for lanes in summary.lanes) for summary in summaries]
        stops = (self._first + np.cumsum(sizes)).tolist()
        self.blocks = [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        for worker, (start, stop) in zip(self._all, self.blocks, strict=True):
            worker.start, worker.stop = start, stop

    def move_to(self, first: int) -> None:
        """Before it is attached: the first lane has this number, as envs before it may have several each."""
        by, self._first = first - self.blocks[0][0], first
        self.blocks = [(start + by, stop + by) for start, stop in self.blocks]
        for worker, (start, stop) in zip(self._all, self.blocks, strict=True):
            worker.start, worker.stop = start, stop

    def _launch(self, worker: Worker) -> None:
        if isinstance(worker, ProcessWorker):
            # A fork inherits the channels to those before it, which must not outlive the caller there.
            worker.launch([other.connection.fileno() for other in self.processes if other is not worker])
        else:
            worker.launch()

    def attach(self, slab: Slab, config: StepperConfig, deadline: Deadline) -> None:
        """Give the slab to everybody; afterwards they wait for requests."""
        self._slab, self._config = slab, config
        if self.processes:
            self._pool_bell = PipesBell(self.processes)
        elif self._backend == "threads" or self._dispatcher is not None:
            self._pool_bell = EventBell()
        for worker in self._all:
            worker.attach(slab, config, self._pool_bell)
        for worker in self._all:
            worker.attached(deadline)
            self._enlist(worker)
        self._bells = [worker.bell for worker in self._all]

    def _enlist(self, worker: Worker) -> None:
        """Write into the slab who owns which lanes, for those who look at it from elsewhere."""
        self._slab.array("roster")[worker.index] = worker.pid or 0, worker.start, worker.stop

    def bells(self) -> tuple[list[Any], Any]:
        """What the twin rings (one per worker) and sleeps on."""
        return self._bells, self._pool_bell

    def watch(
        self, ring: Callable[[int], None], wake_pool: Callable[[], None], step_timeout: float | None = None
    ) -> None:
        """Begin to watch over those that live elsewhere. `ring` wakes a worker, `wake_pool` the pool."""
        self._ring, self._wake_pool = ring, wake_pool
        for worker in self._all:
            if isinstance(worker, ProcessWorker | ThreadWorker):
                worker.use_ringer(ring)
        if self.processes:
            self._supervisor = Supervisor(self.processes, wake_pool)
        if self._dispatcher is not None:
            self._dispatcher.watch(self._slab, wake_pool, step_timeout)

    def owner_of_lanes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [lanes]: the worker of each lane."""
        sizes = [stop - start for start, stop in self.blocks]
        owner = np.repeat(np.arange(len(self.blocks), dtype=np.int32), sizes)
        return np.concatenate([np.zeros(self.blocks[0][0], np.int32), owner])

    # ---- replacing one -----------------------------------------------------------------------------------------

    def dead(self) -> list[Worker]:
        """Workers that ended without being asked to, and were not replaced yet."""
        watching = self._supervisor or self._dispatcher
        return [] if watching is None else list(watching.dead())

    def is_away(self, index: int) -> bool:
        """Whether this worker is being replaced, and hears nothing."""
        return index in self.repairs

    def replace(self, old: Worker, delay: float, states: Mapping[int, Any] | None = None) -> None:
        """Begin to hire somebody for the block of a worker that is gone; cries when done, see `finished`.

        Args:
            delay: seconds to wait before.
            states: the saved states of envs that shall go on as they were.
        """
        with self._lock:
            if self._closing:
                raise PoolClosed("the pool is being closed")
            self._take_off(old)
            start = functools.partial(self._start_again, old, states or {})
            self.repairs[old.index] = Replacement(old, delay, start, self._wake_pool)

    def retire(self, old: ProcessWorker, deadline: Deadline, states: Mapping[int, Any]) -> None:
        """Ask a worker to leave, and begin to replace it."""
        self._take_off(old)
        old.close(deadline)
        self._end_families([old])
        self.replace(old, 0.0, states)

    def _take_off(self, old: Worker) -> None:
        if isinstance(old, ProcessWorker):
            if self._supervisor is not None:
                self._supervisor.forget(old)
            if old in self.processes:
                self.processes.remove(old)
        elif self._dispatcher is not None and isinstance(old, RemoteWorker):
            self._dispatcher.forget(old)
        self._bells[old.index] = SilentBell()
        self._slab.array("roster")[old.index, 0] = AWAY

    def _start_again(self, old: Worker, states: Mapping[int, Any], repair: Replacement) -> None:
        """In the repair's thread: a new worker for the block, ready to step."""
        index = old.index
        deadline = Deadline.after(self._start_timeout)
        # By now this process has threads, and a fork would inherit locks that they hold.
        method = DEFAULT_START_METHOD if self._start_method == "fork" else self._start_method
        worker = repair.worker = self._new_isolated(index, method)
        self._launch(worker)
        summary = worker.built(deadline)
        if _shape(summary) != _shape(self._summaries[index]):
            raise SpaceMismatch(f"the envs of worker {index} have other spaces than before its restart")
        worker.start, worker.stop = self.blocks[index]
        # Nobody else writes there now: the old worker is gone, and lanes are not sent to while it is away.
        for field in ("worker_bells", "mail"):
            self._slab.array(field)[index] = 0
        self._slab.array("stats")[index, [native.STAT_AT, native.STAT_SINCE_NS]] = 0
        worker.attach(self._slab, self._config, self._pool_bell)
        worker.attached(deadline)
        if isinstance(worker, ProcessWorker):
            worker.use_ringer(self._ring)
        worker.inherit(old)
        self._enlist(worker)
        if states:
            for value in worker.reply(worker.call("load", list(states), list(states.values())), deadline):
                if isinstance(value, PackedError):
                    raise StartError(f"worker {index}: an env could not be moved: {value.summary}")

    def finished(self) -> list[Replacement]:
        """The repairs that have ended since the last look; those that succeeded are at work."""
        with self._lock:
            ended = [repair for repair in self.repairs.values() if repair.over] if not self._closing else []
            for repair in ended:
                self._take_on(repair)
        return ended

    def _take_on(self, repair: Replacement) -> None:
        repair.wait(None)
        index, worker = repair.old.index, repair.worker
        del self.repairs[index]
        if repair.error is None and worker is not None:
            self._all[index] = worker
            self._bells[index] = worker.bell
            self._take_in(worker)

    # ---- end ---------------------------------------------------------------------------------------------------

    def dismiss(self, deadline: Deadline) -> list[tuple[int, Any]]:
        """Close all envs and end all workers; the errors of envs' close, by env id."""
        with self._lock:
            self._closing = True
            repairs, self.repairs = list(self.repairs.values()), {}
            supervisor, self._supervisor = self._supervisor, None
        workers = [*self._all, *(repair.worker for repair in repairs if repair.worker is not None)]
        errors: list[tuple[int, Any]] = []
        with contextlib.ExitStack() as stack:  # each step, whatever becomes of the ones before it
            stack.callback(self._end_families, workers)
            if self._dispatcher is not None:
                stack.callback(self._dispatcher.close)
            if isinstance(self._pool_bell, PipesBell):
                stack.callback(self._pool_bell.close)
                self._pool_bell = SilentBell()
            for worker in reversed(self._all):
                stack.callback(_close_into, errors, worker, deadline)
            for worker in self._all:
                stack.callback(_quietly, worker.ask_to_close)
            if supervisor is not None:
                stack.callback(supervisor.close)
            for repair in repairs:
                stack.callback(repair.cancel)
        return errors

    @staticmethod
    def _end_families(workers: Sequence[Worker]) -> None:
        """End what the envs have started and not ended."""
        families = [worker.family for worker in workers if isinstance(worker, ProcessWorker)]
        processes.end_sessions(dict(family for family in families if family is not None))

    def abandon(self) -> None:
        """In a forked child: give up the descriptors, leave the workers to the process that owns them."""
        for worker in self._all:
            worker.abandon()


class Replacement:
    """A thread that hires one worker, so that nobody waits for it who need not."""

    def __init__(
        self,
        old: Worker,
        delay: float,
        start: Callable[[Replacement], None],
        wake_pool: Callable[[], None],
    ):
        self.old = old
        self.worker: ProcessWorker | RemoteWorker | None = None
        self.error: ShoalError | None = None
        self.over = False
        self._delay, self._start, self._wake_pool = delay, start, wake_pool
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-repair-{old.index}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if not self._cancelled.wait(self._delay):
                self._start(self)
        except ShoalError as error:
            self._undo(error)
        except Exception as error:
            self._undo(StartError(f"worker {self.old.index} could not be started again: {error}"))
        self.over = True
        self._wake_pool()

    def _undo(self, error: ShoalError) -> None:
        self.error = error
        if self.worker is not None:
            self.worker.close(Deadline.after(0))

    def wait(self, seconds: float | None) -> bool:
        """Whether it is over by then."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Stop it, whatever it has come to, and leave nothing behind."""
        self._cancelled.set()
        while self._thread.is_alive():
            if self.worker is not None:
                self.worker.condemn("was ended because the pool is being closed")
            self._thread.join(0.05)
        if self.worker is not None:
            self.worker.close(Deadline.after(1.0))


def _close_into(errors: list[tuple[int, Any]], worker: Worker, deadline: Deadline) -> None:
    errors += worker.close(deadline)


def _quietly(act: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        act()


def _shape(summary: BlockSummary) -> Any:
    return [summary.spaces[which] for which in summary.which], summary.lanes
