"""The caller's own block: envs that live in the caller's process and are stepped by it."""

from __future__ import annotations

from collections import deque
from typing import Any

from shoal.backends.backend import Backend, SilentBell
from shoal.backends.base import BlockSpec, Worker
from shoal.envs.group import is_group
from shoal.errors import NothingPending
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.worker.base import EnvBlock, WorkerChannel
from shoal.worker.building import BuildError, build_envs, close_envs
from shoal.worker.make import make_stepper


class InlineWorker(Worker):
    """Steps when the pool says so, in `run`.

    Args:
        interrupts: whether an interrupt is Ctrl-C, and the caller's; otherwise an env has raised it.
    """

    def __init__(self, block: BlockSpec, interrupts: bool = True):
        super().__init__(block)
        self._interrupts = interrupts
        self._env_fns = block.env_fns
        self._envs: list[Any] = []
        self._stepper: Any = None
        self._outbox: deque[Any] = deque()
        self._closed = False

    bell = SilentBell()

    @property
    def state(self) -> str:
        if self._closed:
            return "closed"
        return "starting" if self._stepper is None else "running"

    @property
    def envs(self) -> list[Any]:
        """The envs themselves: they are the caller's to look at."""
        return [env.env if is_group(env) else env for env in self._envs]

    @property
    def stepper(self) -> Any:
        """What steps the envs; None before it is attached and after it was closed."""
        return self._stepper

    @property
    def kernel(self) -> Any:
        """What steps all lanes in one call of the core; None where they are stepped one by one."""
        return getattr(self._stepper, "kernel", None)

    def launch(self, deadline: Deadline) -> None:
        """Nothing to start: built() builds, after the other workers have begun to."""

    def built(self, deadline: Deadline) -> BlockSummary:
        try:
            self._envs, summary = build_envs(self._env_fns, self.start, interrupts=self._interrupts)
        except BuildError as error:
            raise error.error.unpack(error.env_id, self.index) from error.__cause__
        return summary

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        block = EnvBlock(slab, self.index, self.start, self._envs, self._env_fns, config)
        post, no_mail, interrupts = self._outbox.append, lambda: None, self._interrupts
        self._stepper = make_stepper(block, WorkerChannel(post, no_mail, pool_bell, self.bell, True, interrupts))
        self.run = self._stepper.run  # type: ignore[method-assign]

    def attached(self, deadline: Deadline) -> None:
        """Ready at once."""

    def run(self) -> int:
        """Step every lane that was asked for; returns how many."""
        return 0

    def send(self, *message: Any) -> None:
        self._stepper.handle(message)

    def receive(self, deadline: Deadline) -> Any:
        if not self._outbox:
            raise NothingPending("the caller's own block has nothing to say")
        return self._outbox.popleft()

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._closed:
            return []
        self._closed = True
        errors = close_envs(self._envs, self.start) if self._stepper is None else self._stepper.close()
        self._stepper = None
        self.run = lambda: 0  # type: ignore[method-assign]
        return errors


class SerialBackend(Backend):
    """All envs are stepped by the caller, one after the other."""

    name = "serial"
    one_worker = True
    limits_steps = False

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        return 1

    def new_worker(self, block: BlockSpec) -> Worker:
        return InlineWorker(block, self.setup.interrupts)
