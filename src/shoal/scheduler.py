"""The scheduler: which lanes are busy, what they are asked, and what they have answered.

send checks everything first, writes the actions into the slab and rings the workers; a wait returns as soon as
enough lanes have answered. What lies in the side channel for them (infos, objects, errors) is read here as well.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal import native
from shoal.backends.base import Worker
from shoal.block import STATUS_NOTE, Note
from shoal.checks import Ids
from shoal.crew import Crew
from shoal.deadline import NEVER, Deadline
from shoal.errors import CallPending, ConcurrentUse, EnvError, NothingPending, ResetNeeded, ShoalError, StepTimeout
from shoal.frames import Frames, Ready
from shoal.remote import PackedError
from shoal.slab import Slab
from shoal.spaces import Kind, Leaf, read_actions

__all__ = ["Call", "Scheduler"]


class Call(NamedTuple):
    """A command on its way: its env ids, for each worker its ticket and the rows of `ids` that it answers, and what
    has come back: (worker, value) for each row."""

    ids: Ids
    tickets: list[tuple[Worker, int, list[int]]]
    results: list[tuple[int, Any]]


class Scheduler:
    """Requests and answers of the lanes of one slab.

    Args:
        data: where answers are read from.
        check_boxes: whether Box actions must be within their bounds.
        user_resets: whether envs whose episode is over must be reset by the user before they are stepped.
        fifo: whether lanes are received strictly in the order in which they were sent.
        spin_ns: how long a wait spins before it sleeps.
        on_death: told of a worker's death; returns the error to raise.
    """

    def __init__(
        self,
        slab: Slab,
        crew: Crew,
        data: Frames,
        action_leaves: Sequence[Leaf],
        check_boxes: bool,
        user_resets: bool,
        fifo: bool,
        spin_ns: int,
        on_death: Callable[[ShoalError], ShoalError],
    ):
        self._crew, self._data, self._on_death = crew, data, on_death
        self._user_resets, self._fifo, self._spin_ns = user_resets, fifo, spin_ns
        self._count, self._frames = slab.layout.lanes, slab.layout.frames
        self._state = np.zeros(self._count, np.uint8)  # 1 where a request is pending; kept by the core
        self._pending = 0
        self._queue: deque[int] = deque()  # lanes in the order in which they were sent, for fifo
        self._must_reset = np.ones(self._count, np.bool_)
        self._some_must_reset = True
        self._owner = crew.owner_of_lanes()
        self._lanes: Any = native.Lanes(slab, self._state, self._owner, *crew.bells())
        self._run_inline = None if crew.inline is None else crew.inline.run
        self._out = np.zeros(self._count, np.int64)
        self._all_ids = np.arange(self._count, dtype=np.int64)
        self._whole = [Ready(self._all_ids, 0, slot, {}) for slot in range(slab.layout.frames)]
        self._status, self._slot = slab.array("status"), slab.array("slot")
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._lanes.refuse_with(_concurrent)
        self._over: ShoalError | None = None
        self._prepare_actions(slab, action_leaves, check_boxes)
        crew.watch(self._lanes.ring, self._lanes.alarm)

    def _prepare_actions(self, slab: Slab, leaves: Sequence[Leaf], check_boxes: bool) -> None:
        self._action_leaves, self._check_boxes = leaves, check_boxes
        self._action_arrays = slab.leaf_arrays("action", leaves)
        self._has_objects = any(leaf.kind is Kind.OBJECT for leaf in leaves)
        leaf = leaves[0] if len(leaves) == 1 else None
        if leaf is not None and leaf.kind is Kind.ARRAY and not leaf.path:
            # The common case: the core checks and copies one array by itself.
            bounds = (leaf.low, leaf.high) if leaf.discrete or check_boxes else (np.zeros(0), np.zeros(0))
            self._lanes.use_action(slab.describe("action", leaves)[0], *bounds)

    @property
    def pending(self) -> Ids:
        """The lanes that were sent to and not yet received from."""
        return np.flatnonzero(self._state)

    # ---- requests --------------------------------------------------------------------------------------------

    def send(self, actions: Any, ids: Ids | None) -> None:
        """Ask lanes (None: all) for a step."""
        lanes = self._all_ids if ids is None else ids
        with self._lanes:
            self._check_idle(lanes)
            if self._some_must_reset:
                self._check_reset(lanes)
            values = read_actions(self._action_leaves, actions, lanes, self._check_boxes)
            for array, value in zip(self._action_arrays, values, strict=True):
                if array is not None:
                    array[lanes] = value
            if self._has_objects:
                objects = [value for value, array in zip(values, self._action_arrays, strict=True) if array is None]
                for worker, own, rows in self._by_worker(lanes):
                    self._tell(worker, "actions", own, [[column[row] for column in objects] for row in rows])
            self._aim(lanes)
        self._post(ids, native.OP_STEP)

    def reset(self, ids: Ids, seeds: Sequence[int | None], options: dict[str, Any] | None, deadline: Deadline) -> None:
        """Ask lanes for a reset; what they are still busy with is waited for and dropped."""
        self.drop(ids, deadline)
        with self._lanes:
            for worker, lanes, rows in self._by_worker(ids):
                self._tell(worker, "reset", lanes, [seeds[row] for row in rows], options)
            self._aim(ids)
        self._must_reset[ids] = False
        self._some_must_reset = bool(self._must_reset.any())
        self._post(ids, native.OP_RESET)

    def _post(self, ids: Ids | None, op: int) -> None:
        code = self._lanes.post(ids, op)
        if code == native.IN_USE:
            raise _concurrent()
        if code:
            raise self._busy(self._all_ids if ids is None else ids)
        self._pending += self._count if ids is None else len(ids)
        if self._fifo:
            self._queue.extend(range(self._count) if ids is None else ids.tolist())

    def _aim(self, ids: Any) -> None:
        """Let the next request of these lanes, none of which is busy, write into a frame that nobody holds."""
        if not self._data.lends:
            return
        slot = self._data.free_slot()
        assert slot is not None, "the last free frame is never lent"
        self._slot[ids] = (slot - 1) % self._frames  # the core goes on to the next

    # ---- answers ---------------------------------------------------------------------------------------------

    def exchange(self, actions: Any, deadline: Deadline) -> Ready:
        """Ask all lanes for a step and wait for them: in one call of the core where nothing is out of the ordinary."""
        if deadline is NEVER and not self._some_must_reset:
            slots = self._slot.copy() if self._data.lends else None
            if slots is not None and not self._pending:
                with self._lanes:
                    self._aim(slice(None))
            try:
                code = self._lanes.step(actions, self._run_inline, self._spin_ns)
            except BaseException:  # an interrupt, halfway
                self._pending = int(self._state.sum())
                raise
            if code >= 0:
                return self._exchanged(code, deadline)
            self._pending = int(self._state.sum())
            if slots is not None and code == native.NOT_TAKEN:
                self._slot[:] = slots  # nothing was written
            if code == native.IN_USE:
                raise _concurrent()
        if deadline is not NEVER or self._some_must_reset or code == native.NOT_TAKEN:
            self.send(actions, None)
        try:
            return self._wait(self._count, None, deadline)
        except EnvError:
            with contextlib.suppress(StepTimeout):
                self.drop(self._all_ids, deadline)
            raise

    def _exchanged(self, code: int, deadline: Deadline) -> Ready:
        """What the core's short cut has answered: slot | status << 8."""
        slot, status = code & 0xFF, code >> 8
        if not status and slot != native.MIXED_SLOTS and not self._user_resets:
            return self._whole[slot]
        try:
            return self._received(self._all_ids, 0, -1 if slot == native.MIXED_SLOTS else slot, status, deadline)
        except EnvError:
            with contextlib.suppress(StepTimeout):
                self.drop(self._all_ids, deadline)
            raise

    def wait_next(self, need: int, deadline: Deadline) -> Ready:
        """Wait for the next `need` lanes, by the pool's order."""
        wanted = None
        if self._fifo and need < self._count and len(self._queue) >= need:
            wanted = np.fromiter(self._queue, np.int64, need)
        return self._wait(need, wanted, deadline)

    def wait_for(self, ids: Ids, deadline: Deadline) -> Ready:
        """Wait for exactly these lanes, ascending."""
        idle = ids[self._state[ids] == 0]
        if len(idle):
            raise NothingPending(f"envs {idle[:8].tolist()} were not sent to: there is nothing to wait for")
        ready = self._wait(len(ids), ids if len(ids) < self._count else None, deadline)
        slot = int(self._slot[ids[0]])
        if not self._pending and (self._slot != slot).any():
            self._data.realign(slot)
            ready = ready._replace(slot=slot if len(ids) == self._count else ready.slot)
        return ready

    def drop(self, ids: Ids, deadline: Deadline) -> None:
        """Wait for those of the lanes that are busy, and forget what they answer."""
        busy = np.sort(ids[self._state[ids] != 0])
        if not len(busy):
            return
        self._collect(len(busy), busy, deadline)
        for _, note in self._take_notes(busy, deadline):
            if note.error is not None:
                self._fail(note.lane)

    def _wait(self, need: int, wanted: Ids | None, deadline: Deadline) -> Ready:
        if self._pending < need:
            with self._lanes:  # another thread's step may be what is pending
                pass
            raise NothingPending(
                f"recv waits for {need} envs and {self._pending} were sent to: send to more, or make the pool with a "
                "smaller batch_size"
            )
        return self._received(*self._collect(need, wanted, deadline), deadline)

    def _collect(self, need: int, wanted: Ids | None, deadline: Deadline) -> tuple[Ids, int, int, int]:
        """Take `need` lanes that have answered: (ids, first, slot, status), as the core says."""
        count, first, slot, status = self._lanes.collect(
            need, wanted, deadline.at_ns, self._spin_ns, self._out, self._run_inline
        )
        if count < 0:
            raise self._wait_failed(count, deadline)
        self._pending -= count
        ids = self._all_ids if count == self._count else self._out[:count].copy()
        if self._fifo:
            taken = set(ids.tolist())
            self._queue = deque(lane for lane in self._queue if lane not in taken)
        return ids, first, slot, status

    def _received(self, ids: Ids, first: int, slot: int, status: int, deadline: Deadline) -> Ready:
        """Lanes that were taken, with their notes. Raises the first env's error, if one raised."""
        infos = {}
        if status:
            notes = self._take_notes(ids, deadline)
            for worker, note in notes:
                if note.error is not None:
                    # Its lane is idle and must be reset, the others wait for the next recv.
                    self._fail(note.lane)
                    self._put_back(ids[ids != note.lane], [one for one in notes if one[1] is not note])
                    raise note.error.unpack(note.lane, worker.index)
            infos = {note.lane: note.info for _, note in notes if note.info}
        if self._user_resets:
            self._must_reset[ids] = self._data.ended(ids)
            self._some_must_reset = bool(self._must_reset.any())
        return Ready(ids, first, slot, infos)

    def _take_notes(self, ids: Ids, deadline: Deadline) -> list[tuple[Worker, Note]]:
        """Read what lanes have in the side channel; at the deadline, all of them are pending again."""
        noted = ids[(self._status[self._slot[ids], ids] & STATUS_NOTE) != 0]
        notes: list[tuple[Worker, Note]] = []
        for lane in noted.tolist():
            worker = self._crew.workers[self._owner[lane]]
            try:
                with self._lanes:
                    note = worker.take_note(lane, int(self._requested[lane]), deadline)
            except (StepTimeout, ConcurrentUse):
                self._put_back(ids, notes)
                raise
            except Exception as error:
                raise self._lost(error) from None
            if note.objects:
                self._data.keep_objects(lane, note.objects)
            notes.append((worker, note))
        return notes

    def _put_back(self, ids: Ids, notes: list[tuple[Worker, Note]]) -> None:
        """Leave lanes that were taken, and their notes, for the next recv."""
        self._state[ids] = 1
        self._pending += len(ids)
        if self._fifo:
            self._queue.extendleft(ids.tolist()[::-1])
        for worker, note in notes:
            worker.keep_note(note)

    def _fail(self, lane: int) -> None:
        self._must_reset[lane] = self._some_must_reset = True

    # ---- commands --------------------------------------------------------------------------------------------

    def start_call(self, ids: Ids, command: str, arguments: Callable[[list[int]], tuple[Any, ...]]) -> Call:
        """Send a command to the envs' workers; `arguments` gives those for some rows of `ids`."""
        tickets = []
        with self._lanes:
            self._check_idle(ids)
            for worker, lanes, rows in self._by_worker(ids):
                with self._talking_to(worker):
                    tickets.append((worker, worker.call(command, lanes, *arguments(rows)), rows))
        return Call(ids, tickets, [(0, None)] * len(ids))

    def finish_call(self, call: Call, deadline: Deadline) -> list[Any]:
        """Wait for the results of a command, in the order of its ids."""
        while call.tickets:
            worker, ticket, rows = call.tickets[0]
            try:
                with self._lanes:
                    values = worker.reply(ticket, deadline)
            except (StepTimeout, ConcurrentUse):
                raise  # it may be tried again
            except Exception as error:
                raise self._lost(error) from None
            for row, value in zip(rows, values, strict=True):
                call.results[row] = (worker.index, value)
            del call.tickets[0]
        for row, (worker_index, value) in enumerate(call.results):
            if isinstance(value, PackedError):
                raise value.unpack(int(call.ids[row]), worker_index)
        return [value for _, value in call.results]

    def _lost(self, error: Exception) -> Exception:
        """What to raise when a worker does not answer any more."""
        if self._over is not None:
            return self._over  # another thread has closed the pool
        return self._on_death(error) if isinstance(error, ShoalError) else error

    def _by_worker(self, ids: Ids) -> list[tuple[Worker, list[int], list[int]]]:
        """The lanes grouped by worker: (worker, its lanes, their places in `ids`)."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for row, lane in enumerate(ids.tolist()):
            lanes, rows = groups.setdefault(int(self._owner[lane]), ([], []))
            lanes.append(lane)
            rows.append(row)
        return [(self._crew.workers[w], lanes, rows) for w, (lanes, rows) in groups.items()]

    def _tell(self, worker: Worker, *message: Any) -> None:
        with self._talking_to(worker):
            worker.send(*message)

    @contextlib.contextmanager
    def _talking_to(self, worker: Worker) -> Iterator[None]:
        try:
            yield
        except ShoalError as error:
            raise self._lost(error) from None
        except BaseException:
            if worker.torn:  # it waits for the rest of a message, and would never answer again
                self._on_death(worker.cut())
            raise

    # ---- errors ----------------------------------------------------------------------------------------------

    def _check_idle(self, ids: Ids) -> None:
        if self._pending and self._state[ids].any():
            raise self._busy(ids)

    def _check_reset(self, ids: Ids) -> None:
        stale = ids[self._must_reset[ids]]
        if len(stale):
            raise ResetNeeded(
                f"env {stale[0]} must be reset before it is stepped: it was never reset, its episode is over "
                f"or it raised; call reset(env_ids={stale[:8].tolist()}) first"
            )

    def _busy(self, ids: Ids) -> ShoalError:
        busy = ids[self._state[ids] != 0][:8].tolist()
        return CallPending(f"envs {busy} are still busy with an earlier send: recv their results first")

    def end(self, why: ShoalError) -> None:
        """Wake whoever waits in another thread: the pool is being closed."""
        self._over = why
        self._lanes.alarm()

    def _wait_failed(self, code: int, deadline: Deadline) -> ShoalError:
        if code == native.IN_USE:
            return _concurrent()
        if self._over is not None:
            return self._over
        if code == native.COLLECT_ALARM:
            self._lanes.heard()
            return self._on_death(self._crew.dead[0].death())
        pending = self.pending
        late = pending[self._answered[pending] != self._requested[pending]].tolist()
        return StepTimeout(f"envs {late[:8]} did not answer within {deadline.seconds} s; recv may be tried again", late)


def _concurrent() -> ShoalError:
    return ConcurrentUse("another thread is using this pool: give each thread a pool of its own")
