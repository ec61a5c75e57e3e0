"""An image game: Bricks, of Shoal's library, from pixels by a small CNN.

On a GPU (--backend cuda) envs, CNN and learning are one CUDA graph. On two cores a CNN is slow: in a few minutes the
policy only begins to follow the ball. The return is the number of bricks, 48 at most.

Run: python examples/learn_image_game.py [--backend cuda] [--minutes 5]       (needs pip install ".[learn,compiled]")
"""

from __future__ import annotations

import argparse

from shoal.learn import train


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Shoal's Bricks by PPO.")
    parser.add_argument("--backend", default="compiled", choices=["compiled", "cuda"])
    parser.add_argument("--envs", type=int, help="default: 32, and 2048 on a GPU")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = train(
        "shoal/Bricks-v0", options.envs or (2048 if options.backend == "cuda" else 32), backend=options.backend,
        steps=128, epochs=2, minibatches=8, learning_rate=5e-4, anneal=False, clip_values=False, total_steps=10**9,
        target_return=40, minutes=options.minutes, seed=options.seed, screen=True,
    )  # fmt: skip
    last = found.history[-1]
    print(f"mean return {last['return']:.1f} after {int(last['steps'])} steps and {last['seconds']:.1f} s")


if __name__ == "__main__":
    main()
