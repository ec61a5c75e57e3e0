"""The workers of one pool as a whole: started together, given one slab, replaced one by one, closed together."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import native
from shoal.backends.backend import Backend, SilentBell
from shoal.backends.base import BlockSpec, Worker, split
from shoal.backends.inline import InlineWorker
from shoal.envs.functions import EnvFn
from shoal.errors import BadEnv, EnvError, PoolClosed, ShoalError, SpaceMismatch, StartError, StepTimeout
from shoal.memory.messages import BlockSummary, LaneGroup, StepperConfig
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.support.limits import explain, start_thread

if TYPE_CHECKING:
    from shoal.engine.timeouts import Patience

MOST_STORIES = 4
AWAY = -1  # in the roster, instead of a process id: the worker is being replaced


class Workers:
    """Workers that own contiguous blocks of envs. Closes its backend.

    Attributes:
        blocks: the lanes of each worker, (start, stop): one for each env, until envs say that they have several.
        groups: what envs with several lanes have said, in their order; empty where all have one.
        inline: the caller's own worker; None where there is none.
        replacements: the workers that are being replaced, by index.

    Args:
        env_fns: one per env; under a batched backend, one that makes them all.
        count: how many workers; under hybrid the caller is one of them, and a batched backend has just the caller.
        first: the number of the first env, and of its lane: other envs of the pool may be elsewhere.
        start_timeout: seconds until a worker that replaces another one must have built its envs.
    """

    def __init__(
        self, backend: Backend, env_fns: Sequence[EnvFn], count: int, first: int = 0, start_timeout: float | None = None
    ):
        self.backend, self._first, self._start_timeout = backend, first, start_timeout
        self._env_blocks = [
            BlockSpec(index, start + first, stop + first, env_fns[start:stop])
            for index, (start, stop) in enumerate(split(len(env_fns), 1 if backend.batched else count))
        ]
        self.blocks = [(block.start, block.stop) for block in self._env_blocks]
        self.groups: list[LaneGroup] = []
        self.replacements: dict[int, Replacement] = {}
        self._all: list[Worker] = []
        self._lock = threading.RLock()  # close may come from another thread while a worker is being replaced
        self._closing = False
        self._pool_bell: Any = SilentBell()
        self._bells: list[Any] = []
        self._summaries: dict[int, BlockSummary] = {}
        try:
            backend.prepare(self._env_blocks)
            for block in self._env_blocks:
                self._all.append(backend.new_worker(block))
                backend.added(self._all[-1])
        except OSError as error:
            self.close(Deadline.after(0))
            raise StartError(
                f"could not make channels to {count} workers: {explain(error)}; use fewer workers"
            ) from error
        self.inline = next((worker for worker in self._all if isinstance(worker, InlineWorker)), None)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Worker:
        return self._all[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._all)

    # ---- start -------------------------------------------------------------------------------------------------

    def build(self, deadline: Deadline, patience: Patience | None = None) -> list[BlockSummary]:
        """Start all workers and wait until their envs are built. `patience` warns of a wait that takes long."""
        try:
            for worker in self._all:
                self.backend.launch(worker, deadline)
            # The caller's own block last, while the others build theirs.
            order = sorted(self._all, key=lambda worker: worker is self.inline)
            self._summaries = _built(order, deadline, patience)
        except ShoalError:
            raise  # which may be an OSError too: a timeout is one, and an env's own may be
        except OSError as error:
            raise StartError(
                f"could not start {len(self)} workers: {explain(error)}; use fewer workers, or raise the limit"
            ) from error
        summaries = [self._summaries[worker.index] for worker in self._all]
        self.backend.check(summaries, self._first)
        self._assign_lanes(summaries)
        return summaries

    def _assign_lanes(self, summaries: Sequence[BlockSummary]) -> None:
        """Give each worker the lanes that its envs have."""
        self.groups = [lanes for summary in summaries for lanes in summary.lanes]
        if not self.groups:
            return
        if not all(summary.lanes for summary in summaries):
            raise BadEnv("some envs have several lanes, and others are single ones: give each kind a pool of its own")
        sizes = [sum(lanes.size for lanes in summary.lanes) for summary in summaries]
        stops = (self._first + np.cumsum(sizes)).tolist()
        self._place([(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)])

    def move_to(self, first: int) -> None:
        """Before it is attached: the first lane has this number, as envs before it may have several each."""
        by, self._first = first - self.blocks[0][0], first
        self._place([(start + by, stop + by) for start, stop in self.blocks])

    def _place(self, blocks: list[tuple[int, int]]) -> None:
        self.blocks = blocks
        for worker, (start, stop) in zip(self._all, blocks, strict=True):
            worker.start, worker.stop = start, stop

    def attach(self, slab: Slab, config: StepperConfig, deadline: Deadline, patience: Patience | None = None) -> None:
        """Give the slab to all workers; afterwards they wait for requests."""
        self._slab, self._config = slab, config
        self._pool_bell = self.backend.make_bell()
        for worker in self._all:
            worker.attach(slab, config, self._pool_bell)
        for worker in self._all:
            _patient(patience, worker.attached, deadline, worker, lambda w: f"worker {w.index} makes ready to step")
            self._write_roster(worker)
        self._bells = [worker.bell for worker in self._all]

    def _write_roster(self, worker: Worker) -> None:
        """Write into the slab which worker owns which lanes, for other processes that look at it."""
        self._slab.array("roster")[worker.index] = worker.pid or 0, worker.start, worker.stop

    def bells(self) -> tuple[list[Any], Any]:
        """What the twin rings (one per worker) and sleeps on."""
        return self._bells, self._pool_bell

    def watch(self, ring: Callable[[int], None], wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        """Begin to watch the workers. `ring` wakes a worker, `wake_pool` the pool."""
        self._ring, self._wake_pool = ring, wake_pool
        for worker in self._all:
            worker.use_ringer(ring)
        self.backend.watch(self._slab, wake_pool, step_timeout)

    def owner_of_lanes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [lanes]: the worker of each lane."""
        sizes = [stop - start for start, stop in self.blocks]
        owner = np.repeat(np.arange(len(self.blocks), dtype=np.int32), sizes)
        return np.concatenate([np.zeros(self.blocks[0][0], np.int32), owner])

    # ---- replacing one -----------------------------------------------------------------------------------------

    def dead(self) -> list[Worker]:
        """Workers that ended without being asked to, and were not replaced yet."""
        return list(self.backend.dead())

    def is_away(self, index: int) -> bool:
        """Whether this worker is being replaced, and hears nothing."""
        return index in self.replacements

    def replace(self, old: Worker, delay: float, states: Mapping[int, Any] | None = None) -> None:
        """Begin, after `delay` seconds, to start a worker for the block of one that is gone; wakes the pool when done,
        see `finished`. `states` are the saved states of envs that shall go on as they were."""
        with self._lock:
            if self._closing:
                raise PoolClosed("the pool is being closed")
            self._remove(old)
            start = functools.partial(self._start_successor, old, states or {})
            self.replacements[old.index] = Replacement(old, delay, start, self._wake_pool)

    def retire(self, old: Worker, deadline: Deadline, states: Mapping[int, Any]) -> None:
        """Ask a worker to leave, and begin to replace it."""
        self._remove(old)
        old.close(deadline)
        self.backend.end_descendants([old])
        self.replace(old, 0.0, states)

    def _remove(self, old: Worker) -> None:
        self.backend.removed(old)
        self._bells[old.index] = SilentBell()
        self._slab.array("roster")[old.index, 0] = AWAY

    def _start_successor(self, old: Worker, states: Mapping[int, Any], replacement: Replacement) -> None:
        """In the replacement's thread: start a new worker for the block, up to where it is ready to step."""
        index = old.index
        deadline = Deadline.after(self._start_timeout)
        worker = replacement.worker = self.backend.new_successor(self._env_blocks[index])
        self.backend.launch(worker, deadline)
        summary = _built([worker], deadline)[index]
        if _shape(summary) != _shape(self._summaries[index]):
            raise SpaceMismatch(f"the envs of worker {index} have other spaces than before its restart")
        worker.start, worker.stop = self.blocks[index]
        # Nothing else writes there now: the old worker is gone, and lanes are not sent to while it is away.
        for field in ("worker_bells", "mail"):
            self._slab.array(field)[index] = 0
        self._slab.array("stats")[index, [native.STAT_AT, native.STAT_SINCE_NS]] = 0
        worker.attach(self._slab, self._config, self._pool_bell)
        worker.attached(deadline)
        worker.use_ringer(self._ring)
        worker.inherit(old)
        self._write_roster(worker)
        if states:
            for value in worker.reply(worker.call("load", list(states), list(states.values())), deadline):
                if isinstance(value, PackedError):
                    raise StartError(f"worker {index}: an env could not be moved: {value.summary}")

    def finished(self) -> list[Replacement]:
        """The replacements that have ended since the last look; those that succeeded are at work."""
        with self._lock:
            ended = [one for one in self.replacements.values() if one.over] if not self._closing else []
            for replacement in ended:
                self._take_over(replacement)
        return ended

    def _take_over(self, replacement: Replacement) -> None:
        replacement.wait(None)
        index, worker = replacement.old.index, replacement.worker
        del self.replacements[index]
        if replacement.error is None and worker is not None:
            self._all[index] = worker
            self._bells[index] = worker.bell
            self.backend.added(worker)

    # ---- end ---------------------------------------------------------------------------------------------------

    def close(
        self, deadline: Deadline, until_alone: Callable[[Deadline], None] = lambda deadline: None
    ) -> list[tuple[int, Any]]:
        """Close all envs and end all workers; the errors of envs' close, by env id.

        `until_alone` waits for another thread that may be stepping the caller's own block, which is closed last: when
        the other workers are gone, that thread waits for none of them.
        """
        with self._lock:
            self._closing = True
            replacements, self.replacements = list(self.replacements.values()), {}
        workers = [*self._all, *(one.worker for one in replacements if one.worker is not None)]
        errors: list[tuple[int, Any]] = []
        self._pool_bell = SilentBell()
        with contextlib.ExitStack() as stack:  # each step, whatever becomes of the ones before it; the last one first
            stack.callback(self.backend.end_descendants, workers)
            stack.callback(self.backend.close)
            for worker in sorted(self._all, key=lambda worker: not isinstance(worker, InlineWorker)):
                stack.callback(self._close_one, worker, deadline, errors)
                if isinstance(worker, InlineWorker):
                    stack.callback(until_alone, deadline)
            for worker in self._all:
                stack.callback(_quietly, worker.ask_to_close)
            stack.callback(self.backend.stop_watching)
            for replacement in replacements:
                stack.callback(replacement.cancel)
        return sorted(errors, key=lambda one: one[0])

    def _close_one(self, worker: Worker, deadline: Deadline, errors: list[tuple[int, Any]]) -> None:
        # Who was not given any time does not hang; and to ask where one is takes a moment.
        worker.explains = deadline.seconds != 0 and len(self.hung()) < MOST_STORIES
        errors.extend(worker.close(deadline))

    def hung(self) -> list[str]:
        """What those were doing that `close` had to end by force; not all of them, where they are many."""
        return [worker.hung for worker in self._all if worker.hung]

    def abandon(self) -> None:
        """In a forked child: give up the descriptors, leave the workers to the process that owns them."""
        for worker in self._all:
            worker.abandon()


class Replacement:
    """A thread that starts one worker in the place of another one, while the rest of the pool goes on.

    After `delay` seconds, `start` starts the worker, and puts it into `worker`; then the pool is woken.
    """

    def __init__(self, old: Worker, delay: float, start: Callable[[Replacement], None], wake_pool: Callable[[], None]):
        self.old = old  # the worker that is gone
        self.worker: Worker | None = None  # the new one, as soon as there is one
        self.error: ShoalError | None = None  # why there will be none
        self.over = False  # whether the thread is done
        self._delay, self._start, self._wake_pool = delay, start, wake_pool
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shoal-replacement-{old.index}", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        try:
            if not self._cancelled.wait(self._delay):
                self._start(self)
        except Exception as error:
            why = explain(error) if isinstance(error, OSError) else error
            text = f"worker {self.old.index} could not be started again: {why}"
            self.error = error if isinstance(error, ShoalError) else StartError(text)
            if self.worker is not None:
                self.worker.close(Deadline.after(0))
        finally:  # without this word the pool would wait for ever
            self.over = True
            self._wake_pool()

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


def _patient(
    patience: Patience | None,
    wait: Callable[[Deadline], Any],
    deadline: Deadline,
    worker: Worker,
    story: Callable[[Worker], str],
) -> Any:
    return wait(deadline) if patience is None else patience.wait(wait, worker, lambda: story(worker))


def _built(workers: Sequence[Worker], deadline: Deadline, patience: Patience | None = None) -> dict[int, BlockSummary]:
    """What each worker says of its envs, by its index, once they are built.

    At the deadline all other workers are still asked, so that the error names each env that is not built, and only
    those: a worker that was merely started later than another must not be blamed for it.
    """
    summaries: dict[int, BlockSummary] = {}
    late: list[Worker] = []
    for worker in workers:
        if late and isinstance(worker, InlineWorker):
            break  # its envs would be built here and now
        try:
            summaries[worker.index] = _patient(patience, worker.built, deadline, worker, Worker.describe_late_start)
        except StepTimeout as error:
            if isinstance(error, EnvError):
                raise  # the env's own
            late.append(worker)
    if late:
        envs = [env_id for worker in late for env_id in range(worker.building or worker.start, worker.stop)]
        late.sort(key=lambda worker: worker.building is None)
        words = "; ".join(worker.describe_late_start() for worker in late)
        raise StepTimeout(f"not all envs were built within {deadline.seconds} s: {words}", envs)
    return summaries


def _quietly(act: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        act()


def _shape(summary: BlockSummary) -> Any:
    return [summary.spaces[which] for which in summary.which], summary.lanes
