"""A transport whose hosts are threads of this very process: what remote workers do with any transport."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

from shoal.remote.host import BlockHost
from shoal.remote.transport import Deliver, HostLost
from shoal.support.deadline import Deadline

links: list[Any] = []  # of the last pool, for tests that end one


class LoopbackLink:
    """A thread that serves one host. Messages are handed over late or out of order where a test says so."""

    def __init__(self, index: int, deliver: Deliver, options: dict[str, Any]):
        self.host = BlockHost(f"loop {index}")
        self.deliver, self.options, self.killed = deliver, options, False
        self.posted = 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: list[bytes] = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def post(self, data: bytes) -> None:
        self.posted += 1
        if self.options.get("swap") and self.posted > 2 and not self._held and self.posted % 2:
            self._held.append(data)  # the next one overtakes it
            threading.Timer(0.02, self._release).start()
            return
        self._put(data)
        self._release()

    def _release(self) -> None:
        while self._held:
            self._put(self._held.pop())

    def _put(self, data: bytes) -> None:
        self._inbox.put(data)
        if self.options.get("twice") and self.posted > 2:
            self._inbox.put(data)
        self.host.wake()

    def peek(self) -> None:
        self.deliver(self.host.peek())

    def kill(self) -> None:
        self.killed = True
        self._inbox.put(None)
        self.host.wake()

    def lose(self, why: str = "was lost on the way") -> None:
        """As if the connection had broken."""
        self.kill()
        self.deliver(HostLost(why))

    def _serve(self) -> None:
        while not self.killed:
            if self.host.idle or not self._inbox.empty():
                data = self._inbox.get()
                if data is None:
                    break
                self.host.admit(data)
            for answer in self.host.poll(Deadline.after(1.0)):
                if not self.killed:
                    self.deliver(answer)
        if not self.host.over:
            self.host.end()


class LoopbackTransport:
    """It is made as RayTransport is."""

    ends_hung_envs = True

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        self.num_workers = min(num_workers or 2, num_envs)
        self.local_backend = options.get("local_backend", "serial")
        self.local_workers = options.get("local_workers", 1)
        self.options, self.closed = options, False
        links.clear()

    def start(self, index: int, deliver: Deliver) -> LoopbackLink:
        time.sleep(self.options.get("slow_start", 0.0))
        links.append(LoopbackLink(index, deliver, self.options))
        return links[-1]

    def close(self) -> None:
        self.closed = True
