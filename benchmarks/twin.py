"""What the Python twin costs: pools without the C core beside Gymnasium's SyncVectorEnv, batch by batch in turns.

Each cell has a serial pool on the twin, one on the C core (if it is built), and a SyncVectorEnv. They make the same
steps, a batch each in turn, and the CPU time of this thread counts: a busy machine hits all alike. Each life builds
them anew. Shown are the median and the quartiles over lives of twin / SyncVectorEnv (below 1: the twin is faster).

- nothing: envs that return the same observation at once
- CartPole-v1: with autoreset
- infos: as `nothing`, with two numbers in each info

python benchmarks/twin.py --lives 8 --rounds 400
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal import native
from shoal.cli import doctor

WARM_UP = 50  # batches


class Nothing(gymnasium.Env[np.ndarray, np.int64]):
    """Does nothing; `info` is what each step returns beside it."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)
    info: dict[str, Any] = {}

    def __init__(self) -> None:
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode that never ends."""
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: np.int64) -> Any:
        """Return the observation once more."""
        return self.observation, 0.0, False, False, dict(self.info)


class Infos(Nothing):
    """Has something to say at each step."""

    info = {"speed": 1.5, "lives": 3}


ENVS: dict[str, Any] = {"nothing": Nothing, "CartPole-v1": lambda: gymnasium.make("CartPole-v1"), "infos": Infos}


def life(env: Any, lanes: int, rounds: int, number: int) -> dict[str, float]:
    """Make one of each, let them step in turns; the median CPU time of a batch, in microseconds."""
    rng, built = random.Random(number), native.core
    runners: dict[str, Any] = {}
    for name, core in {"twin": None, "native": built}.items() if built is not None else (("twin", None),):
        native.core = core
        runners[name] = shoal.make(env, num_envs=lanes, backend="serial")
    native.core = built
    runners["sync"] = SyncVectorEnv([env] * lanes)
    for runner in runners.values():
        runner.reset(seed=0)
    actions = [np.random.default_rng(i).integers(0, 2, lanes) for i in range(64)]
    times: dict[str, list[int]] = {name: [] for name in runners}
    for turn in range(WARM_UP + rounds):
        for name in rng.sample(list(runners), len(runners)):
            start = time.thread_time_ns()
            runners[name].step(actions[turn % 64])
            times[name].append(time.thread_time_ns() - start)
    for runner in runners.values():
        runner.close()
    return {name: statistics.median(taken[WARM_UP:]) / 1e3 for name, taken in times.items()}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--out", type=Path, help="a folder for the figures as JSON")
    options = parser.parse_args()
    table = Table("env", "envs", "sync, us", "twin, us", "C core, us", "twin / sync", "quartiles", "twin / C core")
    found = []
    for name, env in ENVS.items():
        for lanes in options.envs:
            lives = [life(env, lanes, options.rounds, number) for number in range(options.lives)]
            middle = {who: statistics.median(one[who] for one in lives) for who in lives[0]}
            low, ratio, high = common.quartiles([one["twin"] / one["sync"] for one in lives])
            core = middle.get("native", float("nan"))
            table.add_row(
                name, str(lanes), f"{middle['sync']:.1f}", f"{middle['twin']:.1f}", f"{core:.1f}", f"{ratio:.2f}",
                f"{low:.2f}..{high:.2f}", f"{middle['twin'] / core:.1f}",
            )  # fmt: skip
            found.append({"env": name, "envs": lanes, "ratio": [low, ratio, high], "us": middle})
    Console().print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"machine": doctor.facts(), "cells": found}
        (options.out / "twin.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
