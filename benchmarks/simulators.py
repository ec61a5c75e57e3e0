"""Simulators that people train on: Shoal beside EnvPool and the vector envs that step the same Python env, in turns.

- mujoco: Gymnasium's MuJoCo envs, which Shoal and EnvPool step as batches in threads
- atari: games of 84x84x4, which ALE and EnvPool play in threads
- python: envs in Python, through the ordinary way: LunarLander, dm_control and MiniGrid
- cores: 64 HalfCheetahs on 2 cores and on all (`--cores` says how many these are)

Actions are random and the same for all. Each contender steps for a while, then the next one, in an order that changes;
a ratio is taken within each round, and its median is told.

    python benchmarks/simulators.py --parts mujoco atari python
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import common
import plots
import shoal

MUJOCO = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5", "Walker2d-v5")
GAMES = ("Pong", "Breakout")
PARTS = ("mujoco", "atari", "python", "cores")
SIZES = (16, 64)
ACTIONS = 64  # different batches of actions
CLOCK: Callable[[], float] = time.perf_counter
Make = Callable[[], Any]


THREADS = common.cores()  # of a batch; one where CPU time is measured


def envpool(name: str, count: int, **options: Any) -> Any:
    """Make a pool of EnvPool's, with a thread for each core."""
    import envpool as package

    return package.make_gymnasium(name, num_envs=count, num_threads=min(count, THREADS), seed=0, **options)


def vector(name: str, count: int, mode: str) -> Any:
    """Make one of Gymnasium's vector envs."""
    return gymnasium.make_vec(name, count, mode)


def atari(game: str) -> Any:
    """Make one game with Gymnasium's preprocessing."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(env), 4)


def dm_control() -> Any:
    """Make dm_control's cheetah by Shimmy."""
    import shimmy

    gymnasium.register_envs(shimmy)
    return gymnasium.make("dm_control/cheetah-run-v0")


def minigrid() -> Any:
    """Make a MiniGrid."""
    import minigrid as package

    gymnasium.register_envs(package)
    return package.wrappers.ImgObsWrapper(gymnasium.make("MiniGrid-Empty-8x8-v0"))


PYTHON: dict[str, tuple[Any, str]] = {
    "LunarLander": (functools.partial(gymnasium.make, "LunarLander-v3"), "Box2D"),
    "dm_control cheetah": (dm_control, "dm_control"),
    "MiniGrid": (minigrid, "minigrid"),
}


def contenders(part: str, count: int) -> dict[str, dict[str, Make]]:
    """Return for each env who takes part; the first is Shoal."""
    found: dict[str, dict[str, Make]] = {}
    if part == "mujoco":
        for name in MUJOCO:
            found[name] = {
                "Shoal": functools.partial(shoal.make, name, count, backend="batched", num_workers=THREADS),
                "EnvPool": functools.partial(envpool, name, count),
                "Gymnasium Sync": functools.partial(vector, name, count, "sync"),
            }
    elif part == "atari":
        for game in GAMES:
            found[game] = {
                "Shoal": functools.partial(shoal.atari.make, game, count, clip_rewards=True, num_workers=THREADS),
                "EnvPool": functools.partial(envpool, f"{game}-v5", count),
                "Gymnasium Sync": functools.partial(
                    gymnasium.vector.SyncVectorEnv, [functools.partial(atari, game)] * count
                ),
            }
    elif part == "python":
        for name, (make, module) in PYTHON.items():
            if importlib.util.find_spec(module) is None:
                continue
            found[name] = {
                "Shoal": functools.partial(shoal.make, make, count),
                "Gymnasium Sync": functools.partial(gymnasium.vector.SyncVectorEnv, [make] * count),
                "Gymnasium Async": functools.partial(gymnasium.vector.AsyncVectorEnv, [make] * count),
            }
    return found


def steps_per_second(envs: Any, actions: list[Any], count: int, seconds: float) -> float:
    """Step for so long."""
    began, steps = CLOCK(), 0
    while CLOCK() - began < seconds:
        envs.step(actions[steps % len(actions)])
        steps += 1
    return steps * count / (CLOCK() - began)


def measure(made: dict[str, Make], count: int, how: Any) -> dict[str, list[float]]:
    """Return the rates of each contender, one for each round."""
    envs = {name: make() for name, make in made.items()}
    try:
        first = envs["Shoal"]
        first.action_space.seed(0)
        actions = [first.action_space.sample() for _ in range(ACTIONS)]
        for one in envs.values():
            one.reset()
            steps_per_second(one, actions, count, how.seconds / 4)
        rates: dict[str, list[float]] = {name: [] for name in envs}
        for _, name in common.in_turns(list(envs), how.rounds, how.limit):
            rates[name].append(steps_per_second(envs[name], actions, count, how.seconds))
    finally:
        for one in envs.values():
            one.close()
    return rates


def rows_of(env: str, count: int, rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a row for each contender: quartiles of its rate, and of how many times that Shoal is."""
    found = []
    for name, own in rates.items():
        low, median, high = common.quartiles(own)
        over = common.quartiles(np.array(rates["Shoal"]) / np.array(own))
        found.append({
            "group": f"{env}, {count} envs", "name": name, "low": low, "median": median, "high": high,
            "shoal_over": over[1], "shoal_over_quartiles": over, "role": "shoal" if name == "Shoal" else "peer",
        })  # fmt: skip
    return found


def cores_part(cores: int, how: Any) -> list[dict[str, Any]]:
    """Return the rates of 64 HalfCheetahs on 2 cores and on more, in turns."""
    made = {str(number): shoal.make("HalfCheetah-v5", 64, num_workers=number) for number in (2, cores)}
    allowed = sorted(os.sched_getaffinity(0))
    actions = [made["2"].action_space.sample() for _ in range(ACTIONS)]
    rates: dict[str, list[float]] = {name: [] for name in made}
    for envs in made.values():
        envs.reset(seed=0)
    for _, name in common.in_turns(list(made), how.rounds, how.limit):
        os.sched_setaffinity(0, allowed[: int(name)])
        rates[name].append(steps_per_second(made[name], actions, 64, how.seconds))
    os.sched_setaffinity(0, allowed)
    for envs in made.values():
        envs.close()
    more = {f"{name} cores": own for name, own in rates.items()}
    low, median, high = common.quartiles(np.array(rates[str(cores)]) / np.array(rates["2"]))
    print(f"64 HalfCheetahs: {cores} cores give {median:.2f} ({low:.2f} to {high:.2f}) times the rate of 2")
    return [
        {"group": "HalfCheetah-v5, 64 envs", "name": name, "role": "shoal", "shoal_over": 1.0}
        | dict(zip(("low", "median", "high"), common.quartiles(own), strict=True))
        for name, own in more.items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of all rows."""
    found = Table("env", "who", "steps/s", "Shoal is")
    for row in rows:
        over = "" if row["name"].startswith("Shoal") else f"{row['shoal_over']:.2f} x"
        found.add_row(row["group"], row["name"], f"{row['median']:,.0f}", over)
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("Simulators that people train on.", 0.5, 9)
    common.quick_option(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["mujoco", "atari", "python"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--envs", nargs="+", help="only these, by name")
    parser.add_argument("--cores", type=int, default=common.cores())
    parser.add_argument(
        "--cpu", action="store_true",
        help="steps for each second of CPU time, with one thread each: for machines on which other programs run",
    )  # fmt: skip
    options = parser.parse_args()
    if options.cpu:
        global CLOCK, THREADS
        CLOCK, THREADS = time.process_time, 1
    how, rows = common.settings(options), []
    for part in options.parts:
        if part == "cores":
            rows += cores_part(options.cores, how)
            continue
        for count in options.sizes:
            for env, made in contenders(part, count).items():
                if options.envs is None or env in options.envs:
                    rows += rows_of(env, count, measure(made, count, how))
                    Console().print(table(rows[-len(made) :]))
    Console().print(table(rows))
    clock = "CPU time, one thread" if options.cpu else "wall"
    common.write(options, "simulators", {"rows": rows, "cores": common.cores(), "clock": clock})
    if importlib.util.find_spec("matplotlib") is not None and rows:
        path = Path(options.out) / "simulators.png"
        plots.draw({"title": "Simulators", "unit": "steps/s", "rows": rows}, path)
        print(f"The plot is in {path}")


if __name__ == "__main__":
    main()
