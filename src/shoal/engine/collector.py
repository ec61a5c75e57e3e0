"""Waits for answers, and takes them with their notes. A wait also sees to what goes wrong meanwhile.

The core waits until enough lanes have answered, until it is time to look around, or until it is woken because a worker
has died or is back. Then held requests are posted, dead workers are replaced, and envs that take too long are ended.
"""

from __future__ import annotations

import time

import numpy as np

from shoal import native
from shoal.backends.base import Worker
from shoal.engine.commands import Commands
from shoal.engine.lane_table import LaneTable
from shoal.engine.recovery import Recovery
from shoal.engine.timeouts import Timeouts
from shoal.errors import ConcurrentUse, ShoalError, StepTimeout
from shoal.memory.messages import STATUS_NOTE, Note
from shoal.support.checks import Ids
from shoal.support.deadline import Deadline


class Collector:
    """Takes answers of the lanes of one pool; a wait spins for `spin_ns` before it sleeps."""

    def __init__(self, table: LaneTable, recovery: Recovery, timeouts: Timeouts, commands: Commands, spin_ns: int):
        self._table, self._busy, self._core = table, table.busy, table.core
        self._recovery, self._timeouts, self._commands, self._spin_ns = recovery, timeouts, commands, spin_ns
        self._prompt = table.workers.backend.prompt(table.workers.inline)
        self._out = np.zeros(table.count, np.int64)

    def collect(
        self, need: int, wanted: Ids | None, deadline: Deadline, began_ns: int | None = None
    ) -> tuple[Ids, int, int, int]:
        """Take `need` lanes that have answered: (ids, first, slot, status), as the core says."""
        began_ns = time.monotonic_ns() if began_ns is None else began_ns
        late = None  # looked for only when something takes long
        self.look_around(began_ns)
        while True:
            if self._recovery.troubled:
                self._recovery.release(self._commands.tell)
            until = self._next_look(deadline, began_ns, late)
            count, first, slot, status = self._core.collect(need, wanted, until, self._spin_ns, self._out, self._prompt)
            if count >= 0:
                break
            late = self.attend(count, deadline, began_ns)
        ids = self._table.all_ids if count == self._table.count else self._out[:count].copy()
        return ids, first, slot, status

    def look_around(self, now_ns: int) -> None:
        """End the workers of envs that take too long, if it is time to look for them."""
        if self._timeouts.is_time(now_ns):
            self._end_overdue(self.late())

    def _next_look(self, deadline: Deadline, began_ns: int, late: Ids | None) -> int:
        look = self._timeouts.next_look(deadline, began_ns, None if late is None else self._busy.posted_among(late))
        release = self._recovery.next_release_ns() if self._recovery.troubled else None
        return look if release is None else release if look < 0 else min(look, release)

    def late(self) -> Ids:
        """The lanes that have not answered yet."""
        pending = self._busy.all()
        late = self._table.answered[pending] != self._table.requested[pending]
        if self._busy.held:
            late |= ~np.isin(pending, self._busy.posted_among(pending))
        return np.asarray(pending[late])

    def done_in_order(self, most: int, fifo: bool) -> Ids:
        """Lanes that can be received at once, first to last as they would be, at most so many."""
        pending, groups = self._busy.all(), self._table.groups
        if fifo:
            pending = self._busy.in_order(pending)
        answered = self._table.answered == self._table.requested
        done = np.isin(pending, self._busy.posted_among(pending)) & answered[pending]
        if groups.some:
            done &= answered[groups.leader[pending]]
        if fifo:
            ahead = len(pending) if done.all() else int(np.argmin(done))
            return pending[: min(ahead, most)]
        found: Ids = pending[done]
        return found[np.argsort(self._table.done_ns[found], kind="stable")[:most]]

    def take_notes(self, ids: Ids, deadline: Deadline) -> list[tuple[Worker, Note]] | None:
        """Read what lanes have in the side channel; at the deadline, all of them are pending again.

        None when a worker has died meanwhile: all of them are pending again.
        """
        noted = ids[(self._table.status[self._table.slot[ids], ids] & STATUS_NOTE) != 0]
        notes: list[tuple[Worker, Note]] = []
        sequences = self._table.requested[noted].tolist()
        for lane, owner, sequence in zip(noted.tolist(), self._table.owner[noted].tolist(), sequences, strict=True):
            worker = self._table.workers[owner]
            try:
                with self._core:
                    note = worker.take_note(lane, sequence, deadline)
            except Exception as error:
                self.put_back(ids, notes)
                if isinstance(error, StepTimeout | ConcurrentUse):
                    raise
                self._commands.report_death(worker, error)
                return None
            except BaseException:  # an interrupt
                self.put_back(ids, notes)
                raise
            if note.objects:
                self._table.answers.keep_objects(lane, note.objects)
            notes.append((worker, note))
        return notes

    def put_back(self, ids: Ids, notes: list[tuple[Worker, Note]]) -> None:
        """Leave lanes that were taken, and their notes, for the next recv."""
        self._busy.put_back(ids)
        for worker, note in notes:
            worker.keep_note(note)

    def attend(self, code: int, deadline: Deadline, began_ns: int) -> Ids:
        """See why a wait has ended without an answer. Raises, unless it is to be gone on with, for these lanes."""
        if code == native.IN_USE:
            raise concurrent_use()
        if self._commands.over is not None:
            raise self._commands.over
        if code == native.COLLECT_ALARM:
            self._core.heard()
            self._recovery.news()
            return self.late()
        late = self.late()
        if deadline.left == 0.0:
            message = (
                f"envs {late[:8].tolist()} did not answer within {deadline.seconds} s; they can be waited for again"
            )
            raise StepTimeout(message, late.tolist())
        self._timeouts.speak(began_ns, late.tolist())
        self._end_overdue(late)
        return late

    def _end_overdue(self, late: Ids) -> None:
        """End the workers of envs that take too long. Raises where that cannot be done."""
        seconds = self._timeouts.seconds or 0.0
        stuck = [
            (w, lane)
            for w, lane in self._timeouts.overdue(self._busy.posted_among(late))
            if not self._recovery.condemn(w, lane, seconds)
        ]
        if stuck:
            ids = [one for worker, lane in stuck for one in ([lane] if lane is not None else worker.env_ids)]
            message = f"envs {ids} take longer than step_timeout={seconds:g}; they can be waited for again"
            raise StepTimeout(message, ids)


def concurrent_use() -> ShoalError:
    """What a thread is told that uses a pool while another one does."""
    return ConcurrentUse("another thread is using this pool: give each thread a pool of its own")
