"""Functional envs on a device: CartPole with random actions and auto-reset, whole rollouts in one scan, in turns.

- gymnax: its own env stepped its own way, `vmap(env.step)` with its own reset; actions are the batch that Shoal draws
- gymnax, own actions: the same with `vmap(action_space.sample)`, as its examples do
- shoal: the same gymnax env, by BatchedFunctionalEnv, with the same actions as the first
- shoal, lean: a CartPole with the same dynamics, without what gymnax's does twice
- fast: with `rng="fast"`

All reset in the same step and keep rewards and ended episodes for each env. gymnax needs the package six.

python benchmarks/jax_envs.py --envs 64 4096 65536 --json benchmarks/results/jax_envs.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from shoal.graph.jax.functional import BatchedFunctionalEnv

SIZES = {"cpu": [1, 64, 4096, 65536], "gpu": [4_194_304]}
Runner = Callable[[Any, Any], tuple[Any, Any]]  # (state, key) -> state, (rewards, episodes)


class Cart(NamedTuple):
    """A cart with a pole; see LeanCartPole."""

    x: jax.Array
    speed: jax.Array
    angle: jax.Array
    turning: jax.Array


class LeanCartPole:
    """CartPole-v1 in gymnax's protocol; its time limit is the caller's."""

    observation_space = spaces.Box(-math.inf, math.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, key: Any) -> tuple[jax.Array, Cart]:
        values = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return values, Cart(*values)

    def step(self, key: Any, cart: Cart, action: Any) -> tuple[Any, Cart, Any, Any, dict[str, Any]]:
        sin, cos = jnp.sin(cart.angle), jnp.cos(cart.angle)
        force = jnp.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * cart.turning**2 * sin) * (1 / 1.1)
        twist = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - (0.1 / 1.1) * cos * cos))
        pull = push - (0.05 / 1.1) * twist * cos
        cart = Cart(
            cart.x + 0.02 * cart.speed,
            cart.speed + 0.02 * pull,
            cart.angle + 0.02 * cart.turning,
            cart.turning + 0.02 * twist,
        )
        fell = (jnp.abs(cart.x) > 2.4) | (jnp.abs(cart.angle) > 12 * 2 * math.pi / 360)
        return jnp.stack(cart), cart, 1.0, fell, {}


def shoal(env: Any, n: int, steps: int, unroll: int, **options: Any) -> tuple[Any, Runner]:
    """The start and the rollout of a BatchedFunctionalEnv."""
    envs = BatchedFunctionalEnv(env, n, autoreset="same_step", **options)

    def run(state: Any, key: Any) -> Any:
        state, kept = envs.rollout(state, None, steps, key=key, collect=False, unroll=unroll)
        return state, (kept.summary.reward, kept.summary.episodes)

    return envs.init(0)[0], run


def gymnax_way(env: Any, params: Any, n: int, steps: int, unroll: int, own_actions: bool) -> tuple[Any, Runner]:
    """The start and the rollout as gymnax has it: keys split for every step, and its step's own reset."""
    sample = BatchedFunctionalEnv(env, n).sample
    draw_each = jax.vmap(env.action_space(params).sample)

    def run(state: Any, key: Any) -> Any:
        def body(carry: Any, t: Any) -> Any:
            state, rewards, episodes = carry
            acts, moves = jax.random.split(jax.random.fold_in(key, t))
            action = draw_each(jax.random.split(acts, n)) if own_actions else sample(acts)
            step = jax.vmap(env.step, (0, 0, 0, None))
            result = step(jax.random.split(moves, n), state, action, params)  # done is two values since gymnax 1.0
            state, reward, dones = result[1], result[2], result[3:-1]
            return (state, rewards + reward, episodes + sum(dones)), None

        start = state, jnp.zeros(n), jnp.zeros(n, jnp.int32)
        (state, rewards, episodes), _ = jax.lax.scan(body, start, jnp.arange(steps), unroll=unroll)
        return state, (rewards, episodes)

    return jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(0), n), params)[1], run


def field(n: int, steps: int, unroll: int) -> dict[str, tuple[Any, Runner]]:
    """Who takes part."""
    lean = LeanCartPole()
    found: dict[str, tuple[Any, Runner]] = {}
    try:
        import gymnax
    except ImportError as missing:
        print(f"without gymnax: {missing}")
    else:
        env, params = gymnax.make("CartPole-v1")
        found["gymnax"] = gymnax_way(env, params, n, steps, unroll, own_actions=False)
        found["gymnax, own actions"] = gymnax_way(env, params, n, steps, unroll, own_actions=True)
        found["shoal"] = shoal(env, n, steps, unroll)
        found["shoal, fast"] = shoal(env, n, steps, unroll, rng="fast")
    found["shoal, lean"] = shoal(lean, n, steps, unroll, max_episode_steps=500)
    found["shoal, lean, fast"] = shoal(lean, n, steps, unroll, max_episode_steps=500, rng="fast")
    return found


class Contender:
    """A compiled rollout that goes on from where it stopped."""

    def __init__(self, state: Any, run: Runner):
        self._run = jax.jit(run, donate_argnums=0)
        self._state, self._turn = state, 0
        self.episodes = 0

    def turn(self) -> float:
        """Run once; seconds."""
        key = jax.random.key(self._turn)
        self._turn += 1
        begin = time.perf_counter()
        self._state, sums = jax.block_until_ready(self._run(self._state, key))
        taken = time.perf_counter() - begin
        self.episodes += int(np.asarray(sums[1]).sum())
        return taken


def measure(n: int, steps: int, rounds: int, unroll: int) -> dict[str, dict[str, Any]]:
    """Steps per second of everybody, in turns."""
    contenders = {name: Contender(*made) for name, made in field(n, steps, unroll).items()}
    for one in contenders.values():
        one.turn()  # compiles
        one.turn()
        one.episodes = 0
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        order = list(contenders) if turn % 2 == 0 else list(contenders)[::-1]
        for name in order:
            rates[name].append(n * steps / contenders[name].turn())
    results = {}
    for name, values in rates.items():
        against = rates.get("gymnax", rates["shoal, lean"])
        ratios = [mine / theirs for mine, theirs in zip(values, against, strict=True)]
        length = n * steps * rounds / max(1, contenders[name].episodes)
        results[name] = {"rates": values, "ratio": statistics.median(ratios), "episode_length": length}
    return results


def show(n: int, steps: int, results: dict[str, dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{n:,} envs, {steps} steps a scan")
    print(f"{'':22}{'M steps/s':>12}{'min..max':>22}{'/ gymnax':>10}{'episode':>9}")
    for name, found in results.items():
        rates = [rate / 1e6 for rate in found["rates"]]
        spread = f"{min(rates):,.2f}..{max(rates):,.2f}"
        median = statistics.median(rates)
        print(f"{name:22}{median:12,.2f}{spread:>22}{found['ratio']:10.2f}{found['episode_length']:9.1f}", flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--envs", type=int, nargs="+", metavar="N", help="1 64 4096 65536 on a CPU, 4194304 on a GPU")
    parser.add_argument("--steps", type=int, help="of each scan; by default so that a CPU takes about a second")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contender (%(default)s)")
    parser.add_argument("--unroll", type=int, default=1, help="steps in one pass of the loop (%(default)s)")
    parser.add_argument("--device", help="cpu or gpu; what JAX prefers by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results")
    options = parser.parse_args()
    if options.device:
        jax.config.update("jax_platforms", "cuda" if options.device == "gpu" else options.device)
    device = jax.devices()[0]
    document: dict[str, Any] = {
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "unroll": options.unroll,
        "results": [],
    }
    print(f"{device.device_kind}, {os.cpu_count()} cores, jax {jax.__version__}")
    for n in options.envs or SIZES.get(device.platform, SIZES["gpu"]):
        steps = options.steps or (max(32, min(20_000, 4_000_000 // n)) if device.platform == "cpu" else 1000)
        results = measure(n, steps, options.rounds, options.unroll)
        show(n, steps, results)
        document["results"].append({"envs": n, "steps": steps, "contenders": results})
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
