"""The library's envs under backend="compiled", against EnvPool's and against Gymnasium's plain loop, in turns.

All have the same number of threads but the plain loop, which is one env on one core. A step is one call of an env's
step or reset. Ratios are taken round by round; the table has their median and quartiles. The games, which only Shoal
has, are compared with a plain loop of the same class as plain Python.

python benchmarks/compiled_library.py --only Acrobot-v1 Taxi-v3 -n 64 4096
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal.cli import doctor
from shoal.compiled import as_gymnasium, library
from shoal.observe.progress import progress

ALIASES = {"Taxi-v3": "Taxi-v4"}  # one env under two ids: EnvPool has it under the first, Gymnasium under the second
BATCHES = 16
Burst = Callable[[float], float]  # runs for so many seconds, returns steps/s


def compiled(env_id: str, num_envs: int, threads: int) -> tuple[Burst, Callable[[], None]]:
    """Shoal's."""
    pool = shoal.Pool(library.find(env_id), num_envs, backend="compiled", num_workers=threads)
    pool.reset(seed=0)
    return bursts(pool.step, pool.action_space, pool.num_envs), pool.close


def envpool(env_id: str, num_envs: int, threads: int) -> tuple[Burst, Callable[[], None]] | None:
    """EnvPool's; None where it is not installed or has no such env."""
    try:
        import envpool as peer
    except ImportError:
        return None
    if env_id not in peer.list_all_envs():
        return None
    envs = peer.make(env_id, env_type="gymnasium", num_envs=num_envs, num_threads=threads)
    envs.reset()
    space = gymnasium.vector.utils.batch_space(library.find(env_id)().action_space, num_envs)
    return bursts(envs.step, space, num_envs), envs.close


def bursts(step: Callable[[Any], Any], space: Any, lanes: int) -> Burst:
    """Step with actions that were sampled beforehand."""
    space.seed(0)
    actions = [space.sample() for _ in range(BATCHES)]

    def burst(seconds: float) -> float:
        for action in actions[:3]:  # wakes the threads
            step(action)
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            step(actions[calls % BATCHES])
            calls += 1
        return calls * lanes / (time.perf_counter() - start)

    return burst


def plain_loop(env_id: str) -> tuple[Burst, Callable[[], None]]:
    """One env of Gymnasium's; of a game's class as plain Python, where a step is one of all its agents."""
    if env_id.startswith("shoal/"):
        env: Any = as_gymnasium(library.find(env_id))
    else:
        env = gymnasium.make(ALIASES.get(env_id, env_id))
    agents = library.find(env_id)().num_agents
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(512)]

    def burst(seconds: float) -> float:
        calls, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for action in actions:
                _, _, terminated, truncated, _ = env.step(action)
                calls += 1
                if terminated or truncated:
                    env.reset()
                    calls += 1
        return agents * calls / (time.perf_counter() - start)

    return burst, env.close


def measure(env_id: str, num_envs: int, options: Any, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the rates of all, and the ratios of Shoal to each of the others."""
    made = {
        "shoal": compiled(env_id, num_envs, options.threads),
        "envpool": envpool(env_id, num_envs, options.threads),
        "gymnasium": plain_loop(env_id),
    }
    there = {name: one for name, one in made.items() if one is not None}
    rates: dict[str, list[float]] = {name: [] for name in there}
    for number in range(options.rounds):
        for name in random.Random(number).sample(list(there), len(there)):
            notify(f"{env_id}, {num_envs}: {name}")
            rates[name].append(there[name][0](options.seconds))
    for _, close in there.values():
        close()
    ratios = {
        name: common.quartiles([a / b for a, b in zip(rates["shoal"], values, strict=True)])
        for name, values in rates.items()
        if name != "shoal"
    }
    return {"env": env_id, "num_envs": num_envs, "threads": options.threads, "rates": rates, "ratios": ratios}


def report(results: list[dict[str, Any]]) -> None:
    """Print the figures."""
    grid = Table(title="compiled library: million steps/s, and Shoal's as a multiple", title_justify="left")
    for head in ("env", "envs", "Shoal", "EnvPool", "plain loop", "/ EnvPool", "/ plain loop"):
        grid.add_column(head, justify="left" if head == "env" else "right")
    for result in results:
        rates = {name: f"{np.median(values) / 1e6:.3g}" for name, values in result["rates"].items()}
        ratios = {
            name: f"{middle:.0f} ({low:.0f}..{high:.0f})" for name, (low, middle, high) in result["ratios"].items()
        }
        grid.add_row(
            result["env"], str(result["num_envs"]), rates["shoal"], rates.get("envpool", "-"), rates["gymnasium"],
            ratios.get("envpool", "-"), ratios["gymnasium"],
        )  # fmt: skip
    Console().print(grid)


def main() -> None:
    """Run what the command line asks for."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    every = [env_id for env_id in library.ids() if env_id not in ALIASES.values()]
    parser = common.parser(str(__doc__).partition("\n")[0], 0.3, 15)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="ENV", help=", ".join(every))
    parser.add_argument("-n", "--num-envs", type=int, nargs="+", default=[4096], metavar="N")
    parser.add_argument("--threads", type=int, default=2, help="of Shoal and of EnvPool (%(default)s)")
    options = parser.parse_args()
    results = []
    with progress(len(options.only) * len(options.num_envs) * options.rounds * 3) as notify:
        for env_id in options.only:
            for num_envs in options.num_envs:
                results.append(measure(env_id, num_envs, options, notify))
    report(results)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": doctor.facts(), "results": results}
    (folder / "compiled_library.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
