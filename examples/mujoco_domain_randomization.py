"""Domain randomization: 64 cart-poles of which each has its own masses and friction, stepped as one batch.

    python examples/mujoco_domain_randomization.py

An env of your own is a model in MuJoCo's XML and three functions over arrays with a row for each lane: `observe`,
`reward` and `done`. Here a fourth one, `randomize`, draws a new cart and pole before each episode. A controller that
was tuned on the model as it is written is then tried on all of them: how often it falls says how robust it is.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import numpy as np

import shoal
from shoal.mujoco import BatchedMujocoEnv, LaneModels

XML = """
<mujoco model="cart and pole">
  <option timestep="0.01"/>
  <worldbody>
    <body name="cart">
      <joint name="rail" type="slide" axis="1 0 0" damping="1"/>
      <geom type="box" size="0.2 0.1 0.05" mass="1"/>
      <body name="pole">
        <joint name="hinge" type="hinge" axis="0 1 0" damping="0.01"/>
        <geom type="capsule" fromto="0 0 0 0 0 1" size="0.03" mass="0.2"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="rail" gear="20" ctrlrange="-1 1" ctrllimited="true"/></actuator>
</mujoco>
"""
GAINS = np.array([0.4, 2.6, 0.5, 0.7])  # of position, angle and their velocities


def observe(now: Any) -> Any:
    return np.concatenate([now.qpos, now.qvel], axis=1)


def reward(now: Any, before: Any, actions: Any) -> Any:
    effort = np.square(actions).sum(axis=1)
    return 1.0 - 0.01 * effort, {"effort": effort}


def done(now: Any) -> Any:
    return (np.abs(now.qpos[:, 1]) > 0.5) | (np.abs(now.qpos[:, 0]) > 2.4)


def begin(qpos: Any, qvel: Any, rngs: Any) -> None:
    for row, rng in enumerate(rngs):
        qpos[row] += rng.uniform(-0.1, 0.1, 2)


def randomize(models: LaneModels, rngs: Any, spread: float) -> None:
    """Make poles and carts up to `1 + spread` times as heavy, or light, and rails as much smoother or rougher."""
    drawn = np.array([rng.uniform(-1, 1, 2) for rng in rngs])
    masses, damping = ((1 + spread) ** drawn).T
    models.scale("body_mass", masses)
    models.scale("body_inertia", masses)
    models.scale("dof_damping", damping)
    models.recompute()  # what MuJoCo derives from masses


def fallen(spread: float, num_envs: int, steps: int) -> tuple[float, np.ndarray[Any, Any]]:
    """Return how many of the episodes ended early, and the masses of the poles at the end."""
    make = functools.partial(
        BatchedMujocoEnv, XML, observe=observe, reward=reward, done=done, reset=begin, frame_skip=2,
        max_episode_steps=500, randomize=functools.partial(randomize, spread=spread),
    )  # fmt: skip
    envs = shoal.make(make, num_envs)
    obs, _ = envs.reset(seed=0)
    falls = ends = 0
    for _ in range(steps):
        actions = np.clip(obs @ GAINS, -1, 1).astype(np.float32)[:, None]
        obs, _, terminated, truncated, _ = envs.step(actions)
        falls += int(terminated.sum())
        ends += int((terminated | truncated).sum())
    masses = np.array([model.body("pole").mass[0] for model in envs.get_attr("model")])
    envs.close()
    return falls / max(1, ends), masses


def main() -> None:
    parser = argparse.ArgumentParser(description="Domain randomization in MuJoCo.")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    for spread in (0.0, 0.5, 3.0, 9.0):
        share, masses = fallen(spread, options.num_envs, options.steps)
        print(f"poles of {masses.min():.2f} to {masses.max():.2f} kg: {share:.0%} of the episodes end in a fall")


if __name__ == "__main__":
    main()
