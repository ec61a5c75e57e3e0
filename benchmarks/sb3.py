"""Shoal's VecEnvs and VecNormalize against Stable-Baselines3's own, in turns, in one run.

Each part prints ratios per round, median and quartiles:

- steps: SubprocVecEnv and DummyVecEnv on CartPole, 16 and 64 envs
- normalize: what VecNormalize adds to a step of 64 envs, over a VecEnv that plays back recorded CartPoles
- start: SubprocVecEnv with 16 envs, up to the end of its first reset
- ppo: wall time of PPO, 200,000 steps of CartPole

python benchmarks/sb3.py --parts steps normalize start ppo
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import common
from shoal.cli import doctor
from shoal.observe.progress import progress

WORKERS = 2
PPO_STEPS = 200_000
PPO_ENVS = 16


def cartpole() -> Any:
    """Return a CartPole."""
    return gymnasium.make("CartPole-v1")


def theirs() -> Any:
    """Return Stable-Baselines3's module of VecEnvs."""
    from stable_baselines3.common import vec_env

    return vec_env


def ours() -> Any:
    """Return Shoal's."""
    from shoal.dialects import sb3

    return sb3


VECENVS: dict[str, Callable[[int], Any]] = {
    "SB3 Subproc": lambda n: theirs().SubprocVecEnv([cartpole] * n),
    "SB3 Dummy": lambda n: theirs().DummyVecEnv([cartpole] * n),
    "Shoal Subproc": lambda n: ours().SubprocVecEnv([cartpole] * n, num_workers=WORKERS),
    "Shoal hybrid": lambda n: ours().SubprocVecEnv([cartpole] * n, backend="hybrid", num_workers=WORKERS),
    "Shoal Dummy": lambda n: ours().DummyVecEnv([cartpole] * n),
}
STEPS = {16: list(VECENVS), 64: ["SB3 Dummy", "Shoal Dummy", "Shoal Subproc"]}
RATIOS = {
    16: [("Shoal Subproc", "SB3 Subproc"), ("Shoal Subproc", "SB3 Dummy"), ("Shoal hybrid", "SB3 Dummy")],
    64: [("Shoal Dummy", "SB3 Dummy")],
}


def rate(envs: Any, actions: list[Any], seconds: float) -> float:
    """Return steps of single envs per second."""
    for action in actions[:10]:  # wakes the workers
        envs.step(action)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        envs.step(actions[calls % len(actions)])
        calls += 1
    return calls * envs.num_envs / (time.perf_counter() - start)


def steps(seconds: float, rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Measure throughput."""
    found: dict[str, Any] = {}
    for count, names in STEPS.items():
        actions = [np.random.default_rng(i).integers(0, 2, count) for i in range(64)]
        envs = {name: VECENVS[name](count) for name in names}
        rates: dict[str, list[float]] = {name: [] for name in names}
        for one in envs.values():
            one.seed(0)
            one.reset()
        for number in range(rounds):
            for name in random.Random(number).sample(names, len(names)):
                notify(f"steps, {count} envs: {name}")
                rates[name].append(rate(envs[name], actions, seconds))
        for one in envs.values():
            one.close()
        found[str(count)] = {
            "rates": rates,
            "ratios": {f"{a} / {b}": quartiles([x / y for x, y in zip(rates[a], rates[b], strict=True)])
                       for a, b in RATIOS[count]},
        }  # fmt: skip
    return found


class Playback:
    """A recorded stream of 64 CartPoles as a VecEnv: what a wrapper adds is all there is to measure."""

    def __init__(self, count: int = 64, length: int = 500):
        envs = theirs().DummyVecEnv([cartpole] * count)
        rng = np.random.default_rng(0)
        envs.seed(0)
        self._first = envs.reset()
        self._steps = [envs.step(rng.integers(0, 2, count)) for _ in range(length)]
        self.num_envs, self.render_mode, self.metadata = count, None, {}
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.reset_infos: list[Any] = [{} for _ in range(count)]
        self._at = 0
        envs.close()

    def reset(self) -> Any:
        """Begin the recording."""
        return self._first.copy()

    def step_async(self, actions: Any) -> None:
        """Take no notice of them."""

    def step_wait(self) -> Any:
        """Return the next recorded step."""
        self._at = (self._at + 1) % len(self._steps)
        obs, rewards, dones, infos = self._steps[self._at]
        return obs.copy(), rewards.copy(), dones.copy(), [dict(info) for info in infos]

    def step(self, actions: Any) -> Any:
        """Return the next recorded step."""
        return self.step_wait()

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        """Return nothing of value."""
        return [None] * self.num_envs

    def has_attr(self, name: str) -> bool:
        """Deny it."""
        return False


def normalize(seconds: float, rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Measure what VecNormalize adds, in microseconds for a step of 64 envs."""
    bare = Playback()
    wrapped = {
        "none": bare,
        "SB3": theirs().VecNormalize(Playback()),
        "Shoal": ours().VecNormalize(Playback()),
    }
    micros: dict[str, list[float]] = {name: [] for name in wrapped}
    actions = [np.zeros(64, np.int64)]
    for one in wrapped.values():
        one.reset()
    for number in range(rounds):
        for name in random.Random(number).sample(list(wrapped), 3):
            notify(f"normalize: {name}")
            micros[name].append(64e6 / rate(wrapped[name], actions, seconds))
    added = {name: [a - b for a, b in zip(micros[name], micros["none"], strict=True)] for name in ("SB3", "Shoal")}
    ratios = [a / b for a, b in zip(added["Shoal"], added["SB3"], strict=True)]
    return {"added": {name: quartiles(values) for name, values in added.items()}, "ratio": quartiles(ratios)}


def start(rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Measure the start of 16 envs in worker processes: as each library does it by default."""
    makers = {
        "SB3 Subproc": lambda: theirs().SubprocVecEnv([cartpole] * 16),
        "Shoal Subproc": lambda: ours().SubprocVecEnv([cartpole] * 16),
        "Shoal Subproc, 16 workers": lambda: ours().SubprocVecEnv([cartpole] * 16, num_workers=16),
    }
    taken: dict[str, list[float]] = {name: [] for name in makers}
    for number in range(rounds):
        for name in random.Random(number).sample(list(makers), len(makers)):
            notify(f"start: {name}")
            begin = time.perf_counter()
            envs = makers[name]()
            envs.reset()
            taken[name].append(time.perf_counter() - begin)
            envs.close()
    ratios = {
        name: quartiles([a / b for a, b in zip(taken["SB3 Subproc"], values, strict=True)])
        for name, values in taken.items()
    }
    return {"seconds": {name: quartiles(values) for name, values in taken.items()}, "times as fast": ratios}


def ppo(rounds: int, notify: Callable[[str], None], total: int, names: list[str]) -> dict[str, Any]:
    """Measure the wall time of PPO, the making of the envs not counted."""
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)  # best for such a small network, whoever steps the envs
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):
            notify(f"ppo, round {number + 1}: {name}")
            envs = VECENVS[name](PPO_ENVS)
            model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, n_epochs=4, seed=number, device="cpu")
            gc.collect()
            begin = time.perf_counter()
            model.learn(total)
            taken[name].append(time.perf_counter() - begin)
            envs.close()
    theirs = [values for name, values in taken.items() if name.startswith("SB3")]
    best = [min(several) for several in zip(*theirs, strict=True)]
    ratios = {name: quartiles([b / t for b, t in zip(best, values, strict=True)]) for name, values in taken.items()}
    return {"seconds": {name: quartiles(values) for name, values in taken.items()}, "best of SB3 / it": ratios}


def quartiles(values: list[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return [values[0]] * 3 if len(values) == 1 else statistics.quantiles(values, n=4)


def report(found: dict[str, Any]) -> None:
    """Print the figures."""
    grid = Table(title="Stable-Baselines3", title_justify="left")
    for head in ("", "median", "quartiles"):
        grid.add_column(head, justify="right" if head else "left")

    def row(name: str, three: list[float], form: str = "{:.2f}") -> None:
        low, middle, high = (form.format(value) for value in three)
        grid.add_row(name, middle, f"{low}..{high}")

    for count, one in found.get("steps", {}).items():
        for name, rates in one["rates"].items():
            row(f"{count} CartPoles, {name}, steps/s", quartiles(rates), "{:,.0f}")
        for name, three in one["ratios"].items():
            row(f"{count} CartPoles, {name}", three)
    if "normalize" in found:
        for name, three in found["normalize"]["added"].items():
            row(f"VecNormalize of {name} adds, us", three, "{:.1f}")
        row("what Shoal's adds / what SB3's adds", found["normalize"]["ratio"])
    for part in ("start", "ppo"):
        for what, rows in found.get(part, {}).items():
            for name, three in rows.items():
                row(f"{part}: {name}, {what}", three)
    Console().print(grid)


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.3, 15)
    parser.add_argument("--parts", nargs="+", default=["steps", "normalize", "start", "ppo"])
    parser.add_argument("--start-rounds", type=int, default=5)
    parser.add_argument("--ppo-rounds", type=int, default=3)
    parser.add_argument("--ppo-steps", type=int, default=PPO_STEPS)
    parser.add_argument("--ppo-names", nargs="+", default=list(VECENVS), choices=list(VECENVS))
    options = parser.parse_args()
    count = {
        "steps": options.rounds * sum(map(len, STEPS.values())), "normalize": options.rounds * 3,
        "start": options.start_rounds * 3, "ppo": options.ppo_rounds * len(options.ppo_names),
    }  # fmt: skip
    found: dict[str, Any] = {}
    with progress(sum(count[part] for part in options.parts)) as notify:
        if "steps" in options.parts:
            found["steps"] = steps(options.seconds, options.rounds, notify)
        if "normalize" in options.parts:
            found["normalize"] = normalize(options.seconds, options.rounds, notify)
        if "start" in options.parts:
            found["start"] = start(options.start_rounds, notify)
        if "ppo" in options.parts:
            found["ppo"] = ppo(options.ppo_rounds, notify, options.ppo_steps, options.ppo_names)
    report(found)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": doctor.facts(), **found}
    (folder / "sb3.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
