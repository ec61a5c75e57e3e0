"""Threads of the caller's process: for envs that release the GIL or wait, and for Python without a GIL."""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from shoal.backends.backend import Backend
from shoal.backends.base import BlockSpec, Worker
from shoal.backends.life import Life
from shoal.errors import PoolClosed
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.support.gil import gil_enabled
from shoal.support.limits import start_thread
from shoal.worker.base import WorkerChannel
from shoal.worker.building import BuildError, refuse_shared

MOST_THREADS = 256  # by default
_OVER = object()


class EventBell:
    """A bell between threads of one process."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def sleep(self, timeout: float | None) -> None:
        self._event.wait(timeout)
        self._event.clear()


class ThreadWorker(Worker, Life):
    """One thread that builds and steps a block of envs."""

    def __init__(self, block: BlockSpec):
        super().__init__(block)
        self._env_fns = block.env_fns
        self._bell = EventBell()
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._attachment: queue.SimpleQueue[tuple[Slab, StepperConfig, Any] | None] = queue.SimpleQueue()
        self._ring: Any = None
        self._building: int | None = None
        # Daemon: an env that never returns must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._main, name=f"shoal-{self.index}", daemon=True)

    @property
    def building(self) -> int | None:
        return self._building

    @property
    def bell(self) -> EventBell:
        return self._bell

    def launch(self, deadline: Deadline) -> None:
        start_thread(self._thread)

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._stats = slab.array("stats")[self.index]
        self._attachment.put((slab, config, pool_bell))

    def attached(self, deadline: Deadline) -> None:
        answer = self.receive(deadline)
        if isinstance(answer, BuildError):
            raise answer.__cause__ or answer
        self._state = "running"

    def use_ringer(self, ring: Callable[[int], None]) -> None:
        self._ring = ring

    def send(self, *message: Any) -> None:
        self._commands.put(message)
        if self._ring is not None:
            self._ring(self.index)

    def receive(self, deadline: Deadline) -> Any:
        try:
            message = self._outbox.get(timeout=deadline.left)
        except queue.Empty:
            raise self._timed_out(deadline) from None
        if message is _OVER:
            self._outbox.put(_OVER)
            raise PoolClosed("the pool was closed by another thread")
        return message

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or -1)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-8:]).rstrip()

    def ask_to_close(self) -> None:
        if self._state not in ("closing", "closed"):
            self._state = "closing"
            self._attachment.put(None)
            self.send("close")

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state == "closed":
            return []
        self.ask_to_close()
        self._state = "closed"
        if self._thread.is_alive():  # it may have left already, and its last words lie in the outbox
            self._thread.join(deadline.left)
        if self.explains and self._thread.is_alive():
            self.hung = self.describe_hang()
        errors: list[tuple[int, PackedError]] = []
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if isinstance(message, tuple) and len(message) == 2 and message[0] == "closed":
                errors = message[1]
        self._outbox.put(_OVER)  # for another thread that may still wait
        return errors

    # ---- in the thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        self.live(self.index, self.start, self._env_fns)

    def announce(self, env_id: int) -> None:
        self._building = env_id

    def say(self, message: Any) -> None:
        self._outbox.put(message)

    def wait_for_slab(self, envs: list[Any]) -> tuple[Slab, int, StepperConfig, WorkerChannel] | None:
        attachment = self._attachment.get()
        if attachment is None:
            return None
        slab, config, pool_bell = attachment
        channel = WorkerChannel(self.say, self.read_mail, pool_bell, self._bell, same_process=True)
        return slab, self.start, config, channel

    def next_command(self) -> tuple[Any, ...] | None:
        return None if self._commands.empty() else self._commands.get()


class ThreadBackend(Backend):
    """Each block of envs has a thread of the caller's process."""

    name = "threads"

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        return min(count, MOST_THREADS)

    @classmethod
    def spin_times(cls) -> tuple[int, int]:
        # A thread that spins holds the GIL, which the others need.
        return (0, 0) if gil_enabled() else super().spin_times()

    def new_worker(self, block: BlockSpec) -> Worker:
        return ThreadWorker(block)

    def check(self, summaries: Sequence[BlockSummary], first: int) -> None:
        seen: dict[int, int] = {}
        identities = [identity for summary in summaries for identity in summary.identities]
        for env_id, identity in enumerate(identities, first):
            refuse_shared(seen, identity, env_id)

    def make_bell(self) -> EventBell:
        return EventBell()
