"""PPO on a GPU, all of it as one CUDA graph: trained steps/s, and seconds until it is solved, after warm-up.

`python benchmarks/training_cuda.py` runs CartPole with 4,096 and 262,144 envs and the image game Bricks. Each seed is a
training of its own; the clock starts when the graph has been captured and everything was set back.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import common
from shoal.learn.averages import Together
from shoal.learn.logs import RecentEpisodes
from shoal.learn.ways import Setup, build
from shoal.ranks import Ranks

# What all trainings of CartPole here share: one network with two heads, and rewards small enough for its critic.
CARTPOLE = {
    "shared": True, "learning_rate": 3e-3, "anneal": False, "clip_values": False, "entropy": 0.005,
    "normalize_reward": True,
}  # fmt: skip


class Case(NamedTuple):
    """A training: the env, how many of them, hyperparameters, the return that counts as solved, and how many seeds."""

    env: str
    num_envs: int
    settings: dict[str, Any]
    target: float | None
    seeds: int = 5


CASES = {
    "4096": Case("CartPole-v1", 4096, {**CARTPOLE, "steps": 128}, 475.0),
    "262144": Case(
        "CartPole-v1", 262_144, {**CARTPOLE, "steps": 16, "epochs": 1, "minibatches": 2, "half": True}, None, 1
    ),
    # The rate of the image game, and what it learns: few envs and many small steps learn more from each frame.
    "bricks rate": Case(
        "shoal/Bricks-v0", 8192,
        {"steps": 32, "epochs": 1, "minibatches": 16, "learning_rate": 1e-3, "anneal": False, "clip_values": False},
        40.0, 1,
    ),
    "bricks": Case(
        "shoal/Bricks-v0", 512,
        {"steps": 128, "epochs": 2, "minibatches": 16, "learning_rate": 7e-4, "anneal": False, "clip_values": False,
         "gamma": 0.995, "entropy": 0.005, "normalize_reward": True},
        40.0, 1,
    ),
}  # fmt: skip


def run(case: Case, seed: int, seconds: float) -> dict[str, Any]:
    """Train for so many seconds; return the rate, and when the target was reached."""
    setup = Setup(case.env, case.num_envs, case.settings, backend="cuda", seed=seed)
    began = time.perf_counter()
    built = build(setup, Together(Ranks(), None))
    warm_up = time.perf_counter() - began
    each = built.way.lanes * built.policy.settings.steps
    recent, steps, solved, curve = RecentEpisodes(), 0, None, []
    torch.cuda.synchronize()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        turn = built.turn()
        steps += each
        recent.add(turn.episodes, turn.return_sum, turn.length_sum)
        now = time.perf_counter() - began
        curve.append([round(now, 4), steps, recent.mean_return])
        if case.target is not None and solved is None and recent.count >= 100 and recent.mean_return >= case.target:
            solved = now
    elapsed = time.perf_counter() - began
    built.close()
    found = {"warm_up": warm_up, "steps_per_s": steps / elapsed, "solved": solved, "last": recent.mean_return}
    return {**found, "curve": curve[:: max(1, len(curve) // 200)]}


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 2.0, 5)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, help="of each case, in place of its own number")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    grid = Table("case", "seed", "trained steps/s", "seconds to the target", "last mean return", "warm-up")
    results = []
    for name in options.only:
        case = CASES[name]
        for seed in range(options.seeds or case.seeds):
            seconds = options.seconds * (10 if name == "bricks" else 1)
            found = run(case, seed, seconds)
            solved = "-" if found["solved"] is None else f"{found['solved']:.3f}"
            rate, last, warm = f"{found['steps_per_s']:,.0f}", f"{found['last']:.1f}", f"{found['warm_up']:.1f}"
            grid.add_row(name, str(seed), rate, solved, last, warm)
            print(name, seed, rate, solved, last, warm, flush=True)
            results.append({"case": name, "seed": seed, **found})
    Console().print(grid)
    rates = {name: float(np.median([r["steps_per_s"] for r in results if r["case"] == name])) for name in options.only}
    common.write(options, "training_cuda", {"gpu": torch.cuda.get_device_name(), "median": rates, "trainings": results})


if __name__ == "__main__":
    main()
