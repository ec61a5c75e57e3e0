"""What a step inside of a JAX graph costs beyond a callback that does nothing, in turns, in one run.

64 envs whose steps do nothing; microseconds for one step of all of them, inside of a compiled scan of 200:

- callback: JAX's bare callback of the same arguments and results, which returns constants
- pool: `Pool.exchange` in plain Python
- step: the `step` of `shoal.graph.jax.bind`

"by handle" is the default on the CPU, beside the callback that it uses; "ordered" are JAX's own ordered callbacks.

python benchmarks/graph_jax.py
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

import common
from shoal import Pool
from shoal.cli import doctor
from shoal.graph.jax import bind
from shoal.observe.progress import progress

LENGTH = 200
WAYS = {"ordered": True, "by handle": False}


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


def constants(count: int) -> tuple[Any, ...]:
    """Return what a step answers."""
    flags = np.zeros(count, np.bool_)
    return np.zeros((count, 4), np.float32), np.zeros(count, np.float32), flags, flags


def bare(count: int, ordered: bool) -> Callable[[Any, Any], Any]:
    """Return a step with nobody behind it, by the same kind of callback."""
    answer = constants(count)
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in answer)

    def at_once(ctx: Any, out: Any, handle: Any, actions: Any) -> None:
        for there, here in zip(out, (np.asarray(handle), *answer), strict=True):
            np.asarray(there)[...] = here

    in_place = buffer_callback(at_once, (jax.ShapeDtypeStruct((), jnp.uint32), *shapes), has_side_effect=True)

    def step(handle: Any, actions: Any) -> Any:
        if ordered:
            return handle + jnp.uint32(1), io_callback(lambda actions: answer, shapes, actions, ordered=True)
        handle, *told = in_place(handle, actions)
        return handle, told

    return step


def scanned(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a compiled function that steps LENGTH times, with actions that follow from the observations."""

    def one(carry: Any, _: Any) -> Any:
        handle, obs = carry
        handle, (obs, reward, terminated, truncated, *_) = step(handle, (obs[:, 0] > 0).astype(jnp.int32))
        return (handle, obs), (reward, terminated, truncated)

    return jax.jit(lambda handle, obs: jax.lax.scan(one, (handle, obs), length=LENGTH))


def once(call: Callable[[], Any], seconds: float) -> float:
    """Return microseconds for a step."""
    call()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls / LENGTH * 1e6


def measure(count: int, backend: Any, seconds: float, rounds: int, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the times of all rounds by name, and quartiles of what is told of them."""
    pools = {name: Pool(Idle, count, backend=backend) for name in ("pool", *WAYS)}
    for pool in pools.values():
        pool.reset(seed=0)
    calls: dict[str, Callable[[], Any]] = {}

    def exchanges(pool: Pool, actions: Any) -> Callable[[], Any]:
        def several() -> None:
            for _ in range(LENGTH):
                pool.exchange(actions)

        return several

    def compiled(step: Any) -> Callable[[], Any]:
        rollout, handle, obs = scanned(step), jnp.zeros((), jnp.uint32), jnp.zeros((count, 4))

        def several() -> None:
            nonlocal handle
            (handle, _), _ = jax.block_until_ready(rollout(handle, obs))

        return several

    calls["pool"] = exchanges(pools["pool"], np.zeros(count, np.int64))
    for name, ordered in WAYS.items():
        calls[f"{name} callback"] = compiled(bare(count, ordered))
        calls[f"{name} step"] = compiled(bind(pools[name], ordered=ordered).step)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles
    for number in range(rounds):
        for name in random.Random(number).sample(list(calls), len(calls)):
            notify(name)
            times[name].append(once(calls[name], seconds))
    for pool in pools.values():
        pool.close()
    told = {name: common.quartiles(values) for name, values in times.items()}
    for name in WAYS:
        callback, step = np.array(times[f"{name} callback"]), np.array(times[f"{name} step"])
        told[f"{name} step - callback"] = common.quartiles(step - callback)
        told[f"{name} step - callback - pool"] = common.quartiles(step - callback - np.array(times["pool"]))
    return {"envs": count, "backend": backend, "times": times, "quartiles": told}


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.1, 25)
    parser.add_argument("-n", "--num-envs", type=int, default=64)
    parser.add_argument("--backend", default="serial")
    options = parser.parse_args()
    with progress(options.rounds * 5) as notify:
        found = measure(options.num_envs, options.backend, options.seconds, options.rounds, notify)
    common.show_microseconds(found["quartiles"])
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "graph_jax.json").write_text(json.dumps({"machine": doctor.facts(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
