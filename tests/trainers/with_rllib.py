"""RLlib's PPO over Gymnasium's vector envs, which it makes itself, and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

import functools
import logging
from typing import Any

import gymnasium
import ray
import torch
from ladder import OURS, Cell, Clock, Training, climb
from ray.rllib.algorithms.ppo import PPOConfig
from ray.tune.registry import register_env

import shoal

NUM_ENVS, STEPS = 16, 64
BACKENDS = {"CartPole-v1": "serial", "HalfCheetah-v5": "hybrid"}  # what costs little is stepped here


def make_one(settings: Any) -> Any:
    """Return one env, of which RLlib makes as many as `num_envs_per_env_runner` says."""
    return gymnasium.make(settings["id"])


def make_all(settings: Any) -> Any:
    """Return all envs of an env runner as one."""
    return shoal.make(settings["id"], settings.get("num_envs", 1), backend=BACKENDS[settings["id"]])


def train(env_id: str, rollouts: int, who: str, seed: int) -> Training:
    """Train PPO for some rollouts, in this process."""
    register_env("ladder", make_all if who == OURS else make_one)
    returns: list[float] = []
    # "vector_entry_point" asks the registered function for a vector env; "sync" makes a SyncVectorEnv of single envs.
    mode = "vector_entry_point" if who == OURS else "sync"
    config = (
        PPOConfig()
        .environment("ladder", env_config={"id": env_id})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS, gym_env_vectorize_mode=mode)
        .training(train_batch_size_per_learner=NUM_ENVS * STEPS, minibatch_size=256, num_epochs=4)
        .callbacks(on_episode_end=lambda episode, **_: returns.append(float(episode.get_return())))
        .debugging(log_level="ERROR", seed=seed)
    )
    algorithm = config.build_algo()
    try:
        algorithm.train()
        with Clock() as clock:
            for _ in range(rollouts):
                algorithm.train()
    finally:
        algorithm.stop()
    return Training(returns, rollouts * NUM_ENVS * STEPS, clock.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the networks are small, and some cores are for the envs
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", num_cpus=2)
    names = {"theirs": "gymnasium.vector.SyncVectorEnv", "ours": "shoal.make"}
    cells = [
        Cell("PPO", "CartPole-v1", **names, train=functools.partial(train, "CartPole-v1", 12)),
        Cell("PPO", "HalfCheetah-v5", **names, train=functools.partial(train, "HalfCheetah-v5", 17)),
    ]
    climb("RLlib", ["ray", "gymnasium", "torch"], cells)
