"""The caller's side of backend="ray": one link for each actor, and the thread that hears those of one node."""

from __future__ import annotations

import itertools
import pickle
import queue
import re
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

from shoal.remote.bell import BellTower, MachineBell, home_of_this_process
from shoal.remote.dispatcher import Deliver, HostLost
from shoal.remote.ray.channel import AGAIN, MOST, SLOT, SLOTS, TOO_LARGE, Ring, looks, make_ring
from shoal.remote.ray.host import BY_BUFFER

__all__ = ["Listener", "RayLink"]

SELDOM = 1.0  # seconds between two looks at whether links were killed


class Listener:
    """The thread that takes answers that come by the short way. It starts with the first link that has one."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[RayLink] = queue.SimpleQueue()
        self._links: list[RayLink] = []
        self._work = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None
        home = home_of_this_process()
        self.tower = BellTower.build(home, 1 + MOST)
        self.bell = MachineBell(self.tower, 0, dict.fromkeys(range(1 + MOST), home))
        self._places = itertools.count(1)

    def new_place(self) -> int:
        """The place of another actor's bell. Nobody's own, if there are too many; these have no short way either."""
        return min(next(self._places), MOST)

    def welcome(self, link: RayLink) -> None:
        """Open its way there."""
        self._new.put(link)
        self.wake()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="shoal-listener", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """There is something to do that nobody rings for."""
        self._work.set()
        self.bell.ring(0)

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.tower.close()

    def _main(self) -> None:
        pace = looks()
        while not self._over:
            while not self._new.empty():
                link = self._new.get()
                link.open()
                self._links.append(link)
            if sum(link.look() for link in self._links):  # all of them
                pace.came()
                continue
            underway = any(link.underway for link in self._links)
            if self.bell.reaches(0) and all(link.rings for link in self._links):
                self.bell.sleep(AGAIN if underway else SELDOM)
            elif underway:
                pace.wait()
            else:
                self._work.wait()
                self._work.clear()
                pace.restart()
            if not underway:
                self._links = [link for link in self._links if not link.killed]


class RayLink:
    """One actor."""

    def __init__(self, ray: Any, actor: Any, deliver: Deliver, place_timeout: float, listener: Listener):
        self._ray, self._actor, self._deliver, self._listener = ray, actor, deliver, listener
        self._serve = actor.serve.options(concurrency_group="mail")
        self.killed = False
        self._there: Ring | None = None
        self._back: Ring | None = None
        self._sent = self._heard = 0
        self.rings, self._place = False, listener.new_place()
        self._placed = threading.Timer(place_timeout, self._give_up, (place_timeout,))
        self._placed.daemon = True
        self._placed.start()
        node = ray.get_runtime_context().get_node_id()
        alive = actor.alive.options(concurrency_group="control").remote(node, listener.tower, self._place)
        alive.future().add_done_callback(self._came_up)
        self._call(actor.work)  # ends with the actor, of which we hear

    def _came_up(self, future: Future[tuple[Ring | None, bool]]) -> None:
        """In a thread of Ray's own, where Ray must not be asked for anything."""
        self._placed.cancel()
        if future.exception() is None and future.result()[0] is not None:
            self._back, self.rings = future.result()
            self._listener.welcome(self)

    # ---- the short way -----------------------------------------------------------------------------------------

    @property
    def underway(self) -> int:
        """Messages that have gone by the short way and are not answered."""
        return 0 if self.killed else self._sent - self._heard

    def open(self) -> None:
        """Make the short way there."""
        try:
            there = make_ring(self._ray, self._actor, self._ray.get_runtime_context().get_node_id())
            if there is not None:
                self._actor.listen.options(concurrency_group="control").remote(there)
                self._there = there
        except Exception:
            return  # Ray was shut down

    def look(self) -> bool:
        """Deliver an answer, if one has come: whether it has."""
        if self._back is None or not self.underway:
            return False
        try:
            data = self._back.take()
        except Exception as error:  # Ray is gone
            self._heard, self._there = self._sent, None
            self._deliver(HostLost(_story(error)))
            return False
        if data is None:
            return False
        self._heard += 1
        if data == TOO_LARGE:
            self._there = None  # as will be those that follow
            self._call(self._actor.fetch.options(concurrency_group="control"))
        else:
            for answer in pickle.loads(data):
                self._deliver(answer)
        return True

    # ---- messages ----------------------------------------------------------------------------------------------

    def post(self, data: bytes) -> None:
        """See Link."""
        there = self._there
        if there is not None and len(data) <= SLOT and self.underway < SLOTS:
            self._sent += 1  # before the listener can have an answer
            if there.put(data):
                if self.rings:
                    self._listener.bell.ring(self._place)
                else:
                    self._listener.wake()
                return
            self._sent, self._there = self._sent - 1, None
        argument = np.frombuffer(data, np.uint8) if len(data) >= BY_BUFFER else data
        self._call(self._serve, argument)

    def peek(self) -> None:
        """See Link."""
        self._call(self._actor.peek.options(concurrency_group="control"))

    def _call(self, method: Any, *args: Any) -> None:
        try:
            method.remote(*args).future().add_done_callback(self._answered)
        except Exception as error:  # Ray was shut down under our feet, say
            self._deliver(HostLost(_story(error)))

    def _answered(self, future: Future[Any]) -> None:
        """In a thread of Ray's own: hand over, and return."""
        if self.killed:
            return
        error = future.exception()
        if error is not None:
            self._deliver(HostLost(_story(error)))
            return
        result = future.result()
        for answer in result if isinstance(result, list) else [result]:
            self._deliver(answer)

    def _give_up(self, seconds: float) -> None:
        self.kill()
        self._deliver(HostLost(f"was not started by Ray within place_timeout={seconds:g} s"))

    def kill(self) -> None:
        """See Link."""
        self._placed.cancel()
        if not self.killed:
            self.killed = True
            try:
                self._ray.kill(self._actor, no_restart=True)
            except Exception:
                return  # it is gone, or Ray is
            finally:
                self._listener.wake()


def _story(error: BaseException) -> str:
    """Why an actor does not answer, to go on after its name."""
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
            "has ended without a word: somebody has killed it, the system for want of memory perhaps, native code of "
            "an env crashed, or an env has called os._exit"
        )
    details = [line for line in lines if "exit detail" in line or "exit type" in line or "killed" in line]
    found = " ".join(details) or (lines[0] if lines else "Ray gives no reason")
    return f"is gone: {type(error).__name__}: {found[:400]}"
