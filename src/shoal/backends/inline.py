"""The caller's own block: envs that live in the caller's process and are stepped by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.backends.base import Worker
from shoal.envs.functions import EnvFn
from shoal.envs.group import is_group
from shoal.errors import NothingPending
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.worker.grouped import make_stepper
from shoal.worker.single import BuildError, build_envs, close_envs

__all__ = ["InlineWorker", "SilentBell"]


class SilentBell:
    """A bell that wakes no thread: the caller steps the envs itself."""

    silent = True

    def ring(self) -> None:
        """Nobody to wake."""

    def sleep(self, timeout: float | None) -> None:
        """Never waits."""


class InlineWorker(Worker):
    """Steps when the pool says so, in `run`.

    Args:
        interrupts: whether an interrupt is Ctrl-C, and the caller's; otherwise an env has raised it.
    """

    def __init__(self, index: int, start: int, stop: int, env_fns: Sequence[EnvFn], interrupts: bool = True):
        super().__init__(index, start, stop)
        self._interrupts = interrupts
        self._env_fns = env_fns
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
        """Who steps the envs; None before it is attached and after it was closed."""
        return self._stepper

    @property
    def kernel(self) -> Any:
        """Who steps all lanes in one call of the core, if anybody does."""
        return getattr(self._stepper, "kernel", None)

    def launch(self) -> None:
        """Nothing to start: built() builds, after the other workers have begun to."""

    def built(self, deadline: Deadline) -> BlockSummary:
        try:
            self._envs, summary = build_envs(self._env_fns, self.start, interrupts=self._interrupts)
        except BuildError as error:
            raise error.error.unpack(error.env_id, self.index) from error.__cause__
        return summary

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._stepper = make_stepper(
            slab, self.index, self.start, self._envs, self._env_fns, config, self._outbox.append, lambda: None,
            pool_bell, self.bell, same_process=True, interrupts=self._interrupts,
        )  # fmt: skip
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
