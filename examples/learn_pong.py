"""Atari's Pong from pixels: four frames of 84 x 84, CleanRL's settings for Atari.

Ten million steps are what PPO needs for Pong, which is a day on two cores. With the time limit that is given here it
only shows that the way works: frames, CNN, workers. Chance gives -20.3, and a won game is 21.

Run: python examples/learn_pong.py [--minutes 10]       (needs pip install ".[learn,atari]")
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium

from shoal.learn import train


def make_pong() -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1)
    env = gymnasium.wrappers.AtariPreprocessing(env, frame_skip=4, scale_obs=False)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Pong by PPO.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = train(
        make_pong, options.envs, steps=options.rollout, total_steps=10_000_000, minutes=options.minutes,
        seed=options.seed, screen=True,
    )  # fmt: skip
    last = found.history[-1]
    print(f"mean return {last['return']:.1f} after {int(last['steps'])} steps and {last['seconds']:.0f} s")


if __name__ == "__main__":
    main()
