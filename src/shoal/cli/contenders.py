"""Who takes part: the plain loops that are the limit, Shoal's backends, and what a runner does."""

from __future__ import annotations

import enum
import importlib.util
import itertools
import mmap
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from shoal.cli.work import Work
from shoal.planning.plan import Plan
from shoal.support.usage import Skip

BACKENDS = ("serial", "threads", "processes", "hybrid", "auto")
# Above this many envs, one process each tells more about the machine's memory than about anybody.
MOST_PROCESSES = 256


class Tally(NamedTuple):
    """What one timed run did. A step is one call of an env's `step` or `reset`.

    Resets count because next-step autoreset spends a whole lane on one. Counting them for everybody
    gives equal work equal credit, whichever way a library resets.
    """

    steps: int
    seconds: float


class Opened(NamedTuple):
    """What a start told: constructor and first reset, worker processes, memory in bytes."""

    seconds: float
    workers: int
    worker_pss: int | None
    total_pss: int | None
    note: str


class Runner(ABC):
    """One way to run many envs; built and used inside a process of its own."""

    requires: ClassVar[str] = ""  # a module without which this contender is skipped
    python: ClassVar[bool] = True  # False: runs its own C++ envs instead of the user's
    process_per_env: ClassVar[bool] = False
    spins_when_idle: ClassVar[bool] = False  # must not be left waiting while others are timed

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def reset(self) -> None:
        """Begin an episode in every env; the end of this call is the end of start-up."""

    @abstractmethod
    def run(self, seconds: float) -> Tally:
        """Step for about so long, one batch at least."""

    @abstractmethod
    def close(self) -> None:
        """Let everything go."""

    def note(self) -> str:
        """Say something worth a remark in the table, or nothing."""
        return ""


class VectorRunner(Runner):
    """A runner whose `step` takes one batch of actions and waits for all envs."""

    step: Callable[[Any], Any]

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.actions: list[Any] = work.actions()
        self.extra_resets = 0  # counted by runners that reset within the step that ended an episode

    def run(self, seconds: float) -> Tally:
        """Step all envs over and over with the sampled actions."""
        step, clock = self.step, time.perf_counter
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
    """One env in one loop, with nothing around it: k of these on k cores are the limit."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.env = work.env_fn()()
        self.actions = itertools.cycle(work.lane_actions())
        self.over = False

    def reset(self) -> None:
        """Begin the first episode."""
        self.env.reset(seed=self.work.seed)

    def run(self, seconds: float) -> Tally:
        """Step the env; a reset takes the place of a step, as it does in next-step autoreset."""
        env_step, env_reset, clock = self.env.step, self.env.reset, time.perf_counter
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
            # Look at the clock rarely enough to cost nothing, often enough to stop in time.
            chunk = max(1, min(256, int(0.001 * steps / (now - start))))
        self.over = over
        return Tally(steps, now - start)

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class LoopsInStep(VectorRunner):
    """Plain loops that meet after each batch: a yardstick for whoever waits for all envs.

    Nothing passes between them but a turn number, and everybody spins. What they lose against loops that never meet
    is lost to the meeting, and to stepping many envs instead of one.
    """

    spins_when_idle = True

    def __init__(self, work: Work, cores: int = 2) -> None:
        super().__init__(work)
        make = work.env_fn()
        shares = [range(core, work.num_envs, cores) for core in range(cores)]
        self.turns = memoryview(mmap.mmap(-1, 64 * cores)).cast("q")  # each on a cache line of its own
        self.turn, self.others = 0, [8 * core for core in range(1, cores)]
        self.pids = []
        for core in range(1, cores):
            if pid := os.fork():
                self.pids.append(pid)
            else:
                self._follow(8 * core, [make() for _ in shares[core]])
        self.envs = [make() for _ in shares[0]]
        self.over = [True] * len(self.envs)
        self.step = self._step

    def reset(self) -> None:
        """Nothing to do: an env whose episode has not begun begins one in its first step."""

    def _step(self, actions: Any) -> None:
        turns = self.turns
        self.turn += 1
        turns[0] = self.turn
        step_all(self.envs, self.over, actions)
        for other in self.others:
            while turns[other] < self.turn:
                pass

    def _follow(self, place: int, envs: list[Any]) -> None:
        over, parent = [True] * len(envs), os.getppid()
        try:
            for turn, actions in enumerate(itertools.cycle(self.actions), 1):
                while self.turns[0] < turn:
                    if os.getppid() != parent:
                        return
                step_all(envs, over, actions)
                self.turns[place] = turn
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the others."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def step_all(envs: list[Any], over: list[bool], actions: Any) -> None:
    """Step each env once; a reset takes the place of a step."""
    for i, env in enumerate(envs):
        if over[i]:
            env.reset()
            over[i] = False
        else:
            _, _, terminated, truncated, _ = env.step(actions[i])
            over[i] = terminated or truncated


class ShoalVector(VectorRunner):
    """Shoal through its Gymnasium face, as `shoal.make` gives it."""

    def __init__(self, work: Work, backend: str = "auto", **options: Any) -> None:
        super().__init__(work)
        import shoal

        self.backend = backend
        self.envs = shoal.make(work.env_fn(), work.num_envs, backend=backend, **options)
        self.step = self.envs.step

    def reset(self) -> None:
        """Reset all envs."""
        self.envs.reset(seed=self.work.seed)

    def note(self) -> str:
        """Say what was chosen and why, where there was a choice."""
        return str(self.envs.pool.plan) if self.backend == "auto" else ""

    def close(self) -> None:
        """Close the pool."""
        self.envs.close()


class ShoalPool(VectorRunner):
    """Shoal's own interface, all envs at each step, arrays lent rather than copied."""

    def __init__(self, work: Work, backend: str = "auto", **options: Any) -> None:
        super().__init__(work)
        import shoal

        self.backend = backend
        options["backend"] = backend
        self.pool = shoal.Pool(work.env_fn(), work.num_envs, **options)
        self.step = self.pool.step

    def reset(self) -> None:
        """Reset all envs."""
        self.pool.reset(seed=self.work.seed)

    def note(self) -> str:
        """Say what was chosen and why, where there was a choice."""
        return str(self.pool.plan) if self.backend == "auto" else ""

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()


class ShoalAsync(Runner):
    """Shoal's pool in async mode: the first `batch_size` envs that are ready, again and again."""

    def __init__(self, work: Work, backend: str = "auto", batch_size: int = 1, **more: Any) -> None:
        super().__init__(work)
        import shoal

        if batch_size > work.num_envs:
            raise Skip(f"batch of {batch_size} out of {work.num_envs} envs")
        self.actions = itertools.cycle(work.actions(batch_size))
        self.backend = backend
        more = {"backend": backend, "batch_size": batch_size, **more}
        self.pool = shoal.Pool(work.env_fn(), work.num_envs, **more)

    def reset(self) -> None:
        """Ask for a reset of all envs and answer the first batch."""
        self.pool.async_reset(seed=self.work.seed)
        self._turn()

    def run(self, seconds: float) -> Tally:
        """Answer batches as they come; what is under way at the end stays under way."""
        turn, clock = self._turn, time.perf_counter
        steps = 0
        start = now = clock()
        while now - start < seconds:
            steps += turn()
            now = clock()
        return Tally(steps, now - start)

    def _turn(self) -> int:
        batch = self.pool.recv()
        self.pool.send(next(self.actions), batch.env_id)
        return len(batch.env_id)

    def note(self) -> str:
        """Say what was chosen and why, where there was a choice."""
        return str(self.pool.plan) if self.backend == "auto" else ""

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()


class ShoalPlanned(Runner):
    """Shoal's pool by a plan, whose number of envs counts rather than the work's."""

    def __init__(self, work: Work, plan: Plan) -> None:
        work = replace(work, num_envs=plan.num_envs or work.num_envs)
        super().__init__(work)
        self.inner: ShoalPool | ShoalAsync
        if plan.batch_size in (None, work.num_envs):
            self.inner = ShoalPool(work, plan.backend, plan=plan)
        else:
            self.inner = ShoalAsync(work, plan.backend, plan.batch_size, plan=plan)

    def reset(self) -> None:
        """Reset all envs."""
        self.inner.reset()

    def run(self, seconds: float) -> Tally:
        """Step for about so long."""
        return self.inner.run(seconds)

    def close(self) -> None:
        """Close the pool."""
        self.inner.close()


class Role(enum.Enum):
    """What a row is compared with or as."""

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
    copies: int = 1  # so many of it run at the same time and their rates add up

    def unfit(self, work: Work) -> str:
        """Say why this contender need not even be started for this work; empty if it may."""
        if self.runner.requires and not _installed(self.runner.requires):
            return f"{self.runner.requires} is not installed"
        if self.runner.process_per_env and work.num_envs > MOST_PROCESSES:
            return "one process per env"
        return ""


def limits(cores: int) -> list[Contender]:
    """Return the plain loop, and as many plain loops as there are cores: the limit."""
    one = Contender("plain loop", PlainLoop, role=Role.LOOP)
    if cores == 1:
        return [Contender("plain loop", PlainLoop, role=Role.LIMIT)]
    return [one, Contender(f"{cores} plain loops", PlainLoop, role=Role.LIMIT, copies=cores)]


def shoals(
    backends: Sequence[str],
    workers: int | None = None,
    batch_size: int | None = None,
    lend: bool = False,
) -> list[Contender]:
    """Return one contender for each backend; `lend` measures the pool instead of `shoal.make`."""
    runner: type[Runner] = ShoalPool if lend else ShoalVector
    options: dict[str, Any] = {}
    label = ""
    if workers is not None:
        options["num_workers"] = workers
        label += f" x{workers}"
    if batch_size is not None:
        runner = ShoalAsync
        options["batch_size"] = batch_size
        label += f", batch {batch_size}"
    found = []
    for backend in backends:
        # A worker count means nothing to the serial backend.
        fitting = {k: v for k, v in options.items() if k != "num_workers" or backend != "serial"}
        name = f"Shoal {backend}{label if fitting == options else ''}"
        found.append(Contender(name, runner, {"backend": backend, **fitting}, Role.SHOAL))
    return found


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
