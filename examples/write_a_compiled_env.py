"""From a Gymnasium class to a compiled one: a balloon that must stay at its height in gusts of wind.

The same env twice: as one usually writes it, and as Shoal can compile it. Shows that both do the same, that the
compiled one does the same as itself in plain Python, and how fast each of them is.

    python examples/write_a_compiled_env.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import shoal
from shoal import compiled

OBSERVATIONS = spaces.Box(-np.inf, np.inf, (3,), np.float32)  # height, speed, gust
ACTIONS = spaces.Discrete(3)  # let air out, wait, heat
STEPS = 200


class BalloonGym(gymnasium.Env[Any, Any]):
    """The balloon as a Gymnasium class: its state is in attributes, and `step` returns everything."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.height = self.np_random.uniform(-1.0, 1.0)
        self.speed, self.gust, self.steps = 0.0, 0.0, 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.gust = 0.9 * self.gust + self.np_random.normal(0.0, 0.02)
        self.speed = 0.95 * self.speed + 0.02 * (int(action) - 1) + 0.1 * self.gust
        self.height += self.speed
        self.steps += 1
        return self._observe(), 1.0 - abs(self.height), abs(self.height) > 3.0, self.steps >= STEPS, {}

    def _observe(self) -> Any:
        return np.array([self.height, self.speed, self.gust], np.float32)


class Balloon(compiled.Env):
    """The balloon as a class that can be compiled.

    Its state is a record, which is handed to static methods; random numbers come from `rng`; observations are written
    where they are to lie; the steps are counted by Shoal. What one might want to vary is in `params`.
    """

    observation_space, action_space = OBSERVATIONS, ACTIONS
    max_episode_steps = STEPS
    state = {"height": float, "speed": float, "gust": float}
    params = {"wind": 0.02}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.height = compiled.uniform(rng, -1.0, 1.0)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.gust = 0.9 * state.gust + compiled.normal(rng, 0.0, state.wind)
        state.speed = 0.95 * state.speed + 0.02 * (action - 1) + 0.1 * state.gust
        state.height += state.speed
        return 1.0 - abs(state.height), abs(state.height) > 3.0

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.height
        obs[1] = state.speed
        obs[2] = state.gust


class Calm:
    """A generator for days without wind."""

    def normal(self, mean: float, std: float) -> float:
        return mean


@compiled.policy
def steer(obs: Any, action: Any, rng: Any, weights: Any) -> None:
    """Heat where the balloon is, or will be, too low. Compiled too, inside of a rollout."""
    wish = obs[0] * weights[0] + obs[1] * weights[1] + obs[2] * weights[2]
    action[0] = 2 if wish < -0.05 else 0 if wish > 0.05 else 1


def check() -> None:
    """The two classes draw other numbers, so they are compared step by step, from the same state and without wind."""
    old, new = BalloonGym(), compiled.as_gymnasium(Balloon)
    old.reset(seed=0)
    new.reset(seed=0)
    old.np_random = Calm()  # type: ignore[assignment]
    new.wind = 0.0
    draw = np.random.default_rng(0)
    for _ in range(1000):
        old.height, old.speed, old.gust = draw.normal(0.0, (2.0, 0.1, 0.1)).tolist()
        new.state.height, new.state.speed, new.state.gust = old.height, old.speed, old.gust
        action = int(draw.integers(3))
        for a, b in zip(old.step(action)[:3], new.step(action)[:3], strict=True):
            assert np.array_equal(a, b)
    print("both classes step in the same way")
    plain = shoal.Pool(Balloon, 8, backend="serial", seed=0)
    fast = shoal.Pool(Balloon, 8, seed=0)
    with plain, fast:
        one, other = plain.rollout("random", 500, seed=1), fast.rollout("random", 500, seed=1)
    assert np.array_equal(one.obs, other.obs)
    assert np.array_equal(one.reward, other.reward)
    print("plain Python and compiled code give the same bits")


def rate(env: Any, num_envs: int, seconds: float, **options: Any) -> float:
    """Steps/s of a pool, by one call of `step` each."""
    with shoal.Pool(env, num_envs, seed=0, **options) as pool:
        pool.reset()
        actions = np.random.default_rng(0).integers(0, 3, num_envs)
        pool.step(actions)
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            pool.step(actions)
            steps += num_envs
        return steps / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each measurement (%(default)s)")
    options = parser.parse_args()
    check()
    old = rate(BalloonGym, min(options.num_envs, 64), options.seconds, backend="serial")
    new = rate(Balloon, options.num_envs, options.seconds)
    print(f"Gymnasium class: {old:,.0f} steps/s; compiled: {new:,.0f} steps/s, {new / old:,.0f} times as many")
    with shoal.Pool(Balloon, options.num_envs, seed=0) as pool:
        pool.set_attr("wind", list(np.linspace(0.0, 0.2, options.num_envs)))  # each in a weather of its own
        rollout = pool.rollout(steer, STEPS, params=[np.array([1.0, 10.0, 5.0])])
        calm, stormy = np.array_split(rollout.reward.mean(axis=0), 2)
        print(f"mean reward of the policy: {calm.mean():.2f} in the calmer half, {stormy.mean():.2f} in the other")


if __name__ == "__main__":
    main()
