"""Pendulum: continuous actions, and observations and rewards that are normalized.

A mean return of about -200 means that the pendulum is swung up and held; chance gives -1200.

Run: python examples/learn_pendulum.py [--minutes 2]       (needs pip install ".[learn,compiled]")
"""

from __future__ import annotations

import argparse

from shoal.learn import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Pendulum-v1 by PPO.")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--target", type=float, default=-250.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = train(
        "Pendulum-v1", 32, backend="compiled", steps=64, gamma=0.9, learning_rate=1e-3, minibatches=16, epochs=10,
        clip_values=False, target_return=options.target, minutes=options.minutes, seed=options.seed, screen=True,
    )  # fmt: skip
    last = found.history[-1]
    print(f"mean return {last['return']:.1f} after {int(last['steps'])} steps and {last['seconds']:.1f} s")


if __name__ == "__main__":
    main()
