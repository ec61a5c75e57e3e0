"""The caller's side of backend="ray": a link to each actor, and the thread that listens to those of this node."""

from __future__ import annotations

import itertools
import pickle
import queue
import re
import threading
from concurrent.futures import Future
from typing import Any

from shoal.remote.bell import BellMemory, MachineBells, home_of_this_process
from shoal.remote.poll_backoff import PollBackoff
from shoal.remote.ray.channel import MAX_CHANNELS, SLOT_BYTES, SLOTS, TIMES, TOO_LARGE, RayChannel, open_channel
from shoal.remote.ray.host import without_copy
from shoal.remote.transport import Deliver, HostLost

IDLE_LOOK = 1.0  # seconds between two looks at whether links were killed


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
        self.wake()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="shoal-listener", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Make the thread look for work."""
        self.bells.ring(0)

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self.wake()
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
    """The connection to one actor.

    Attributes:
        rings: whether this process and the actor wake each other by bells.
        killed: whether `kill` was called.
    """

    def __init__(self, ray: Any, actor: Any, deliver: Deliver, place_timeout: float, listener: Listener):
        self._ray, self._actor, self._deliver, self._listener = ray, actor, deliver, listener
        self._serve = actor.serve.options(concurrency_group="mail")
        self.killed = self.rings = False
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

    # ---- channels ----------------------------------------------------------------------------------------------

    @property
    def unanswered(self) -> int:
        """The number of messages that were sent by the channel and not answered."""
        return 0 if self.killed else self._sent - self._answered

    def open(self) -> None:
        """Open the channel to the actor."""
        try:
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
            for answer in pickle.loads(data):
                self._deliver(answer)
        return True

    # ---- messages ----------------------------------------------------------------------------------------------

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
            self._deliver(HostLost(_reason(error)))
            return
        result = future.result()
        for answer in result if isinstance(result, list) else [result]:
            self._deliver(answer)

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
                self._listener.wake()


def _reason(error: BaseException) -> str:
    """Why an actor does not answer, as the end of a sentence that begins with the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if "failed to import" in text:
        causes = re.findall(r"\b\w+Error: [^\n]*", str(error))
        cause = f" ({causes[-1]})" if causes else ""
        return f"cannot run there: its node has no Shoal, or not all that Shoal needs{cause}: install it on every node"
    if "node has died" in text or "node died" in text or "NODE_DIED" in text:
        return "died with its node"
    if "running low on memory" in text:
        return "was ended by Ray because its node ran out of memory: use fewer envs, or larger nodes"
    if type(error).__name__ == "ActorUnavailableError":
        return "cannot be reached any more: its node, or the way there, is gone"
    if "connection error code 2" in text or "died unexpectedly" in text:
        return (
            "has ended without a word: it was killed, perhaps by the system for lack of memory, native code of an env "
            "crashed, or an env has called os._exit"
        )
    details = [line for line in lines if "exit detail" in line or "exit type" in line or "killed" in line]
    found = " ".join(details) or (lines[0] if lines else "Ray gives no reason")
    return f"is gone: {type(error).__name__}: {found[:400]}"
