"""Train CartPole with RLlib's PPO, whose env runners step Shoal's envs.

    pip install "ray[rllib]" torch
    python examples/rllib_ppo.py

RLlib asks for a vector env by `gymnasium.make_vec`. A function that makes one, registered under a name, and
`gym_env_vectorize_mode="vector_entry_point"` are all that it takes; every env runner gets a vector env of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

import shoal


def make_envs(settings: dict[str, Any]) -> Any:
    """What an env runner steps: so many envs as one. RLlib also makes a single one, to look at its spaces."""
    backend = settings.get("backend", "serial")
    return shoal.make(settings.get("id", "CartPole-v1"), settings.get("num_envs", 1), backend=backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60, help="at most so many")
    parser.add_argument("--reward", type=float, default=450.0, help="stop at this mean return")
    parser.add_argument("--runners", type=int, default=1, help="env runners, each an actor of Ray")
    parser.add_argument("--envs", type=int, default=16, help="of each env runner")
    parser.add_argument("--backend", default="serial", help='how a runner steps them: "processes" with CPUs to spare')
    options = parser.parse_args()

    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("shoal-cartpole", make_envs)
    config = (
        PPOConfig()
        .environment("shoal-cartpole", env_config={"id": "CartPole-v1", "backend": options.backend})
        .env_runners(
            num_env_runners=options.runners,
            num_envs_per_env_runner=options.envs,
            gym_env_vectorize_mode="vector_entry_point",
        )
        .training(lr=5e-4, train_batch_size_per_learner=2048, minibatch_size=256, num_epochs=10, gamma=0.98)
        .debugging(log_level="ERROR", seed=0)
    )
    algorithm = config.build_algo()
    mean = float("nan")
    for iteration in range(1, options.iterations + 1):
        found = algorithm.train()["env_runners"]
        mean = found.get("episode_return_mean", float("nan"))
        print(f"iteration {iteration}: mean return {mean:.1f}", flush=True)
        if mean >= options.reward:
            break
    algorithm.stop()
    ray.shutdown()
    print(f"mean return {mean:.1f} after {iteration} iterations")


if __name__ == "__main__":
    main()
