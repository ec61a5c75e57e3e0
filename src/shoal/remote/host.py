"""Runs a block of envs for a pool elsewhere: local workers behind a slab of its own.

A host takes a request, posts it to its workers as a pool would, and packs the rows that the lanes have answered. The
workers are the same as in a local pool, so autoreset, infos, errors and restarts work as they do there. Only the pool
decides which lanes are requested, and what happens to their answers.
"""

from __future__ import annotations

import collections
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.backends import registry as backends
from shoal.backends.backend import BackendSetup
from shoal.backends.base import Worker
from shoal.backends.mail import dumps_summary, pack
from shoal.engine.workers import Workers
from shoal.envs.functions import install_registry
from shoal.errors import EnvError, ShoalError, WorkerDied
from shoal.memory.messages import STATUS_NOTE, BlockSummary, Note, Order, Reply
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import Layout, Slab
from shoal.planning.plan import Plan, spin_times
from shoal.remote.wire import AVERAGED, HOST_LIVES, RowsMessage, Wire, is_words, pack_words, unpack_words
from shoal.spaces.leaves import flatten
from shoal.support.cores import usable_cores
from shoal.support.deadline import NEVER, Deadline

Array = npt.NDArray[Any]
ONE = np.uint64(1)
CLOSE_TIMEOUT = 5.0  # seconds for the envs' close; after that worker processes are killed
PER_LANE = ("set", "load")  # commands with one value for each lane as the last argument


@dataclass
class _Job:
    """A request that is being carried out, and the messages to send with its answer."""

    number: int
    lanes: Array
    at: Any  # an index of the lanes
    since_ns: int
    letters: list[bytes] = field(default_factory=list)


class BlockHost:
    """Runs a block of envs.

    Give it each message by `admit`, and send back what `poll` returns; end when it is `over`. One thread calls all
    methods, except for `peek` and `wake`, which any thread may call. Error messages call this machine `node`.
    """

    def __init__(self, node: str = ""):
        self.node = node or platform.node()
        self.over = False
        self._workers: Workers | None = None
        self._slab: Slab | None = None
        self._answers: collections.deque[bytes] = collections.deque()
        self._early: dict[int, RowsMessage] = {}  # requests that have arrived before an earlier one
        self._next = 0
        self._jobs: dict[int, _Job] = {}
        self._thread: int | None = None

    @property
    def idle(self) -> bool:
        """Whether `poll` has nothing to wait for until the next message."""
        return not self._jobs and not self._answers

    @property
    def takes_turns(self) -> bool:
        """Whether `poll` itself steps the envs, so that messages are carried out one after the other."""
        return self._workers is None or self._workers.inline is not None

    def admit(self, data: Any) -> None:
        """Take a message. Its answer may be there at once."""
        self._thread = threading.get_ident()
        try:
            if is_words(data):
                name, *words = unpack_words(data)
                getattr(self, f"_on_{name}")(*words)
            else:
                self._on_request(self._wire.read_request(data))
        except Exception as error:
            self._fail(error)

    def poll(self, deadline: Deadline = NEVER) -> list[bytes]:
        """The messages to send back. Waits for one if a request is being carried out; `wake` ends the wait."""
        try:
            if not self._answers and self._jobs:
                self._collect(deadline)
        except Exception as error:
            self._fail(error)
        found = list(self._answers)
        self._answers.clear()
        return found

    def wake(self) -> None:
        """Make `poll` return, because there is another message to admit."""
        if self._slab is not None:
            self._lanes.alarm()

    def peek(self) -> bytes:
        """A message that says which env has been running for the longest time, and the Python stack."""
        at, sequence, age_ns, stack = 0, 0, 0, ""
        if self._slab is not None:
            requested = self._slab.array("requested").copy()  # first, so that it is not the number of a later request
            now = time.monotonic_ns()
            for row in self._slab.array("stats").copy():
                doing, since = int(row[native.STAT_AT]), int(row[native.STAT_SINCE_NS])
                if doing and now - since > age_ns:
                    at, age_ns = doing + (self._shift if doing > 0 else -self._shift), now - since
                    sequence = int(requested[abs(doing) - 1])
        frame = sys._current_frames().get(self._thread or -1)
        if frame is not None:
            stack = "".join(traceback.format_stack(frame)[-8:]).rstrip()
        return pack_words(HOST_LIVES, at, sequence, age_ns, stack)

    def _fail(self, error: Exception) -> None:
        """Give up the block: one of its worker processes has died, or a message could not be carried out."""
        self._jobs.clear()
        summary = str(error).partition("\n")[0]
        if isinstance(error, WorkerDied):
            self._answer("died", f"has lost its {summary}", error.env_id)
        else:
            self._answer("died", f"cannot go on: {type(error).__name__}: {summary}", None)
        self.end(CLOSE_TIMEOUT)

    def _answer(self, *words: Any) -> None:
        self._answers.append(pack_words(*words))

    # ---- start -------------------------------------------------------------------------------------------------

    def _on_build(
        self, index: int, start: int, env_fns: Sequence[bytes], registry: bytes | None, local: dict[str, Any]
    ) -> None:
        """Build the envs; `start` is the id of the first one."""
        try:
            install_registry(registry)
            loaded = {data: cloudpickle.loads(data) for data in dict.fromkeys(env_fns)}
        except Exception as error:
            self._answer("raised", start, pack_error(error, "loading its env function"))
            return
        kind = backends.find(local["backend"])
        alone = kind.one_worker or kind.batched
        self._plan = Plan(kind.name, 1 if alone else min(local["workers"], len(env_fns)))
        try:
            backend = kind(BackendSetup(len(env_fns), interrupts=False))
            self._workers = Workers(backend, [loaded[data] for data in env_fns], self._plan.num_workers, first=start)
            summaries = self._workers.build(NEVER)
        except EnvError as error:
            self._answer("raised", error.env_id, error.packed)
        except ShoalError as error:
            self._answer("failed", error)
        else:
            summary = cloudpickle.loads(dumps_summary(_merged(summaries)))
            self._answer("built", summary, self.node, os.getpid())

    def _on_attach(self, facts: dict[str, Any]) -> None:
        """Make the slab and give it to the workers; see RemoteWorker.attach for the facts.

        Lanes have the same numbers as in the pool. The slab's rows of other lanes take no memory, as they are never
        used. Batched backends are the exception: they count their lanes from 0.
        """
        assert self._workers is not None
        self._shift = facts["first"] if self._workers.backend.batched else 0
        first, stop = facts["first"] - self._shift, facts["stop"] - self._shift
        self._spin_ns, spin_workers = spin_times(self._plan)
        config = replace(facts["config"], publish_each=False, spin_ns=spin_workers)
        try:
            self._workers.move_to(first)
            layout = Layout.plan(
                flatten(config.observation_space), flatten(config.action_space), stop, facts["frames"],
                len(self._workers), **facts["parts"],
            )  # fmt: skip
            slab = Slab.create(layout, self._workers.backend.shares_slab)
            slab.array("requested")[first:stop] = slab.array("answered")[first:stop] = facts["requested"]
            slab.array("lane_stats")[first:stop] = facts["lane_stats"]
            for name, counted in facts["counters"].items():
                slab.array(name)[0] = counted
            slab.array("stats")[:, AVERAGED] = facts["counters"]["stats"][AVERAGED]
            self._workers.attach(slab, config, NEVER)
        except ShoalError as error:
            self._answer("failed", error)
            return
        self._wire = Wire(slab, 0 if len(self._workers) == 1 else None, self._shift)
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._pending, self._status, self._slot = slab.array("pending"), slab.array("status"), slab.array("slot")
        self._ops = slab.array("op")
        self._owner = self._workers.owner_of_lanes()
        self._lanes: Any = native.Lanes(slab, self._pending, self._owner, *self._workers.bells(), None, 0)
        self._lanes.use_cores(len(self._workers) + (self._workers.inline is None), usable_cores())
        self._out = np.zeros(stop, np.int64)
        self._workers.watch(self._lanes.ring, self._lanes.alarm, None)
        self._slab = slab  # last: from now on other threads may call `wake` and `peek`
        self._answer("attached")

    # ---- requests ----------------------------------------------------------------------------------------------

    def _on_request(self, request: RowsMessage) -> None:
        if request.number < self._next:
            return  # it has arrived twice
        self._early[request.number] = request
        while (following := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._begin(following)

    def _begin(self, request: RowsMessage) -> None:
        lanes, at = request.rows.lanes, request.rows.at
        job = self._jobs[request.number] = _Job(request.number, lanes, at, time.monotonic_ns())
        for command in request.mail:
            self._obey(job, *cloudpickle.loads(command))
        if not len(lanes):
            self._finish(job)
            return
        self._wire.write_request(request)
        # `post` increases these numbers by one. Then they are the numbers that the pool expects.
        self._requested[at] = self._answered[at] = request.sequences() - ONE
        ops = self._ops[at].tobytes()
        if ops.count(ops[0]) == len(ops):
            self._lanes.post(lanes, ops[0])
            return
        for op in sorted(set(ops)):
            self._lanes.post(np.ascontiguousarray(lanes[np.frombuffer(ops, np.uint8) == op]), op)

    def _collect(self, deadline: Deadline) -> None:
        """Wait for lanes until a request can be answered, `wake` is called, or the deadline has passed."""
        assert self._workers is not None
        run = None if self._workers.inline is None else self._workers.inline.run
        while not self._answers:
            wanted, need = None, 1
            if len(self._jobs) == 1:  # no other request can become ready, so wait for all lanes of this one
                (job,) = self._jobs.values()
                wanted = np.ascontiguousarray(job.lanes[self._pending[job.at] != 0])
                need = len(wanted)
            count, *_ = self._lanes.collect(need, wanted, deadline.at_ns, self._spin_ns, self._out, run)
            if count == native.COLLECT_ALARM:
                self._lanes.heard()
                for worker in self._workers.dead():
                    raise worker.death()
                return
            if count < 0:
                return
            self._pending[self._answered == self._requested] = 0
            for job in list(self._jobs.values()):
                if not self._pending[job.at].any():
                    self._finish(job)

    def _finish(self, job: _Job) -> None:
        """Pack the answer to a request, with the notes of its lanes."""
        del self._jobs[job.number]
        rows = self._wire.answered_rows(job.at)
        status, notes = self._status[rows.frame], list[Note]()
        if any(status.tobytes()):
            assert self._workers is not None
            for lane in job.lanes[(status & STATUS_NOTE) != 0].tolist():
                worker = self._workers[int(self._owner[lane])]
                note = worker.take_note(lane, int(self._requested[lane]), NEVER)
                notes.append(note._replace(lane=lane + self._shift))
        letters = [pack(notes), *job.letters] if notes else job.letters
        self._answers.append(self._wire.answer(job.number, time.monotonic_ns() - job.since_ns, rows, letters))

    # ---- commands ----------------------------------------------------------------------------------------------

    def _obey(self, job: _Job, name: str, *args: Any) -> None:
        """Send a command to the workers of its lanes, and add their replies, if there are any, to the answer."""
        if name == "reset":
            asked = [(lane - self._shift, *given) for lane, *given in args[0]]
            self._send(name, [lane for lane, *_ in asked], asked)
        elif name == "restart":
            orders = [self._with_last_answer(order, rows) for order, rows in args[0]]
            self._send(name, [order.lane for order in orders], orders)
        elif name == "actions":
            self._send(name, args[0], *args)
        else:
            job.letters.append(self._call(name, *args))

    def _send(self, name: str, lanes: Sequence[int], *arguments: Sequence[Any]) -> None:
        """Send a command to the workers of these lanes. Each argument has one value for each lane."""
        for worker, rows in self._by_worker(lanes):
            worker.send(name, *([values[row] for row in rows] for values in arguments))

    def _with_last_answer(self, order: Order, last: dict[str, Array] | None) -> Order:
        """Write a lane's last answer into a slot that is not written next, and name the slot in the order."""
        if last is None:
            return order
        slot = int(self._slot[order.lane])
        for name, row in last.items():
            self._wire.arrays[name][slot, order.lane] = row
        return order._replace(last_slot=slot)

    def _call(self, name: str, ticket: int, lanes: Sequence[int], *args: Any) -> bytes:
        """Send a command that workers reply to; return the packed replies."""
        lanes = [lane - self._shift for lane in lanes]
        tickets = []
        for worker, rows in self._by_worker(lanes):
            given = (*args[:-1], [args[-1][row] for row in rows]) if name in PER_LANE else args
            tickets.append((worker, worker.call(name, [lanes[row] for row in rows], *given), rows))
        values: list[Any] = [None] * len(lanes)
        for worker, own_ticket, rows in tickets:
            for row, value in zip(rows, worker.reply(own_ticket, NEVER), strict=True):
                values[row] = value
        return pack(Reply(ticket, values))

    def _by_worker(self, lanes: Sequence[int]) -> list[tuple[Worker, list[int]]]:
        """The workers of these lanes, each with the positions of its lanes in the list."""
        groups: dict[int, list[int]] = {}
        for row, lane in enumerate(lanes):
            groups.setdefault(int(self._owner[lane]), []).append(row)
        assert self._workers is not None
        return [(self._workers[index], rows) for index, rows in groups.items()]

    # ---- end ---------------------------------------------------------------------------------------------------

    def _on_close(self) -> None:
        self._jobs.clear()
        self._answer("closed", self.end(CLOSE_TIMEOUT))

    def end(self, seconds: float = 0.0) -> list[tuple[int, PackedError]]:
        """Close the workers: at once, whatever their envs are doing, unless these have some seconds for it."""
        self.over = True
        workers, self._workers = self._workers, None
        errors = [] if workers is None else workers.close(Deadline.after(seconds))
        if self._slab is not None:
            self._slab.close()
        return errors


def _merged(summaries: Sequence[BlockSummary]) -> BlockSummary:
    """The summaries of several workers as one."""
    spaces: list[Any] = []
    which = []
    for summary in summaries:
        for pair in summary.spaces:
            if pair not in spaces:
                spaces.append(pair)
        which += [spaces.index(summary.spaces[place]) for place in summary.which]
    lanes = [one for summary in summaries for one in summary.lanes]
    return replace(summaries[0], spaces=spaces, which=which, identities=[], lanes=lanes)
