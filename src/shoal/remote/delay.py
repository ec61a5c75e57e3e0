"""A transport that delays every message, as a slow network would. It is for tests and benchmarks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.remote.transport import Deliver, Link, Transport


class DelayedTransport:
    """Wraps another transport and delays each of its messages, in both directions, by `seconds`.

    Messages do not wait for each other. All have the same delay, so one thread can hand them over in their order.
    """

    def __init__(self, inner: Transport, seconds: float):
        self._inner, self._seconds = inner, seconds
        self.num_workers, self.local_backend = inner.num_workers, inner.local_backend
        self.local_workers, self.ends_hung_envs = inner.local_workers, inner.ends_hung_envs
        self._queue: queue.SimpleQueue[tuple[float, Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._main, name="shoal-delay", daemon=True).start()

    def start(self, index: int, deliver: Deliver) -> Link:
        """See Transport."""
        return _DelayedLink(self, self._inner.start(index, lambda data: self.later(deliver, data)))

    def later(self, act: Callable[[Any], None], data: Any) -> None:
        """Call `act(data)` after the delay."""
        self._queue.put((time.monotonic() + self._seconds, act, data))

    def close(self) -> None:
        """See Transport."""
        self._closed.set()
        self._queue.put(None)
        self._inner.close()

    def _main(self) -> None:
        while (entry := self._queue.get()) is not None:
            due, act, data = entry
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            act(data)


class _DelayedLink:
    def __init__(self, transport: DelayedTransport, inner: Link):
        self._transport, self._inner = transport, inner
        self.peek, self.kill = inner.peek, inner.kill

    def post(self, data: bytes) -> None:
        self._transport.later(self._inner.post, data)
