"""The actor's side of backend="ray": a host, and whoever brings it messages."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from shoal.remote.bell import BellTower, MachineBell, home_of_this_process
from shoal.remote.host import BlockHost
from shoal.remote.poll_backoff import PollBackoff
from shoal.remote.ray.channel import AGAIN, SLOT, TOO_LARGE, Ring, looks, make_ring
from shoal.support.deadline import NEVER, Deadline

__all__ = ["BY_BUFFER", "RayHost"]

BY_BUFFER = 1 << 16  # bytes from which a message travels beside the pickle, without a copy
SWITCH_INTERVAL = 500e-6  # seconds for which an env that computes keeps those from the interpreter who bring messages
SHORTEST_LOOK = 50e-6  # seconds of a wait for local workers, until the next look for messages


class RayHost:
    """What an actor is: a host, and whoever brings it messages. They come as arguments of `serve`, whose results are
    the answers, or by the short way.

    Args:
        host: one for tests.
    """

    def __init__(self, host: BlockHost | None = None) -> None:
        if host is None:
            host = BlockHost(_here())
            sys.setswitchinterval(SWITCH_INTERVAL)
        self._host = host
        self._inbox: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._there: Ring | None = None
        self._back: Ring | None = None
        self._bell: MachineBell | None = None
        self._place = 0
        self._large: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()

    # ---- calls: each has a thread of Ray's ---------------------------------------------------------------------

    def serve(self, data: Any) -> list[Any]:
        """Take a message: an answer, of this or another one."""
        answers: Future[list[bytes]] = Future()
        self._inbox.put((data, answers.set_result))
        self._wake()
        return _light(answers.result())

    def fetch(self) -> list[Any]:
        """Answers that are too large for the short way."""
        return _light(self._large.get())

    def alive(self, node: str, tower: BellTower, place: int) -> tuple[Ring | None, bool]:
        """Returns once there is an actor: the short way back to the caller's node, if there is one, and whether both
        sides wake each other. The caller's bell is 0, this one's has its own place."""
        import ray

        self._back = make_ring(ray, ray.get_runtime_context().current_actor, node)
        bell = MachineBell(tower, place, {0: tower.home, place: home_of_this_process()})
        if self._back is not None and bell.reaches(0):
            self._bell, self._place = bell, place
        return self._back, self._bell is not None

    def listen(self, there: Ring) -> None:
        """From now on messages may come by the short way too."""
        self._there = there
        self._inbox.put(None)
        self._wake()

    def _wake(self) -> None:
        """There is something in the inbox."""
        if not self._host.takes_turns:
            self._host.wake()
        if self._bell is not None:
            self._bell.ring(self._place)

    def peek(self) -> bytes:
        """What the envs are doing, asked while they are at it."""
        return self._host.peek()

    # ---- the thread that steps ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Take messages and have them answered, for as long as there is an actor. Envs are built and stepped in this
        one thread, or by workers of their own, and messages come and go meanwhile."""
        pace = looks()
        waiting: list[Callable[[list[bytes]], None]] = []
        while True:
            if self._host.idle or not self._host.takes_turns:
                while (letter := self._next(pace)) is not None:
                    pace.came()
                    data, reply = letter
                    waiting.append(reply)
                    self._host.admit(data)  # one that comes too early waits with the others: each has one answer
                    if self._host.takes_turns:
                        break
            if not self._host.idle:
                look = not self._host.takes_turns and self._there is not None
                for answer in self._host.poll(Deadline.after(max(pace.sleep, SHORTEST_LOOK)) if look else NEVER):
                    waiting.pop(0)([answer])
                    pace.restart()

    def _next(self, pace: PollBackoff) -> _Letter | None:
        """The next message, and who wants its answer. Waits for it, for a while, where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        if self._there is None:
            return self._inbox.get() if self._host.idle else None
        data = self._there.take()
        if data is not None:
            return data, self._send
        if self._host.idle and self._bell is not None:
            self._bell.sleep(AGAIN)
        elif self._host.idle:
            seconds = pace.sleep
            if seconds > 0:
                with contextlib.suppress(queue.Empty):
                    return self._inbox.get(timeout=seconds)
            else:
                os.sched_yield()
        return None

    def _send(self, answers: list[bytes]) -> None:
        """Answer by the short way."""
        assert self._back is not None
        data = pickle.dumps(answers)
        if len(data) > SLOT:
            self._large.put(answers)
            data = TOO_LARGE
        if not self._back.put(data):
            raise RuntimeError("nobody takes its answers")
        if self._bell is not None:
            self._bell.ring(0)


_Letter = tuple[Any, Callable[[list[bytes]], None]]


def _here() -> str:
    import ray

    node = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()} ({node[:8]})"


def _light(answers: list[bytes]) -> list[Any]:
    """Large ones as arrays, which Ray neither copies nor pickles."""
    return [np.frombuffer(one, np.uint8) if len(one) >= BY_BUFFER else one for one in answers]
