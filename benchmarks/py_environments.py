"""Shoal's BatchedPyEnvironment and ParallelPyEnvironment against those of TF-Agents, in turns, in one run.

16 PyEnvironments that do next to nothing; steps/s of all of them together. "one alone" is one of them in a plain loop.
Shoal makes TF-Agents' TimeSteps by quick functions of its own (`quicken`); who is not Shoal runs without them, except
in the row that says so.

.venv-tf/bin/python benchmarks/py_environments.py
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from rich.console import Console
from rich.table import Table
from tf_agents.environments import batched_py_environment, parallel_py_environment, py_environment
from tf_agents.specs import array_spec
from tf_agents.system import system_multiprocessing
from tf_agents.trajectories import time_step as ts

import common
from shoal.cli import doctor
from shoal.dialects.tf_agents import BatchedPyEnvironment, ParallelPyEnvironment, quicken, slow_down
from shoal.observe.progress import progress


class Cheap(py_environment.PyEnvironment):
    """Counts to 200."""

    def __init__(self) -> None:
        super().__init__()
        self._count, self._over = 0, False

    def action_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.int32, 0, 1, "action")

    def observation_spec(self) -> Any:
        return array_spec.ArraySpec((4,), np.float32, "count")

    def _reset(self) -> Any:
        self._count, self._over = 0, False
        return ts.restart(np.zeros(4, np.float32))

    def _step(self, action: Any) -> Any:
        if self._over:
            return self.reset()
        self._count += 1
        observation = np.full(4, self._count, np.float32)
        if self._count < 200:
            return ts.transition(observation, 1.0)
        self._over = True
        return ts.termination(observation, 1.0)


def contenders(count: int) -> dict[str, Callable[[], Any]]:
    """Return what makes each of them; those of TF-Agents first, whose processes begin as a copy of this one."""
    return {
        "one alone": Cheap,
        "one alone, quickened": Cheap,
        "TF-Agents batched": lambda: batched_py_environment.BatchedPyEnvironment(
            [Cheap() for _ in range(count)], multithreading=False
        ),
        "TF-Agents batched, threads": lambda: batched_py_environment.BatchedPyEnvironment(
            [Cheap() for _ in range(count)]
        ),
        "TF-Agents parallel": lambda: parallel_py_environment.ParallelPyEnvironment([Cheap] * count),
        "Shoal batched, one thread": lambda: BatchedPyEnvironment(
            [Cheap() for _ in range(count)], multithreading=False
        ),
        "Shoal batched": lambda: BatchedPyEnvironment([Cheap() for _ in range(count)]),
        "Shoal parallel": lambda: ParallelPyEnvironment([Cheap] * count),
    }


def rate(env: Any, seconds: float) -> float:
    """Return steps/s."""
    action: Any = np.ones(env.batch_size, np.int32) if env.batched else np.int32(1)
    env.step(action)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        env.step(action)
        calls += 1
    return calls * (env.batch_size or 1) / (time.perf_counter() - start)


def measure(count: int, seconds: float, rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the rates of all rounds by name, the ratios asked for, and what Shoal has chosen."""
    envs = {name: make() for name, make in contenders(count).items()}
    for env in envs.values():
        env.reset()
    rates: dict[str, list[float]] = {name: [] for name in envs}
    for number in range(rounds):
        for name in random.Random(number).sample(list(envs), len(envs)):
            notify(name)
            (quicken if "Shoal" in name or "quickened" in name else slow_down)()
            rates[name].append(rate(envs[name], seconds))
    plan = str(envs["Shoal batched"].pool.plan)
    for env in envs.values():
        env.close()
    found = {name: np.array(values) for name, values in rates.items()}
    theirs = np.maximum(found["TF-Agents batched"], found["TF-Agents batched, threads"])
    ratios = {
        "Shoal batched / the better of TF-Agents' batched": found["Shoal batched"] / theirs,
        "Shoal batched, one thread / TF-Agents batched": found["Shoal batched, one thread"]
        / found["TF-Agents batched"],
        "Shoal parallel / TF-Agents parallel": found["Shoal parallel"] / found["TF-Agents parallel"],
    }
    return {
        "envs": count, "plan": plan, "rates": rates,
        "ratios": {name: np.percentile(values, (25, 50, 75)).tolist() for name, values in ratios.items()},
    }  # fmt: skip


def report(found: dict[str, Any]) -> None:
    """Print the tables."""
    grid = Table(f"{found['envs']} envs", "steps/s", "quartiles")
    for name, values in found["rates"].items():
        low, middle, high = np.percentile(values, (25, 50, 75))
        grid.add_row(name, f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}")
    ratios = Table("ratio, round by round", "median", "quartiles")
    for name, (low, middle, high) in found["ratios"].items():
        ratios.add_row(name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}")
    console = Console()
    console.print(grid, ratios, f"Shoal batched: {found['plan']}")


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.5, 11)
    parser.add_argument("-n", "--num-envs", type=int, default=16)
    options = parser.parse_args()
    system_multiprocessing.enable_interactive_mode()  # without it TF-Agents starts no processes from a plain script
    with progress(options.rounds * len(contenders(1))) as notify:
        found = measure(options.num_envs, options.seconds, options.rounds, notify)
    report(found)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "py_environments.json").write_text(json.dumps({**found, "machine": doctor.facts()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
