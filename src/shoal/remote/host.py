"""Where a block of envs lives that a pool elsewhere drives: a set of local workers behind a slab of its own.

A host takes a request, posts it to its workers as a pool would, and packs the rows that the lanes have answered.
All that makes an env behave (autoreset, infos, errors, restarts) is done by the same steppers as anywhere; which lanes
are asked, and what becomes of the answers, is known to the pool alone.
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
from shoal.backends.mail import pack
from shoal.backends.worker_main import dumps_summary
from shoal.engine.workers import Workers
from shoal.envs.autoreset import RULES
from shoal.envs.functions import install_registry
from shoal.errors import EnvError, ShoalError, WorkerDied
from shoal.memory.messages import STATUS_NOTE, BlockSummary, Note, Order, Reply
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import Layout, Slab
from shoal.planning.plan import Plan, spin_times
from shoal.remote.wire import HOST_LIVES, Request, Wire, is_words, pack_words, unpack_words
from shoal.spaces.leaves import flatten
from shoal.support.deadline import NEVER, Deadline

__all__ = ["BlockHost"]

Array = npt.NDArray[Any]
ONE = np.uint64(1)
CLOSE_TIMEOUT = 5.0  # seconds for the envs' close, until worker processes are forced


@dataclass
class _Job:
    """A request under way: which of its lanes have not answered, and what lies beside the slab for its answer."""

    number: int
    lanes: Array
    at: Any  # an index of theirs
    left: int
    since_ns: int
    letters: list[bytes] = field(default_factory=list)


class BlockHost:
    """A block of envs.

    For one thread, but for `peek` and `wake`. `admit` each message, and send what `poll` returns; when `over`, leave.

    Args:
        node: the machine, as people call it; goes into messages.
    """

    def __init__(self, node: str = ""):
        self.node = node or platform.node()
        self.over = False
        self._workers: Workers | None = None
        self._slab: Slab | None = None
        self._answers: collections.deque[bytes] = collections.deque()
        self._early: dict[int, Request] = {}  # requests that have overtaken another one
        self._next = 0
        self._jobs: dict[int, _Job] = {}
        self._thread: int | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to poll for until the next message."""
        return not self._jobs and not self._answers

    @property
    def takes_turns(self) -> bool:
        """Whether the envs are stepped by whoever polls, so that only one message after the other can be done."""
        return self._workers is None or self._workers.inline is not None

    def admit(self, data: Any) -> None:
        """Take a message. Answers may be there at once."""
        self._thread = threading.get_ident()
        try:
            if is_words(data):
                name, *words = unpack_words(data)
                getattr(self, f"_on_{name}")(*words)
            else:
                self._on_request(self._wire.read_request(data))
        except Exception as error:
            self._die(error)

    def poll(self, deadline: Deadline = NEVER) -> list[bytes]:
        """What is to be sent back; waits for something unless nothing is under way. Returns early when woken."""
        try:
            if not self._answers and self._jobs:
                self._collect(deadline)
        except Exception as error:
            self._die(error)
        found = list(self._answers)
        self._answers.clear()
        return found

    def wake(self) -> None:
        """Make `poll` return: there is another message to admit."""
        if self._slab is not None:
            self._lanes.alarm()

    def peek(self) -> bytes:
        """What the envs are doing: the one that is at it for the longest time, and the Python stack."""
        at, sequence, age_ns, stack = 0, 0, 0, ""
        if self._slab is not None:
            requested = self._slab.array("requested").copy()  # before the rest: not that of a later request
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

    def _die(self, error: Exception) -> None:
        """A worker process of ours is gone, or nothing can be made of a message: so is the block, for the pool."""
        self._jobs.clear()
        story = str(error).partition("\n")[0]
        if isinstance(error, WorkerDied):
            self._answers.append(pack_words("died", f"has lost its {story}", error.env_id))
        else:
            self._answers.append(pack_words("died", f"cannot go on: {type(error).__name__}: {story}", None))
        self._dismiss()

    # ---- start -------------------------------------------------------------------------------------------------

    def _on_build(
        self, index: int, start: int, env_fns: Sequence[bytes], registry: bytes | None, local: dict[str, Any]
    ) -> None:
        """Build the envs: `start` is the id of the first."""
        try:
            install_registry(registry)
            loaded = {data: cloudpickle.loads(data) for data in dict.fromkeys(env_fns)}
        except Exception as error:
            self._answers.append(pack_words("raised", start, pack_error(error, "loading its env function")))
            return
        kind = backends.find(local["backend"])
        alone = kind.one_worker or kind.batched
        self._plan = Plan(kind.name, 1 if alone else min(local["workers"], len(env_fns)))
        try:
            backend = kind(BackendSetup(len(env_fns), interrupts=False))
            self._workers = Workers(backend, [loaded[data] for data in env_fns], self._plan.num_workers, first=start)
            summaries = self._workers.build(NEVER)
        except EnvError as error:
            self._answers.append(pack_words("raised", error.env_id, error.packed))
        except ShoalError as error:
            self._answers.append(pack_words("failed", error))
        else:
            summary = cloudpickle.loads(dumps_summary(_merged(summaries)))
            self._answers.append(pack_words("built", summary, self.node, os.getpid()))

    def _on_attach(self, facts: dict[str, Any]) -> None:
        """Make the slab, and be ready for requests. Lanes have the numbers that the pool gives them; rows of a slab
        that are others' cost nothing, as nobody ever touches them."""
        assert self._workers is not None
        config = facts["config"]
        # Kernels count their lanes from 0.
        self._shift = facts["first"] if self._workers.backend.batched else 0
        first, stop = facts["first"] - self._shift, facts["stop"] - self._shift
        spin_ns, spin_workers = spin_times(self._plan)
        config = replace(config, publish_each=False, spin_ns=spin_workers)
        try:
            self._workers.move_to(first)
            layout = Layout.plan(
                flatten(config.observation_space), flatten(config.action_space), stop, facts["frames"],
                len(self._workers), finals=RULES[config.autoreset].resets_at_once, absences=facts["absences"],
                rows=facts["rows"],
            )  # fmt: skip
            slab = Slab.create(layout, self._workers.backend.shares_slab)
            for name in ("requested", "answered"):
                slab.array(name)[first:stop] = facts["requested"]
            self._workers.attach(slab, config, NEVER)
        except ShoalError as error:
            self._answers.append(pack_words("failed", error))
            return
        self._spin_ns = spin_ns
        self._wire = Wire(slab, 0 if len(self._workers) == 1 else None, self._shift)
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._state, self._status, self._slot = slab.array("pending"), slab.array("status"), slab.array("slot")
        self._ops = slab.array("op")
        self._owner = self._workers.owner_of_lanes()
        self._lanes: Any = native.Lanes(slab, self._state, self._owner, *self._workers.bells(), None, 0)
        self._out, self._job_of = np.zeros(stop, np.int64), np.zeros(stop, np.int64)
        self._workers.watch(self._lanes.ring, self._lanes.alarm, None)
        self._slab = slab  # now `wake` and `peek`, which others call, find all they need
        self._answers.append(pack_words("attached"))

    # ---- requests ----------------------------------------------------------------------------------------------

    def _on_request(self, request: Request) -> None:
        if request.number < self._next:
            return  # it came twice
        self._early[request.number] = request
        while (following := self._early.pop(self._next, None)) is not None:
            self._next += 1
            self._begin(following)

    def _begin(self, request: Request) -> None:
        lanes, at = request.rows.lanes, request.rows.at
        job = self._jobs[request.number] = _Job(request.number, lanes, at, len(lanes), time.monotonic_ns())
        for command in request.commands:
            self._obey(job, *cloudpickle.loads(command))
        if not job.left:
            self._finish(job)
            return
        request.rows.fill(request.values)
        # One less, since posting them moves them on: so they are the numbers by which the pool knows the answers.
        self._requested[at] = self._answered[at] = request.sequences - ONE
        self._job_of[at] = job.number
        ops = self._ops[at].tobytes()
        if ops.count(ops[0]) == len(ops):
            self._lanes.post(lanes, ops[0])
            return
        for op in sorted(set(ops)):
            self._lanes.post(np.ascontiguousarray(lanes[np.frombuffer(ops, np.uint8) == op]), op)

    def _collect(self, deadline: Deadline) -> None:
        """Wait for lanes, until a message can be answered, somebody wakes us or the deadline is over."""
        assert self._workers is not None
        run = None if self._workers.inline is None else self._workers.inline.run
        while not self._answers:
            first = next(iter(self._jobs.values()))
            whole = len(self._jobs) == 1 and first.left == len(first.lanes)  # nothing else can become ready
            wanted, need = (first.lanes, first.left) if whole else (None, 1)
            count, *_ = self._lanes.collect(need, wanted, deadline.at_ns, self._spin_ns, self._out, run)
            if count == native.COLLECT_ALARM:
                self._lanes.heard()
                for worker in self._workers.dead():
                    raise worker.death()
                return
            if count < 0:
                return
            if whole:
                self._finish(first)
                return
            more = np.flatnonzero((self._state != 0) & (self._answered == self._requested))
            self._state[more] = 0
            done = collections.Counter(self._job_of[more].tolist())
            done[int(self._job_of[self._out[0]])] += 1
            for number, lanes in done.items():
                job = self._jobs[number]
                job.left -= lanes
                if not job.left:
                    self._finish(job)

    def _finish(self, job: _Job) -> None:
        del self._jobs[job.number]
        rows = self._wire.answered_rows(job.at)
        status, notes = self._status[rows.frame], list[Note]()
        if any(status.tobytes()):
            for lane in job.lanes[(status & STATUS_NOTE) != 0].tolist():
                note = self._worker(lane).take_note(lane, int(self._requested[lane]), NEVER)
                notes.append(note._replace(lane=lane + self._shift))
        letters = [pack(notes), *job.letters] if notes else job.letters
        self._answers.append(self._wire.answer(job.number, time.monotonic_ns() - job.since_ns, rows, letters))

    def _worker(self, lane: int) -> Worker:
        assert self._workers is not None
        return self._workers[int(self._owner[lane])]

    # ---- commands ----------------------------------------------------------------------------------------------

    def _obey(self, job: _Job, name: str, *args: Any) -> None:
        """Take a command to the workers that it concerns, and wait for what they reply, if they do."""
        if name == "reset":
            asked = [(lane - self._shift, *given) for lane, *given in args[0]]
            for worker, rows in self._by_worker([lane for lane, *_ in asked]):
                worker.send("reset", [asked[row] for row in rows])
        elif name == "restart":
            orders = [self._placed(order, rows) for order, rows in args[0]]
            for worker, rows in self._by_worker([order.lane for order in orders]):
                worker.send("restart", [orders[row] for row in rows])
        elif name == "actions":
            lanes, objects = args
            for worker, rows in self._by_worker(lanes):
                worker.send("actions", [lanes[row] for row in rows], [objects[row] for row in rows])
        else:
            job.letters.append(self._call(name, *args))

    def _placed(self, order: Order, last: dict[str, Array] | None) -> Order:
        """An order whose last answer lies here, where the lane will not be written next."""
        assert self._slab is not None
        if last is None:
            return order
        slot = int(self._slot[order.lane])
        for name, row in last.items():
            self._wire.arrays[name][slot, order.lane] = row
        return order._replace(last_slot=slot)

    def _call(self, name: str, ticket: int, lanes: Sequence[int], *args: Any) -> bytes:
        """A command that is replied to; of those whose last argument has one value for each lane, each gets its own."""
        lanes = [lane - self._shift for lane in lanes]
        each = name in ("set", "load")
        tickets = []
        for worker, rows in self._by_worker(lanes):
            given = (*args[:-1], [args[-1][row] for row in rows]) if each else args
            tickets.append((worker, worker.call(name, [lanes[row] for row in rows], *given), rows))
        values: list[Any] = [None] * len(lanes)
        for worker, own_ticket, rows in tickets:
            for row, value in zip(rows, worker.reply(own_ticket, NEVER), strict=True):
                values[row] = value
        return pack(Reply(ticket, values))

    def _by_worker(self, lanes: Sequence[int]) -> list[tuple[Worker, list[int]]]:
        """The workers of these lanes, and the places of each one's."""
        groups: dict[int, list[int]] = {}
        for row, lane in enumerate(lanes):
            groups.setdefault(int(self._owner[lane]), []).append(row)
        assert self._workers is not None
        return [(self._workers[index], rows) for index, rows in groups.items()]

    # ---- end ---------------------------------------------------------------------------------------------------

    def _on_close(self) -> None:
        self._jobs.clear()
        self._answers.append(pack_words("closed", self._dismiss()))

    def end(self) -> None:
        """Give up the envs at once, whatever they are doing, and be over."""
        self._dismiss(0.0)

    def _dismiss(self, seconds: float = CLOSE_TIMEOUT) -> list[tuple[int, PackedError]]:
        self.over = True
        workers, self._workers = self._workers, None
        errors = [] if workers is None else workers.close(Deadline.after(seconds))
        if self._slab is not None:
            self._slab.close()
        return errors


def _merged(summaries: Sequence[BlockSummary]) -> BlockSummary:
    """What several workers tell about their envs, as if they were one."""
    spaces: list[Any] = []
    which = []
    for summary in summaries:
        for pair in summary.spaces:
            if pair not in spaces:
                spaces.append(pair)
        which += [spaces.index(summary.spaces[place]) for place in summary.which]
    lanes = [one for summary in summaries for one in summary.lanes]
    return replace(summaries[0], spaces=spaces, which=which, identities=[], lanes=lanes)
