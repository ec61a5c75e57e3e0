"""What a turn costs beside the envs: recv and send of batches, and actions of every type; serial, envs that do nothing.

All pools live at the same time and take turns, some hundred calls each, in an order that changes with each round. The
CPU time of this thread counts, so that a busy machine hits all alike; a serial pool has no other thread. Shown are the
median and the quartiles over the rounds, in microseconds for one turn, beside what was asked for, where something was.

- recv, send: `batch = pool.recv(); pool.send(actions, batch.env_id)`
- scattered: two halves in turn, every other env each, so that all arrays are gathered
- step: `pool.step(actions)` of 8 envs

python benchmarks/turns.py --rounds 40
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal.cli import doctor

WARM_UP = 2  # rounds
Turn = Callable[[], object]


class Nothing(gymnasium.Env[Any, Any]):
    """Does nothing."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self) -> None:
        self.observation = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode that never ends."""
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action: Any) -> Any:
        """Return the observation once more."""
        return self.observation, 0.0, False, False, {}


class Steered(Nothing):
    """Does nothing with two floats."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)


def batches(envs: int, size: int, order: str, pools: list[shoal.Pool]) -> Turn:
    """Receive a batch and send to the same envs."""
    pool = shoal.Pool(Nothing, envs, backend="serial", batch_size=size, order=order)
    pools.append(pool)
    pool.async_reset(seed=0)
    actions = np.zeros(size, np.int64)

    def turn() -> None:
        pool.send(actions, pool.recv().env_id)

    return turn


def scattered(envs: int, pools: list[shoal.Pool]) -> Turn:
    """Send to every other env and receive them."""
    pool = shoal.Pool(Nothing, envs, backend="serial", batch_size=envs // 2)
    pools.append(pool)
    pool.reset(seed=0)
    actions, halves = np.zeros(envs // 2, np.int64), [np.arange(0, envs, 2), np.arange(1, envs, 2)]

    def turn() -> None:
        halves.reverse()
        pool.send(actions, halves[0])
        pool.recv()

    return turn


def steps(env: Any, actions: Any, pools: list[shoal.Pool]) -> Turn:
    """Step all envs by the same actions."""
    pool = shoal.Pool(env, 8, backend="serial")
    pools.append(pool)
    pool.reset(seed=0)
    return lambda: pool.step(actions)


def kinds_of_actions() -> Iterator[tuple[str, Any, Any]]:
    """Give a name, an env, and actions of a type for eight of it."""
    whole, real = np.zeros(8, np.int64), np.zeros((8, 2))
    yield "int64", Nothing, whole
    for dtype in ("int32", "uint8"):
        yield dtype, Nothing, whole.astype(dtype)
    yield "int64, strided", Nothing, np.zeros(16, np.int64)[::2]
    yield "list of int", Nothing, whole.tolist()
    yield "float32 for float32", Steered, real.astype(np.float32)
    yield "float64 for float32", Steered, real
    yield "lists of float", Steered, real.tolist()
    if find_spec("torch"):
        import torch

        yield "torch int64", Nothing, torch.zeros(8, dtype=torch.int64)
        yield "torch float32", Steered, torch.zeros(8, 2)
    if find_spec("jax"):
        import jax.numpy as jnp

        yield "JAX int32", Nothing, jnp.zeros(8, jnp.int32)
        yield "JAX float32", Steered, jnp.zeros((8, 2))


def cells(pools: list[shoal.Pool]) -> dict[str, tuple[float | None, Turn]]:
    """Make all cells: what was asked for, in microseconds, and one turn; their pools are added to `pools`."""
    found: dict[str, tuple[float | None, Turn]] = {}
    found["recv, send: all of 8"] = 7.0, batches(8, 8, "ready", pools)
    for envs, size, asked in ((8, 4, 7.0), (64, 32, 12.0)):
        for order in ("ready", "fifo", "contiguous"):
            found[f"recv, send: {size} of {envs}, {order}"] = asked, batches(envs, size, order, pools)
        found[f"send, recv: {size} of {envs}, scattered"] = None, scattered(envs, pools)
    for name, env, actions in kinds_of_actions():
        plain = name in ("int64", "float32 for float32")
        found[f"step: {name}"] = None if plain else 5.5, steps(env, actions, pools)
    return found


def measure(turns: dict[str, Turn], rounds: int, calls: int) -> dict[str, list[float]]:
    """Let all take turns; the microseconds of one turn, for each round."""
    rng, times = random.Random(0), {name: list[float]() for name in turns}
    for number in range(WARM_UP + rounds):
        for name in rng.sample(list(turns), len(turns)):
            turn = turns[name]
            start = time.thread_time_ns()
            for _ in range(calls):
                turn()
            taken = (time.thread_time_ns() - start) / calls / 1e3
            if number >= WARM_UP:
                times[name].append(taken)
    return times


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=300, help="turns of each cell in a round (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for the figures as JSON")
    options = parser.parse_args()
    pools: list[shoal.Pool] = []
    made = cells(pools)
    times = measure({name: turn for name, (_, turn) in made.items()}, options.rounds, options.calls)
    table, found = Table("turn", "us", "quartiles", "asked"), []
    for name, (asked, _) in made.items():
        low, middle, high = common.quartiles(times[name])
        table.add_row(name, f"{middle:.2f}", f"{low:.2f}..{high:.2f}", "" if asked is None else f"{asked:g}")
        found.append({"turn": name, "us": [low, middle, high], "asked_us": asked})
    for pool in pools:
        pool.close()
    Console().print(table)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        facts = {"machine": doctor.facts(), "cells": found}
        (options.out / "turns.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
