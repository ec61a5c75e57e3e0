"""Compiled envs on a GPU: CartPole with auto-reset, in turns against JAX on the same GPU.

- step: `CudaEnvs.step`, one call from Python and one launch for each step, with actions that lie on the GPU (bytes, as
  few as they can be, and int32); by a captured graph, as always, and by Numba's own launches
- step, torch: the same with actions that PyTorch draws anew before each step
- rollout: `CudaEnvs.rollout("random", 64)`, all steps in one launch, into the same arrays again
- JAX: `vmap` in one `lax.scan` by `BatchedFunctionalEnv`, with its own random actions: "same work" carries
  observations, rewards and flags from step to step, so that they are written as above; "no observations" only adds up
  rewards and episodes, and lets XLA keep the rest in registers

python benchmarks/compiled_cuda.py -n 4096 4194304 --json benchmarks/results/compiled_cuda.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.compiled.cuda import CudaEnvs, missing
from shoal.compiled.cuda.build import driver
from shoal.compiled.library.classic_control import CartPole

ROLLED = 64


def wait() -> None:
    """Until the GPU has done all that it was asked for."""
    driver().synchronize()


def stepping(num_envs: int, dtype: Any, **options: Any) -> Callable[[int], None]:
    """Steps with the same eight batches of actions again and again."""
    envs = CudaEnvs(CartPole, num_envs, seed=0, **options)
    envs.reset()
    random = np.random.default_rng(0)
    actions = [driver().to_device(random.integers(0, 2, num_envs).astype(dtype)) for _ in range(8)]

    def run(steps: int) -> None:
        for i in range(steps):
            envs.step(actions[i % 8])

    return run


def without_graphs(num_envs: int) -> Callable[[int], None]:
    """As Numba launches a kernel by itself."""
    envs = CudaEnvs(CartPole, num_envs, seed=0)
    envs.reset()
    actions = driver().to_device(np.random.default_rng(0).integers(0, 2, num_envs).astype(np.uint8))
    launch = envs._launcher(envs._kind("step"), {"action_0": actions})
    stream = envs._streams.use(0)

    def run(steps: int) -> None:
        for _ in range(steps):
            launch(stream)

    return run


def by_torch(num_envs: int) -> Callable[[int], None]:
    """With PyTorch in the loop."""
    import torch

    envs = CudaEnvs(CartPole, num_envs, seed=0)
    envs.reset()
    actions = torch.zeros(num_envs, dtype=torch.uint8, device="cuda")

    def run(steps: int) -> None:
        for _ in range(steps):
            actions.random_(0, 2)
            envs.step(actions)

    return run


def rolling(num_envs: int) -> Callable[[int], None]:
    """Whole rollouts."""
    envs = CudaEnvs(CartPole, num_envs, seed=0)
    envs.reset()

    kept = envs.rollout("random", ROLLED, seed=0)

    def run(steps: int) -> None:
        for i in range(0, steps, ROLLED):
            envs.rollout("random", ROLLED, seed=i, out=kept)

    return run


def by_jax(num_envs: int, steps: int, rng: str, same_work: bool, unroll: int = 1) -> Callable[[int], None]:
    """One scan."""
    import jax
    import jax.numpy as jnp

    from jax_envs import LeanCartPole
    from shoal.graph.jax.functional import BatchedFunctionalEnv

    envs = BatchedFunctionalEnv(LeanCartPole(), num_envs, autoreset="same_step", max_episode_steps=500, rng=rng)

    def answers(out: Any) -> Any:
        return out.obs, out.reward, out.terminated, out.truncated

    def carried(state: Any, key: Any) -> Any:
        def body(carry: Any, t: Any) -> Any:
            state, _ = carry
            state, out = envs.step(state, envs.sample(jax.random.fold_in(key, t)))
            return (state, answers(out)), None

        _, out = jax.eval_shape(envs.step, state, envs.sample(key))
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), answers(out))
        (state, last), _ = jax.lax.scan(body, (state, zeros), jnp.arange(steps), unroll=unroll)
        return state, last

    def summed(state: Any, key: Any) -> Any:
        state, kept = envs.rollout(state, None, steps, key=key, collect=False, unroll=unroll)
        return state, (kept.summary.reward, kept.summary.episodes)

    jitted, kept = jax.jit(carried if same_work else summed, donate_argnums=0), [envs.init(0)[0]]

    def run(_: int) -> None:
        kept[0], sums = jitted(kept[0], jax.random.key(0))
        jax.block_until_ready(sums)

    return run


def field(num_envs: int, steps: int) -> dict[str, Callable[[int], None]]:
    """Who takes part."""
    found = {
        "step, bytes": stepping(num_envs, np.uint8),
        "step, int32": stepping(num_envs, np.int32),
        "step, bytes, episodes tracked": stepping(num_envs, np.uint8, track_episodes=True),
        "step, bytes, double": stepping(num_envs, np.uint8, precision="double"),
        "step, same_step": stepping(num_envs, np.uint8, autoreset="same_step"),
        "step, no graph": without_graphs(num_envs),
    }
    if num_envs * ROLLED <= 2**26:
        found["rollout"] = rolling(num_envs)
    try:
        found["step, torch"] = by_torch(num_envs)
    except ImportError as error:
        print(f"without PyTorch: {error}")
    try:
        found["JAX, same work"] = by_jax(num_envs, steps, "threefry", same_work=True)
        found["JAX, same work, fast rng"] = by_jax(num_envs, steps, "fast", same_work=True)
        found["JAX, no observations"] = by_jax(num_envs, steps, "threefry", same_work=False)
        found["JAX, no observations, fast rng"] = by_jax(num_envs, steps, "fast", same_work=False)
        found["JAX, no obs., fast, unroll 4"] = by_jax(num_envs, steps, "fast", same_work=False, unroll=4)
    except ImportError as error:
        print(f"without JAX: {error}")
    return found


def measure(num_envs: int, steps: int, rounds: int) -> dict[str, Any]:
    """Steps/s of everybody, in turns; in each round also as multiples of JAX doing the same work."""
    contenders = field(num_envs, steps)
    for run in contenders.values():
        run(steps)
        run(steps)
        wait()
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders) if turn % 2 == 0 else list(contenders)[::-1]:
            began = time.perf_counter()
            contenders[name](steps)
            wait()
            rates[name].append(num_envs * steps / (time.perf_counter() - began))
    others = rates.get("JAX, same work", [])
    told = {}
    for name, values in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(values, others, strict=False)] or [0.0]
        told[name] = {"rates": values, "times_jax": statistics.median(ratios)}
    return {"envs": num_envs, "steps": steps, "contenders": told}


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    print(f"\nCartPole x {result['envs']:,}, {result['steps']} steps a run")
    print(f"{'':32}{'M steps/s':>12}{'min..max':>26}{'x JAX':>8}")
    for name, told in result["contenders"].items():
        rates = [rate / 1e6 for rate in told["rates"]]
        spread = f"{min(rates):,.1f}..{max(rates):,.1f}"
        print(f"{name:32}{statistics.median(rates):12,.1f}{spread:>26}{told['times_jax']:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--num-envs", type=int, nargs="+", default=[4096, 4_194_304], metavar="N")
    parser.add_argument("--steps", type=int, default=1024, help="of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contender (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results")
    options = parser.parse_args()
    if missing():
        raise SystemExit(missing())
    device = driver().get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else str(device.name)
    document: dict[str, Any] = {"device": name, "results": []}
    print(name)
    for num_envs in options.num_envs:
        document["results"].append(measure(num_envs, options.steps, options.rounds))
        show(document["results"][-1])
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
