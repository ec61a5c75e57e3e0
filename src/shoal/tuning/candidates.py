"""Lists what can be tried: the ways to run an env within the user's limits, and the rate expected of each."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shoal.backends.threads import MOST_THREADS
from shoal.observe.words import duration, plural, size
from shoal.planning.plan import MOST_PROCESSES, Plan, predict, worker_counts
from shoal.worker.measurement import Measurement

MOST_ENVS = 1024  # the largest number that is tried if the user leaves it open
WAITS = 0.2  # if an env waits for this part of its step or more, more workers than cores may pay
PROCESS_START = 0.01  # seconds of a core for each worker process
SPINS = ((0, 0), (2_000_000, 2_000_000))  # nanoseconds: never, and long enough for a policy of 2 ms
SIMPLEST = ("serial", "hybrid", "threads", "processes")
CLOSE = 1.02  # rates within this factor count as equal


@dataclass(frozen=True)
class EnvCost:
    """What an env costs in time and memory.

    Attributes:
        measured: the times of its steps.
        build: seconds for constructor and first reset of the second env in a process.
        first_build: the same for the first env, with everything that it imports and loads.
        process_memory: bytes of a worker process with one env.
        env_memory: bytes of each further env.
    """

    measured: Measurement
    build: float
    first_build: float
    process_memory: int
    env_memory: int

    @property
    def spread(self) -> float:
        """The standard deviation of a step, as a fraction of the mean."""
        return float(np.std(self.measured.wall)) / max(self.measured.mean, 1e-12)

    @property
    def step_text(self) -> str:
        """The time of a step, in words."""
        measured = self.measured
        return f"a step takes {duration(measured.mean)} (+- {self.spread:.0%}), {measured.waiting:.0%} of it waiting"

    def __str__(self) -> str:
        return (
            f"{self.step_text}; "
            f"an env takes {duration(self.build)} to build and reset ({duration(self.first_build)} the first time in "
            f"a process) and {size(self.env_memory)} of memory, a process {size(self.process_memory)}"
        )


@dataclass(frozen=True)
class Limits:
    """What the user allows, after checks."""

    num_envs: int | None
    batch_size: int | Literal["all"] | None
    backends: tuple[str, ...]
    policy_latency: float
    max_memory: int | None
    cores: int


@dataclass(frozen=True)
class Candidate:
    """One way to run the env."""

    backend: str
    num_workers: int
    num_envs: int
    batch_size: int
    spin: tuple[int, int] | None = None

    def __str__(self) -> str:
        words = self.backend if self.backend == "serial" else f"{self.backend} x{self.num_workers}"
        words += f", {plural(self.num_envs, 'env')}"
        words += f", batches of {self.batch_size}" if self.partial else ""
        return words + (f", {self.spinning}" if self.spin else "")

    @property
    def partial(self) -> bool:
        """Whether a batch is smaller than all envs."""
        return self.batch_size < self.num_envs

    @property
    def spinning(self) -> str:
        """How it spins, in words; "" for the usual way."""
        if self.spin is None:
            return ""
        return f"spins {max(self.spin) / 1e6:g} ms" if max(self.spin) else "never spins"

    @property
    def simplicity(self) -> tuple[object, ...]:
        """A key that sorts simpler candidates first."""
        return self.num_envs, self.partial, SIMPLEST.index(self.backend), self.spin is not None, self.num_workers

    @property
    def processes(self) -> int:
        """The number of processes that hold envs."""
        return self.num_workers if self.backend in ("processes", "hybrid") else 1

    def plan(self, reason: str = "tried", measured: Measurement | None = None) -> Plan:
        """Return the plan that runs envs this way."""
        batch = self.batch_size if self.partial else None
        return Plan(self.backend, self.num_workers, reason, measured, self.num_envs, batch, self.spin)

    def memory(self, cost: EnvCost) -> int:
        """Return the bytes that it will take."""
        return self.processes * cost.process_memory + max(0, self.num_envs - self.processes) * cost.env_memory

    def batch_seconds(self, cost: EnvCost, limits: Limits) -> float:
        """Return the expected time of a batch, with the caller's policy."""
        seconds = predict(cost.measured, self.backend, self.num_workers, self.num_envs, self.batch_size, limits.cores)
        if self.partial and self.backend in ("threads", "processes"):
            return max(seconds, limits.policy_latency)  # the envs step while the policy computes
        return seconds + limits.policy_latency

    def rate(self, cost: EnvCost, limits: Limits) -> float:
        """Return the expected steps per second."""
        return self.batch_size / self.batch_seconds(cost, limits)

    def start_seconds(self, cost: EnvCost, limits: Limits) -> float:
        """Return the expected time of its start."""
        own = cost.first_build + (-(-self.num_envs // self.processes) - 1) * cost.build
        return own * max(1.0, self.processes / limits.cores) + self.processes * PROCESS_START


def all_candidates(cost: EnvCost, limits: Limits) -> list[Candidate]:
    """Return every way to run the env that keeps to the limits on numbers, in no order."""
    return [
        Candidate(backend, workers, count, batch)
        for count, batch in _sizes(limits)
        for backend in limits.backends
        # A single worker gains nothing by partial batches.
        if backend != "serial" or batch == count or limits.batch_size is not None
        for workers in _workers(backend, count, cost, limits)
    ]


def _sizes(limits: Limits) -> list[tuple[int, int]]:
    """Return the numbers of envs to try, each with the batch sizes to try."""
    size = limits.batch_size
    if limits.num_envs is not None:
        counts = [limits.num_envs]
    elif isinstance(size, int):
        counts = [size * part for part in (1, 2, 4)]
    else:
        counts = [limits.cores << k for k in range(MOST_ENVS.bit_length()) if limits.cores << k <= MOST_ENVS]
    if isinstance(size, int):
        return [(count, size) for count in counts]
    parts = (1,) if size == "all" else (1, 2, 4)
    return [(count, count // part) for count in counts or [limits.cores] for part in parts if count >= part]


def _workers(backend: str, count: int, cost: EnvCost, limits: Limits) -> list[int]:
    """Return the numbers of workers to try: up to a few times the cores, or one for each env if envs wait."""
    if backend == "serial":
        return [1]
    cores = limits.cores
    # Fewer workers leave cores to others. More workers even out unequal envs, and get more of a shared machine.
    numbers = {*worker_counts(count, cores), max(1, cores // 2), 2 * cores, 4 * cores, 8 * cores}
    if cost.measured.waiting > WAITS:
        numbers |= {cores << k for k in range(4, 12)} | {count}
    most = MOST_THREADS if backend == "threads" else MOST_PROCESSES
    least = 2 if backend == "hybrid" else 1
    return sorted({min(number, count) for number in numbers if least <= min(number, count) <= most})


def in_order(candidates: Sequence[Candidate], rate: Callable[[Candidate], float]) -> list[Candidate]:
    """Sort candidates by expected rate, but take turns between kinds.

    A kind is a backend with full batches, or with batches of one part of the envs. Kinds take turns because the
    expectation may be wrong for a whole kind. Candidates of about the same expected rate are sorted by simplicity.
    """
    kinds: dict[tuple[str, int], list[Candidate]] = defaultdict(list)
    for one in candidates:
        kinds[one.backend, round(one.num_envs / one.batch_size)].append(one)

    def key(one: Candidate) -> tuple[float, tuple[object, ...]]:
        return -round(math.log(rate(one), CLOSE)), one.simplicity

    queues = sorted((sorted(kind, key=key) for kind in kinds.values()), key=lambda kind: key(kind[0]))
    turns = itertools.zip_longest(*queues)
    return [one for turn in turns for one in turn if one is not None]


def neighbours(one: Candidate, known: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidates that differ in one number, by one place up or down."""
    alike = [other for other in known if other.backend == one.backend and other.spin == one.spin]
    for name in ("num_envs", "num_workers", "batch_size"):
        mine = getattr(one, name)
        values = sorted({getattr(other, name) for other in alike})
        place = values.index(mine)
        for value in values[max(0, place - 1) : place] + values[place + 1 : place + 2]:
            wanted = replace(one, **{name: value})
            if name == "num_envs" and one.num_envs % one.batch_size == 0:
                wanted = replace(wanted, batch_size=max(1, value * one.batch_size // one.num_envs))
            if wanted in alike:
                yield wanted


def other_spins(one: Candidate) -> Iterator[Candidate]:
    """Yield the same candidate with other times of spinning. Threads never spin, because they would hold the GIL."""
    if one.backend in ("processes", "hybrid") and one.spin is None:
        yield from (replace(one, spin=spin) for spin in SPINS)
