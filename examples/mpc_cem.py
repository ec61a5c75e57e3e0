"""Model-predictive control by the cross-entropy method: at each step of a pendulum, thousands of futures are tried.

The controller learns nothing. At each step it sets all lanes of a compiled pool to the pendulum's present state, tries
a sequence of torques in each, and draws the next sequences around the best; then it applies the first torque of what it
has found. The pendulum itself is Gymnasium's. Run: python examples/mpc_cem.py
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np
from rich.progress import Progress

import shoal
from shoal.compiled.library.classic_control import Pendulum


class Model(Pendulum):
    """The pendulum that futures are tried on; no future is cut short."""

    max_episode_steps = None


class Planner:
    """Finds a sequence of torques that earns much from a given state."""

    def __init__(self, pool: shoal.Pool, horizon: int, rounds: int, seed: int):
        self._pool, self._rounds = pool, rounds
        self._mean = np.zeros(horizon)
        self._rng = np.random.default_rng(seed)

    def plan(self, theta: float, omega: float) -> float:
        """Return the torque to apply now."""
        mean, spread = self._mean, np.full_like(self._mean, 2.0)
        for _ in range(self._rounds):
            noise = self._rng.standard_normal((len(mean), self._pool.num_envs))
            torques = np.clip(mean[:, None] + spread[:, None] * noise, -2.0, 2.0)
            best = np.argsort(-self._returns(theta, omega, torques))[: max(2, self._pool.num_envs // 20)]
            mean, spread = torques[:, best].mean(1), torques[:, best].std(1)
        self._mean = np.append(mean[1:], 0.0)  # where the search begins at the next step
        return float(mean[0])

    def _returns(self, theta: float, omega: float, torques: np.ndarray) -> np.ndarray:
        """Return what each lane earns: torques has a row for each step and a column for each lane."""
        self._pool.set_attr("theta", theta)
        self._pool.set_attr("omega", omega)
        total = np.zeros(self._pool.num_envs)
        for row in torques.astype(np.float32):
            total += self._pool.step(row[:, None]).reward
        return total


def episode(env: gymnasium.Env, planner: Planner | None, steps: int, seed: int, progress: Progress) -> float:
    """Return what a planner, or chance where there is none, earns in one episode."""
    env.reset(seed=seed)
    env.action_space.seed(seed)
    bar = progress.add_task("random torques" if planner is None else "planned torques", total=steps)
    total = 0.0
    for _ in range(steps):
        torque = env.action_space.sample() if planner is None else [planner.plan(*env.unwrapped.state)]
        _, reward, _, _, _ = env.step(np.asarray(torque, np.float32))
        total += float(reward)
        progress.advance(bar)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, default=2048, help="futures tried at once")
    parser.add_argument("--horizon", type=int, default=25, help="steps of each")
    parser.add_argument("--rounds", type=int, default=3, help="searches at each step")
    parser.add_argument("--steps", type=int, default=200, help="steps of the episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="compiled", help='"serial" runs without Numba, and slowly')
    options = parser.parse_args()

    env = gymnasium.make("Pendulum-v1")
    with shoal.Pool(Model, options.lanes, backend=options.backend) as pool, Progress() as progress:
        pool.reset(seed=options.seed)
        planner = Planner(pool, options.horizon, options.rounds, options.seed)
        chance = episode(env, None, options.steps, options.seed, progress)
        start = time.perf_counter()
        planned = episode(env, planner, options.steps, options.seed, progress)
        seconds = time.perf_counter() - start
    tried = options.steps * options.rounds * options.horizon * options.lanes
    print(f"return of random torques {chance:.0f}, of planned torques {planned:.0f}")
    print(f"{tried:,} steps tried in {seconds:.1f} s, {tried / seconds:,.0f} a second")


if __name__ == "__main__":
    main()
