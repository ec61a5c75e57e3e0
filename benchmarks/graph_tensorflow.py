"""What a step inside of a TensorFlow graph costs beyond the framework's bare callback and the pool's own step.

All in one process, in turns, so that a busy machine hits all alike; differences are taken within a round.

- a: a `tf.numpy_function` with the same inputs and outputs, whose Python function returns ready-made arrays
- b: `pool.step` in Python, and `pool.exchange`, which is the same without the parts of a batch that a graph leaves out
- b in a: the same bare callback, in which `pool.exchange` is called and its answer left alone: in a thread of
  TensorFlow's, on another core maybe, a pool's step takes longer than in the caller's own
- c: `InGraphBatchEnv.step`
- a, first: like a, measured before this process has made its first step in a graph. From then on Python remembers
  TensorFlow's threads, which makes all callbacks of the process cheaper, the bare one too.

Once with many steps in one call, in a `tf.while_loop`, and once with one step in each call. The envs do nothing.

python benchmarks/graph_tensorflow.py --rounds 60
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import gymnasium
import numpy as np
import tensorflow as tf
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal.cli import doctor
from shoal.graph.tensorflow import InGraphBatchEnv
from shoal.observe.progress import progress

TARGET_US = 15.0
Runs = dict[str, list[float]]


class Idle(gymnasium.Env[Any, Any]):
    """Does nothing."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Nothing to reset."""
        return self._observation, {}

    def step(self, action: Any) -> Any:
        """Nothing to do."""
        return self._observation, 0.0, False, False, {}


def bare(num_envs: int, within: Callable[[Any], Any] | None = None) -> Callable[[Any], None]:
    """An op that calls back into Python, where `within` is called, and gets what a step gets."""
    flags = np.zeros(num_envs, np.bool_)
    ready = (np.zeros((num_envs, 4), np.float32), np.zeros(num_envs, np.float32), flags, flags.copy())
    types = [tf.as_dtype(array.dtype) for array in ready]

    def callback(actions: Any) -> Any:
        if within is not None:
            within(actions)
        return ready

    return lambda actions: tf.numpy_function(callback, [actions], types)


def in_graph(act: Callable[[Any], Any], actions: Any, looped: bool) -> Callable[[int], None]:
    """What runs it so many times: in one call, or in a call each."""

    @tf.function
    def loop(steps: Any) -> None:
        tf.while_loop(lambda i: i < steps, lambda i: _then(act(actions), i + 1), [0])

    @tf.function
    def once(given: Any) -> None:
        act(given)

    def each(steps: int) -> None:
        for _ in range(steps):
            once(actions)

    return (lambda steps: loop(tf.constant(steps))) if looped else each


def _then(_: Any, value: Any) -> list[Any]:
    return [value]


def in_python(act: Callable[[Any], Any], actions: Any) -> Callable[[int], None]:
    """What runs it so many times."""

    def run(steps: int) -> None:
        for _ in range(steps):
            act(actions)

    return run


def measure(players: dict[str, Callable[[int], None]], rounds: int, steps: int, tick: Callable[[str], None]) -> Runs:
    """Microseconds for a step, of each player in each round."""
    runs: Runs = {name: [] for name in players}
    for turn in range(-3, rounds):  # the first ones trace, and warm up
        for name in random.Random(turn).sample(list(players), len(players)):
            players[name](10)
            begun = time.perf_counter()
            players[name](steps)
            if turn >= 0:
                runs[name].append((time.perf_counter() - begun) / steps * 1e6)
                tick(name)
    return runs


def with_differences(runs: Runs) -> Runs:
    """Those of interest, round by round."""
    a, b, c, exchange = (runs[name] for name in ("a: bare callback", "b: pool.step", "c: in graph", "b: pool.exchange"))
    return {
        **runs,
        "c - a": [z - x for x, z in zip(a, c, strict=True)],
        "c - a - b (step)": [z - x - y for x, y, z in zip(a, b, c, strict=True)],
        "c - a - b (exchange)": [z - x - y for x, y, z in zip(a, exchange, c, strict=True)],
        "c - (b in a)": [z - x for x, z in zip(runs["b in a: pool.exchange in bare callback"], c, strict=True)],
    }


def report(found: dict[str, Runs], about: str, out: Path) -> None:
    """Print and save medians with quartiles."""
    grid = Table(title=about, title_justify="left")
    for head in ("us for a step: median (quartiles), least", *found):
        grid.add_column(head, justify="right" if head in found else "left")
    names = list(dict.fromkeys(name for runs in found.values() for name in runs))
    summary: dict[str, Any] = {}
    for name in names:
        cells = []
        for mode, runs in found.items():
            low, middle, high = statistics.quantiles(runs[name], n=4)
            summary.setdefault(mode, {})[name] = {"median": middle, "quartiles": [low, high], "least": min(runs[name])}
            cells.append(f"{middle:.1f} ({low:.1f}..{high:.1f}), {min(runs[name]):.1f}")
        grid.add_row(name, *cells)
    Console().print(grid)
    for mode in found:
        middle = summary[mode]["c - a - b (step)"]["median"]
        word = "reached" if middle <= TARGET_US else "missed"
        Console().print(f"  target of {TARGET_US:.0f} us for c - a - b, {mode}: {word} ({middle:.1f})")
    out.mkdir(parents=True, exist_ok=True)
    document = {"machine": doctor.facts(), "tensorflow": tf.__version__, "about": about, "us": summary, "runs": found}
    (out / "graph_tensorflow.json").write_text(json.dumps(document, indent=2) + "\n")


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.0, 60)
    parser.add_argument("-n", "--num-envs", type=int, default=64, metavar="N")
    parser.add_argument("--steps", type=int, default=200, help="in each run (%(default)s)")
    parser.add_argument("--backend", default="serial", choices=["serial", "threads", "processes", "hybrid"])
    options = parser.parse_args()
    n, rounds, steps = options.num_envs, options.rounds, options.steps
    actions = np.zeros(n, np.int64)
    tensor = tf.constant(actions)
    modes = {f"{steps} steps in a call": True, "one step in a call": False}
    found: dict[str, Runs] = {}
    with (
        shoal.Pool(Idle, n, backend=options.backend, autoreset="disabled") as pool,
        progress(len(modes) * rounds * 6) as notify,
    ):
        firsts = {
            mode: measure({"a, first": in_graph(bare(n), tensor, looped)}, rounds, steps, notify)
            for mode, looped in modes.items()
        }
        envs = InGraphBatchEnv(pool)
        envs.reset()
        for mode, looped in modes.items():
            players = {
                "a: bare callback": in_graph(bare(n), tensor, looped),
                "b: pool.step": in_python(pool.step, actions),
                "b: pool.exchange": in_python(pool.exchange, actions),
                "b in a: pool.exchange in bare callback": in_graph(bare(n, pool.exchange), tensor, looped),
                "c: in graph": in_graph(envs.step, tensor, looped),
            }
            found[mode] = {**firsts[mode], **with_differences(measure(players, rounds, steps, notify))}
    report(found, f"{n} envs that do nothing, {pool.plan.backend}", options.out)


if __name__ == "__main__":
    main()
