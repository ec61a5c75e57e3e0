"""The two ends of the connection to an actor of backend="ray": `RayLink` for the caller, `RayHost` in the actor.

A call of an actor takes Ray about a millisecond. Between two processes of one node, small messages go a shorter way, by
shared memory: those in Ray's compiled-graph channels are found within a tenth of that. Ray's own `read` spins until
there is a message. So both sides look without waiting: when the other side rings (MachineBells), or often where there
are no bells (PollBackoff). Calls carry everything else: messages to other nodes, large messages, the start and the end.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import queue
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from shoal.remote.bell import BellMemory, MachineBells, PollBackoff, PollTimes, home_of_this_process
from shoal.remote.host import BlockHost
from shoal.remote.transport import Deliver, HostLost
from shoal.support.deadline import NEVER, Deadline

IDLE_LOOK = 1.0  # seconds between two looks at whether links were killed
BY_BUFFER = 1 << 16  # bytes; a larger message travels as an array
SWITCH_INTERVAL = 500e-6  # seconds for which an env that computes can keep threads with messages from the interpreter
SHORTEST_POLL = 50e-6  # seconds to wait for local workers until the next look for messages
_Letter = tuple[Any, Callable[[bytes], None]]  # a message, and what to do with its answer
SLOT_BYTES = 1 << 15  # the size of the largest message
TOO_LARGE = b""  # in place of an answer that must be fetched by a call
SLOTS = 4  # the number of messages that can be unread at a time
MAX_CHANNELS = 256  # of one process: Ray keeps the memory of each for as long as the process is connected
SLOT_TIMEOUT = 1.0  # seconds; a slot must be free already, unless the reader was killed in the middle of a read
TIMES = PollTimes(soon=0.9, spin=100e-6, longest=20e-3, woken=0.1)
_opened: collections.Counter[str] = collections.Counter()  # by cluster


def import_channels() -> None:
    """Import Ray's channels, if this version of Ray has them.

    Call it before other threads of Ray's can do so: the modules import each other, and if two threads begin with
    different ones, one of the threads gets an ImportError.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.experimental.channel")


def open_channel(ray: Any, reader: Any, node: str) -> RayChannel | None:
    """Make a channel from this process to one of a node; None if that is not possible.

    The other process is the actor `reader`. If it is not an actor, any actor will do.
    """
    here = ray.get_runtime_context()
    if sys.platform != "linux" or here.get_node_id() != node or _opened[here.gcs_address] >= MAX_CHANNELS:
        return None
    _opened[here.gcs_address] += 1
    try:
        from ray.experimental.channel.shared_memory_channel import Channel
        from ray.experimental.channel.utils import get_self_actor

        return RayChannel([Channel(get_self_actor(), [(reader, node)], SLOT_BYTES + 1024) for _ in range(SLOTS)])
    except Exception:  # this version of Ray has none, or its object store is full: calls will do
        return None


class RayChannel:
    """Carries messages of one process to another. Each of the two has a copy of it.

    Ray's channels have no buffer: one can be written again only after it was read. So there are several of them, used
    in turn, and the writer must know that no more than SLOTS messages are unread.
    """

    def __init__(self, slots: list[Any]):
        self._slots, self._next = slots, 0

    def put(self, data: bytes) -> bool:
        """Send a message. Returns False if the reader is dead."""
        try:
            self._slots[self._next].write(data, SLOT_TIMEOUT)
        except Exception:
            return False
        self._next = (self._next + 1) % SLOTS
        return True

    def register_reader(self) -> None:
        """Make ready to read, while the writer is alive: Ray ends a process that does so after the writer's death."""
        for slot in self._slots:
            slot.ensure_registered_as_reader()

    def take(self) -> bytes | None:
        """The next message, or None. Raises one of Ray's errors if Ray has ended."""
        from ray.exceptions import RayChannelTimeoutError

        try:
            data: bytes = self._slots[self._next].read(0)
        except RayChannelTimeoutError:
            return None
        self._next = (self._next + 1) % SLOTS
        return data


class RayHost:
    """The class of the actors. One actor runs one block of envs.

    Messages come as calls of `serve`, which return the answers, or by a channel. Ray runs each call in a thread of its
    own; the call of `work` is the thread that steps the envs. Tests bring a host.
    """

    def __init__(self, host: BlockHost | None = None) -> None:
        if host is None:
            import ray

            node = ray.get_runtime_context().get_node_id()
            host = BlockHost(f"{ray.util.get_node_ip_address()} ({node[:8]})")
            sys.setswitchinterval(SWITCH_INTERVAL)
        self._host = host
        self._inbox: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._requests: RayChannel | None = None
        self._answers: RayChannel | None = None
        self._large: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._bells: MachineBells | None = None
        self._rank, self._rings = 0, False

    def serve(self, data: Any) -> Any:
        """Take a message, and return an answer, which may belong to another message."""
        answer: Future[bytes] = Future()
        self._put((data, answer.set_result))
        return without_copy(answer.result())

    def fetch(self) -> Any:
        """An answer that is too large for the channel."""
        return without_copy(self._large.get())

    def connect(self, node: str, memory: BellMemory, rank: int) -> tuple[RayChannel | None, bool]:
        """Return as soon as the actor runs: the channel to the caller's node, if there is one, and whether both sides
        ring. The caller is rank 0 of the bells, and this actor has the given rank."""
        import ray

        bells = MachineBells(memory, rank, {0: memory.home, rank: home_of_this_process()})
        self._answers = open_channel(ray, ray.get_runtime_context().current_actor, node)
        if self._answers is not None:
            self._bells, self._rank, self._rings = bells, rank, bells.reaches(0)
        return self._answers, self._rings

    def listen(self, requests: RayChannel) -> None:
        """Take messages from this channel too."""
        self._requests = requests
        self._put(None)

    def peek(self) -> bytes:
        return self._host.peek()

    def _put(self, letter: _Letter | None) -> None:
        """Make `work` look into the inbox."""
        self._inbox.put(letter)
        if not self._host.takes_turns:
            self._host.wake()
        if self._bells is not None:
            self._bells.ring(self._rank)

    def work(self) -> None:
        """Take messages and answer them, for as long as the actor lives. Envs are built and stepped in this thread, or
        by workers of the host."""
        backoff = PollBackoff(TIMES)
        waiting: list[Callable[[bytes], None]] = []
        while True:
            if self._host.idle or not self._host.takes_turns:
                while (letter := self._next(backoff)) is not None:
                    backoff.came()
                    data, reply = letter
                    waiting.append(reply)
                    self._host.admit(data)  # each message has one answer, but the answers may come in another order
                    if self._host.takes_turns:
                        break
            if not self._host.idle:
                look = not self._host.takes_turns and self._requests is not None
                for answer in self._host.poll(Deadline.after(max(backoff.sleep, SHORTEST_POLL)) if look else NEVER):
                    waiting.pop(0)(answer)
                    backoff.restart()

    def _next(self, backoff: PollBackoff) -> _Letter | None:
        """The next message, or None. Waits for a while if there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        if self._requests is None:
            return self._inbox.get() if self._host.idle else None
        data = self._requests.take()
        if data is not None:
            return data, self._send
        if self._host.idle:
            backoff.bells, backoff.woken = self._bells, self._rings
            backoff.wait()
            backoff.woken = False  # rings do not end a wait for local workers
        return None

    def _send(self, answer: bytes) -> None:
        assert self._answers is not None
        if len(answer) > SLOT_BYTES:
            self._large.put(answer)
            answer = TOO_LARGE
        if not self._answers.put(answer):
            raise RuntimeError("the caller does not take the answers any more")
        if self._bells is not None:
            self._bells.ring(0)


def without_copy(data: bytes) -> Any:
    """A large message as an array, which Ray neither copies nor pickles; a small one as it is."""
    return np.frombuffer(data, np.uint8) if len(data) >= BY_BUFFER else data


class Listener:
    """Takes the answers that come by channels, in a thread that starts with the first such link."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[RayLink] = queue.SimpleQueue()
        self._links: list[RayLink] = []
        self._over = False
        self._thread: threading.Thread | None = None
        home = home_of_this_process()
        self.memory = BellMemory.create(home, 1 + MAX_CHANNELS)
        self.bells = MachineBells(self.memory, 0, dict.fromkeys(range(1 + MAX_CHANNELS), home))
        self._ranks = itertools.count(1)

    def new_rank(self) -> int:
        """The rank of another actor. If there are too many, the last ones share one, but these have no channel."""
        return min(next(self._ranks), MAX_CHANNELS)

    def add(self, link: RayLink) -> None:
        """Open the channel to a link's actor, and listen to it."""
        self._new.put(link)
        self.bells.ring(0)  # it looks for work
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="shoal-listener", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._over = True
        self.bells.ring(0)  # it looks for work
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.memory.close()

    def _main(self) -> None:
        backoff = PollBackoff(TIMES, self.bells)
        while not self._over:
            while not self._new.empty():
                link = self._new.get()
                link.open()
                self._links.append(link)
            if sum(link.look() for link in self._links):  # looks at all of them
                backoff.came()
                continue
            backoff.woken = all(link.rings for link in self._links)
            if any(link.unanswered for link in self._links):
                backoff.wait()
            else:
                backoff.rest(IDLE_LOOK)
                self._links = [link for link in self._links if not link.killed]


class RayLink:
    """The caller's end of the connection to one actor."""

    def __init__(self, ray: Any, actor: Any, deliver: Deliver, place_timeout: float, listener: Listener):
        self._ray, self._actor, self._deliver, self._listener = ray, actor, deliver, listener
        self._serve = actor.serve.options(concurrency_group="mail")
        self.killed = self._lost = False
        self.rings = False  # whether this process and the actor wake each other by bells
        self._requests: RayChannel | None = None
        self._answers: RayChannel | None = None
        self._sent = self._answered = 0  # messages by channels
        self._rank = listener.new_rank()
        self._timer = threading.Timer(place_timeout, self._give_up, (place_timeout,))
        self._timer.daemon = True
        self._timer.start()
        node = ray.get_runtime_context().get_node_id()
        connected = actor.connect.options(concurrency_group="control").remote(node, listener.memory, self._rank)
        connected.future().add_done_callback(self._connected)
        self._call(actor.work)  # returns only when the actor ends, which is then delivered

    def _connected(self, future: Future[tuple[RayChannel | None, bool]]) -> None:
        """Called in a thread of Ray's, where no call of Ray is allowed."""
        self._timer.cancel()
        if future.exception() is None and future.result()[0] is not None:
            self._answers, self.rings = future.result()
            self._listener.add(self)

    @property
    def unanswered(self) -> int:
        """The number of messages that were sent by the channel and not answered."""
        return 0 if self.killed or self._lost else self._sent - self._answered

    def open(self) -> None:
        try:
            if self._answers is not None:
                self._answers.register_reader()
            requests = open_channel(self._ray, self._actor, self._ray.get_runtime_context().get_node_id())
            if requests is not None:
                self._actor.listen.options(concurrency_group="control").remote(requests)
                self._requests = requests
        except Exception:
            return  # Ray was shut down

    def look(self) -> bool:
        """Deliver the next answer of the channel. Returns whether there was one."""
        if self._answers is None or not self.unanswered:
            return False
        try:
            data = self._answers.take()
        except Exception as error:  # Ray has ended
            self._answered, self._requests = self._sent, None
            self._deliver(HostLost(_reason(error)))
            return False
        if data is None:
            return False
        self._answered += 1
        if data == TOO_LARGE:
            self._requests = None  # the answers that follow will be as large
            self._call(self._actor.fetch.options(concurrency_group="control"))
        else:
            self._deliver(data)
        return True

    def post(self, data: bytes) -> None:
        requests = self._requests
        if requests is not None and len(data) <= SLOT_BYTES and self.unanswered < SLOTS:
            self._sent += 1  # first, as the listener may get the answer at once
            if requests.put(data):
                self._listener.bells.ring(self._rank if self.rings else 0)
                return
            self._sent, self._requests = self._sent - 1, None
        self._call(self._serve, without_copy(data))

    def peek(self) -> None:
        self._call(self._actor.peek.options(concurrency_group="control"))

    def _call(self, method: Any, *args: Any) -> None:
        try:
            method.remote(*args).future().add_done_callback(self._returned)
        except Exception as error:  # Ray was shut down by the caller, for example
            self._deliver(HostLost(_reason(error)))

    def _returned(self, future: Future[Any]) -> None:
        """Deliver the result of a call, in a thread of Ray's."""
        if self.killed:
            return
        error = future.exception()
        if error is not None:
            self._lost = True
        self._deliver(future.result() if error is None else HostLost(_reason(error)))

    def _give_up(self, seconds: float) -> None:
        self.kill()
        self._deliver(HostLost(f"was not started by Ray within place_timeout={seconds:g} s"))

    def kill(self) -> None:
        self._timer.cancel()
        if not self.killed:
            self.killed = True
            try:
                self._ray.kill(self._actor, no_restart=True)
            except Exception:
                return  # the actor or Ray has ended
            finally:
                self._listener.bells.ring(0)  # it looks at whether links were killed


DIED = "died with its node"
CRASHED = (
    "has ended without a word: it was killed, perhaps by the system for lack of memory, native code of an env crashed, "
    "or an env has called os._exit"
)
REASONS = {  # what Ray says of an actor that is gone, and what we say
    "node has died": DIED, "node died": DIED, "NODE_DIED": DIED,
    "running low on memory": "was ended by Ray because its node ran out of memory: use fewer envs, or larger nodes",
    "ActorUnavailableError": "cannot be reached any more: its node, or the way there, is gone",
    "connection error code 2": CRASHED, "died unexpectedly": CRASHED,
}  # fmt: skip


def _reason(error: BaseException) -> str:
    """Why an actor does not answer, as the end of a sentence that begins with the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind, text = type(error).__name__, " ".join(lines)
    if "failed to import" in text:
        causes = re.findall(r"\b\w+Error: [^\n]*", str(error))
        cause = f" ({causes[-1]})" if causes else ""
        return f"cannot run there: its node has no Shoal, or not all that Shoal needs{cause}: install it on every node"
    for said, reason in REASONS.items():
        if said in f"{kind} {text}":
            return reason
    details = [line for line in lines if "exit detail" in line or "exit type" in line or "killed" in line]
    found = " ".join(details) or (lines[0] if lines else "Ray gives no reason")
    return f"is gone: {kind}: {found[:400]}"
