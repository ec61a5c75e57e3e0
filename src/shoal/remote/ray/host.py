"""The actor's side of backend="ray": a BlockHost, and the ways by which messages reach it."""

from __future__ import annotations

import contextlib
import pickle
import queue
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from shoal.remote.bell import BellMemory, MachineBells, home_of_this_process
from shoal.remote.host import BlockHost
from shoal.remote.poll_backoff import PollBackoff
from shoal.remote.ray.channel import SLOT_BYTES, TIMES, TOO_LARGE, RayChannel, open_channel
from shoal.support.deadline import NEVER, Deadline

BY_BUFFER = 1 << 16  # bytes; a larger message travels as an array
SWITCH_INTERVAL = 500e-6  # seconds for which an env that computes can keep threads with messages from the interpreter
SHORTEST_POLL = 50e-6  # seconds to wait for local workers until the next look for messages
_Letter = tuple[Any, Callable[[list[bytes]], None]]  # a message, and what to do with its answer


class RayHost:
    """The class of the actors. One actor runs one block of envs.

    Messages come as calls of `serve`, which return the answers, or by a channel. Ray runs each call in a thread of its
    own; the call of `work` is the thread that steps the envs.

    Args:
        host: a host for tests.
    """

    def __init__(self, host: BlockHost | None = None) -> None:
        if host is None:
            host = BlockHost(_place())
            sys.setswitchinterval(SWITCH_INTERVAL)
        self._host = host
        self._inbox: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._requests: RayChannel | None = None
        self._answers: RayChannel | None = None
        self._large: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._bells: MachineBells | None = None
        self._rank, self._rings = 0, False

    # ---- calls -------------------------------------------------------------------------------------------------

    def serve(self, data: Any) -> list[Any]:
        """Take a message, and return an answer, which may belong to another message."""
        answers: Future[list[bytes]] = Future()
        self._inbox.put((data, answers.set_result))
        self._wake()
        return [without_copy(answer) for answer in answers.result()]

    def fetch(self) -> list[Any]:
        """Answers that are too large for the channel."""
        return [without_copy(answer) for answer in self._large.get()]

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
        self._inbox.put(None)
        self._wake()

    def peek(self) -> bytes:
        """What the envs are doing now."""
        return self._host.peek()

    def _wake(self) -> None:
        """Make `work` look into the inbox."""
        if not self._host.takes_turns:
            self._host.wake()
        if self._bells is not None:
            self._bells.ring(self._rank)

    # ---- the thread that steps ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Take messages and answer them, for as long as the actor lives. Envs are built and stepped in this thread, or
        by workers of the host."""
        backoff = PollBackoff(TIMES)
        waiting: list[Callable[[list[bytes]], None]] = []
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
                    waiting.pop(0)([answer])
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

    def _send(self, answers: list[bytes]) -> None:
        """Send answers by the channel."""
        assert self._answers is not None
        data = pickle.dumps(answers)
        if len(data) > SLOT_BYTES:
            self._large.put(answers)
            data = TOO_LARGE
        if not self._answers.put(data):
            raise RuntimeError("the caller does not take the answers any more")
        if self._bells is not None:
            self._bells.ring(0)


def without_copy(data: bytes) -> Any:
    """A large message as an array, which Ray neither copies nor pickles; a small one as it is."""
    return np.frombuffer(data, np.uint8) if len(data) >= BY_BUFFER else data


def _place() -> str:
    import ray

    node = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()} ({node[:8]})"
