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
from shoal.errors import PoolClosed
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.support.limits import start_thread
from shoal.worker.base import EnvBlock, WorkerChannel
from shoal.worker.building import BuildError, build_envs, close_envs, refuse_shared
from shoal.worker.make import make_stepper

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


class ThreadWorker(Worker):
    """One thread that builds and steps a block of envs."""

    def __init__(self, block: BlockSpec):
        super().__init__(block)
        self._env_fns = block.env_fns
        self._bell = EventBell()
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._attachment: queue.SimpleQueue[tuple[Slab, StepperConfig, Any] | None] = queue.SimpleQueue()
        self._ring: Any = None
        self._state = "starting"
        self._leaving = False
        self._building: int | None = None
        self._stepper: Any
        # Daemon: an env that never returns must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._main, name=f"shoal-{self.index}", daemon=True)

    @property
    def state(self) -> str:
        return self._state

    @property
    def building(self) -> int | None:
        return self._building

    @property
    def bell(self) -> EventBell:
        return self._bell

    def launch(self, deadline: Deadline) -> None:
        start_thread(self._thread)

    def built(self, deadline: Deadline) -> BlockSummary:
        answer = self.receive(deadline)
        if isinstance(answer, BuildError):
            raise answer.error.unpack(answer.env_id, self.index) from answer.__cause__
        assert isinstance(answer, BlockSummary)
        return answer

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._attachment.put((slab, config, pool_bell))

    def attached(self, deadline: Deadline) -> None:
        answer = self.receive(deadline)
        if isinstance(answer, BaseException):
            raise answer
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
        errors: list[tuple[int, PackedError]] = []
        while not self._outbox.empty():
            message = self._outbox.get_nowait()
            if isinstance(message, tuple) and len(message) == 2 and message[0] == "closed":
                errors = message[1]
        self._outbox.put(_OVER)  # for another thread that may still wait
        return errors

    # ---- in the thread ---------------------------------------------------------------------------------------

    def _note_building(self, env_id: int) -> None:
        self._building = env_id

    def _main(self) -> None:
        try:
            envs, summary = build_envs(self._env_fns, self.start, announce=self._note_building)
        except BuildError as error:
            self._outbox.put(error)
            return
        self._outbox.put(summary)
        attachment = self._attachment.get()
        if attachment is None:
            close_envs(envs, self.start)
            return
        slab, config, pool_bell = attachment
        try:
            block = EnvBlock(slab, self.index, self.start, envs, self._env_fns, config)
            channel = WorkerChannel(self._outbox.put, self._read_mail, pool_bell, self._bell, same_process=True)
            self._stepper = make_stepper(block, channel)
        except BaseException as error:
            close_envs(envs, self.start)
            self._outbox.put(error)
            return
        self._outbox.put("attached")
        while not self._leaving:
            self._stepper.wait(-1, config.spin_ns)
            self._read_mail()
            self._stepper.run()
        self._outbox.put(("closed", self._stepper.close()))

    def _read_mail(self) -> None:
        while not self._commands.empty():
            message = self._commands.get()
            if message[0] == "close":
                self._leaving = True
            else:
                self._stepper.handle(message)


class ThreadBackend(Backend):
    """Each block of envs has a thread of the caller's process."""

    name = "threads"

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        return min(count, MOST_THREADS)

    @classmethod
    def spin_times(cls, num_workers: int, cores: int) -> tuple[int, int]:
        return 0, 0  # a thread that spins holds the GIL, which the others need

    def new_worker(self, block: BlockSpec) -> Worker:
        return ThreadWorker(block)

    def check(self, summaries: Sequence[BlockSummary], first: int) -> None:
        seen: dict[int, int] = {}
        identities = [identity for summary in summaries for identity in summary.identities]
        for env_id, identity in enumerate(identities, first):
            refuse_shared(seen, identity, env_id)

    def make_bell(self) -> EventBell:
        return EventBell()
