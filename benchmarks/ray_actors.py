"""Shoal's Ray backend against tianshou's RayVectorEnv, PufferLib's Ray and Shoal's own processes, on one local cluster.

Everybody lives in this process, with actors of its own on the same cluster, and steps when it is its turn, so that a
busy machine hits all alike; medians of the rounds, quartiles in brackets, ratios within each round. Actors have the
niceness of this process, as local processes have, unless RAY_worker_niceness says otherwise: Ray's own default of 15
leaves them next to nothing of a machine where others compute.

- throughput: 64 CartPoles on 2 actors, PufferLib's with 2 actors, tianshou's with an actor for each env (16 of them)
- start: until 2 actors with 32 envs each have answered their first reset, Ray being up
- slow envs: 16 envs of 500 us, 2 actors against 2 local processes: in batches of 4, so that each actor has a message to
  work on while another one is under way, and in full batches, where everybody waits for the network
- delay: envs of 1 ms, 4 batches under way, with and without 5 ms added to every message, there and back

python benchmarks/ray_actors.py --parts throughput start slow delay
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import shoal

RESULTS = Path(__file__).parent / "results"
Run = Callable[[], int]  # makes a batch of steps: how many


class Working(gymnasium.Env[Any, Any]):
    """Computes for so many seconds in each step, without giving up the core."""

    def __init__(self, seconds: float):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._seconds, self._observation = seconds, np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> Any:
        until = time.perf_counter() + self._seconds
        while time.perf_counter() < until:
            pass
        return self._observation, 0.0, False, False, {}


class Waiting(Working):
    """Waits for so many seconds in each step, as for a simulator elsewhere."""

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return self._observation, 0.0, False, False, {}


def stepping(pool: Any) -> Run:
    """A full batch at a time."""
    actions = np.zeros(pool.num_envs, np.int64)
    pool.reset(seed=0)

    def run() -> int:
        pool.step(actions)
        return int(pool.num_envs)

    return run


def streaming(pool: Any) -> Run:
    """Whoever is ready is sent on at once."""
    actions = np.zeros(pool.batch_size, np.int64)
    pool.async_reset(seed=0)

    def run() -> int:
        batch = pool.recv()
        pool.send(actions, batch.env_id)
        return len(batch.env_id)

    return run


def on_ray(env: Any, num_envs: int, workers: int = 2, **options: Any) -> Any:
    """A pool on the cluster; actors share this machine's cores, however many these are."""
    given = {"num_cpus": 0.01, "local_backend": "serial", **options.pop("backend_options", {})}
    return shoal.Pool(env, num_envs, backend="ray", num_workers=workers, backend_options=given, **options)


def puffers(num_envs: int) -> tuple[Run, Callable[[], None]]:
    """PufferLib's Ray."""
    import pufferlib.emulation
    import pufferlib.vector
    import ray

    def make(buf: Any = None, seed: int = 0) -> Any:
        creator = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
        return pufferlib.emulation.GymnasiumPufferEnv(env_creator=creator, buf=buf, seed=seed)

    envs = pufferlib.vector.make(make, backend=pufferlib.vector.Ray, num_envs=num_envs, num_workers=2)
    actions = np.zeros(num_envs, np.int64)
    envs.async_reset(0)
    envs.recv()

    def run() -> int:
        envs.send(actions)
        envs.recv()
        return num_envs

    # Its own close shuts Ray down.
    return run, lambda: [ray.kill(actor) for actor in envs.envs] and None


def tianshous(num_envs: int) -> tuple[Run, Callable[[], None]]:
    """tianshou's RayVectorEnv, one actor for each env."""
    from tianshou.env import RayVectorEnv

    envs = RayVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs)
    actions = np.zeros(num_envs, np.int64)
    envs.reset()

    def run() -> int:
        *_, terminated, truncated, _ = envs.step(actions)
        done = np.flatnonzero(terminated | truncated)
        if len(done):  # it leaves that to the caller, and counts as a step, as elsewhere
            envs.reset(done)
        return num_envs + len(done)

    return run, envs.close


def in_turns(runs: dict[str, Run], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Steps per second of each, in every round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        names = list(runs) if number % 2 else list(reversed(runs))
        for name in names:
            steps, start = 0, time.perf_counter()
            while (now := time.perf_counter()) - start < seconds:
                steps += runs[name]()
            if number:  # the first is to warm up
                rates[name].append(steps / (now - start))
    return rates


def spread(values: list[float], digits: str = ",.0f") -> str:
    """The median, and the quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{statistics.median(values):{digits}} ({low:{digits}} to {high:{digits}})"


def report(title: str, rates: dict[str, list[float]], ours: str) -> dict[str, Any]:
    """Print, and return as data."""
    table = Table("", "steps/s", f"{ours} is", title=title)
    for name, values in rates.items():
        ratios = [mine / other for mine, other in zip(rates[ours], values, strict=True)]
        table.add_row(name, spread(values), "" if name == ours else f"{spread(ratios, '.2f')} times as fast")
    Console().print(table)
    return {"title": title, "ours": ours, "rates": rates}


def throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    ours = "shoal, 64 envs on 2 actors"
    closers, runs = [], {}
    pool = on_ray("CartPole-v1", 64)
    runs[ours], closers = stepping(pool), [pool.close]
    if importlib.util.find_spec("pufferlib"):
        runs["PufferLib's Ray, 64 envs on 2 actors"], close = puffers(64)
        closers.append(close)
    if importlib.util.find_spec("tianshou"):
        runs[f"tianshou's RayVectorEnv, {options.tianshou} envs"], close = tianshous(options.tianshou)
        closers.append(close)
    found = report("64 CartPoles", in_turns(runs, options.seconds, options.rounds), ours)
    for close in closers:
        close()
    return [found]


def start(options: argparse.Namespace) -> list[dict[str, Any]]:
    times = []
    for _ in range(min(5, options.rounds)):
        began = time.perf_counter()
        pool = on_ray("CartPole-v1", 64)
        pool.reset(seed=0)
        times.append(time.perf_counter() - began)
        pool.close()
    Console().print(f"start of 2 actors with 32 envs each, first reset included: {spread(times, '.2f')} s")
    return [{"title": "start", "seconds": times}]


def slow(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for kind, size in ((Working, 4), (Waiting, 4), (Working, 16), (Waiting, 16)):
        env = functools.partial(kind, 500e-6)
        pools = {
            "shoal, 2 actors": on_ray(env, 16, batch_size=size),
            "shoal, 2 processes": shoal.Pool(env, 16, backend="processes", num_workers=2, batch_size=size),
        }
        runs = {name: streaming(pool) for name, pool in pools.items()}
        rates = in_turns(runs, options.seconds, options.rounds)
        title = f"16 envs, {kind.__name__.lower()} for 500 us, batches of {size}"
        found.append(report(title, rates, "shoal, 2 actors"))
        for pool in pools.values():
            pool.close()
    return found


def delay(options: argparse.Namespace) -> list[dict[str, Any]]:
    env = functools.partial(Waiting, 1e-3)
    pools = {
        name: on_ray(env, 64, batch_size=16, backend_options={"delay": seconds})
        for name, seconds in (("5 ms more for every message", 5e-3), ("no delay", 0.0))
    }
    runs = {name: streaming(pool) for name, pool in pools.items()}
    rates = in_turns(runs, max(1.0, options.seconds), options.rounds)
    found = report("64 envs of 1 ms on 2 actors, batches of 16", rates, "5 ms more for every message")
    for pool in pools.values():
        pool.close()
    return [found]


PARTS = {"throughput": throughput, "start": start, "slow": slow, "delay": delay}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.7, help="length of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each (%(default)s)")
    parser.add_argument("--tianshou", type=int, default=16, metavar="N", help="envs of tianshou's (%(default)s)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (%(default)s)")
    options = parser.parse_args()
    import ray  # not before somebody has read the help

    os.environ.setdefault("RAY_worker_niceness", "0")
    # As many CPUs as tianshou's actors ask for: Ray would wait for more of them for ever.
    ray.init(address="local", num_cpus=options.tianshou + 4, include_dashboard=False, log_to_driver=False,
             logging_level="ERROR")  # fmt: skip
    found = [one for part in options.parts for one in PARTS[part](options)]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "ray_actors.json").write_text(json.dumps(found, indent=1))
    ray.shutdown()


if __name__ == "__main__":
    main()
