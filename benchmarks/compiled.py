"""Compiled envs: CartPole with random actions, in turns against free-running compiled loops and EnvPool.

- limit: one compiled loop for each thread, over its own envs, that meets nobody and keeps no books
- Pool.step, shoal.make: one call from Python for each step of all envs
- rollout: `Pool.rollout("random", 64, out=...)`, all steps in one call, into the same arrays again
- EnvPool: its own CartPole in C++, with the same number of threads, and with one where there are few envs

Everybody writes observations, rewards and flags at each step, and resets by himself. `--start` measures the first use
instead: a fresh interpreter from its start to the first step, with nothing in the cache and with everything in it.
`--scaling` measures the same envs with one thread and with several, in turns.

python benchmarks/compiled.py -n 64 16384 --threads 2 --json benchmarks/results/compiled.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
from shoal.compiled.library.classic_control import CartPole
from shoal.support.cores import usable_cores

STEPS = 64  # of a run's unit: so many batches of actions were drawn beforehand


class Limit:
    """Loops that meet nobody, one for each thread, each over its share of the envs."""

    def __init__(self, num_envs: int, threads: int, actions: Any):
        self._shares = np.array_split(actions, threads, axis=1)
        self._parts = [_arrays(share.shape[1]) for share in self._shares]
        self._loop = _free_loop()
        self.run(1)

    def run(self, units: int) -> None:
        """Each of them so many units, at its own pace."""
        workers = [
            threading.Thread(target=self._loop, args=(units, np.ascontiguousarray(share), *part))
            for share, part in zip(self._shares, self._parts, strict=True)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def _arrays(count: int) -> tuple[Any, ...]:
    from shoal.compiled.definition import define

    states = define(CartPole, {}).new_states(count)
    flags = np.zeros((2, count), np.bool_)
    return states, np.zeros((count, 4), np.float32), np.zeros(count), *flags, np.zeros(count, np.int64)


def _free_loop() -> Any:
    import numba

    from shoal.compiled.random import VERSIONS
    from shoal.compiled.rebuild import Rebuilder

    jit = numba.njit(error_model="numpy", nogil=True)
    rebuild = Rebuilder(jit, VERSIONS)
    step, reset, observe = rebuild(CartPole.step), rebuild(CartPole.reset), rebuild(CartPole.observe)

    @jit  # type: ignore[untyped-decorator]
    def loop(
        units: int, actions: Any, states: Any, obs: Any, reward: Any, terminated: Any, truncated: Any, length: Any
    ) -> None:
        rng = np.zeros(1, np.uint64)
        for _ in range(units):
            for t in range(len(actions)):
                for env in range(len(states)):
                    state = states[env]
                    gain, over = step(state, actions[t, env], rng)
                    length[env] += 1
                    cut = length[env] >= 500
                    reward[env], terminated[env], truncated[env] = gain, over, cut
                    if over or cut:
                        reset(state, rng)
                        length[env] = 0
                    observe(state, obs[env])

    return loop


def contenders(num_envs: int, threads: int, actions: Any) -> dict[str, Callable[[int], None]]:
    """Who takes part: functions that step all envs so many units."""
    options: dict[str, Any] = {"backend": "compiled", "num_workers": threads}
    pool = shoal.Pool(CartPole, num_envs, seed=0, **options)
    pool.reset()
    envs = shoal.make(CartPole, num_envs, **options)
    envs.reset(seed=0)
    rolled = shoal.Pool(CartPole, num_envs, seed=0, **options)
    kept = rolled.rollout("random", STEPS)
    field: dict[str, Callable[[int], None]] = {
        "Shoal Pool.step": _stepping(pool.step, actions),
        "shoal.make": _stepping(envs.step, actions),
        "Pool.rollout": lambda units: (
            [rolled.rollout("random", STEPS, seed=i, out=kept) for i in range(units)] and None
        ),
    }
    try:
        import envpool
    except ImportError:
        return field
    for count in sorted({threads, 1 if num_envs < 1024 else threads}):
        peer = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=num_envs, num_threads=count)
        peer.reset()
        field[f"EnvPool, {count} threads"] = _stepping(peer.step, actions.astype(np.int32))
    return field


def _stepping(step: Callable[[Any], Any], actions: Any) -> Callable[[int], None]:
    def run(units: int) -> None:
        for _ in range(units):
            for row in actions:
                step(row)

    return run


def measure(num_envs: int, threads: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Steps/s of everybody, and of each round its share of the limit, which runs just before and after it."""
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, num_envs))
    limit = Limit(num_envs, threads, actions)
    field = contenders(num_envs, threads, actions)
    units = {name: _units(run, seconds) for name, run in field.items()}
    limit_units = _units(limit.run, seconds)
    rates: dict[str, list[float]] = {name: [] for name in ("limit", *field)}
    shares: dict[str, list[float]] = {name: [] for name in field}
    for turn in range(rounds):
        names = list(field)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = _rate(limit.run, limit_units, num_envs)
            rate = _rate(field[name], units[name], num_envs)
            around = (before + _rate(limit.run, limit_units, num_envs)) / 2
            rates[name].append(rate)
            rates["limit"].append(around)
            shares[name].append(rate / around)
    told = {name: {"steps_per_s": _quartiles(found)} for name, found in rates.items()}
    for name, found in shares.items():
        told[name]["of_limit"] = _quartiles(found)
        for peer in (peer for peer in field if peer.startswith("EnvPool")):
            ratios = np.array(rates[name]) / np.array(rates[peer])
            told[name][f"times {peer}"] = _quartiles(ratios)
    return {"num_envs": num_envs, "threads": threads, "rounds": rounds, "contenders": told}


def scaling(num_envs: int, threads: int, seconds: float, rounds: int) -> dict[str, Any]:
    """How many times the rate of one thread so many have: stepped by a pool, and as loops that meet nobody."""
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, num_envs))
    field: dict[str, dict[int, Callable[[int], None]]] = {"limit": {}, "Shoal Pool.step": {}}
    for count in (1, threads):
        field["limit"][count] = Limit(num_envs, count, actions).run
        pool = shoal.Pool(CartPole, num_envs, seed=0, backend="compiled", num_workers=count)
        pool.reset()
        field["Shoal Pool.step"][count] = _stepping(pool.step, actions)
    told: dict[str, Any] = {"num_envs": num_envs, "threads": threads}
    for name, runs in field.items():
        units = {count: _units(run, seconds) for count, run in runs.items()}
        rates: dict[int, list[float]] = {count: [] for count in runs}
        for turn in range(rounds):
            for count in sorted(runs, reverse=bool(turn % 2)):
                rates[count].append(_rate(runs[count], units[count], num_envs))
        told[name] = {
            "one": _quartiles(rates[1]), "all": _quartiles(rates[threads]),
            "times": _quartiles(np.array(rates[threads]) / np.array(rates[1])),
        }  # fmt: skip
        share = told[name]["times"][1] / threads
        print(f"{name}: {_spread(told[name]['one'], 1e-6)} M steps/s by one thread, {_spread(told[name]['all'], 1e-6)} "
              f"by {threads}: {_spread(told[name]['times'])} times, {share:.2f} of {threads}")  # fmt: skip
    return told


def _units(run: Callable[[int], None], seconds: float) -> int:
    run(1)
    began, units = time.perf_counter(), 0
    while time.perf_counter() - began < seconds / 2:
        run(1)
        units += 1
    return max(1, 2 * units)


def _rate(run: Callable[[int], None], units: int, num_envs: int) -> float:
    began = time.perf_counter()
    run(units)
    return units * STEPS * num_envs / (time.perf_counter() - began)


def _quartiles(values: Any) -> list[float]:
    return [float(value) for value in np.percentile(values, (25, 50, 75))]


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    grid = Table(
        f"CartPole x {result['num_envs']}, {result['threads']} threads", "M steps/s", "of the limit", "x EnvPool"
    )
    for name, told in result["contenders"].items():
        peers = [values for key, values in told.items() if key.startswith("times EnvPool")]
        best = min(peers, key=lambda values: values[1]) if peers else None
        row = [_spread(told["steps_per_s"], 1e-6), _spread(told.get("of_limit")), _spread(best)]
        grid.add_row(name, *row)
    Console().print(grid)


def _spread(values: list[float] | None, scale: float = 1.0) -> str:
    if values is None:
        return ""
    low, middle, high = (f"{value * scale:.3g}" for value in values)
    return f"{middle} ({low} to {high})"


FIRST_USE = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
import shoal
from shoal.compiled.library.classic_control import CartPole
with shoal.Pool(CartPole, 64, backend="compiled", seed=0) as pool:
    pool.reset()
    pool.step(np.zeros(64, np.int64))
"""


def first_use(rounds: int) -> dict[str, list[float]]:
    """Seconds and seconds of CPU from the start of an interpreter to its first step: cold and warm."""
    script = FIRST_USE.format(here=str(Path(__file__).parent))
    told: dict[str, list[float]] = {name: [] for name in ("cold", "warm", "cold_cpu", "warm_cpu")}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, "SHOAL_CACHE_DIR": folder, "SHOAL_QUIET": "1"}
            for name in ("cold", "warm"):
                began, cpu = time.perf_counter(), _children_cpu()
                subprocess.run([sys.executable, "-c", script], env=variables, check=True)
                told[name].append(time.perf_counter() - began)
                told[f"{name}_cpu"].append(_children_cpu() - cpu)
    return {name: _quartiles(values) for name, values in told.items()}


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--num-envs", type=int, nargs="+", default=[64, 16384], metavar="N")
    parser.add_argument("--threads", type=int, nargs="+", default=[usable_cores()], metavar="T")
    parser.add_argument("--seconds", type=float, default=0.2, help="length of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender (%(default)s)")
    parser.add_argument("--start", action="store_true", help="measure the first use instead")
    parser.add_argument("--scaling", action="store_true", help="measure one thread against many instead")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    if options.scaling:
        results: Any = [
            scaling(number, max(options.threads), options.seconds, options.rounds) for number in options.num_envs
        ]
    elif options.start:
        results = first_use(min(options.rounds, 5))
        for name, values in results.items():
            print(f"first use, {name}: {_spread(values)} s")
    else:
        results = []
        for number in options.num_envs:
            for threads in options.threads:
                results.append(measure(number, threads, options.seconds, options.rounds))
                show(results[-1])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
