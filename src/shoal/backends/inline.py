"""The caller's own block: envs that live in the caller's process and are stepped by it, one by one or all as one."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from shoal.backends import registry
from shoal.backends.backend import Backend, EnvRequest, EnvSource, SilentBell
from shoal.backends.base import BlockSpec, Worker
from shoal.backends.life import make_stepper
from shoal.envs.batched import BatchedEnv, RowsEnv
from shoal.envs.group import is_group
from shoal.errors import NothingPending, PoolClosed
from shoal.memory.messages import BlockSummary, StepperConfig
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.worker.base import EnvBlock, WorkerChannel
from shoal.worker.building import BuildError, build_envs, close_envs


class LocalEnvs(list[Any]):
    """The envs of the caller's own block. An env that is assigned to an index is stepped there from then on."""

    def __init__(self, worker: InlineWorker, envs: list[Any]):
        super().__init__(envs)
        self._worker = worker

    def __setitem__(self, index: Any, env: Any) -> None:
        if isinstance(index, slice):
            for i, one in zip(range(len(self))[index], env, strict=True):
                self[i] = one
        elif env is not self[index]:
            if self._worker.stepper is None:
                raise PoolClosed("the envs were closed: make a new pool")
            self._worker.stepper.put(range(len(self))[index], env)
            super().__setitem__(index, env)

    def __reduce__(self) -> Any:
        return list, (list(self),)


class InlineWorker(Worker):
    """Steps when the pool says so, in `run`. `interrupts`: whether an interrupt is Ctrl-C, and the caller's; otherwise
    an env has raised it."""

    def __init__(self, block: BlockSpec, interrupts: bool = True):
        super().__init__(block)
        self._interrupts = interrupts
        self._env_fns = block.env_fns
        self._envs: list[Any] = []
        self.stepper: Any = None  # what steps the envs; None before it is attached and after it was closed
        self._outbox: deque[Any] = deque()

    bell = SilentBell()

    @property
    def envs(self) -> LocalEnvs:
        """The envs themselves: they are the caller's to look at, and to replace."""
        return LocalEnvs(self, [env.env if is_group(env) else env for env in self._envs])

    @property
    def kernel(self) -> Any:
        """What steps all lanes in one call of the core; None where they are stepped one by one."""
        return getattr(self.stepper, "kernel", None)

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
        self.stepper = make_stepper(block, WorkerChannel(post, no_mail, pool_bell, self.bell, True, interrupts))
        self.run = self.stepper.run  # type: ignore[method-assign]
        self._state = "running"

    def attached(self, deadline: Deadline) -> None:
        """Ready at once."""

    def run(self) -> int:
        """Step every lane that was asked for; returns how many."""
        return 0

    def send(self, *message: Any) -> None:
        stepper = self.stepper
        if stepper is None:
            raise PoolClosed("the pool was closed by another thread")
        stepper.handle(message)

    def receive(self, deadline: Deadline) -> Any:
        if not self._outbox:
            raise NothingPending("the caller's own block has nothing to say")
        return self._outbox.popleft()

    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        if self._state == "closed":
            return []
        self._state = "closed"
        errors = close_envs(self._envs, self.start) if self.stepper is None else self.stepper.close()
        self.stepper = None
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


class BatchedBackend(SerialBackend):
    """One inline worker with one env object, which steps all lanes at once."""

    batched = True
    writes_infos = False

    @classmethod
    @abstractmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        """What makes the one env that steps all lanes."""

    @classmethod
    def gather(cls, request: EnvRequest) -> EnvSource:
        count = request.batched_count
        env_fn = cls.env_fn(request.env, count, request.kwargs, request.num_workers)
        return EnvSource(request, [env_fn], count)


class RowsBackend(BatchedBackend):
    """A batched backend of which the envs are a `BatchedEnv`."""

    @staticmethod
    @abstractmethod
    def make_envs(env: Any, num_envs: int, kwargs: Mapping[str, Any]) -> BatchedEnv:
        """Make so many envs as one object."""

    @classmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        return functools.partial(cls._rows, env, num_envs, kwargs)

    @classmethod
    def _rows(cls, *args: Any) -> RowsEnv:
        return RowsEnv(cls.make_envs(*args))


def build_batched(name: str, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Any:
    """Make the env of a batched backend: for a host elsewhere, which gets this function by its name."""
    kind = registry.find(name)
    assert issubclass(kind, BatchedBackend)
    return kind.env_fn(env, num_envs, kwargs, num_workers)()
