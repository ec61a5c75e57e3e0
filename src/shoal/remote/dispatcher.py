"""Blocks of envs that live elsewhere: the caller's side, whatever carries the messages.

A RemoteWorker is a worker like any other: its lanes are requested and answered in the pool's slab. Between them lies a
Dispatcher, one thread of the caller's process. It takes what lanes are asked out of the slab, one message for each host
that is concerned, and writes what comes back into the slab's frames; so scheduling, autoreset, infos, errors and
restarts are the engine's own, and know nothing of it. What the messages say is in `wire`, who answers them is
`remote.host.BlockHost`, and a Transport (below) carries them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.backends.backend import SilentBell
from shoal.backends.base import BlockSpec, Worker
from shoal.backends.mail import unpack
from shoal.errors import ShoalError, WorkerDied
from shoal.memory.messages import BlockSummary, Order, StepperConfig
from shoal.memory.slab import Slab
from shoal.native import counters, twin
from shoal.remote.wire import COUNTERS, HOST_LIVES, Wire, WireRows, is_words, pack_words, run_of, unpack_words
from shoal.support.deadline import Deadline

__all__ = ["REMOTE", "Dispatcher", "HostLost", "Link", "RemoteWorker", "Transport", "make_transport", "pack_assignment"]

Array = npt.NDArray[Any]
# Who carries the messages of such a backend; imported when asked for, since each needs a package of its own.
REMOTE = {"ray": ("shoal.remote.ray.transport", "RayTransport"), "mpi": ("shoal.remote.mpi.transport", "MpiTransport")}
WITH_REQUESTS = ("reset", "restart", "actions")  # commands that travel with the request that they are for
LARGE = 1 << 18  # bytes of an answer; whoever brings more than that has better things to do than to copy it
STACK_PATIENCE = 1.0  # seconds to wait for a stack, which is only for a message
_OVER = object()


@dataclass(frozen=True)
class HostLost:
    """Delivered instead of an answer: there is no host any more. `why` goes on after "worker 3 (...)".

    `for_good`: nor can there be another one.
    """

    why: str
    env_id: int | None = None
    for_good: bool = False


# Takes an answer, as bytes or anything like it, or HostLost; may be called by any thread, and waits for nobody.
Deliver = Callable[[Any], None]


class Link(Protocol):
    """The caller's end of one host. None of its methods raises or waits for the host; all are called by one thread,
    but for `kill`, which may come from any and more than once."""

    def post(self, data: bytes) -> None:
        """Send a message to the host's `admit`. All of its answers are delivered, and HostLost if it cannot answer."""

    def peek(self) -> None:
        """Have what the host's `peek` returns delivered, even while it is stepping."""

    def kill(self) -> None:
        """End the host at once, with all of its processes. Nothing need be delivered after that."""


class Transport(Protocol):
    """Starts hosts elsewhere, and carries messages to them. One for each pool, made by
    `make_transport`, whose class raises ShoalError or ValueError, within seconds, where it cannot be.

    A host's side: make a `BlockHost(where)` of `remote.host`, hand it each message (`admit`), and send back what its
    `poll` returns, until it is `over`. Messages may arrive in any order, and must not be lost without a HostLost. A
    host must not outlive the caller's process.
    """

    num_workers: int  # hosts: as asked for, or as many as there is room for
    local_backend: str  # how a host runs its envs, and by how many workers
    local_workers: int
    ends_hung_envs: bool  # whether `kill` ends a host whose env does not return

    def start(self, index: int, deliver: Deliver) -> Link:
        """Begin to start a host, or one in the place of an earlier one of this index. Does not wait for it.

        Raises StartError where there is no room for it.
        """
        ...

    def close(self) -> None:
        """Give everything back, once all links were killed. May be called again."""


class RemoteWorker(Worker):
    """A block of envs in a host."""

    isolated = True

    def __init__(self, index: int, start: int, stop: int, assignment: bytes, dispatcher: Dispatcher):
        super().__init__(BlockSpec(index, start, stop, ()))
        self._assignment, self._dispatcher = assignment, dispatcher
        self._link: Link | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._state = "starting"
        self.node, self._host_pid = "", 0
        self._lost: HostLost | None = None
        self._lock = threading.Lock()  # held while an answer is written: after `reap`, nothing is
        self._gone = False
        # Those of the dispatcher's thread.
        self._commands: list[bytes] = []
        self._posted_ns: dict[int, int] = {}
        self._number = 0
        self._stacks: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def state(self) -> str:
        return "dead" if self._lost is not None and self._state in ("starting", "running") else self._state

    @property
    def bell(self) -> SilentBell:
        return SilentBell()  # the dispatcher is told by Dispatcher.ring

    @property
    def replaceable(self) -> bool:
        return self._lost is None or not self._lost.for_good

    @property
    def waiting(self) -> bool:
        """Whether the host has something to answer."""
        return bool(self._posted_ns)

    # ---- start -------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        self._link = self._dispatcher.transport.start(self.index, functools.partial(self._dispatcher.deliver, self))
        self._dispatcher.post(self, self._assignment)
        self._assignment = b""

    def built(self, deadline: Deadline) -> BlockSummary:
        summary, self.node, self._host_pid = self._what_it_found(deadline)
        assert isinstance(summary, BlockSummary)
        return summary

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._slab = slab
        # Whoever looks whether an env takes too long must not see what a host says of itself, by a clock of its own.
        self._told = np.zeros_like(slab.array("stats")[self.index])
        self._wire = Wire(slab, self.index, stats=self._told)
        mine = slice(self.start, self.stop)
        self._sent = slab.array("requested")[mine].copy()
        self._rows = {name: slab.array(name)[self.index] for name in COUNTERS}
        self._stats = memoryview(self._rows["stats"])
        # Of an earlier host, if there was one. What a host counts starts with it, ours with the pool.
        self._base = {name: row.copy() for name, row in self._rows.items()}
        self._lane_base = slab.array("lane_stats")[mine].copy()
        self._is_first = not self._base["stats"].any()
        self._core = native.Block(
            slab, self.index, self.start, self.stop, 0, False, twin.ACTION_CALL, (),
            [None] * (self.stop - self.start), None, (None,) * 6, pool_bell, self.bell,
        )  # fmt: skip
        layout = slab.layout
        facts = {
            "first": self.start, "stop": self.stop, "frames": min(2, layout.frames),
            "absences": "present" in layout.fields, "rows": "obs_rows" in layout.fields, "config": config,
            "requested": self._sent,
        }  # fmt: skip
        self._dispatcher.post(self, pack_words("attach", facts))

    def attached(self, deadline: Deadline) -> None:
        self._what_it_found(deadline)
        self._state = "running"

    def _what_it_found(self, deadline: Deadline) -> Any:
        """Its answer while it is being started. Raises the error of an env, or the host's own."""
        kind, *answer = self.receive(deadline)
        if kind == "raised":
            env_id, error = answer
            raise error.unpack(env_id, self.index)
        if kind == "failed":
            raise answer[0]
        return answer

    # ---- the side channel --------------------------------------------------------------------------------------

    def send(self, *message: Any) -> None:
        if self._lost is not None:
            raise self.death()
        if message[0] == "restart":
            message = ("restart", [self._with_rows(order) for order in message[1]])
        # Pickled here, where whoever gave it hears of what cannot be.
        self._dispatcher.tell(self, message[0], cloudpickle.dumps(message))

    def _with_rows(self, order: Order) -> tuple[Order, dict[str, Array] | None]:
        """An order, and what the caller has seen last, which no new host knows."""
        seen = order.last_slot < self._slab.layout.frames
        return order, self._wire.last_rows(order.last_slot, order.lane) if seen else None

    def receive(self, deadline: Deadline) -> Any:
        try:
            message = self._outbox.get(timeout=deadline.left)
        except queue.Empty:
            raise self._timed_out(deadline) from None
        if message is _OVER:
            self._outbox.put(_OVER)
            raise self.death()
        return message

    # ---- the dispatcher's part -------------------------------------------------------------------------------------

    def order(self, name: str, command: bytes) -> None:
        """Take a command to the host: with the request that it belongs to, or at once."""
        self._commands.append(command)
        if name not in WITH_REQUESTS:
            self._request(np.zeros(0, np.int64), np.zeros(0, np.uint64))

    def ask(self, requested: Array) -> None:
        """Send what lanes are asked that the host has not heard of, by the sequence numbers of all lanes."""
        mine = requested[self.start : self.stop]
        new = mine > self._sent
        if self._gone or not (count := np.count_nonzero(new)):
            return
        if count == len(mine):
            self._request(slice(self.start, self.stop), mine)
        else:
            self._request(run_of(np.flatnonzero(new) + self.start), mine[new])
        np.copyto(self._sent, mine, where=new)

    def _request(self, at: Any, sequences: Array) -> None:
        commands, self._commands = self._commands, []
        self._posted_ns[self._number] = time.monotonic_ns()
        self.post(self._wire.request(self._number, at, sequences, commands))
        self._number += 1

    def post(self, data: bytes) -> None:
        """Send a message."""
        if self._link is not None and self._lost is None:
            self._link.post(data)

    def peek(self) -> None:
        """Ask what it is doing."""
        if self._link is not None and self._lost is None:
            self._link.peek()

    def take(self, data: Any) -> None:
        """Write what has come from the host to where the pool looks for it."""
        if not is_words(data):
            with self._lock:
                if not self._gone:
                    self._write(data)
            return
        words = unpack_words(data)
        if words[0] == HOST_LIVES:
            self._show(*words[1:])
        elif words[0] == "died":
            self._dispatcher.lose(self, HostLost(*words[1:]))
        else:
            self._outbox.put(words)

    def _write(self, data: Any) -> None:
        answer = self._wire.read_answer(data)
        for letter in answer.mail:
            self._outbox.put(unpack(letter))
        now, stats, told, count = time.monotonic_ns(), self._stats, self._told, len(answer.rows.lanes)
        # The way there and back counts as the time that it takes to wake a worker, and a message as one pass, whoever
        # steps its lanes there.
        underway_ns = now - self._posted_ns.pop(answer.number, now)
        waking = stats[counters.STAT_WAKE_NS] + max(0, underway_ns - answer.busy_ns)
        passes = stats[counters.STAT_PASSES]
        self._wire.write_answer(answer)
        if not self._is_first:
            self._add_base(answer.rows)
        told[counters.STAT_AT] = told[counters.STAT_SINCE_NS] = 0
        told[counters.STAT_WAKE_NS], told[counters.STAT_PASSES] = waking, passes
        told[counters.STAT_STEPS] -= count  # which `publish` adds, as it does a pass
        np.copyto(self._rows["stats"], told)
        if count:
            # The last lane of an env last, as they are here. And nothing after it: who is woken by it needs the GIL.
            self._core.publish(answer.rows.lanes, now)

    def _add_base(self, rows: WireRows) -> None:
        """Add what earlier hosts have counted to what this one has."""
        for name, row in (self._rows | {"stats": self._told}).items():
            row += self._base[name]
        base, lane_stats = self._lane_base[rows.lanes - self.start], self._wire.arrays["lane_stats"]
        found, longest = lane_stats[rows.at].copy(), counters.LANE_LONGEST_NS
        together = found + base
        together[:, longest] = np.maximum(found[:, longest], base[:, longest])
        lane_stats[rows.at] = together

    def _show(self, at: int, sequence: int, age_ns: int, stack: str) -> None:
        """Which env the host is busy with, for how long, and what its thread is doing."""
        with self._lock:
            # What was said of an earlier step of that env must not be held against the next.
            if self.waiting and (at <= 0 or self._wire.arrays["answered"][at - 1] < sequence):
                self._rows["stats"][[counters.STAT_SINCE_NS, counters.STAT_AT]] = time.monotonic_ns() - age_ns, at
        self._stacks.put(stack)

    def lose(self, lost: HostLost) -> None:
        """It is gone: whoever waits for it hears so."""
        self._lost = self._lost or lost
        self._outbox.put(_OVER)

    # ---- end ---------------------------------------------------------------------------------------------------

    def stack(self) -> str:
        while not self._stacks.empty():
            self._stacks.get()
        self._dispatcher.peek(self)
        with contextlib.suppress(queue.Empty):
            return self._stacks.get(timeout=STACK_PATIENCE)
        return ""

    def condemn(self, why: str) -> None:
        self.condemned = why
        self._kill()
        self._dispatcher.deliver(self, HostLost(why, self._at_work()))

    def _at_work(self) -> int | None:
        at = abs(int(self._rows["stats"][counters.STAT_AT])) if self._state == "running" else 0
        return at - 1 if at else None

    def death(self) -> WorkerDied:
        lost = self._lost or HostLost("is gone")
        envs = f"env {self.start}" if len(self.env_ids) == 1 else f"envs {self.start} to {self.stop - 1}"
        place = f"on node {self.node}, pid {self._host_pid}, " if self.node else ""
        message = f"worker {self.index} ({place}{envs}) {self.condemned or lost.why}"
        if lost.env_id is not None and not self.condemned:
            message += f"; it was running env {lost.env_id}"
        return copy.copy(
            WorkerDied(message, self.index, self._host_pid or None, None, self.env_ids, lost.env_id, node=self.node)
        )

    def reap(self) -> None:
        with self._lock:
            self._gone = True
        self._kill()
        self._state = "restarting"
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if message is not _OVER:
                self._file(message)
        self._outbox.put(_OVER)

    def ask_to_close(self) -> None:
        if self._state not in ("closing", "closed", "restarting") and self._link is not None:
            self._state = "closing"
            self._dispatcher.post(self, pack_words("close"))

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state in ("closed", "restarting"):
            return []
        self.ask_to_close()
        self._state = "closed"
        errors: list[tuple[int, Any]] = []
        with contextlib.suppress(ShoalError):  # it is gone, or takes too long
            while self._link is not None:
                message = self.receive(deadline)
                if isinstance(message, tuple) and message[0] == "closed":
                    errors = message[1]
                    break
        with self._lock:
            self._gone = True
        self._kill()
        self._outbox.put(_OVER)  # for another thread that may still wait
        self._lost = self._lost or HostLost("was closed")
        return errors

    def _kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    def abandon(self) -> None:
        self._state, self._link = "closed", None


class Dispatcher:
    """The thread that carries messages between a pool's slab and its hosts.

    Everything that comes to it waits in one queue, so it never waits for anybody, and nobody for it; an interrupt in
    the caller's thread cannot cut anything in two.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers: dict[int, RemoteWorker] = {}
        self._dead: list[RemoteWorker] = []
        self._wake_pool: Callable[[], None] = lambda: None
        self._look_every: float | None = None
        self._requested: Array | None = None
        self._thread = threading.Thread(target=self._main, name="shoal-dispatcher", daemon=True)
        self._thread.start()

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:
        """The pool is ready: wake_pool when a host is lost, and ask those that take long what they are doing."""
        self._requested, self._wake_pool = slab.array("requested"), wake_pool
        if step_timeout is not None:
            self._events.put((self._look_after, step_timeout / 4))
        if self._dead:
            wake_pool()

    def enlist(self, worker: RemoteWorker) -> None:
        """This is the one of its index from now on."""
        self._workers[worker.index] = worker

    # ---- for the caller's thread: all of them return at once ---------------------------------------------------

    def ring(self) -> int:
        """Lanes were asked for something: take it to the hosts. None of the lanes is the caller's own to step.

        The numbers are read here, in the thread that moves them: lanes that are asked together are seen together.
        """
        if self._requested is not None:
            self._events.put((self._ask, self._requested.copy()))
        return 0

    def tell(self, worker: RemoteWorker, name: str, command: bytes) -> None:
        """Take a command to a host."""
        self._events.put((self._try, worker, worker.order, name, command))

    def post(self, worker: RemoteWorker, data: bytes) -> None:
        """Take a whole message to a host."""
        self._events.put((self._try, worker, worker.post, data))

    def peek(self, worker: RemoteWorker) -> None:
        """Ask a host what it is doing."""
        self._events.put((self._try, worker, worker.peek))

    def deliver(self, worker: RemoteWorker, data: Any) -> None:
        """Something has come from a host, or will never come.

        Rows are written in the thread that brings them. To wake the dispatcher takes longer than to write them, unless
        they are many. The last words of a host come after all that it has answered before.
        """
        if isinstance(data, HostLost):
            self._events.put((self.lose, worker, data))
        elif len(data) > LARGE or is_words(data):
            self._events.put((self._take, worker, data))
        else:
            self._take(worker, data)

    def dead(self) -> list[RemoteWorker]:
        """Those that were lost without being asked to leave, until they are forgotten."""
        return list(self._dead)

    def forget(self, worker: RemoteWorker) -> None:
        """It was heard of."""
        self._dead = [other for other in self._dead if other is not worker]

    def close(self) -> None:
        """End the thread, and give the transport back."""
        self._events.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.transport.close()

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _main(self) -> None:
        looked = time.monotonic()
        while True:
            left = None
            if self._look_every is not None:  # also while other hosts keep us busy
                left = looked + self._look_every - time.monotonic()
                if left <= 0:
                    looked, left = time.monotonic(), self._look_every
                    for worker in [one for one in list(self._workers.values()) if one.waiting]:
                        self._try(worker, worker.peek)
            try:
                event = self._events.get(timeout=left)
            except queue.Empty:
                continue
            if event is None:
                return
            event[0](*event[1:])

    def _look_after(self, seconds: float) -> None:
        self._look_every = seconds

    def _ask(self, requested: Array) -> None:
        for worker in list(self._workers.values()):
            self._try(worker, worker.ask, requested)

    def _try(self, worker: RemoteWorker, act: Callable[..., None], *args: Any) -> None:
        """Tell a host something. Whatever goes wrong with it, the others want this thread."""
        try:
            act(*args)
        except Exception as error:
            self.lose(worker, HostLost(f"could not be asked: {type(error).__name__}: {error}"))

    def _take(self, worker: RemoteWorker, data: Any) -> None:
        try:
            worker.take(data)
        except Exception as error:
            self.lose(worker, HostLost(f"has sent what cannot be read: {type(error).__name__}: {error}"))

    def lose(self, worker: RemoteWorker, lost: HostLost) -> None:
        """A host is gone."""
        if worker.state in ("starting", "running"):
            worker.lose(lost)
            self._dead.append(worker)
            self._wake_pool()
        else:
            worker.lose(lost)


def make_transport(backend: str, options: Mapping[str, Any], num_envs: int, num_workers: int | None) -> Transport:
    """What carries the messages of a pool with such a backend. Raises ShoalError or ValueError where it cannot be."""
    module, name = REMOTE[backend]
    transport: Transport = getattr(importlib.import_module(module), name)(dict(options), num_envs, num_workers)
    return transport


def pack_assignment(
    index: int, start: int, env_fns: Sequence[bytes], registry: bytes | None, local: Mapping[str, Any]
) -> bytes:
    """A host's first message: what it has to build, and how it shall run it."""
    return pack_words("build", index, start, list(env_fns), registry, dict(local))
