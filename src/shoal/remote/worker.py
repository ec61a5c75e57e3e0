"""The pool's handle of a block of envs that a host elsewhere runs."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

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
from shoal.remote.transport import HostLost, Link, host_died
from shoal.remote.wire import COUNTERS, HOST_LIVES, Wire, is_words, lanes_index, pack_words, unpack_words
from shoal.support.deadline import Deadline

if TYPE_CHECKING:
    from shoal.remote.backend import RemoteBackend

Array = npt.NDArray[Any]
WITH_REQUESTS = ("reset", "restart", "actions")  # commands that travel with the request that they belong to
STACK_TIMEOUT = 1.0  # seconds to wait for a stack, which only improves a message
_END = object()  # in the outbox: no message will follow


class RemoteWorker(Worker):
    """A block of envs in a host.

    The pool requests its lanes in the slab, as it does for every worker. The dispatcher's thread calls the methods in
    the section "messages": they post the requests to the host, and write the host's answers into the slab.
    """

    isolated = True

    def __init__(self, block: BlockSpec, build: bytes, dispatcher: RemoteBackend):
        super().__init__(block)
        self._build, self._dispatcher = build, dispatcher
        self._link: Link | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stacks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._state = "starting"
        self.node, self._host_pid = "", 0
        self._lost: HostLost | None = None
        self._lock = threading.Lock()  # held while an answer is written
        self._detached = False  # from now on no answer may be written
        # The dispatcher's thread alone uses these.
        self._commands: list[bytes] = []
        self._posted_ns: dict[int, int] = {}  # when each request was posted, until its answer comes
        self._next_number = 0

    @property
    def state(self) -> str:
        return "dead" if self._lost is not None and self._state in ("starting", "running") else self._state

    @property
    def bell(self) -> SilentBell:
        return SilentBell()  # the backend is prompted when there are new requests

    @property
    def replaceable(self) -> bool:
        return self._lost is None or not self._lost.for_good

    @property
    def waiting(self) -> bool:
        """Whether the host has requests that it has not answered."""
        return bool(self._posted_ns)

    # ---- start -------------------------------------------------------------------------------------------------

    def launch(self, deadline: Deadline) -> None:
        self._link = self._dispatcher.transport.start(self.index, functools.partial(self._dispatcher.deliver, self))
        self._dispatcher.call(self, self.post, self._build)
        self._build = b""

    def built(self, deadline: Deadline) -> BlockSummary:
        summary, self.node, self._host_pid = self._start_answer(deadline)
        assert isinstance(summary, BlockSummary)
        return summary

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._slab = slab
        mine, fields = slice(self.start, self.stop), slab.layout.fields
        self._stats = slab.array("stats")[self.index]
        # An answer's stats are first written here. They say what the host is doing by the clock of the host's machine,
        # and no thread that looks for slow envs may see that.
        self._host_stats = np.zeros_like(self._stats)
        self._wire = Wire(slab, self.index, stats=self._host_stats)
        self._sent = slab.array("requested")[mine].copy()
        self._core = native.Block(
            slab, self.index, self.start, self.stop, 0, False, twin.ACTION_CALL, (),
            [None] * (self.stop - self.start), None, (None,) * 6, pool_bell, self.bell,
        )  # fmt: skip
        facts = {
            "first": self.start, "stop": self.stop, "frames": min(2, slab.layout.frames), "config": config,
            "parts": {
                "finals": "final.0" in fields, "absences": "present" in fields, "rows": "obs_rows" in fields,
            },
            "requested": self._sent,
            # A host that replaces another one goes on counting from there.
            "counters": {name: slab.array(name)[self.index] for name in COUNTERS},
            "lane_stats": slab.array("lane_stats")[mine],
        }  # fmt: skip
        self._dispatcher.call(self, self.post, pack_words("attach", facts))

    def attached(self, deadline: Deadline) -> None:
        self._start_answer(deadline)
        self._state = "running"

    def _start_answer(self, deadline: Deadline) -> Any:
        """Wait for the host's answer to a message of its start. Raises the error of an env, or of the host."""
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
        # It is pickled here, so that the caller gets the error if that is not possible.
        self._dispatcher.call(self, self._add_command, message[0], cloudpickle.dumps(message))

    def _with_rows(self, order: Order) -> tuple[Order, dict[str, Array] | None]:
        """An order, and the lane's last answer that the caller has seen. A new host does not know it."""
        seen = order.last_slot < self._slab.layout.frames
        return order, self._wire.last_rows(order.last_slot, order.lane) if seen else None

    def receive(self, deadline: Deadline) -> Any:
        try:
            message = self._outbox.get(timeout=deadline.left)
        except queue.Empty:
            raise self._timed_out(deadline) from None
        if message is _END:
            self._outbox.put(_END)
            raise self.death()
        return message

    # ---- messages, in the dispatcher's thread ------------------------------------------------------------------

    def _add_command(self, name: str, command: bytes) -> None:
        """Send a command to the host: with the next request if it belongs to one, otherwise at once."""
        self._commands.append(command)
        if name not in WITH_REQUESTS:
            self._post_request(np.zeros(0, np.int64), np.zeros(0, np.uint64))

    def post_requests(self, requested: Array) -> None:
        """Post the requests that the host has not got yet; `requested` has the sequence numbers of all lanes."""
        mine = requested[self.start : self.stop]
        new = mine > self._sent
        if self._detached or not new.any():
            return
        self._post_request(lanes_index(np.flatnonzero(new) + self.start), mine[new])
        np.copyto(self._sent, mine, where=new)

    def _post_request(self, at: Any, sequences: Array) -> None:
        commands, self._commands = self._commands, []
        self._posted_ns[self._next_number] = time.monotonic_ns()
        self.post(self._wire.request(self._next_number, at, sequences, commands))
        self._next_number += 1

    def post(self, data: bytes) -> None:
        if self._link is not None and self._lost is None:
            self._link.post(data)

    def peek(self) -> None:
        """Ask the host what it is doing."""
        if self._link is not None and self._lost is None:
            self._link.peek()

    def take(self, data: Any) -> None:
        """Pass on a message of the host: rows to the slab, words to the caller, which waits for them."""
        if not is_words(data):
            with self._lock:
                if not self._detached:
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
        """Write an answer into the slab, and wake the pool."""
        answer = self._wire.read_answer(data)
        for letter in answer.mail:
            self._outbox.put(unpack(letter))
        now, stats, count = time.monotonic_ns(), self._host_stats, len(answer.rows.lanes)
        # The time of the messages on their way counts as the time to wake a worker, and a message counts as one pass.
        travel_ns = now - self._posted_ns.pop(answer.number, now) - answer.busy_ns
        self._wire.write_answer(answer)
        stats[counters.STAT_AT] = stats[counters.STAT_SINCE_NS] = 0
        stats[counters.STAT_WAKE_NS] = self._stats[counters.STAT_WAKE_NS] + max(0, travel_ns)
        stats[counters.STAT_PASSES] = self._stats[counters.STAT_PASSES]
        stats[counters.STAT_STEPS] -= count  # `publish` adds the steps, and one pass
        np.copyto(self._stats, stats)
        if count:
            # Lanes are published in their order, the last lane of an env last. This must be the last statement: it
            # wakes the caller's thread, which then needs the GIL.
            self._core.publish(answer.rows.lanes, now)

    def _show(self, at: int, sequence: int, age_ns: int, stack: str) -> None:
        """Note which env the host is running, for how long, and the stack of its thread."""
        with self._lock:
            # What the host said about an earlier step of that env must not count for the present one.
            if self.waiting and (at <= 0 or self._wire.arrays["answered"][at - 1] < sequence):
                self._stats[[counters.STAT_SINCE_NS, counters.STAT_AT]] = time.monotonic_ns() - age_ns, at
        self._stacks.put(stack)

    def lose(self, lost: HostLost) -> None:
        """Note that the host is gone, and end the wait of callers."""
        self._lost = self._lost or lost
        self._outbox.put(_END)

    # ---- end ---------------------------------------------------------------------------------------------------

    def stack(self) -> str:
        while not self._stacks.empty():
            self._stacks.get()
        self._dispatcher.call(self, self.peek)
        with contextlib.suppress(queue.Empty):
            return self._stacks.get(timeout=STACK_TIMEOUT)
        return ""

    def condemn(self, why: str) -> None:
        self.condemned = why
        at = abs(int(self._stats[counters.STAT_AT])) if self._state == "running" else 0
        self._kill()
        self._dispatcher.deliver(self, HostLost(why, at - 1 if at else None))

    def death(self) -> WorkerDied:
        lost = self._lost or HostLost("is gone")
        why = self.condemned or lost.why
        if lost.env_id is not None and not self.condemned:
            why += f"; it was running env {lost.env_id}"
        return host_died(self.index, self.env_ids, self.node, self._host_pid or None, why, lost.env_id)

    def reap(self) -> None:
        self._detach()
        self._state = "restarting"
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if message is not _END:
                self._file(message)
        self._outbox.put(_END)

    def ask_to_close(self) -> None:
        if self._state not in ("closing", "closed", "restarting") and self._link is not None:
            self._state = "closing"
            self._dispatcher.call(self, self.post, pack_words("close"))

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state in ("closed", "restarting"):
            return []
        self.ask_to_close()
        self._state = "closed"
        errors: list[tuple[int, Any]] = []
        with contextlib.suppress(ShoalError):  # the host is gone, or takes too long
            while self._link is not None:
                message = self.receive(deadline)
                if isinstance(message, tuple) and message[0] == "closed":
                    errors = message[1]
                    break
        self._detach()
        self._outbox.put(_END)  # for another thread that may still wait
        self._lost = self._lost or HostLost("was closed")
        return errors

    def _detach(self) -> None:
        """Let the host write nothing more, and end it."""
        with self._lock:
            self._detached = True
        self._kill()

    def _kill(self) -> None:
        if self._link is not None:
            self._link.kill()

    def abandon(self) -> None:
        self._state, self._link = "closed", None
