"""What a step inside of a PyTorch graph costs beyond an operator that does nothing, in turns, in one run.

64 envs whose steps do nothing; microseconds for one step of all of them:

- op: a bare operator of the same arguments and results, registered in the same way, that returns constants
- pool: `Pool.exchange` in plain Python
- env: `TorchEnv.step`

python benchmarks/graph_torch.py
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

import common
from shoal import Pool
from shoal.cli import doctor
from shoal.graph.torch import TorchEnv
from shoal.observe.progress import progress

UNROLLED = 20


class Idle(gymnasium.Env[Any, Any]):
    """Four numbers that never change."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs, self._info = np.zeros(4, np.float32), dict[str, Any]()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin."""
        return self._obs, self._info

    def step(self, action: Any) -> Any:
        """Do nothing."""
        return self._obs, 0.0, False, False, self._info


def bare_operator(count: int) -> Callable[..., Any]:
    """Return an operator like that of TorchEnv.step, with nobody behind it."""
    kinds = [((count, 4), torch.float32), ((count,), torch.float32), ((count,), torch.bool), ((count,), torch.bool)]
    constants = tuple(torch.zeros(shape, dtype=kind) for shape, kind in kinds)

    def real(handle: torch.Tensor, layout: str, actions: list[torch.Tensor]) -> Any:
        handle.numpy()[1] += 1
        return constants

    def fake(handle: torch.Tensor, layout: str, actions: list[torch.Tensor]) -> Any:
        return tuple(torch.empty(shape, dtype=kind) for shape, kind in kinds)

    library = torch.library.Library("shoal_bench", "FRAGMENT")
    library.define("bare(Tensor(a!) handle, str layout, Tensor[] actions) -> (Tensor, Tensor, Tensor, Tensor)")
    library.impl("bare", real, "CompositeExplicitAutograd")
    library.impl("bare", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("shoal_bench::bare", fake, lib=library)
    bare_operator.library = library  # type: ignore[attr-defined]  # it is undefined again when nobody holds it
    operator: Callable[..., Any] = torch.ops.shoal_bench.bare.default
    return operator


def repeated(step: Callable[[Any], Any], compiled: bool) -> Callable[[Any], Any]:
    """Return a function that steps UNROLLED times; as one graph where `compiled`."""

    def rollout(actions: Any) -> Any:
        answer = None
        for _ in range(UNROLLED):
            answer = step(actions)
        return answer

    return torch.compile(rollout, fullgraph=True, dynamic=False) if compiled else rollout


def once(call: Callable[[Any], Any], actions: Any, seconds: float) -> float:
    """Return microseconds for a step."""
    call(actions)
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        call(actions)
        calls += 1
    return (time.perf_counter() - start) / calls / UNROLLED * 1e6


def measure(count: int, seconds: float, rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the times of all rounds by name, and quartiles of what is told of them."""
    pools = {name: Pool(Idle, count, backend="serial", copy=True) for name in ("pool", "eager env", "compiled env")}
    eager, compiled = TorchEnv(pools["eager env"]), TorchEnv(pools["compiled env"])
    for pool in pools.values():
        pool.reset(seed=0)
    bare, handle = bare_operator(count), torch.zeros(2, dtype=torch.int64)
    actions = torch.zeros(count, dtype=torch.int64)
    calls: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "pool": (repeated(pools["pool"].exchange, False), actions.numpy()),
        "eager op": (repeated(lambda a: bare(handle, "x", [a]), False), actions),
        "eager env": (repeated(eager.step, False), actions),
        "compiled op": (repeated(lambda a: bare(handle, "x", [a]), True), actions),
        "compiled env": (repeated(compiled.step, True), actions),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call, given in calls.values():
        call(given)  # compiles
    for number in range(rounds):
        for name in random.Random(number).sample(list(calls), len(calls)):
            notify(name)
            times[name].append(once(*calls[name], seconds))
    for pool in pools.values():
        pool.close()
    told = {name: common.quartiles(values) for name, values in times.items()}
    for mode in ("eager", "compiled"):
        op, env = np.array(times[f"{mode} op"]), np.array(times[f"{mode} env"])
        told[f"{mode} env - op"] = common.quartiles(env - op)
        told[f"{mode} env - op - pool"] = common.quartiles(env - op - np.array(times["pool"]))
    return {"envs": count, "times": times, "quartiles": told}


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.1, 25)
    parser.add_argument("-n", "--num-envs", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with progress(options.rounds * 5) as notify:
        found = measure(options.num_envs, options.seconds, options.rounds, notify)
    common.show_microseconds(found["quartiles"])
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph_torch.json").write_text(json.dumps({"machine": doctor.facts(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
