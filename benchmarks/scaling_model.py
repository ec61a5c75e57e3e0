"""The model of far pools (shoal.scaling) against backend="ray" on one machine, and what it says of many machines.

- constants: what a batch, a message, a lane and a byte cost the driver and an actor, by the CPU time of their threads
  in runs of envs that do nothing (full batches of several sizes; least squares without negative costs), and the
  transport's own round trip
- check: envs that sleep, with delays injected into every message; steps/s as measured and as predicted from the
  constants of the same run and from the time that steps took (the hosts' counters), and the quartiles of
  predicted / measured
- nodes: what the model predicts for 1 to 1000 nodes and how many envs hide which round trip, as tables, and with --plot
  as a picture beside the check, which is read from the results of an earlier run; measures nothing

Envs sleep rather than compute, so that a machine with few cores can stand for many. Points of the check run in an order
that is drawn at random, so that a busy while of the machine hits no part of the grid alone.

python benchmarks/scaling_model.py --parts constants check
python benchmarks/scaling_model.py --parts constants --save      # the constants of shoal.scaling, anew
python benchmarks/scaling_model.py --parts nodes --plot docs/plots/scaling.png
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import platform
import random
import re
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import shoal
import shoal.support.cores
from shoal.scaling import Advice, Cluster, Costs, Setup, StepTime, advise, model, simulate
from shoal.scaling.model import ANSWER_LANE, LARGE

RESULTS = Path(__file__).parent / "results"
BATCH = 8  # envs, in the check
WARM_UP = 0.3  # seconds, and circles
CIRCLES = 6


class Sleeper(gymnasium.Env[Any, Any]):
    """Sleeps in each step: for so many seconds on average, with a log-normal spread in parts of that."""

    def __init__(self, seconds: float = 0.0, spread: float = 0.0, obs_bytes: int = 16):
        self.observation_space = gymnasium.spaces.Box(0, 255, (obs_bytes,), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._time, self._observation = StepTime(seconds, spread), np.zeros(obs_bytes, np.uint8)
        self._pauses: list[float] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._pauses = self._time.draw(self.np_random, 256).tolist()
        return self._observation, {}

    def step(self, action: Any) -> Any:
        if self._time.mean:
            if not self._pauses:
                self._pauses = self._time.draw(self.np_random, 256).tolist()
            time.sleep(self._pauses.pop())
        return self._observation, 0.0, False, False, {}


def on_ray(env: Any, num_envs: int, actors: int, batch_size: int, delay: float = 0.0) -> Any:
    """A pool on the local cluster, with an actor's envs in its own thread."""
    options = {"num_cpus": 0.01, "local_backend": "serial", "delay": delay}
    return shoal.Pool(
        env, num_envs, batch_size=batch_size, backend="ray", num_workers=actors, backend_options=options
    )  # fmt: skip


# ---- constants -------------------------------------------------------------------------------------------------------


class Load(NamedTuple):
    """A pool whose envs do nothing, in full batches."""

    actors: int
    envs: int
    obs_bytes: int

    @property
    def large(self) -> int:
        """How many messages of a batch are."""
        return self.actors if self.envs / self.actors * (self.obs_bytes + ANSWER_LANE) >= LARGE else 0


LOADS = [
    *(Load(actors, actors, 16) for actors in (1, 2, 4)),
    *(Load(actors, 64 * actors, 16) for actors in (1, 2, 4)),
    *(Load(actors, 512, 16) for actors in (1, 4)),
    *(Load(actors, 16 * actors, 28_224) for actors in (1, 2, 4)),
    Load(1, 2, 28_224),
    Load(1, 64, 28_224),
    Load(2, 16, 100_000),
]


def clock_of_host(env: Any) -> tuple[int, float]:
    """Which actor this is, and the CPU seconds of its thread that steps envs: its others work at the same time."""
    return os.getpid(), time.thread_time()


def hosts_cpu(pool: Any) -> float:
    """CPU seconds of all actors' threads, so far."""
    return sum(dict(pool.apply(clock_of_host)).values())


def threads_cpu() -> dict[str, float]:
    """CPU seconds of each thread of this process, so far."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            found[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def one_after_the_other(before: dict[str, float], after: dict[str, float]) -> float:
    """CPU seconds of the driver that cannot overlap: those of the caller and of the busiest of the other threads."""
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    return spent.pop(str(os.getpid())) + max(spent.values())


def cost_of(load: Load, seconds: float) -> dict[str, float]:
    """Seconds of the driver and of the actors for one batch."""
    pool = on_ray(functools.partial(Sleeper, obs_bytes=load.obs_bytes), load.envs, load.actors, load.envs)
    try:
        pool.reset(seed=0)
        actions = np.zeros(load.envs, np.int64)
        trips: list[float] = []

        def run(for_seconds: float) -> None:
            trips.clear()
            until = time.perf_counter() + for_seconds
            while (began := time.perf_counter()) < until:
                pool.step(actions)
                trips.append(time.perf_counter() - began)

        run(WARM_UP)
        hosts, driver, all_threads = hosts_cpu(pool), threads_cpu(), time.process_time()
        run(seconds)
        all_threads = time.process_time() - all_threads
        serial = one_after_the_other(driver, threads_cpu())
        hosts = hosts_cpu(pool) - hosts
        batches = len(trips)
        return {
            "driver": serial / batches, "hosts": hosts / batches, "trip": statistics.median(trips),
            "all": all_threads / batches,
        }  # fmt: skip
    finally:
        pool.close()


def fitted(rows: list[list[float]], values: list[float]) -> list[float]:
    """The costs that explain the values best, none below 0; relative errors count, not absolute ones."""
    weights = 1 / np.asarray(values)
    table, target = np.asarray(rows) * weights[:, None], np.ones(len(values))
    best: tuple[float, list[float]] = (np.inf, [])
    # Few unknowns: all subsets of those that are not 0 are tried.
    for size in range(1, table.shape[1] + 1):
        for chosen in itertools.combinations(range(table.shape[1]), size):
            found, *_ = np.linalg.lstsq(table[:, chosen], target, rcond=None)
            error = float(np.square(table[:, chosen] @ found - target).sum())
            if (found >= 0).all() and error < best[0]:
                whole = np.zeros(table.shape[1])
                whole[list(chosen)] = found
                best = error, whole.tolist()
    return best[1]


def constants(options: argparse.Namespace) -> Costs:
    seen: dict[Load, list[dict[str, float]]] = {load: [] for load in LOADS}
    for _ in range(options.rounds):
        for load in random.sample(LOADS, len(LOADS)):
            seen[load].append(cost_of(load, options.seconds))
    fits = [fit({load: many[at] for load, many in seen.items()}) for at in range(options.rounds)]
    names = list(fits[0])
    found = {name: statistics.median(one[name] for one in fits) for name in names}
    middle = {
        load: {key: statistics.median(one[key] for one in many) for key in many[0]} for load, many in seen.items()
    }
    say_loads(middle, Costs(**found))
    print(f"measured on {machine()}, medians of {options.rounds} rounds (range):")
    for name in names:
        print(
            f"{name}: {us(found[name])} ({us(min(one[name] for one in fits))} to {us(max(one[name] for one in fits))})"
        )
    if options.save:
        save(found)
    return Costs(**found)


def fit(middle: dict[Load, dict[str, float]]) -> dict[str, float]:
    """The costs that explain what each load took."""
    rows = [row_of(load) for load in LOADS]
    of_driver = fitted(rows, [middle[load]["driver"] for load in LOADS])
    of_hosts = fitted([row[1:] for row in rows], [middle[load]["hosts"] for load in LOADS])
    alone = middle[Load(1, 1, 16)]
    # What lies on the way of a single message beside that: sockets, other threads, and waking up.
    transport = max(0.0, alone["trip"] - alone["driver"] - alone["hosts"])
    return asdict(Costs(*of_driver, *of_hosts, transport))


def row_of(load: Load) -> list[float]:
    """How often a batch has what costs the driver something."""
    return [1.0, load.actors, load.large, load.envs, load.envs * (load.obs_bytes + 8.0)]


def say_loads(middle: dict[Load, dict[str, float]], costs: Costs) -> None:
    of_driver = [costs.batch, costs.message, costs.large, costs.lane, costs.byte]
    of_hosts = [costs.host_message, costs.host_large, costs.host_lane, costs.host_byte]
    table = Table("actors", "envs", "bytes", "driver", "fit", "actors'", "fit", "round trip", "driver, all threads",
                  title="us for a batch")  # fmt: skip
    for load in LOADS:
        one, row = middle[load], row_of(load)
        fits = np.dot(row, of_driver), np.dot(row[1:], of_hosts)
        cells = (one["driver"], fits[0], one["hosts"], fits[1], one["trip"], one["all"])
        table.add_row(*map(str, load), *(f"{1e6 * cell:,.0f}" for cell in cells))
    Console().print(table)


def us(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} us" if seconds >= 1e-8 else f"{1e9 * seconds:.3g} ns"


def machine() -> str:
    import ray

    return f"Ray {ray.__version__}, Python {platform.python_version()}, {shoal.support.cores.usable_cores()} cores"


def save(costs: dict[str, float]) -> None:
    """Write them where shoal.scaling reads them, with two digits: there is no more in them."""
    path = Path(model.__file__)
    text = re.sub('MEASURED_ON = ".*"', f'MEASURED_ON = "{machine()}"', path.read_text())
    for name, value in costs.items():
        text = re.sub(rf"^    {name}: float = .*$", f"    {name}: float = {value:.2g}", text, flags=re.MULTILINE)
    path.write_text(text)
    print(f"saved to {path}: update the table of docs/explanation/scaling.md, too")


# ---- check -----------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """One pool of the check."""

    step: float
    spread: float
    delay: float
    in_flight: int
    actors: int


GRID = [
    *(Point(*one) for one in itertools.product((0.5e-3, 1e-3, 5e-3), (0.0,), (0.0, 5e-3, 20e-3), (1, 2, 4, 8), (1, 2))),
    *(Point(*one) for one in itertools.product((1e-3, 5e-3), (1.0,), (0.0, 5e-3), (1, 4), (2,))),
]


def measured(point: Point, seconds: float) -> tuple[float, StepTime]:
    """Steps per second, and what a step took where it was made."""
    envs = BATCH * point.in_flight
    pool = on_ray(functools.partial(Sleeper, point.step, point.spread), envs, point.actors, BATCH, point.delay)
    try:
        actions = np.zeros(BATCH, np.int64)
        pool.async_reset(seed=0)

        def run(for_seconds: float, circles: int) -> float:
            count, began = 0, time.perf_counter()
            while (now := time.perf_counter()) - began < for_seconds or count < circles * point.in_flight:
                pool.send(actions, pool.recv().env_id)
                count += 1
            return count * BATCH / (now - began)

        run(WARM_UP, CIRCLES)
        before = pool.stats()
        rate = run(seconds, CIRCLES)
        found = (pool.stats() - before).envs
        steps = sum(one.steps for one in found)
        return rate, StepTime(sum(one.mean * one.steps for one in found) / steps, point.spread)
    finally:
        pool.close()


def predicted(point: Point, step: StepTime, costs: Costs) -> float:
    envs = BATCH * point.in_flight // point.actors
    return simulate(Setup(step, point.actors, envs, BATCH, obs_bytes=16, round_trip=2 * point.delay, costs=costs)).rate


def check(options: argparse.Namespace, costs: Costs) -> list[dict[str, Any]]:
    seen: dict[Point, list[tuple[float, StepTime]]] = {point: [] for point in GRID}
    for _ in range(options.rounds):
        for point in random.sample(GRID, len(GRID)):
            seen[point].append(measured(point, options.seconds))
    found = []
    for point, runs in seen.items():
        ratios = [predicted(point, step, costs) / rate for rate, step in runs]
        rate, step = statistics.median(rate for rate, _ in runs), statistics.median(step.mean for _, step in runs)
        found.append({**point._asdict(), "rate": rate, "real_step": step, "ratios": ratios,
                      "runs": [(rate, step.mean) for rate, step in runs]})  # fmt: skip
    table = Table("step", "spread", "delay", "in flight", "actors", "measured", "predicted / measured", title="steps/s")
    for one in found:
        middle = statistics.median(one["ratios"])
        counts = (str(one[name]) for name in ("in_flight", "actors"))
        table.add_row(f"{1e3 * one['step']:g} ms", f"{one['spread']:g}", f"{1e3 * one['delay']:g} ms", *counts,
                      f"{one['rate']:,.0f}", f"{middle:.2f}")  # fmt: skip
    Console().print(table)
    for name in ("delay", "in_flight", "actors", "spread"):
        for value in sorted({one[name] for one in found}):
            say_quartiles(f"{name} {value:g}", [one for one in found if one[name] == value])
    say_quartiles("all", found)
    return found


def say_quartiles(name: str, found: list[dict[str, Any]]) -> None:
    ratios = [statistics.median(one["ratios"]) for one in found]
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    off = np.percentile(np.abs(np.log(ratios)), (50, 90))
    within = f"half within {np.expm1(off[0]):.0%}, nine in ten within {np.expm1(off[1]):.0%}"
    ratio = f"predicted / measured {middle:.2f} ({low:.2f} to {high:.2f})"
    Console().print(f"{name}: {ratio}, {within}; {len(ratios)} points")


# ---- many nodes ------------------------------------------------------------------------------------------------------

CORES, ENVS_PER_CORE = 32, 4
NETWORK = {"latency": 0.5e-3, "bandwidth": 10e9 / 8, "policy": 1e-3, "policy_lane": 1e-6}
NODES = (1, 3, 10, 30, 100, 300, 1000)
WORKLOADS = {
    "0.1 ms, 100 bytes": (StepTime(0.1e-3, 0.3), 100),
    "2 ms, 28 kB (images)": (StepTime(2e-3, 0.3), 28_224),
    "20 ms, 1 kB": (StepTime(20e-3, 0.5), 1000),
    "200 ms, 1 kB": (StepTime(200e-3, 1.0), 1000),
}
STEPS, TRIPS = (1e-3, 10e-3, 100e-3), (0.5e-3, 5e-3, 20e-3, 100e-3)
PER_WORKER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
GOAL = 0.9  # of the time, for workers that are called busy


def many_nodes() -> dict[str, list[Advice]]:
    """The best way to run each workload on each number of nodes."""
    found = {}
    for name, (step, obs_bytes) in WORKLOADS.items():
        clusters = [Cluster(step, CORES * ENVS_PER_CORE * n, n, CORES, obs_bytes, **NETWORK) for n in NODES]
        found[name] = [advise(one) for one in clusters]
    table = Table(
        "step", "nodes", "used", "steps/s", "workers busy", "limit", "actors", "batch", "in flight", title="predicted"
    )
    for name, advices in found.items():
        for one in advices:
            setup, now = one.setup, one.prediction
            counts = (f"{n:,.0f}" for n in (setup.actors, setup.batch_size, setup.in_flight))
            table.add_row(
                name,
                f"{one.cluster.nodes:,}",
                f"{one.nodes:,}",
                f"{now.rate:,.0f}",
                f"{now.busy['envs']:.0%}",
                one.limit,
                *counts,
            )
    Console().print(table)
    return found


def envs_that_hide(step: float, trip: float, messages: int) -> int | None:
    """How many envs an actor of one worker needs to be busy in spite of such a round trip, when each batch is one
    message and it has so many of them; 8 actors."""
    for count in PER_WORKER:
        pool = Setup(StepTime(step), 8, count, max(1, count // messages), obs_bytes=100, round_trip=trip)
        if simulate(pool).busy["envs"] >= GOAL:
            return count
    return None


def hidden_latency() -> None:
    numbers = (1, 2, 4)
    table = Table(
        "step", "round trip", *map(str, numbers), title="envs per actor, by batches that these are split into"
    )
    for step, trip in itertools.product(STEPS, TRIPS):
        counts = (envs_that_hide(step, trip, number) for number in numbers)
        table.add_row(f"{1e3 * step:g} ms", f"{1e3 * trip:g} ms", *(str(one or "more") for one in counts))
    Console().print(table)


def plot(found: dict[str, list[Advice]], checked: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, advices in found.items():
        (line,) = left.plot(NODES, [one.prediction.rate for one in advices], marker="o", markersize=4, label=name)
        ideal = [one.most["envs"] / one.nodes * one.cluster.nodes for one in advices]
        left.plot(NODES, ideal, linestyle=":", linewidth=1, color=line.get_color())
    left.set(
        xscale="log", yscale="log", xlabel="nodes of 32 cores, with 128 envs for each", ylabel="steps/s, one driver"
    )
    left.set_title("predicted; dotted: the envs alone", fontsize=10, loc="left")
    left.legend(fontsize=8, title="a step takes, and sends", title_fontsize=8)
    for actors, marker in ((1, "o"), (2, "s")):
        some = [one for one in checked if one["actors"] == actors]
        right.scatter([one["rate"] for one in some], [one["rate"] * statistics.median(one["ratios"]) for one in some],
                      s=14, marker=marker, label=f"{actors} actor" + "s" * (actors > 1))  # fmt: skip
    ends = [50, 5000]
    right.plot(ends, ends, color="#888888", linewidth=1)
    right.set(xscale="log", yscale="log", xlabel="measured steps/s, with delays injected", ylabel="predicted steps/s")
    right.set_title("the check on one machine", fontsize=10, loc="left")
    right.legend(fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.7, help="length of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (%(default)s)")
    parts = ("constants", "check", "nodes")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), metavar="PART", help=", ".join(parts))
    parser.add_argument("--save", action="store_true", help="have shoal.scaling use the constants from now on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="save a picture of the nodes and of the check")
    options = parser.parse_args()
    results = options.out / "scaling_model.json"
    document = json.loads(results.read_text()) if results.exists() else {"costs": {}, "check": []}
    if {"constants", "check"} & set(options.parts):
        import ray

        random.seed(0)
        ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        if "constants" in options.parts:
            document["costs"] = asdict(constants(options))
        if "check" in options.parts:
            document["check"] = check(options, Costs(**document["costs"]))
        ray.shutdown()
        options.out.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(document, indent=1))
    if "nodes" in options.parts:
        hidden_latency()
        found = many_nodes()
        if options.plot:
            plot(found, document["check"], options.plot)


if __name__ == "__main__":
    main()
