"""Double-buffered sampling: the policy works on one half of the envs while the other half steps.

Two batches are in flight at all times. Each is always the same neighbours (order="contiguous"), so that its arrays are
views. The same envs and the same policy are then stepped as one batch, where one of the two always waits for the other.
Both ways take turns, round by round.

The policy has one thread. By default NumPy's matrix products use all cores, and their threads spin for a while after
each product: then the worker has no core to step on while the policy computes, and two halves are slower than one
batch. The same is true of torch: torch.set_num_threads(1), or as many as the workers leave.

Run: python examples/double_buffer.py --policy-ms 1
"""

from __future__ import annotations

import os

for library in ("OPENBLAS", "MKL", "OMP"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")  # before NumPy is imported

import argparse  # noqa: E402
import time  # noqa: E402

import numpy as np  # noqa: E402

import shoal  # noqa: E402


class Policy:
    """Two layers, large enough to cost something."""

    def __init__(self, inputs: int, hidden: int, seed: int, seconds: float = 0.0):
        rng = np.random.default_rng(seed)
        self._seconds = seconds  # for a batch of all envs, at least
        self.whole = 1  # how many envs that are
        self._first = rng.normal(0, 0.1, (inputs, hidden))
        self._middle = rng.normal(0, 0.1, (hidden, hidden))
        self._last = rng.normal(0, 0.1, hidden)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        until = time.thread_time() + self._seconds * len(obs) / self.whole  # its own time, whatever else runs
        while True:
            actions = (np.tanh(np.tanh(obs @ self._first) @ self._middle) @ self._last > 0).astype(np.int64)
            if time.thread_time() >= until:
                return actions


class Halves:
    """Two halves in flight."""

    def __init__(self, num_envs: int, policy: Policy, seed: int):
        self.pool = shoal.Pool(
            "CartPole-v1", num_envs, backend="processes", num_workers=1, batch_size=num_envs // 2, order="contiguous"
        )
        self._policy = policy
        self.pool.async_reset(seed=seed)

    def run(self, batches: int) -> float:
        """Return steps/s."""
        pool, policy, start = self.pool, self._policy, time.perf_counter()
        for _ in range(2 * batches):
            batch = pool.recv()  # this half is here, the other one steps
            pool.send(policy(batch.obs), batch.env_id)
        return batches * pool.num_envs / (time.perf_counter() - start)


class Whole:
    """One batch of all."""

    def __init__(self, num_envs: int, policy: Policy, seed: int):
        self.pool = shoal.Pool("CartPole-v1", num_envs, backend="processes", num_workers=1)
        self._policy = policy
        self._obs = self.pool.reset(seed=seed).obs

    def run(self, batches: int) -> float:
        """Return steps/s."""
        pool, policy, start = self.pool, self._policy, time.perf_counter()
        for _ in range(batches):
            self._obs = pool.step(policy(self._obs)).obs
        return batches * pool.num_envs / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description="Double-buffered sampling.")
    parser.add_argument("--envs", type=int, default=128, help="an even number")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--policy-ms", type=float, default=0.0, help="how long the policy takes for all envs, at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = Policy(4, options.hidden, options.seed, options.policy_ms / 1e3)
    policy.whole = options.envs
    each = max(1, options.batches // options.rounds)
    halves, whole = (kind(options.envs, policy, options.seed) for kind in (Halves, Whole))
    with halves.pool, whole.pool:
        rates = [(halves.run(each), whole.run(each)) for _ in range(options.rounds)]
    buffered, plain = (float(np.median(column)) for column in zip(*rates, strict=True))
    ratio = float(np.median([one / other for one, other in rates]))
    print(f"one batch: {plain:,.0f} steps/s; two halves in turn: {buffered:,.0f} steps/s, {ratio:.2f} x")


if __name__ == "__main__":
    main()
