"""Many cores: backends, numbers of workers and times of spinning, against the limit of one plain loop on each core.

    python benchmarks/many_cores.py --quick
    python benchmarks/many_cores.py --busy 2 --only spins auto --json busy.json
    python benchmarks/many_cores.py --only plans parts auto tuned puffer

Needs nothing but shoal, numpy and gymnasium; `puffer` needs PufferLib. All contenders of a cell stay open and take
turns: each round runs all of them, in an order that changes, and the limit before each group of four. A ratio is taken
against the limits of its own round. The limit is k processes that step one env each in a plain loop; a reset counts as
a step, everywhere. "Loops in step" are plain loops that wait for each other after each batch, with nothing else between
them: what they lose against the limit is lost by any library that waits for all envs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import shoal
from runners import LoopsInStep
from shoal.cli.work import Work

MS = 1_000_000
GROUPS = ("plans", "spins", "parts", "auto", "tuned", "puffer")  # of contenders
SPINS: dict[str, tuple[int, int] | None] = {
    "usual": None, "0": (0, 0), "10 ms": (10 * MS, 10 * MS), "10 ms of workers": (0, 10 * MS),
    "10 ms of the caller": (10 * MS, 0),
}  # fmt: skip
Run = Callable[[float], float]  # runs for so many seconds; steps per second


class Busy(gymnasium.Env[np.ndarray, np.int64]):
    """A step computes for 500 microseconds of its thread's own time."""

    observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float64)
    action_space = spaces.Discrete(2)
    cpu, episode = 500e-6, 200

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.state = 0, np.zeros(8)
        return self.state, {}

    def step(self, action: np.int64) -> Any:
        stop, value = time.thread_time() + self.cpu, 0.5
        while time.thread_time() < stop:
            for _ in range(20):
                value = math.sin(value) + 0.5
        self.steps += 1
        return self.state, value, False, self.steps >= self.episode, {}


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


# ---- the limit -------------------------------------------------------------------------------------------------------


def plain_loop(make: Callable[[], Any], link: Any) -> None:
    """In a process of its own: steps one env for as many seconds as it is told, again and again."""
    env, over = make(), True
    actions = np.random.default_rng(os.getpid()).integers(0, 2, 4096)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            seconds = link.recv()
            steps, began = 0, time.perf_counter()
            while (now := time.perf_counter()) - began < seconds:
                at = steps % 4096
                for action in actions[at : at + 64]:
                    if over:
                        env.reset()
                        over = False
                    else:
                        _, _, terminated, truncated, _ = env.step(action)
                        over = terminated or truncated
                steps += 64
            link.send(steps / (now - began))


class Loops:
    """One plain loop on each core: the limit."""

    def __init__(self, make: Callable[[], Any], cores: int):
        context = multiprocessing.get_context("fork")
        self._links, self._processes = [], []
        for _ in range(cores):
            ours, theirs = context.Pipe()
            process = context.Process(target=plain_loop, args=(make, theirs), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def run(self, seconds: float) -> float:
        for link in self._links:
            link.send(seconds)
        return float(sum(link.recv() for link in self._links))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many other programs that compute all the time."""
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_compute, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def _compute() -> None:
    value = 0.5
    while True:
        value = math.sin(value)


# ---- a cell ----------------------------------------------------------------------------------------------------------


def pool_run(pool: shoal.Pool) -> Run:
    rng = np.random.default_rng(0)
    actions = [rng.integers(0, 2, pool.num_envs) for _ in range(64)]

    def step_all(turn: int) -> None:
        pool.step(actions[turn % 64])

    def step_parts(turn: int) -> None:
        batch = pool.recv()
        pool.send(actions[turn % 64][: pool.batch_size], batch.env_id)

    def run(seconds: float) -> float:
        turns, step = 0, step_all if pool.batch_size == pool.num_envs else step_parts
        if step is step_parts and not len(pool.pending):
            pool.send(actions[0])
        until = time.perf_counter() + seconds / 5
        while time.perf_counter() < until:  # it was idle while others ran
            step(0)
        began = time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            for at in range(4):
                step(turns + at)
            turns += 4
        return turns * pool.batch_size / (now - began)

    return run


def plans_of(cores: int, num_envs: int, options: Any) -> dict[str, shoal.Plan]:
    """Contenders by hand: backends and workers, times of spinning, and batches of a part of the envs."""
    quick, groups, plans = options.quick, options.only, {}
    fewer = sorted({cores, max(1, cores - 1), max(1, cores * 3 // 4), *([] if quick else [max(1, cores // 2)])})
    for backend in ("processes", "hybrid"):
        for workers in fewer:
            several = "spins" in groups and (workers == cores or not quick)
            if several or "plans" in groups:
                for spin in SPINS if several else ["usual"]:
                    plans[f"{backend} {workers}, spin {spin}"] = shoal.Plan(backend, workers, "", spin=SPINS[spin])
    for workers in (cores, max(1, cores - 1)) if "parts" in groups else ():
        for part in (2, 4):
            plan = shoal.Plan("processes", workers, "", batch_size=max(1, num_envs // part))
            plans[f"processes {workers}, batches of 1/{part}"] = plan
    if "parts" in groups:
        plans[f"hybrid {cores}, batches of 1/2"] = shoal.Plan("hybrid", cores, "", batch_size=max(1, num_envs // 2))
    return plans


class Spinning:
    """Something whose processes look for work without a pause; they are stopped between runs."""

    def __init__(self, pids: list[int], rows: int, turn: Callable[[int], Any]):
        self._pids, self._rows, self._turn = pids, rows, turn
        self.run(0.01)

    def run(self, seconds: float) -> float:
        """As `pool_run`."""
        self._signal(signal.SIGCONT)
        clock, turns, until = time.perf_counter, 0, time.perf_counter() + seconds / 5
        while clock() < until:
            self._turn(0)
        began = clock()
        while (now := clock()) - began < seconds:
            self._turn(turns)
            turns += 1
        self._signal(signal.SIGSTOP)
        return turns * self._rows / (now - began)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def close(self) -> None:
        """End its processes."""
        self._signal(signal.SIGKILL)


def loops_in_step(make: Callable[[], Any], num_envs: int, cores: int) -> Spinning:
    runner = LoopsInStep(Work(f"{__name__}:{make.__name__}", num_envs, spaces.Discrete(2)), cores)
    return Spinning(runner.pids, num_envs, lambda turn: runner.step(runner.actions[turn % 64]))


def puffer(make: Callable[[], Any], num_envs: int, **options: Any) -> Spinning:
    """PufferLib's Multiprocessing."""
    from pufferlib import emulation, vector

    envs = vector.make(
        emulation.GymnasiumPufferEnv, env_kwargs={"env_creator": make}, backend=vector.Multiprocessing,
        num_envs=num_envs, overwork=True, **options,
    )  # fmt: skip
    envs.async_reset(0)
    rows = envs.agents_per_batch
    actions = np.random.default_rng(0).integers(0, 2, (64, rows))

    def turn(number: int) -> None:
        envs.recv()
        envs.send(actions[number % 64])

    return Spinning([process.pid for process in envs.processes], rows, turn)


def puffers(make: Callable[[], Any], num_envs: int, cores: int) -> Iterator[tuple[str, Spinning]]:
    """PufferLib at settings that are worth a try, some of which it refuses; all workers have equally many envs."""
    for workers in dict.fromkeys((cores, cores - 1, max(1, cores // 2))):
        own = num_envs // workers
        for parts, more in ((1, {}), (2, {}), (2, {"sync_traj": False}), (3, {}), (4, {"sync_traj": False})):
            if workers % parts:
                continue
            with contextlib.suppress(Exception):
                options = {"num_workers": workers, "batch_size": own * workers // parts, **more}
                words = f"PufferLib {workers}, batches of 1/{parts}" + ", any order" * bool(more)
                yield words, puffer(make, own * workers, **options)


def measure(make: Callable[[], Any], num_envs: int, options: Any, budget: float) -> dict[str, Any]:
    """One cell: all contenders in turns. {"limit": rates, "rows": {name: {"ratios", "rates", "verdict"}}}."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        loops = Loops(make, options.cores)
        stack.callback(loops.close)
        pools = open_pools(make, num_envs, options, stack)
        runs = {name: pool_run(pool) for name, pool in pools.items()}
        spinning = {"loops in step": loops_in_step(make, num_envs, options.cores)}
        if "puffer" in options.only:
            spinning.update(puffers(make, num_envs, options.cores))
        for name, one in spinning.items():
            stack.callback(one.close)
            runs[name] = one.run
        rows: dict[str, Any] = {name: {"ratios": [], "rates": [], "verdict": ""} for name in runs}
        limits: list[float] = []
        order, rng = list(runs), random.Random(0)
        loops.run(0.2)
        for _ in range(options.rounds):
            if time.monotonic() - began > budget:
                break
            rng.shuffle(order)
            for at, name in enumerate(order):
                if at % 4 == 0:
                    limits.append(loops.run(options.seconds))
                earlier = pools[name].stats() if name in pools else None
                rate = runs[name](options.seconds)
                if earlier is not None:
                    rows[name]["verdict"] = (pools[name].stats() - earlier).verdict
                rows[name]["rates"].append(rate)
                rows[name]["ratios"].append(rate / limits[-1])
    return {"envs": num_envs, "limit": limits, "rows": rows}


def open_pools(
    make: Callable[[], Any], num_envs: int, options: Any, stack: contextlib.ExitStack
) -> dict[str, shoal.Pool]:
    """All pools of a cell, which have begun. The tuner goes first, while nothing else is there."""
    pools: dict[str, shoal.Pool] = {}
    plans = {}
    if "tuned" in options.only:
        found = shoal.tune(make, num_envs, seconds=options.tune_seconds, progress=False).plan
        size = found.batch_size or num_envs
        plans[f"tuned: {found.backend} {found.num_workers}, batches of {size}"] = found
    if "auto" in options.only:
        chosen = stack.enter_context(shoal.Pool(make, num_envs))
        pools[f"auto: {chosen.plan.backend} {chosen.plan.num_workers}"] = chosen
    for name, plan in {**plans, **plans_of(options.cores, num_envs, options)}.items():
        pools[name] = stack.enter_context(shoal.Pool(make, num_envs, plan=plan))
    for pool in pools.values():
        pool.reset(seed=0)
    return pools


# ---- output ----------------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(values or [float("nan")], (25, 50, 75))
    return float(low), float(middle), float(high)


def show(title: str, cell: dict[str, Any]) -> None:
    limit = quartiles(cell["limit"])
    print(f"\n{title}: limit {limit[1] / 1e3:,.0f} k steps/s ({limit[0] / 1e3:,.0f} to {limit[2] / 1e3:,.0f})")
    ranked = sorted(cell["rows"].items(), key=lambda row: -quartiles(row[1]["ratios"])[1])
    for name, row in ranked:
        low, middle, high = quartiles(row["ratios"])
        rate = quartiles(row["rates"])[1]
        verdict = row["verdict"] if "usual" in name or "auto" in name else ""
        print(f"  {middle:5.2f} ({low:.2f} to {high:.2f}) {rate / 1e3:9,.0f} k  {name:28} {verdict}")
    medians = {name: quartiles(row["ratios"])[1] for name, row in cell["rows"].items()}
    for group in dict.fromkeys(name.partition(", spin")[0] for name in medians if ", spin" in name):
        spins = {
            name.partition(", spin ")[2]: value for name, value in medians.items() if name.startswith(f"{group}, spin")
        }
        if len(spins) > 1:
            print(f"  {group}: usual over the best of all spins {spins['usual'] / max(spins.values()):.2f}")
    print(end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-n", "--num-envs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--busy", type=int, default=0, help="how many busy loops run beside")
    parser.add_argument("--seconds", type=float, default=None, help="of each run")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--no-computing", action="store_true", help="leave out the envs that compute for 500 us")
    parser.add_argument("--quick", action="store_true", help="under four minutes in all")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", nargs="+", choices=GROUPS, default=GROUPS[:4], metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--tune-seconds", type=float, default=8.0, help="of each search by tune (%(default)s)")
    options = parser.parse_args()
    options.seconds = options.seconds or (0.15 if options.quick else 0.3)
    options.rounds = options.rounds or (9 if options.quick else 15)
    cells = [(f"CartPole, {n} envs", cartpole, n) for n in options.num_envs]
    if not options.no_computing:
        cells.append(("500 us of computing, 64 envs", Busy, 64))
    budget = (200.0 if options.quick else 1200.0) / len(cells)
    facts = {
        "cores": options.cores,
        "busy": options.busy,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "shoal": shoal.__version__,
        "native": shoal.native.KIND,
    }
    print(facts)
    document: dict[str, Any] = {"facts": facts, "cells": {}}
    with busy_loops(options.busy):
        for title, make, num_envs in cells:
            cell = measure(make, num_envs, options, budget)
            document["cells"][title] = cell
            show(title, cell)
            if options.json:
                options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
