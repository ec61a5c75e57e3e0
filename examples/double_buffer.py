"""Double-buffered sampling: the policy works on one half of the envs while the other half steps.

Two batches are in flight at all times, received strictly in turn (order="fifo"). The same envs and the same policy are
then stepped as one batch, where one of the two always waits for the other. Run: python examples/double_buffer.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import shoal


class Policy:
    """Two layers, large enough to cost something."""

    def __init__(self, inputs: int, hidden: int, seed: int):
        rng = np.random.default_rng(seed)
        self._first = rng.normal(0, 0.1, (inputs, hidden))
        self._middle = rng.normal(0, 0.1, (hidden, hidden))
        self._last = rng.normal(0, 0.1, hidden)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        return (np.tanh(np.tanh(obs @ self._first) @ self._middle) @ self._last > 0).astype(np.int64)


def halves(num_envs: int, policy: Policy, batches: int, seed: int) -> float:
    """Return steps/s with two halves in flight."""
    with shoal.Pool(
        "CartPole-v1", num_envs, backend="processes", num_workers=1, batch_size=num_envs // 2, order="fifo"
    ) as pool:
        pool.async_reset(seed=seed)
        start = time.perf_counter()
        for _ in range(2 * batches):
            batch = pool.recv()  # this half is here, the other one steps
            pool.send(policy(batch.obs), batch.env_id)
        return batches * num_envs / (time.perf_counter() - start)


def whole(num_envs: int, policy: Policy, batches: int, seed: int) -> float:
    """Return steps/s with one batch of all."""
    with shoal.Pool("CartPole-v1", num_envs, backend="processes", num_workers=1) as pool:
        obs = pool.reset(seed=seed).obs
        start = time.perf_counter()
        for _ in range(batches):
            obs = pool.step(policy(obs)).obs
        return batches * num_envs / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=128, help="an even number")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = Policy(4, options.hidden, options.seed)
    rates = [(halves(options.envs, policy, options.batches, options.seed),
              whole(options.envs, policy, options.batches, options.seed)) for _ in range(3)]  # fmt: skip
    buffered, plain = (float(np.median(column)) for column in zip(*rates, strict=True))
    print(f"one batch: {plain:,.0f} steps/s; two halves in turn: {buffered:,.0f} steps/s, {buffered / plain:.2f} x")


if __name__ == "__main__":
    main()
