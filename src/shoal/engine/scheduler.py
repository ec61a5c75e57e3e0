"""The scheduler: which lanes are busy, what they are asked, and what they have answered.

send checks everything first, writes the actions into the slab and rings the workers; a wait returns as soon as
enough lanes have answered. What lies in the side channel for them (infos, objects, errors) is read here as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal import native
from shoal.engine.collector import Collector, concurrent_use
from shoal.engine.commands import Arguments, Call, Commands
from shoal.engine.lane_table import ActionWriter, HeldRequest, LaneTable
from shoal.engine.recovery import Recovery
from shoal.engine.timeouts import Timeouts
from shoal.envs.autoreset import RULES
from shoal.errors import CallPending, CannotSnapshot, EnvError, NothingPending, ResetNeeded, ShoalError, StepTimeout
from shoal.memory.answers import Ready
from shoal.memory.messages import STATUS_FINAL, STATUS_INFO, STATUS_NOTE, Note, StepperConfig
from shoal.options import PoolOptions
from shoal.spaces.leaves import flatten
from shoal.support.checks import Ids, check_ids
from shoal.support.cores import usable_cores
from shoal.support.deadline import NEVER, Deadline


class Scheduler:
    """Requests and answers of the lanes of one pool.

    Attributes:
        some_must_reset: whether a step of all lanes would be refused until some were reset.

    Args:
        config: how the workers step the lanes.
        user_resets: whether the user must reset an env after its episode, before it is stepped.
        spin_ns: how long a wait spins before it sleeps; negative to have the core decide.
        on_death: closes the pool after a worker's death; returns the error to raise.
    """

    def __init__(
        self,
        table: LaneTable,
        options: PoolOptions,
        config: StepperConfig,
        user_resets: bool,
        spin_ns: int,
        on_death: Callable[[ShoalError], ShoalError],
    ):
        self.table, self._busy, self._core, self._frames = table, table.busy, table.core, table.answers
        self._groups, self._window = table.groups, table.window
        self._fifo, self._spin_ns = options.order == "fifo", spin_ns
        workers, batched = table.workers, table.workers.backend.batched
        self._user_resets = user_resets and (batched or options.check_reset != "none")
        self._strict = batched or options.check_reset == "all"  # whether what was never reset, or raised, must be reset
        self._must_reset, self.some_must_reset = np.full(table.count, self._strict), self._strict
        self._prompt, self._inline = workers.backend.prompt(workers.inline), workers.inline is not None
        if workers.inline is not None and workers.inline.kernel is not None:
            self._core.use_kernel(workers.inline.kernel)
        # Made once: what most steps answer.
        self._whole = [Ready(table.all_ids, 0, slot, {}) for slot in range(table.frame_count)]
        self._core.use_cores(len(workers) + (not self._inline), usable_cores())
        self._core.refuse_with(concurrent_use)
        self._frames.handed = self._core.handed
        self._timeouts = Timeouts(table, options.step_timeout)
        self._recovery = Recovery(table, options, RULES[config.autoreset].resets_at_once, on_death)
        self._replaces = options.replaces_envs
        self.commands = Commands(table, self._recovery, self._timeouts, on_death)
        self._collector = Collector(table, self._recovery, self._timeouts, self.commands, spin_ns)
        self._actions = ActionWriter(table, flatten(config.action_space), options.check_actions)
        if self._fifo:
            self._core.use_order(table.busy.sent_at)
        workers.watch(self._core.ring, self._core.alarm, options.step_timeout)

    @property
    def pending(self) -> Ids:
        """The lanes that were sent to and not yet received from."""
        return self._busy.all()

    @property
    def done(self) -> Ids:
        """Those of them that have answered, ascending."""
        return np.sort(self._collector.done_in_order(self.table.count, False))

    # ---- requests --------------------------------------------------------------------------------------------

    def send(self, actions: Any, env_ids: Any) -> None:
        """Ask lanes (None: all) for a step: in one call of the core where nothing is out of the ordinary."""
        if not (self.some_must_reset or self._recovery.troubled or self._frames.lends):
            code = self._core.send(actions, env_ids)
            if code == native.IN_USE:
                raise concurrent_use()
            if code != native.NOT_TAKEN:
                self._prompt_workers()
                return
        self._send(actions, None if env_ids is None else check_ids(env_ids, self.table.count))

    def _send(self, actions: Any, ids: Ids | None) -> None:
        """The same step by step, for what the core does not take: says what is wrong, or does it all the same."""
        self._core.arrive()
        lanes = self.table.all_ids if ids is None else ids
        if self._groups.some:
            self._groups.check_whole(lanes, "send")
        with self._core:
            self._check_idle(lanes)
            if self.some_must_reset:
                self._check_reset(lanes)
            columns = self._actions.write(actions, lanes)
            objects: dict[int, list[Any]] = {}
            if columns:
                objects = {lane: [column[row] for column in columns] for row, lane in enumerate(lanes.tolist())}
                self._tell(lanes, lambda own: ("actions", own, [objects[lane] for lane in own]))
            self._aim(lanes)
        self._ask(ids, native.OP_STEP, lambda lane: HeldRequest(native.OP_STEP, objects=objects.get(lane)))

    def reset(
        self, ids: Ids, seeds: list[int | None], options: Sequence[dict[str, Any] | None], deadline: Deadline
    ) -> None:
        """Ask lanes for a reset, one seed and options each; what they are still busy with is waited for and dropped."""
        self._groups.check_whole(ids, "reset")
        self._core.arrive()
        self.drop(ids, deadline)
        with self._core:
            asked = {lane: (seed, given) for lane, seed, given in zip(ids.tolist(), seeds, options, strict=True)}
            self._tell(ids, lambda own: ("reset", [(lane, *asked[lane]) for lane in own]))
            self._aim(ids)
        if self._replaces:
            self._recovery.resets(asked)
        self._note_must_reset(ids, False)
        self._ask(ids, native.OP_RESET, lambda lane: HeldRequest(native.OP_RESET, *asked[lane]))

    def begin(self, ids: Ids, deadline: Deadline) -> Ready:
        """Reset lanes, ascending, without arguments, and wait for them: in two calls of the core as a rule."""
        if not self._groups.apart or self._replaces or self._frames.lends or self._recovery.troubled:
            self.reset(ids, [None] * len(ids), [None] * len(ids), deadline)
            return self.wait_for(ids, deadline)
        if self._busy.count:
            self.drop(ids, deadline)
        self._core.arrive()
        self._note_must_reset(ids, False)
        self._ask(ids, native.OP_BEGIN, lambda lane: HeldRequest(native.OP_RESET))
        return self.wait_for(ids, deadline)

    def _tell(self, ids: Ids, message: Callable[[list[int]], tuple[Any, ...]]) -> None:
        """Tell the workers of those lanes that can be posted now what must come before the requests."""
        now = ids if not self._recovery.troubled else self._recovery.sort_out(ids)[0]
        for worker, own, _ in self.commands.by_worker(now):
            self.commands.tell(worker, *message(own))

    def _ask(self, ids: Ids | None, op: int, held: Callable[[int], HeldRequest]) -> None:
        """Post the requests of lanes (None: all), or hold those that cannot be posted now, as `held` says."""
        if self._fifo:
            self._busy.sent(self.table.all_ids if ids is None else ids)
        if not self._recovery.troubled:
            self._post(ids, op)
            return
        # Not as it was found before the workers were told: one may just have been found dead.
        now, later = self._recovery.sort_out(self.table.all_ids if ids is None else ids)
        for lane in later:
            self._recovery.hold(lane, held(lane))
        if len(now):
            self._post(now, op)

    def _post(self, ids: Ids | None, op: int) -> None:
        code = self._core.post(ids, op)
        if code == native.IN_USE:
            raise concurrent_use()
        if code:
            raise self._busy_error(self.table.all_ids if ids is None else ids)
        self._prompt_workers()

    def _prompt_workers(self) -> None:
        """Let workers elsewhere begin at once; the caller's own block begins when it is waited for."""
        if self._prompt is not None and not self._inline:
            self._prompt()

    def _aim(self, ids: Any) -> None:
        """Let the next request of these lanes, none of which is busy, write into a frame that no array is lent from."""
        if not self._frames.lends:
            return
        seen = self._recovery.seen_slots(ids) if self._replaces else set()
        slot = self._frames.free_slot(seen)
        if slot is None:
            slot = self._frames.free_slot()
        assert slot is not None, "the last free frame is never lent"
        self.table.slot[ids] = (slot - 1) % self.table.frame_count  # the core goes on to the next

    # ---- answers ---------------------------------------------------------------------------------------------

    def exchange(self, actions: Any, deadline: Deadline) -> Ready:
        """Ask all lanes for a step and wait for them: in one call of the core where nothing is out of the ordinary."""
        code, began_ns = native.NOT_TAKEN, None
        if deadline is NEVER and not self.some_must_reset and not self._recovery.troubled:
            code = self._step_at_once(actions)
            if code == native.COLLECT_TIMEOUT:
                began_ns = self._look_around(code, deadline)
        if code == native.NOT_TAKEN:
            self._send(actions, None)
        try:
            ready = self._taken(self.table.all_ids, code, deadline) if code >= 0 else None
            return self._wait(self.table.count, None, deadline, began_ns) if ready is None else ready
        except EnvError:
            with contextlib.suppress(ShoalError):  # the env's own error is what matters
                self.drop(self.table.all_ids, deadline)
            raise

    def _step_at_once(self, actions: Any) -> int:
        """The core's short cut, as it says: status << 8 | slot, or why not."""
        slots = self.table.slot.copy() if self._frames.lends else None
        if slots is not None and not self._busy.count:
            with self._core:
                self._aim(slice(None))
        code: int = self._core.step(actions, self._prompt, self._spin_ns, self._timeouts.patience_ns)
        if code < 0:
            if slots is not None and code == native.NOT_TAKEN:
                self.table.slot[:] = slots  # nothing was written
            if code == native.IN_USE:
                raise concurrent_use()
        return code

    def _look_around(self, code: int, deadline: Deadline) -> int:
        """The core's patience is over: see why. Returns when its wait has begun, for the one that goes on with it."""
        began_ns = time.monotonic_ns() - self._timeouts.patience_ns
        self._collector.attend(code, deadline, began_ns)
        return began_ns

    def _taken(self, ids: Ids, code: int, deadline: Deadline) -> Ready | None:
        """What the core's step or recv has answered, of these lanes; None when it must be waited for once more."""
        slot, status, first = code & 0xFF, code >> 8 & 0xFF, code >> 16
        if slot == native.MIXED_SLOTS:
            slot = -1
        if status or self._user_resets:
            return self._received(ids, first, slot, status, deadline)
        if self._replaces:
            self._recovery.delivered(ids, slot)
        return self._whole[slot] if slot >= 0 and ids is self.table.all_ids else Ready(ids, first, slot, {})

    def wait_next(self, need: int, deadline: Deadline, least: int | None = None) -> Ready:
        """Wait for the next `need` lanes, by the pool's order; at the deadline `least` will do, if so many are done.

        In one call of the core where nothing is out of the ordinary.
        """
        began_ns = None
        if deadline is NEVER and least is None and not self._recovery.troubled:
            ids = self.table.all_ids if need == self.table.count else np.empty(need, np.int64)
            code = self._recv_at_once(need, ids)
            ready = self._taken(ids, code, deadline) if code >= 0 else None
            if ready is not None:
                return ready
            if code == native.COLLECT_TIMEOUT:
                began_ns = self._look_around(code, deadline)
        return self._wait_next(need, deadline, least, began_ns)

    def _recv_at_once(self, need: int, ids: Ids) -> int:
        """The core's short cut, as it says: first << 16 | status << 8 | slot, with the lanes in `ids`; or why not."""
        if self._timeouts.seconds is not None:
            self._collector.look_around(time.monotonic_ns())
            if self._recovery.troubled:
                return native.NOT_TAKEN
        out = None if need == self.table.count else ids
        code: int = self._core.recv(need, out, self._prompt, self._spin_ns, self._timeouts.patience_ns)
        if code == native.IN_USE:
            raise concurrent_use()
        return code

    def _wait_next(self, need: int, deadline: Deadline, least: int | None, began_ns: int | None) -> Ready:
        """The same step by step: where something is wrong, where there is a deadline, or where fewer may do."""
        self._core.arrive()
        pending = self._busy.count
        if least is not None and least <= pending < need:
            need = pending
        wanted = None
        if self._fifo and need < self.table.count and pending >= need:
            wanted = self._busy.in_order(self.pending)[:need]
        if need == self._window and pending >= need:
            wanted = self._busy.part_of_window(self._window, least)
            need = need if wanted is None else len(wanted)
        try:
            return self._wait(need, wanted, deadline, began_ns)
        except StepTimeout:
            done = self._collector.done_in_order(need, self._fifo)
            if least is None or len(done) < least or deadline.left != 0.0:
                raise
            return self._wait(len(done), done, deadline)

    def wait_any(self, least: int, deadline: Deadline) -> Ready:
        """Wait until so many lanes are done, and take all that are; none are waited for if `least` is 0."""
        self._core.arrive()
        done = np.sort(self._collector.done_in_order(self.table.count, self._fifo))
        if not len(done) and not least:
            return Ready(done, 0, -1, {})
        return self._wait(least, None, deadline) if len(done) < least else self._wait(len(done), done, deadline)

    def wait_for(self, ids: Ids, deadline: Deadline) -> Ready:
        """Wait for exactly these lanes, ascending."""
        self._groups.check_whole(ids, "reset")
        self._core.arrive()
        idle = ids[~self._busy.among(ids)]
        if len(idle):
            raise NothingPending(f"envs {idle[:8].tolist()} were not sent to: there is nothing to wait for")
        if self.table.frame_count == 1 and self._busy.count == len(ids):
            return self.wait_next(len(ids), deadline)
        ready = self._wait(len(ids), ids if len(ids) < self.table.count else None, deadline)
        slot = int(self.table.slot[ids[0]])
        if not self._busy.count and self._frames.can_realign(ids, slot):
            self._frames.realign(slot)
            if self._replaces:
                self._recovery.realigned(slot)
            ready = ready._replace(slot=slot if len(ids) == self.table.count else ready.slot)
        return ready

    def drop(self, ids: Ids, deadline: Deadline) -> None:
        """Wait for those of the lanes that are busy, and forget what they answer."""
        self._recovery.note_posted()
        if self._groups.some:
            stepping = self.pending
            # Resets of some lanes are asked for one by one.
            stepping = stepping[self.table.op[stepping] == native.OP_STEP]
            self._groups.check_none_stays(ids, stepping, "drop")
        for lane in ids.tolist():
            self._busy.drop_held(lane)
        while len(busy := np.sort(ids[self._busy.among(ids)])):
            self._collector.collect(len(busy), busy, deadline)
            notes = self._collector.take_notes(busy, deadline)
            if notes is not None:
                self._forget(busy, [note for _, note in notes if note.error is not None])

    def _forget(self, ids: Ids, failed: list[Note]) -> None:
        """Lanes that were taken, and of which the caller will not see the answers."""
        for note in failed:
            lanes = self._groups.of(note.lane)
            if note.lane == lanes[0] and not self._give_up(note):
                for lane in lanes.tolist():
                    self._busy.drop_held(lane)  # a new env is built when the lane is asked again
        fine = ids[~np.isin(ids, [note.lane for note in failed])]
        if self._user_resets:
            self._note_must_reset(fine, self._must_reset[fine] | self._frames.ended(fine))
        # Their next request is written into the same frame, so that what was seen last stays where it is.
        if self._replaces:
            self._recovery.dropped(fine)
        elif not self._frames.lends:
            self.table.slot[fine] = (self.table.slot[fine].astype(np.int64) - 1) % self.table.frame_count

    def _wait(self, need: int, wanted: Ids | None, deadline: Deadline, began_ns: int | None = None) -> Ready:
        if self._busy.count < need:
            with self._core:  # another thread's step may be what is pending
                pass
            more = (
                "send to more, or make the pool with a smaller batch_size"
                if self._busy.count
                else "call async_reset or send first"
            )
            raise NothingPending(f"recv waits for {need} envs and {self._busy.count} were sent to: {more}")
        while True:
            ready = self._received(*self._collector.collect(need, wanted, deadline, began_ns), deadline)
            if ready is not None:
                return ready

    def _received(self, ids: Ids, first: int, slot: int, status: int, deadline: Deadline) -> Ready | None:
        """Lanes that were taken, with their notes; None when one was lost, and all must be waited for once more.

        Raises the first env's error, if one raised.
        """
        infos = {}
        began_ns = time.monotonic_ns() if status else 0
        if status & STATUS_NOTE:
            notes = self._collector.take_notes(ids, deadline)
            if notes is None:
                return None
            for worker, note in notes:
                if note.error is not None:
                    # Its lanes are idle and must be reset, or are held; the others wait for the next recv.
                    lost = self._groups.of(note.lane)
                    self._collector.put_back(
                        ids[~np.isin(ids, lost)], [one for one in notes if one[1].lane not in lost]
                    )
                    if not self._give_up(note):
                        return None
                    hint = self._recovery.restarts.spent() if self._recovery.mends else ""
                    raise note.error.unpack(note.lane, worker.index, hint)
            infos = {note.lane: note.info for _, note in notes if note.info}
        if status & (STATUS_FINAL | STATUS_INFO):
            infos = self._frames.infos(Ready(ids, first, slot, infos), status)
        if status:
            self._frames.spent_on_infos(began_ns)
        if self._user_resets:
            self._note_must_reset(ids, self._frames.ended(ids))
        if self._replaces:
            self._recovery.delivered(ids, slot)
        return Ready(ids, first, slot, infos)

    def _give_up(self, note: Note) -> bool:
        """An env raised, and its lane was taken: whether it must be reset, rather than get a new env."""
        assert note.error is not None
        lanes = self._groups.of(note.lane)
        if self._recovery.retry(lanes, note.error):
            return False
        self._note_must_reset(lanes, self._strict)
        return True

    def start_call(self, ids: Ids, command: str, arguments: Arguments, deadline: Deadline = NEVER) -> Call:
        """Send a command to the envs' workers; `arguments` gives those for some rows of `ids`."""
        with self._core:
            self._check_idle(ids)
        return self.commands.start(ids, command, arguments, deadline)

    # ---- rollouts --------------------------------------------------------------------------------------------

    def roll_at_once(self, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        """Let the backend fill the record of a rollout without Python; False where it cannot.

        No lane may be busy. If it fails, all lanes must be reset.
        """
        table, workers = self.table, self.table.workers
        with self._core:
            self._check_idle(table.all_ids)
            self._check_reset(table.all_ids)
            try:
                if not workers.backend.roll_out(workers.inline, record, policy, params, rngs):
                    return False
            except BaseException:
                self._note_must_reset(table.all_ids, True)
                raise
            self._aim(slice(None))
            slot = (int(table.slot[0]) + 1) % table.frame_count
            table.slot[:] = slot
        for name, array in record.last_answers().items():
            table.slab.array(name)[slot] = array
        table.status[slot] = 0
        return True

    # ---- snapshots -------------------------------------------------------------------------------------------

    def settle(self, deadline: Deadline) -> dict[int, Note]:
        """Wait until all lanes that are busy have answered, and leave the answers for recv: their notes, by lane."""
        while len(busy := self.pending):
            self._collector.collect(len(busy), busy if len(busy) < self.table.count else None, deadline)
            notes = self._collector.take_notes(busy, deadline)
            if notes is None:
                continue
            self._collector.put_back(busy, notes)
            bad = [note.lane for _, note in notes if note.error is not None]
            if bad:
                raise CannotSnapshot(f"envs {bad} have raised: recv, and reset them, before a snapshot", bad)
            return self._frames.whole_notes(busy, [note for _, note in notes], self.table.requested)
        return {}

    def facts(self) -> dict[str, Any]:
        """What is known about the lanes, none of which is at work, as plain data."""
        return {
            "pending": self._busy.in_order(self.pending).tolist(),
            "must_reset": np.flatnonzero(self._must_reset).tolist(),
            **self._recovery.restarts.facts(),
        }

    def resume(self, facts: dict[str, Any], notes: dict[int, Note], slot: int) -> None:
        """The counterpart of `facts`, for lanes that are all idle, with their last answers in this frame."""
        self.table.slot[:] = slot
        self._note_must_reset(self.table.all_ids, np.isin(self.table.all_ids, facts["must_reset"]))
        self._recovery.restarts.resume(facts)
        self._recovery.resumed(slot)
        self._recovery.look()
        for lane, note in notes.items():
            self.table.worker_of(lane).keep_note(note)
        pending = np.array(facts["pending"], np.int64)
        self._busy.put_back(pending)
        self._busy.sent(pending)

    def _note_must_reset(self, ids: Any, must: Any) -> None:
        """Note which of these lanes the user must reset before they are stepped."""
        self._must_reset[ids] = must
        self.some_must_reset = bool(self._must_reset.any())

    # ---- errors ----------------------------------------------------------------------------------------------

    def _check_idle(self, ids: Ids) -> None:
        if self._busy.count and self._busy.among(ids).any():
            raise self._busy_error(ids)

    def _check_reset(self, ids: Ids) -> None:
        stale = ids[self._must_reset[ids]]
        if len(stale):
            raise ResetNeeded(
                f"env {stale[0]} must be reset before it is stepped: it was never reset, its episode is over "
                f"or it raised; reset envs {stale[:8].tolist()} first"
            )

    def _busy_error(self, ids: Ids) -> ShoalError:
        busy = ids[self._busy.among(ids)][:8].tolist()
        return CallPending(f"envs {busy} have an earlier send whose results were not received: recv them first")

    def end(self, why: ShoalError) -> None:
        """Wake a thread that waits for answers: the pool is being closed."""
        self.commands.over = why
        self._core.alarm()
