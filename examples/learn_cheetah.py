"""MuJoCo's HalfCheetah: a real simulator in worker processes, which step while the policy computes.

One million steps take a quarter of an hour or more on two cores. Chance gives a return of about -300.

Run: python examples/learn_cheetah.py [--minutes 30]       (needs pip install ".[learn,mujoco]")
"""

from __future__ import annotations

import argparse

from shoal.learn import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train HalfCheetah-v5 by PPO.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = train(
        "HalfCheetah-v5", 16, steps=128, clip_values=False, total_steps=options.steps, minutes=options.minutes,
        seed=options.seed, screen=True,
    )  # fmt: skip
    last = found.history[-1]
    print(f"mean return {last['return']:.0f} after {int(last['steps'])} steps and {last['seconds']:.0f} s")


if __name__ == "__main__":
    main()
