"""A network that takes its time: every message, there and back, arrives so much later. For tests and benchmarks."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.remote.dispatcher import Deliver, Link, Transport

__all__ = ["DelayedTransport"]


class DelayedTransport:
    """Another transport, whose messages are held back for `seconds`; those under way do not wait for each other."""

    def __init__(self, inner: Transport, seconds: float):
        self._inner, self._seconds = inner, seconds
        self.num_workers, self.local_backend = inner.num_workers, inner.local_backend
        self.local_workers, self.ends_hung_envs = inner.local_workers, inner.ends_hung_envs
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._main, name="shoal-delay", daemon=True).start()

    def start(self, index: int, deliver: Deliver) -> Link:
        """See Transport."""
        return _DelayedLink(self, self._inner.start(index, lambda data: self.later(deliver, data)))

    def later(self, act: Callable[[Any], None], data: Any) -> None:
        """Do it when the time has come."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + self._seconds, next(self._order), act, data))
            self._changed.notify()

    def close(self) -> None:
        """See Transport."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._inner.close()

    def _main(self) -> None:
        while True:
            with self._changed:
                left = self._due[0][0] - time.monotonic() if self._due else None
                if self._closed:
                    return
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
                _, _, act, data = heapq.heappop(self._due)
            act(data)


class _DelayedLink:
    def __init__(self, transport: DelayedTransport, inner: Link):
        self._transport, self._inner = transport, inner

    def post(self, data: bytes) -> None:
        self._transport.later(self._inner.post, data)

    def peek(self) -> None:
        self._inner.peek()

    def kill(self) -> None:
        self._inner.kill()
