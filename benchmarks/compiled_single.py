"""Compiled envs in single precision: against double precision and JAX on the same cores, in turns.

- step: `Pool.step` with actions that were drawn beforehand, in double and in single precision
- rollout: `Pool.rollout("random", 64)`, and with a network of 4-64-64-2
- JAX: `jax_envs.LeanCartPole` in one scan, with `rng="fast"`, which keeps no observations

The table has medians and quartiles of the rounds, and the ratio to double precision, round by round.

python benchmarks/compiled_single.py --json benchmarks/results/compiled_single.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
from shoal import compiled
from shoal.cli import doctor
from shoal.support.cores import usable_cores

STEPS = 64
OTHERS = ("Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "shoal/Bricks-v0")
Run = Callable[[], int]  # makes some steps, returns how many


def stepping(name: str, num_envs: int, threads: int, precision: str) -> Run:
    """Steps of a pool, one by one."""
    kwargs = {"precision": precision}
    pool = shoal.Pool(name, num_envs, seed=0, backend="compiled", num_workers=threads, env_kwargs=kwargs)
    pool.reset()
    pool.action_space.seed(0)
    actions = [pool.action_space.sample() for _ in range(16)]

    def run() -> int:
        for row in actions:
            pool.step(row)
        return len(actions) * num_envs

    return run


def rolling(num_envs: int, threads: int, precision: str, policy: Any, params: Any = ()) -> Run:
    """Rollouts of CartPole, into the same arrays."""
    kwargs = {"precision": precision}
    pool = shoal.Pool("CartPole-v1", num_envs, seed=0, backend="compiled", num_workers=threads, env_kwargs=kwargs)
    steps = STEPS if policy == "random" else 8
    out = pool.rollout(policy, steps, params=params)

    def run() -> int:
        pool.rollout(policy, steps, params=params, out=out)
        return steps * num_envs

    return run


def jax_scan(num_envs: int) -> Run:
    """JAX's best on the CPU."""
    import jax

    from jax_envs import LeanCartPole
    from jax_envs import shoal as functional

    state, scan = functional(LeanCartPole(), num_envs, STEPS, 4, max_episode_steps=500, rng="fast")
    step, keep = jax.jit(scan, donate_argnums=0), [state]

    def run() -> int:
        keep[0], sums = step(keep[0], jax.random.key(1))
        jax.block_until_ready(sums)
        return STEPS * num_envs

    return run


def weights() -> list[Any]:
    """The params of a network."""
    rng, sizes = np.random.default_rng(0), (4, 64, 64, 2)
    shapes = [shape for i in range(3) for shape in ((sizes[i], sizes[i + 1]), (sizes[i + 1],))]
    return [rng.normal(0.0, 0.3, shape).astype(np.float32) for shape in shapes]


def groups(threads: int, only: list[str]) -> dict[str, dict[str, Callable[[], Run]]]:
    """What is measured in turns with what."""
    found: dict[str, dict[str, Callable[[], Run]]] = {}
    for count in (16384, 64):
        found[f"CartPole {count}, step"] = {
            one: lambda count=count, one=one: stepping("CartPole-v1", count, threads, one)
            for one in ("double", "single")
        }
    found["CartPole 16384, step"]["JAX"] = lambda: jax_scan(16384)
    found["CartPole 16384, rollout"] = {
        one: lambda one=one: rolling(16384, threads, one, "random") for one in ("double", "single")
    }
    found["CartPole 16384, network"] = {"single": lambda: rolling(16384, threads, "single", compiled.Mlp(), weights())}
    for name in OTHERS:
        found[f"{name} 16384, step"] = {
            one: lambda name=name, one=one: stepping(name, 16384, threads, one) for one in ("double", "single")
        }
    return {name: runs for name, runs in found.items() if not only or any(word in name for word in only)}


def rate(run: Run, seconds: float) -> float:
    """Steps per second."""
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        steps += run()
    return steps / (time.perf_counter() - began)


def measure(runs: dict[str, Callable[[], Run]], seconds: float, rounds: int) -> dict[str, Any]:
    """Rates of all, in turns."""
    ready = {name: make() for name, make in runs.items()}
    for run in ready.values():
        rate(run, seconds / 2)
    rates: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(rounds):
        names = list(ready)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rates[name].append(rate(ready[name], seconds))
    told = {name: {"steps_per_s": quartiles(found)} for name, found in rates.items()}
    for name, found in rates.items():
        for other in ("double", "JAX"):
            if name == "single" and other in rates:
                told[name][f"times {other}"] = quartiles(np.array(found) / np.array(rates[other]))
    return told


def quartiles(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def shown(values: list[float] | None, scale: float = 1.0) -> str:
    if values is None:
        return ""
    low, middle, high = (f"{value * scale:.3g}" for value in values)
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores(), metavar="T")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="rows with one of these words")
    parser.add_argument("--seconds", type=float, default=0.25, help="length of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": doctor.facts(), "threads": options.threads}
    for name, runs in groups(options.threads, options.only).items():
        results[name] = measure(runs, options.seconds, options.rounds)
        grid = Table(f"{name}, {options.threads} threads", "M steps/s", "x double", "x JAX")
        for one, told in results[name].items():
            times = [shown(told.get(f"times {other}")) for other in ("double", "JAX")]
            grid.add_row(one, shown(told["steps_per_s"], 1e-6), *times)
        Console().print(grid)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
