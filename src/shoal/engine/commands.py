"""Sends commands to the workers and collects their replies: the calls of a pool, and what a request needs first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shoal.backends.base import TICKETS, Worker
from shoal.engine.lane_table import LaneTable
from shoal.engine.recovery import Recovery
from shoal.engine.timeouts import Timeouts
from shoal.errors import BadCall, ConcurrentUse, ShoalError, StepTimeout, WorkerDied
from shoal.memory.packed_errors import PackedError
from shoal.support.checks import Ids
from shoal.support.deadline import Deadline

Arguments = Callable[[list[int]], tuple[Any, ...]]  # those of a command, for some rows of its ids


class Call(NamedTuple):
    """A command on its way: what its envs are called, for each worker its ticket and the rows of `ids` that it answers,
    what has come back for each row, and the index of each row's worker."""

    ids: Ids
    tickets: list[tuple[Worker, int, list[int]]]
    results: list[Any]
    workers: list[int]


class Commands:
    """Talks to the workers. `over` is why another thread has closed the pool; None while it is open."""

    def __init__(
        self, table: LaneTable, recovery: Recovery, timeouts: Timeouts, on_death: Callable[[ShoalError], ShoalError]
    ):
        self._table, self._core, self._workers = table, table.core, table.workers
        self._recovery, self._timeouts, self._on_death = recovery, timeouts, on_death
        self.over: ShoalError | None = None

    def start(self, ids: Ids, command: str, arguments: Arguments, deadline: Deadline) -> Call:
        """Send a command to the envs' workers."""
        tickets = []
        if self._recovery.mends:
            self._recovery.news()
        for worker, lanes, rows in self.by_worker(ids):
            told = False  # one that was dead before it could have heard of it is being replaced
            while not told:
                if self.over is not None:
                    raise self.over
                worker = self._recovery.await_worker(worker.index, deadline)
                ticket = next(TICKETS)
                with self._core:
                    told = self.tell(worker, command, ticket, lanes, *arguments(rows))
            tickets.append((worker, ticket, rows))
        return Call(ids, tickets, [None] * len(ids), self._table.owner[ids].tolist())

    def finish(self, call: Call, deadline: Deadline) -> list[Any]:
        """Wait for the results of a command, in the order of its ids. Raises the first env's error."""
        values = self._fetch(call, deadline)
        for env_id, worker, value in zip(call.ids.tolist(), call.workers, values, strict=True):
            if isinstance(value, PackedError):
                raise value.unpack(env_id, worker)
        return values

    def command(self, ids: Ids, name: str, arguments: Arguments, deadline: Deadline) -> list[Any]:
        """Send a command, also to lanes with answers that wait to be received: the results, errors among them."""
        return self._fetch(self.start(ids, name, arguments, deadline), deadline)

    def _fetch(self, call: Call, deadline: Deadline) -> list[Any]:
        while call.tickets:
            worker, ticket, rows = call.tickets[0]
            values = self._reply(worker, ticket, deadline)
            for row, value in zip(rows, values, strict=True):
                call.results[row] = value
            del call.tickets[0]
        return list(call.results)

    def _reply(self, worker: Worker, ticket: int, deadline: Deadline) -> list[Any]:
        began_ns = time.monotonic_ns()
        while True:
            look_ns = self._timeouts.next_word(deadline, began_ns)
            try:
                with self._core:
                    return worker.reply(ticket, Deadline(deadline.seconds, look_ns))
            except ConcurrentUse:
                raise
            except StepTimeout:
                if look_ns == deadline.at_ns:
                    raise  # it may be tried again
                self._timeouts.speak(began_ns, worker.env_ids)
            except Exception as error:
                self.report_death(worker, error)
                raise error from None

    def report_death(self, worker: Worker, error: Exception) -> None:
        """A worker does not answer any more. Raises, unless it is being replaced."""
        if self.over is not None:
            raise self.over  # another thread has closed the pool
        if not isinstance(error, ShoalError):
            raise error
        self._recovery.handle_death(worker, error)

    def by_worker(self, ids: Ids) -> list[tuple[Worker, list[int], list[int]]]:
        """The lanes grouped by worker: (worker, its lanes, their places in `ids`)."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for row, lane in enumerate(ids.tolist()):
            lanes, rows = groups.setdefault(int(self._table.owner[lane]), ([], []))
            lanes.append(lane)
            rows.append(row)
        return [(self._workers[w], lanes, rows) for w, (lanes, rows) in groups.items()]

    def tell(self, worker: Worker, *message: Any) -> bool:
        """Take a message to a worker. False when it is gone, and is being replaced."""
        try:
            worker.send(*message)
        except (BadCall, ConcurrentUse):
            raise  # nothing was sent
        except ShoalError as error:
            self.report_death(worker, error)
            if isinstance(error, WorkerDied) and self._workers.is_away(worker.index):
                return False
            raise
        except (OSError, ValueError):
            if self.over is not None:
                raise self.over from None  # another thread has closed the channel under our hands
            raise
        except BaseException:
            if worker.torn:  # it waits for the rest of a message, and would never answer again
                self._on_death(worker.cut())
            raise
        return True
