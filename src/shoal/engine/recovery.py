"""Keeps a pool going while envs and workers are lost and replaced: who is lost, who is away, which requests must wait.

A lane whose env was lost is `due`: its next request becomes an order to its new env (messages.Order), whose answer
reports the loss once. A request that cannot be posted now, because its worker is being replaced or must rest, is held.
Nobody else than the caller writes to the lanes of a worker that is gone, so their sequence numbers stay in order: what
was asked of the old worker can never be answered by it any more, and is asked of the new one under a new number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal import native
from shoal.backends.base import Worker
from shoal.backends.processes import ProcessWorker
from shoal.engine.lane_groups import Groups
from shoal.engine.restarts import Loss, Restarts
from shoal.engine.workers import Replacement, Workers
from shoal.errors import ShoalError, StepTimeout, WorkerDied
from shoal.memory.answers import Frames
from shoal.memory.messages import STATUS_ERROR, STATUS_NOTE, Order
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.native.counters import POOL_RESTARTS
from shoal.support.checks import Ids, check_choice, positive_number, whole_number
from shoal.support.deadline import Deadline

__all__ = ["HeldRequest", "Recovery", "RecoveryPolicy"]

log = logging.getLogger("shoal")
WEIGH_EVERY = 0.02  # seconds between two looks at a worker's memory; each has its turn
NEVER_SEEN = 255  # no frame has this number
SAVE_TIMEOUT = 30.0  # seconds for the envs of a worker that is to be recycled to say how they are


@dataclass(frozen=True)
class RecoveryPolicy:
    """What a pool does about losses.

    Attributes:
        same_step: whether an answer that ends an episode brings the next one's first observation along.
        restart: whether lost envs are replaced; otherwise the pool is closed when a worker dies.
        max_restarts, window: the budget, see Restarts.
        recycle_after: bytes that a worker may grow by until it is replaced at an episode's end; None for any.
    """

    same_step: bool = False
    restart: bool = False
    max_restarts: int = 10
    window: float = 600.0
    recycle_after: int | None = None

    @classmethod
    def checked(cls, on_error: str, max_restarts: Any, restart_window: Any, recycle_after: Any) -> RecoveryPolicy:
        """From a pool's options. Raises ValueError for those that make no sense."""
        check_choice("on_error", on_error, ("raise", "restart"))
        return cls(
            restart=on_error == "restart",
            max_restarts=whole_number("max_restarts", max_restarts, 1, 10**9),
            window=positive_number("restart_window", restart_window),
            recycle_after=None if recycle_after is None else whole_number("recycle_after", recycle_after, 1, 2**62),
        )

    @property
    def replaces(self) -> bool:
        """Whether envs may ever be replaced."""
        return self.restart or self.recycle_after is not None


@dataclass(frozen=True)
class HeldRequest:
    """A request that waits: what was asked for, and when it may be posted at the earliest.

    `objects`: the parts of the action that have no array; None for none.
    """

    op: int
    seed: int | None = None
    options: dict[str, Any] | None = None
    objects: list[Any] | None = None
    not_before_ns: int = 0


class Recovery:
    """The losses, and the requests that wait for them to be mended.

    Args:
        state: uint8 [lanes], as the core has it.
        lanes: the core's Lanes.
        groups: which lanes are one env's, and are lost together.
        on_death: closes the pool; returns the error to raise.
    """

    def __init__(
        self,
        slab: Slab,
        workers: Workers,
        data: Frames,
        state: Any,
        lanes: Any,
        groups: Groups,
        policy: RecoveryPolicy,
        on_death: Callable[[ShoalError], ShoalError],
    ):
        self.policy, self.restarts = policy, Restarts(slab.layout.lanes, policy.max_restarts, policy.window)
        self.held: dict[int, HeldRequest] = {}
        self.troubled = False  # whether anything is out of the ordinary: due, held, away or about to be recycled
        self._told: dict[int, Loss] = {}  # what the last order of a lane was about
        self._asked: dict[int, HeldRequest] = {}  # the last request of a lane that was no plain step
        self._workers, self._data, self._state, self._lanes, self._on_death = workers, data, state, lanes, on_death
        self._owner, self._frames = workers.owner_of_lanes(), slab.layout.frames
        self._groups = groups
        self._slot, self._op, self._status = slab.array("slot"), slab.array("op"), slab.array("status")
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._pool_stats = slab.array("pool_stats")
        # Of the last answer that the caller has seen.
        self._seen_slot = np.full(slab.layout.lanes, NEVER_SEEN, np.uint8)
        self._next_weighing = 0.0
        self._failed: list[Replacement] = []  # those that must be tried again
        self._weighed = -1  # the worker whose memory was looked at last
        self._heavy: set[int] = set()  # workers that have grown too much
        self._leaving: set[int] = set()  # workers that shall be recycled as soon as they have nothing to do

    # ---- requests ----------------------------------------------------------------------------------------------

    def sort_out(self, ids: Ids) -> tuple[Ids, list[int]]:
        """Those of the lanes that can be posted now, and those that must be held."""
        later = [lane for lane in ids.tolist() if lane in self.restarts.due or self._is_away(int(self._owner[lane]))]
        return (ids[~np.isin(ids, later)], later) if later else (ids, later)

    def _is_away(self, index: int) -> bool:
        return self._workers.is_away(index) or index in self._leaving

    def hold(self, lane: int, held: HeldRequest) -> None:
        """Keep a request until its worker is there and its time has come."""
        self.held[lane] = held
        self.troubled = True

    def resets(self, asked: dict[int, tuple[int | None, dict[str, Any] | None]]) -> None:
        """Note resets that are asked for, in case that they have to be asked for again: seed and options, by lane."""
        for lane, (seed, options) in asked.items():
            self._asked[lane] = HeldRequest(native.OP_RESET, seed, options)
            if seed is not None:
                self.restarts.seeds[lane] = seed

    def next_release_ns(self) -> int | None:
        """When something that is held may be posted at the latest; None for "when it is cried out"."""
        if self._leaving:
            return time.monotonic_ns() + 5_000_000
        times = [held.not_before_ns for lane, held in self.held.items() if not self._is_away(int(self._owner[lane]))]
        return min(times, default=None)

    def release(self, tell: Callable[..., bool]) -> None:
        """Post what was held and need not be any longer. `tell` takes a message to a worker, if that is still there."""
        self.note_posted()
        now = time.monotonic_ns()
        posts: dict[int, list[int]] = {native.OP_STEP: [], native.OP_RESET: [], native.OP_RESTART: []}
        with self._lanes:  # workers are talked to by one thread at a time
            self._recycle()
            for lane, held in list(self.held.items()):
                worker = self._workers[self._owner[lane]]
                if held.not_before_ns > now or self._is_away(worker.index):
                    continue
                if self._prepare(lane, held, worker, tell):
                    posts[native.OP_RESTART if lane in self.restarts.due else held.op].append(lane)
        for op, lanes in posts.items():
            # A worker that was told and then died has taken its lanes back.
            ids = np.array([lane for lane in lanes if not self._is_away(int(self._owner[lane]))], np.int64)
            if len(ids):
                self._lanes.post(ids, op)
        self.note_posted()
        self.look()

    def note_posted(self) -> None:
        """What was held and is pending in the core is held no more.

        The core's word counts, whenever somebody asks: an interrupt may come between a post and a note of it.
        """
        for lane in [lane for lane in self.held if self._state[lane]]:
            if lane in self.restarts.due:
                self._told[lane] = self.restarts.due.pop(lane)
            self._asked[lane] = self.held.pop(lane)

    def _prepare(self, lane: int, held: HeldRequest, worker: Worker, tell: Callable[..., bool]) -> bool:
        if lane in self.restarts.due:
            return tell(worker, "restart", [self._order(lane, held)])
        if held.op == native.OP_RESET:
            return tell(worker, "reset", [(lane, held.seed, held.options)])
        return held.objects is None or tell(worker, "actions", [lane], [held.objects])

    def _order(self, lane: int, held: HeldRequest) -> Order:
        seen = int(self._seen_slot[lane])
        between = seen == NEVER_SEEN or (self._data.ended_in(seen, lane) and not self.policy.same_step)
        begin = held.op == native.OP_RESET or between
        seed = self.restarts.seed(lane) if held.seed is None else held.seed
        return Order(
            lane, self.restarts.due[lane].rebuild, begin, seed, held.options, seen, self._data.objects_of(lane),
            self.restarts.report(lane),
        )  # fmt: skip

    def look(self) -> None:
        """See whether all is well again."""
        self.troubled = bool(self.held or self.restarts.due or self._workers.repairs or self._leaving)

    # ---- answers -----------------------------------------------------------------------------------------------

    def delivered(self, ids: Ids, slot: int) -> None:
        """The caller has seen these lanes' answers, all in one frame unless `slot` is -1."""
        if slot >= 0 and len(ids) == len(self._seen_slot):
            self._seen_slot.fill(slot)
        else:
            self._seen_slot[ids] = self._slot[ids] if slot < 0 else slot
        if self.policy.recycle_after is not None:
            if time.monotonic() >= self._next_weighing:
                self._weigh()
            if self._heavy:
                self._look_for_ends(ids)

    def dropped(self, ids: Ids) -> None:
        """Nobody has seen these answers: the last ones that the caller has seen are the lanes' last ones again."""
        for lane in ids[self._op[ids] == native.OP_RESTART].tolist():
            # It is still to be told, unless the lane has lost another env since: then that is.
            self.restarts.due.setdefault(lane, self._told[lane])
            self.troubled = True
        seen = ids[self._seen_slot[ids] != NEVER_SEEN]
        self._slot[seen] = self._seen_slot[seen]

    def seen_slots(self, ids: Any) -> set[int]:
        """The frames in which the last answers of these lanes are that the caller has seen."""
        return set(self._seen_slot[ids].tobytes()) - {NEVER_SEEN}

    def realigned(self, slot: int) -> None:
        """All lanes' last answers are in this frame now; what nobody has seen stays unseen."""
        self._seen_slot[self._seen_slot != NEVER_SEEN] = slot

    def resumed(self, slot: int) -> None:
        """All lanes go on from what is in this frame."""
        self._seen_slot[:] = slot

    def retry(self, lanes: Ids, error: PackedError) -> bool:
        """The env of these lanes raised, and its answer was taken: hold its request for a new one. False when that was
        too often."""
        if not self.policy.restart:
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
            self._take_back(lane, True, not_before_ns)
        return True

    def _lose(self, lane: int, loss: Loss) -> None:
        self.restarts.lose(lane, loss)
        self._pool_stats[POOL_RESTARTS] += lane == self._groups.last_of(lane)  # envs are counted, not lanes

    def _has_worked(self, lanes: Iterable[int]) -> bool:
        """Whether one of these lanes has made a step since its env was built anew."""
        seen = [(int(self._seen_slot[lane]), lane) for lane in lanes]
        return any(slot != NEVER_SEEN and self._data.is_step(slot, lane) for slot, lane in seen)

    def _take_back(self, lane: int, guilty: bool, not_before_ns: int = 0) -> None:
        """Hold a lane's last request once more; it will be written into the same frame.

        Args:
            guilty: the env was lost over it. A seed that came with it is not tried again: it may be to blame.
        """
        op = int(self._op[lane])
        held = HeldRequest(native.OP_STEP) if op == native.OP_STEP else self._asked[lane]
        self._slot[lane] = (int(self._slot[lane]) - 1) % self._frames
        if guilty:
            held = replace(held, seed=None)
        self.hold(lane, replace(held, objects=None, not_before_ns=not_before_ns))

    # ---- workers -----------------------------------------------------------------------------------------------

    def news(self) -> None:
        """See who has died and who is back. Raises, with the pool closed, where nothing is to be done about it."""
        try:
            for worker in self._workers.dead():
                self.bury(worker, worker.death())
            self._failed += [repair for repair in self._workers.finished() if repair.error is not None]
            while self._failed:
                self._try_again(self._failed[0], self._failed[0].error)
                del self._failed[0]
        except Exception:
            raise  # the pool is closed
        except BaseException:
            self._lanes.alarm()  # an interrupt, halfway: who waits next looks again
            raise
        self.look()

    def news_if_mended(self) -> None:
        """Before a call: see who is gone, if that is to be mended rather than told."""
        if self.policy.restart:
            self.news()

    def bury(self, worker: Worker, error: ShoalError) -> None:
        """A worker is gone: have it replaced. Raises, with the pool closed, where that must not be."""
        mend = worker.isolated and worker.replaceable and self.policy.restart
        if not mend or not isinstance(error, WorkerDied):
            raise self._on_death(error)
        if self._workers[worker.index] is not worker or self._workers.is_away(worker.index):
            return  # known
        culprit = f"worker {worker.index}" if error.env_id is None else error.env_id
        guilty = worker.env_ids if error.env_id is None else self._groups.of(error.env_id).tolist()
        delay = self.restarts.blame(culprit, self._has_worked(guilty))
        worker.bury()
        if delay is None:
            raise self._on_death(self._spent(error))
        story = str(error).partition("\n")[0]
        kind = "timed out" if worker.condemned else "died"
        loss = Loss(kind, story, rebuild=False, culprit=-1 if error.env_id is None else error.env_id)
        log.warning("restarting: %s", story)
        for lane in worker.env_ids:
            self._lose(lane, loss)
        self._orphan(worker, [] if error.env_id is None else guilty)
        self._settle_requests(worker)
        self._heavy.discard(worker.index)
        self._leaving.discard(worker.index)
        self._workers.replace(worker, delay)
        self.troubled = True

    def _orphan(self, worker: Worker, guilty: Collection[int] = ()) -> None:
        """The lanes' worker is gone. An answer that is whole will be delivered; anything less is asked for again."""
        lanes = np.arange(worker.start, worker.stop)
        pending = lanes[self._state[lanes] != 0]
        untold = {self._groups.last_of(lane) for lane in pending.tolist() if not self._is_told(worker, lane)}
        for lane in pending.tolist():
            if self._groups.last_of(lane) in untold:  # a group is whole or not
                self._state[lane] = 0
                self._take_back(lane, lane in guilty)

    def _is_told(self, worker: Worker, lane: int) -> bool:
        """Whether a lane has answered, and its note, if it has one, is here."""
        if self._answered[lane] != self._requested[lane]:
            return False
        noted = self._status[self._slot[lane], lane] & STATUS_NOTE
        return not noted or worker.has_note(lane, int(self._requested[lane]))

    def _settle_requests(self, worker: Worker) -> None:
        """The new worker must not find half a request."""
        lanes = slice(worker.start, worker.stop)
        self._answered[lanes] = self._requested[lanes]

    def _try_again(self, repair: Replacement, error: ShoalError | None) -> None:
        """A new worker could not be started."""
        assert error is not None
        delay = self.restarts.blame(f"worker {repair.old.index}")
        if delay is None:
            raise self._on_death(self._spent(error))
        loss = Loss("died", str(error).partition("\n")[0], rebuild=False)
        for lane in repair.old.env_ids:
            if lane not in self.restarts.due:  # it was to be moved, and its state is lost now
                self._lose(lane, loss)
        self._workers.replace(repair.old, delay)

    def _spent(self, error: ShoalError) -> ShoalError:
        if isinstance(error, WorkerDied):
            story, _, rest = str(error).partition("\n")
            error.args = (story + self.restarts.spent() + (f"\n{rest}" if rest else ""),)
        return error

    def await_worker(self, index: int, deadline: Deadline) -> Worker:
        """The worker of this index, once it is there."""
        while (repair := self._workers.repairs.get(index)) is not None:
            if not repair.wait(deadline.left):
                ids = repair.old.env_ids
                raise StepTimeout(f"worker {index} was not back after {deadline.seconds} s", ids)
            self.news()
        return self._workers[index]

    def condemn(self, worker: Worker, lane: int | None, seconds: float) -> bool:
        """End a worker that takes too long, so that it is replaced. False where that cannot be done."""
        if not self.policy.restart or not worker.isolated:
            return False
        what = "it did not begin to answer" if lane is None else f"env {lane} took longer than step_timeout={seconds:g}"
        worker.condemn(f"was ended because {what}")
        return True

    # ---- recycling ---------------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        """One worker after another: has it grown too much?"""
        self._next_weighing = time.monotonic() + WEIGH_EVERY
        self._weighed = (self._weighed + 1) % len(self._workers)
        worker = self._workers[self._weighed]
        if isinstance(worker, ProcessWorker) and not self._is_away(worker.index):
            worker.look_at_memory()
            if (worker.memory or 0) - (worker.memory_at_start or 0) > (self.policy.recycle_after or 0):
                self._heavy.add(worker.index)

    def _look_for_ends(self, ids: Ids) -> None:
        """A worker that has grown too much is recycled when an episode of its envs ends."""
        ended = ids[self._data.ended(ids)]
        due = self._heavy.intersection(self._owner[ended].tolist())
        if due:
            self._heavy -= due
            self._leaving |= due
            self.troubled = True

    def _recycle(self) -> None:
        """Replace those that have grown too much and have nothing to do."""
        for index in list(self._leaving):
            worker = self._workers[index]
            lanes = np.arange(worker.start, worker.stop)
            pending = self._state[lanes].astype(bool)
            # An env that has raised must be told of before anything becomes of its worker.
            raised = (self._status[self._slot[lanes], lanes] & STATUS_ERROR) != 0
            busy = pending & ((self._answered[lanes] != self._requested[lanes]) | raised)
            if isinstance(worker, ProcessWorker) and not busy.any():
                self._leaving.discard(index)
                self._replace_grown(worker, lanes)

    def _replace_grown(self, worker: ProcessWorker, lanes: Ids) -> None:
        """Envs in the middle of an episode move to the new worker with their state, where that can be saved."""
        growth = ((worker.memory or 0) - (worker.memory_at_start or 0)) / 2**20
        loss = Loss("recycled", f"worker {worker.index} had grown by {growth:.0f} MiB", rebuild=False)
        # Under same_step the next episode has begun, and its first observation was seen.
        whole = self.policy.same_step or self._groups.some
        moving = (lanes if whole else lanes[~self._data.ended(lanes)]).tolist()
        deadline = Deadline.after(SAVE_TIMEOUT)
        try:
            saved = worker.reply(worker.call("save", moving), deadline) if moving else []
        except ShoalError as error:
            self.bury(worker, error if isinstance(error, WorkerDied) else worker.death())
            return
        states = {lane: state for lane, state in zip(moving, saved, strict=True) if not isinstance(state, PackedError)}
        self._workers.retire(worker, deadline, states)
        for lane in lanes.tolist():
            if lane not in states:
                self._lose(lane, loss)
        self._orphan(worker)
        self._settle_requests(worker)
