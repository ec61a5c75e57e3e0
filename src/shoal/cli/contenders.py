"""The contenders of a benchmark: what a runner does, the plain loops that are the limit, and Shoal's backends."""

from __future__ import annotations

import enum
import importlib.util
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import shoal
from shoal.cli.work import Work
from shoal.pool import Pool
from shoal.support.usage import Skip
from shoal.tuning.lab import PoolDriver

BACKENDS = ("serial", "threads", "processes", "hybrid", "auto")
# With more envs, one process for each measures the machine's memory rather than the library.
MOST_PROCESSES = 256


class Tally(NamedTuple):
    """What one timed run did. A step is one call of an env's `step` or `reset`.

    Resets count because with next-step autoreset a reset takes the place of a step. They count for all contenders, so
    that equal work counts equally, in whichever way a library resets.
    """

    steps: int
    seconds: float


class Opened(NamedTuple):
    """What was measured at a start: seconds of constructor and first reset, worker processes, memory in bytes."""

    seconds: float
    workers: int
    worker_pss: int | None
    total_pss: int | None
    note: str


class Runner(ABC):
    """One way to run many envs, here those of `envs`. It is built and used in a process of its own."""

    requires: ClassVar[str] = ""  # a module; if it is not installed, this contender is skipped
    python: ClassVar[bool] = True  # False if it runs its own C++ envs instead of the user's
    process_per_env: ClassVar[bool] = False
    spins_when_idle: ClassVar[bool] = False  # if so, it is closed while others are timed
    envs: Any

    def __init__(self, work: Work) -> None:
        self.work = work

    def reset(self) -> None:
        """Begin an episode in every env. The start ends with this call."""
        self.envs.reset(seed=self.work.seed)

    @abstractmethod
    def run(self, seconds: float) -> Tally:
        """Step for about so long, at least one batch."""

    def close(self) -> None:
        """Close everything."""
        self.envs.close()

    def note(self) -> str:
        """Return a remark for the table, or "" for none."""
        return ""


class VectorRunner(Runner):
    """A runner of a vector env, whose `step` takes one batch of actions and waits for all envs."""

    step: Callable[[Any], Any] | None = None  # what to call instead

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.actions: list[Any] = work.actions()
        self.extra_resets = 0  # runners that reset within the step that ended an episode count these here

    def run(self, seconds: float) -> Tally:
        """Step all envs over and over with the sampled actions."""
        step, clock = self.step or self.envs.step, time.perf_counter
        self.extra_resets = calls = 0
        start = now = clock()
        for action in itertools.cycle(self.actions):
            step(action)
            calls += 1
            now = clock()
            if now - start >= seconds:
                break
        return Tally(calls * self.work.num_envs + self.extra_resets, now - start)


class PlainLoop(Runner):
    """One env in one loop, with nothing around it. One of these on each core is the limit."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.envs = work.env_fn()()
        self.actions = itertools.cycle(work.lane_actions())
        self.over = False

    def run(self, seconds: float) -> Tally:
        """Step the env; a reset takes the place of a step, as it does in next-step autoreset."""
        env_step, env_reset, clock = self.envs.step, self.envs.reset, time.perf_counter
        over, steps, chunk = self.over, 0, 1
        start = now = clock()
        while now - start < seconds:
            for action in itertools.islice(self.actions, chunk):
                if over:
                    env_reset()
                    over = False
                else:
                    _, _, terminated, truncated, _ = env_step(action)
                    over = terminated or truncated
            steps += chunk
            now = clock()
            # Read the clock rarely, so that it costs nothing, but often enough to stop in time.
            chunk = max(1, min(256, int(0.001 * steps / (now - start))))
        self.over = over
        return Tally(steps, now - start)


class ShoalVector(VectorRunner):
    """Shoal's vector env for Gymnasium, as `shoal.make` gives it."""

    make: ClassVar[Callable[..., Any]] = staticmethod(shoal.make)

    def __init__(self, work: Work, backend: str = "auto", **options: Any) -> None:
        super().__init__(work)
        self.backend = backend
        self.envs = self.make(work.env_fn(), work.num_envs, backend=backend, **options)
        self.pool: Pool = getattr(self.envs, "pool", self.envs)

    def note(self) -> str:
        """Return the plan and its reason, if Shoal had to choose."""
        return str(self.pool.plan) if self.backend == "auto" else ""


class ShoalPool(ShoalVector):
    """Shoal's own interface with full batches, which lends its arrays."""

    make = Pool


class ShoalAsync(ShoalPool):
    """Shoal's own interface with partial batches: the first `batch_size` envs that are ready, again and again."""

    def __init__(self, work: Work, backend: str = "auto", batch_size: int = 1, **more: Any) -> None:
        if batch_size > work.num_envs:
            raise Skip(f"batch of {batch_size} out of {work.num_envs} envs")
        super().__init__(work, backend, batch_size=batch_size, **more)

    def reset(self) -> None:
        self.driver = PoolDriver(self.pool, self.work.actions(self.pool.batch_size), seed=self.work.seed)
        self.driver.run(0.0)

    def run(self, seconds: float) -> Tally:
        """Step batches as they become ready; steps that are under way at the end do not count."""
        turns, took = self.driver.run(seconds)
        return Tally(turns * self.pool.batch_size, took)


class Role(enum.Enum):
    """What a row is in the comparison."""

    LIMIT = "limit"
    LOOP = "loop"
    SHOAL = "shoal"
    PEER = "peer"


@dataclass(frozen=True)
class Contender:
    """A runner with its options and the name of its row."""

    name: str
    runner: type[Runner]
    options: Mapping[str, Any] = field(default_factory=dict)
    role: Role = Role.PEER
    copies: int = 1  # so many run at the same time, and their rates are added

    def unfit(self, work: Work) -> str:
        """Return why this contender is not started for this work; "" if it is."""
        if self.runner.requires and not installed(self.runner.requires):
            return f"{self.runner.requires} is not installed"
        if self.runner.process_per_env and work.num_envs > MOST_PROCESSES:
            return "one process per env"
        return ""


def limits(cores: int) -> list[Contender]:
    """Return one plain loop, and as many as there are cores, which are the limit."""
    if cores == 1:
        return [Contender("plain loop", PlainLoop, role=Role.LIMIT)]
    many = Contender(f"{cores} plain loops", PlainLoop, role=Role.LIMIT, copies=cores)
    return [Contender("plain loop", PlainLoop, role=Role.LOOP), many]


def shoals(
    backends: Sequence[str], workers: int | None = None, batch_size: int | None = None, lend: bool = False
) -> list[Contender]:
    """Return one contender for each backend; `lend` measures the pool instead of `shoal.make`."""
    runner: type[Runner] = ShoalAsync if batch_size is not None else ShoalPool if lend else ShoalVector
    label = "" if batch_size is None else f", batch {batch_size}"
    found = []
    for backend in backends:
        many = None if backend == "serial" else workers
        asked = {"backend": backend, "num_workers": many, "batch_size": batch_size}
        options = {name: value for name, value in asked.items() if value is not None}
        name = f"Shoal {backend}{'' if many is None else f' x{many}'}{label}"
        found.append(Contender(name, runner, options, Role.SHOAL))
    return found


def installed(module: str) -> bool:
    """Say whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
