"""Keeps a pool going while envs and workers are lost and replaced.

A lane is **due** when its env was lost: its next request becomes an order to its new env (messages.Order), and the
answer reports the loss once. A request is **held** when it cannot be posted now, because its worker is being replaced
or must rest. Only the caller writes to the lanes of a worker that is gone, so their sequence numbers stay in order: the
old worker can no longer answer what it was asked, and the new one is asked under a new number.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from shoal import native
from shoal.backends.base import Worker
from shoal.engine.lane_table import HeldRequest, LaneTable
from shoal.engine.restarts import Loss, Recycling, Restarts
from shoal.engine.workers import Replacement
from shoal.errors import ShoalError, StartError, StepTimeout, WorkerDied
from shoal.memory.messages import STATUS_ERROR, STATUS_NOTE, Order
from shoal.memory.packed_errors import PackedError
from shoal.native.counters import POOL_RESTARTS
from shoal.options import PoolOptions
from shoal.support.checks import Ids
from shoal.support.deadline import Deadline

log = logging.getLogger("shoal")
NEVER_SEEN = 255  # no frame has this number
SAVE_TIMEOUT = 30.0  # seconds for the envs of a worker that is to be recycled to say how they are


class Recovery:
    """The losses, and the requests that wait until the losses are made good.

    Attributes:
        mends: whether lost envs are replaced; otherwise the pool is closed when a worker dies.
        troubled: whether anything is out of the ordinary: due, held, away or about to be recycled.

    Args:
        resets_at_once: whether an answer that ends an episode brings the next one's first observation along.
        on_death: closes the pool; returns the error to raise.
    """

    def __init__(
        self, table: LaneTable, options: PoolOptions, resets_at_once: bool, on_death: Callable[[ShoalError], ShoalError]
    ):
        self.restarts = Restarts(table.count, options.max_restarts, options.restart_window)
        self.mends, self._resets_at_once = options.on_error == "restart", resets_at_once
        self._recycle_after = options.recycle_after
        self.troubled = False
        self._table, self._busy, self._workers = table, table.busy, table.workers
        self._frames, self._groups, self._on_death = table.answers, table.groups, on_death
        self._told: dict[int, Loss] = {}  # what the last order of a lane was about
        self._asked: dict[int, HeldRequest] = {}  # the last request of a lane that was no plain step
        self._pool_stats = table.slab.array("pool_stats")
        # Where the last answer is that the caller has seen.
        self._seen_slot = np.full(table.count, NEVER_SEEN, np.uint8)
        self._failed: list[Replacement] = []  # those that must be tried again
        self._recycling = Recycling(options.recycle_after, table.workers)

    # ---- requests ----------------------------------------------------------------------------------------------

    def sort_out(self, ids: Ids) -> tuple[Ids, list[int]]:
        """Those of the lanes that can be posted now, and those that must be held."""
        later = [lane for lane in ids.tolist() if lane in self.restarts.due or self._is_cut_off(lane)]
        return (ids[~np.isin(ids, later)], later) if later else (ids, later)

    def _is_away(self, index: int) -> bool:
        """Whether this worker is being replaced, or is about to be."""
        return self._workers.is_away(index) or index in self._recycling.leaving

    def _is_cut_off(self, lane: int) -> bool:
        """Whether the worker of a lane is away."""
        return self._is_away(int(self._table.owner[lane]))

    def hold(self, lane: int, request: HeldRequest) -> None:
        """Keep a request until its worker is there and its time has come."""
        self._busy.hold(lane, request)
        self.troubled = True

    def resets(self, asked: dict[int, tuple[int | None, dict[str, Any] | None]]) -> None:
        """Note resets that are asked for, in case that they have to be asked for again: seed and options, by lane."""
        for lane, (seed, options) in asked.items():
            self._asked[lane] = HeldRequest(native.OP_RESET, seed, options)
            if seed is not None:
                self.restarts.seeds[lane] = seed

    def next_release_ns(self) -> int | None:
        """When something that is held may be posted at the latest; None where the pool will be woken."""
        if self._recycling.leaving:
            return time.monotonic_ns() + 5_000_000
        times = [held.not_before_ns for lane, held in self._busy.held.items() if not self._is_cut_off(lane)]
        return min(times, default=None)

    def release(self, tell: Callable[..., bool]) -> None:
        """Post what was held and need not be any longer. `tell` takes a message to a worker, if that is still there."""
        self.note_posted()
        now = time.monotonic_ns()
        posts: dict[int, list[int]] = {native.OP_STEP: [], native.OP_RESET: [], native.OP_RESTART: []}
        with self._table.core:  # workers are talked to by one thread at a time
            self._recycle()
            for lane, held in list(self._busy.held.items()):
                if held.not_before_ns > now or self._is_cut_off(lane):
                    continue
                if self._prepare(lane, held, self._table.worker_of(lane), tell):
                    posts[native.OP_RESTART if lane in self.restarts.due else held.op].append(lane)
        for op, lanes in posts.items():
            # A worker that was told and then died has taken its lanes back.
            ids = np.array([lane for lane in lanes if not self._is_cut_off(lane)], np.int64)
            if len(ids):
                self._table.core.post(ids, op)
        self.note_posted()
        self.look()

    def note_posted(self) -> None:
        """What was held and is pending in the core is held no more."""
        for lane in self._busy.held_and_posted():
            if lane in self.restarts.due:
                self._told[lane] = self.restarts.due.pop(lane)
            self._asked[lane] = self._busy.held.pop(lane)

    def _prepare(self, lane: int, held: HeldRequest, worker: Worker, tell: Callable[..., bool]) -> bool:
        if lane in self.restarts.due:
            return tell(worker, "restart", [self._order(lane, held)])
        if held.op == native.OP_RESET:
            return tell(worker, "reset", [(lane, held.seed, held.options)])
        return held.objects is None or tell(worker, "actions", [lane], [held.objects])

    def _order(self, lane: int, held: HeldRequest) -> Order:
        seen = int(self._seen_slot[lane])
        between = seen == NEVER_SEEN or (self._frames.ended_in(seen, lane) and not self._resets_at_once)
        begin = held.op == native.OP_RESET or between
        seed = self.restarts.seed(lane) if held.seed is None else held.seed
        return Order(
            lane, self.restarts.due[lane].rebuild, begin, seed, held.options, seen, self._frames.objects_of(lane),
            self.restarts.report(lane),
        )  # fmt: skip

    def look(self) -> None:
        """See whether all is well again."""
        self.troubled = bool(
            self._busy.held or self.restarts.due or self._workers.replacements or self._recycling.leaving
        )

    # ---- answers -----------------------------------------------------------------------------------------------

    def delivered(self, ids: Ids, slot: int) -> None:
        """The caller has seen these lanes' answers, all in one frame unless `slot` is -1."""
        if slot >= 0 and len(ids) == len(self._seen_slot):
            self._seen_slot.fill(slot)
        else:
            self._seen_slot[ids] = self._table.slot[ids] if slot < 0 else slot
        if self._recycle_after is not None and self._recycling.look(self._is_away):
            ended = ids[self._frames.ended(ids)]
            # A worker that has grown too much is recycled when an episode of its envs ends.
            self.troubled |= self._recycling.may_leave(set(self._table.owner[ended].tolist()))

    def dropped(self, ids: Ids) -> None:
        """The caller will not see these answers: those that it has seen last are the lanes' last ones again."""
        for lane in ids[self._table.op[ids] == native.OP_RESTART].tolist():
            # It is still to be told, unless the lane has lost another env since: then that is.
            self.restarts.due.setdefault(lane, self._told[lane])
            self.troubled = True
        seen = ids[self._seen_slot[ids] != NEVER_SEEN]
        self._table.slot[seen] = self._seen_slot[seen]

    def seen_slots(self, ids: Any) -> set[int]:
        """The frames in which the last answers of these lanes are that the caller has seen."""
        return set(self._seen_slot[ids].tobytes()) - {NEVER_SEEN}

    def realigned(self, slot: int) -> None:
        """All lanes' last answers are in this frame now; answers that the caller has not seen stay unseen."""
        self._seen_slot[self._seen_slot != NEVER_SEEN] = slot

    def resumed(self, slot: int) -> None:
        """All lanes go on from what is in this frame."""
        self._seen_slot[:] = slot

    def retry(self, lanes: Ids, error: PackedError) -> bool:
        """The env of these lanes raised, and its answer was taken: hold its request for a new one. False when that was
        too often."""
        if not self.mends:
            return False
        first = int(lanes[0])
        loss = Loss("raised", f"env {first} raised in {error.during}: {error.summary}", rebuild=True, culprit=first)
        delay = self.restarts.blame(first, self._has_worked(lanes.tolist()))
        if delay is None:
            self.restarts.due.update(dict.fromkeys(lanes.tolist(), loss))  # a reset will still give it a new env
            self.troubled = True
            return False
        log.warning("restarting: %s", loss.text)
        not_before_ns = time.monotonic_ns() + int(delay * 1e9)
        for lane in lanes.tolist():
            self._lose(lane, loss)
            self.hold(lane, self._asked_again(lane, True, not_before_ns))
        return True

    def _lose(self, lane: int, loss: Loss) -> None:
        self.restarts.lose(lane, loss)
        self._pool_stats[POOL_RESTARTS] += lane == self._groups.last_of(lane)  # envs are counted, not lanes

    def _has_worked(self, lanes: Iterable[int]) -> bool:
        """Whether one of these lanes has made a step since its env was built anew."""
        seen = [(int(self._seen_slot[lane]), lane) for lane in lanes]
        return any(slot != NEVER_SEEN and self._frames.is_step(slot, lane) for slot, lane in seen)

    def _asked_again(self, lane: int, guilty: bool, not_before_ns: int = 0) -> HeldRequest:
        """The last request of a lane, to be held once more; its answer will be written into the same frame. If the env
        was lost over it, a seed that came with it is not tried again: it may be to blame."""
        op, slot = int(self._table.op[lane]), self._table.slot
        request = HeldRequest(native.OP_STEP) if op == native.OP_STEP else self._asked[lane]
        slot[lane] = (int(slot[lane]) - 1) % self._table.frame_count
        if guilty:
            request = replace(request, seed=None)
        return replace(request, objects=None, not_before_ns=not_before_ns)

    # ---- workers -----------------------------------------------------------------------------------------------

    def news(self) -> None:
        """See which workers have died and which are back. Raises, with the pool closed, where nothing can be done."""
        try:
            with self._or_close():
                for worker in self._workers.dead():
                    self.handle_death(worker, worker.death())
                self._failed += [one for one in self._workers.finished() if one.error is not None]
                while self._failed:
                    self._try_again(self._failed[0], self._failed[0].error)
                    del self._failed[0]
        except Exception:
            raise  # the pool is closed
        except BaseException:
            self._table.core.alarm()  # an interrupt, halfway: the next wait looks again
            raise
        self.look()

    @contextlib.contextmanager
    def _or_close(self) -> Iterator[None]:
        """Whatever goes wrong inside closes the pool: lanes that were half mended would be waited for without end."""
        try:
            yield
        except ShoalError as error:
            raise self._on_death(error)  # noqa: B904, it is the same one
        except Exception as error:
            text = f"a worker that was lost could not be replaced: {type(error).__name__}: {error}; make a new pool"
            raise self._on_death(StartError(text)) from error

    def handle_death(self, worker: Worker, error: ShoalError) -> None:
        """A worker is gone: have it replaced. Raises, with the pool closed, where that must not be."""
        mend = worker.isolated and worker.replaceable and self.mends
        if not mend or not isinstance(error, WorkerDied):
            raise self._on_death(error)
        if self._workers[worker.index] is not worker or self._workers.is_away(worker.index):
            return  # known
        with self._or_close():
            self._mend(worker, error)

    def _mend(self, worker: Worker, error: WorkerDied) -> None:
        culprit = f"worker {worker.index}" if error.env_id is None else error.env_id
        guilty = worker.env_ids if error.env_id is None else self._groups.of(error.env_id).tolist()
        delay = self.restarts.blame(culprit, self._has_worked(guilty))
        worker.reap()
        if delay is None:
            raise self._on_death(self._spent(error))
        story = str(error).partition("\n")[0]
        kind = "timed out" if worker.condemned else "died"
        loss = Loss(kind, story, rebuild=False, culprit=-1 if error.env_id is None else error.env_id)
        log.warning("restarting: %s", story)
        for lane in worker.env_ids:
            self._lose(lane, loss)
        self._orphan(worker, [] if error.env_id is None else guilty)
        self._recycling.forget(worker.index)
        self._workers.replace(worker, delay)
        self.troubled = True

    def _orphan(self, worker: Worker, guilty: Collection[int] = ()) -> None:
        """The lanes' worker is gone. An answer that is whole will be delivered; anything less is asked for again."""
        posted = self._busy.posted_among(np.arange(worker.start, worker.stop)).tolist()
        untold = {self._groups.last_of(lane) for lane in posted if not self._is_told(worker, lane)}
        for lane in posted:
            if self._groups.last_of(lane) in untold:  # a group is whole or not
                self.hold(lane, self._asked_again(lane, lane in guilty))
        # The new worker must not find half a request.
        lanes = slice(worker.start, worker.stop)
        self._table.answered[lanes] = self._table.requested[lanes]

    def _is_told(self, worker: Worker, lane: int) -> bool:
        """Whether a lane has answered, and its note, if it has one, is here."""
        table = self._table
        if table.answered[lane] != table.requested[lane]:
            return False
        noted = table.status[table.slot[lane], lane] & STATUS_NOTE
        return not noted or worker.has_note(lane, int(table.requested[lane]))

    def _try_again(self, replacement: Replacement, error: ShoalError | None) -> None:
        """A new worker could not be started."""
        assert error is not None
        delay = self.restarts.blame(f"worker {replacement.old.index}")
        if delay is None:
            raise self._on_death(self._spent(error))
        loss = Loss("died", str(error).partition("\n")[0], rebuild=False)
        for lane in replacement.old.env_ids:
            if lane not in self.restarts.due:  # it was to be moved, and its state is lost now
                self._lose(lane, loss)
        self._workers.replace(replacement.old, delay)

    def _spent(self, error: ShoalError) -> ShoalError:
        if isinstance(error, WorkerDied):
            story, _, rest = str(error).partition("\n")
            error.args = (story + self.restarts.spent() + (f"\n{rest}" if rest else ""),)
        return error

    def await_worker(self, index: int, deadline: Deadline) -> Worker:
        """The worker of this index, once it is there."""
        while (replacement := self._workers.replacements.get(index)) is not None:
            if not replacement.wait(deadline.left):
                ids = replacement.old.env_ids
                raise StepTimeout(f"worker {index} was not back after {deadline.seconds} s", ids)
            self.news()
        return self._workers[index]

    def condemn(self, worker: Worker, lane: int | None, seconds: float) -> bool:
        """End a worker that takes too long, so that it is replaced. False where that cannot be done."""
        if not self.mends or not worker.isolated:
            return False
        what = "it did not begin to answer" if lane is None else f"env {lane} took longer than step_timeout={seconds:g}"
        worker.condemn(f"was ended because {what}")
        return True

    # ---- recycling ---------------------------------------------------------------------------------------------

    def _recycle(self) -> None:
        """Replace those that have grown too much and have nothing to do."""
        table = self._table
        for index in list(self._recycling.leaving):
            worker = self._workers[index]
            lanes = np.arange(worker.start, worker.stop)
            posted = self._busy.posted_among(lanes)
            # An env that has raised must be reported before anything becomes of its worker.
            raised = (table.status[table.slot[posted], posted] & STATUS_ERROR) != 0
            if not ((table.answered[posted] != table.requested[posted]) | raised).any():
                self._recycling.forget(index)
                self._replace_grown(worker, lanes)

    def _replace_grown(self, worker: Worker, lanes: Ids) -> None:
        """Envs in the middle of an episode move to the new worker with their state, where that can be saved."""
        loss = Loss("recycled", f"worker {worker.index} had grown by {worker.growth / 2**20:.0f} MiB", rebuild=False)
        # Under same_step the next episode has begun, and its first observation was seen.
        whole = self._resets_at_once or self._groups.some
        moving = (lanes if whole else lanes[~self._frames.ended(lanes)]).tolist()
        deadline = Deadline.after(SAVE_TIMEOUT)
        try:
            saved = worker.reply(worker.call("save", moving), deadline) if moving else []
        except ShoalError as error:
            self.handle_death(worker, error if isinstance(error, WorkerDied) else worker.death())
            return
        states = {lane: state for lane, state in zip(moving, saved, strict=True) if not isinstance(state, PackedError)}
        with self._or_close():
            self._workers.retire(worker, deadline, states)
            for lane in lanes.tolist():
                if lane not in states:
                    self._lose(lane, loss)
            self._orphan(worker)
