"""CartPole to a mean return of 475: Gymnasium's own env, or Shoal's compiled one, in seconds.

Run: python examples/learn_cartpole.py [--compiled] [--minutes 2]       (needs pip install ".[learn]")
"""

from __future__ import annotations

import argparse

from shoal.learn import train

SETTINGS = {
    "steps": 32, "learning_rate": 1e-3, "gamma": 0.98, "trace": 0.9, "entropy": 0.0, "anneal": False,
    "clip_values": False, "total_steps": 2_000_000,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Train CartPole-v1 by PPO.")
    parser.add_argument("--compiled", action="store_true", help="step Shoal's compiled CartPole")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    backend = "compiled" if options.compiled else "auto"
    found = train(
        "CartPole-v1", 64, backend=backend, hyperparameters=SETTINGS, target_return=475, minutes=options.minutes,
        seed=options.seed, screen=True,
    )  # fmt: skip
    last = found.history[-1]
    word = "solved" if found.solved else "not solved"
    print(f"{word}: mean return {last['return']:.1f} after {int(last['steps'])} steps and {last['seconds']:.1f} s")


if __name__ == "__main__":
    main()
