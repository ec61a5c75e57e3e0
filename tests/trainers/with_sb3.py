"""Stable-Baselines3's PPO and SAC over its own best vector env and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import torch
from ladder import OURS, Cell, Clock, Training, climb
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

import shoal

NUM_ENVS, STEPS = 16, 128


class Returns(BaseCallback):
    """Collects the returns of episodes as they end."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def _on_step(self) -> bool:
        self.found += [float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info]
        return True


def make_env(env_id: str) -> Any:
    """Return an env that reports the return of each episode."""
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))


def envs(env_id: str, who: str) -> Any:
    """Return the envs of a side."""
    env_fns = [functools.partial(make_env, env_id)] * NUM_ENVS
    return shoal.make(env_fns, api="sb3") if who == OURS else DummyVecEnv(env_fns)


def train(env_id: str, rollouts: int, who: str, seed: int) -> Training:
    """Train PPO for some rollouts."""
    vec_env = envs(env_id, who)
    try:
        model = PPO("MlpPolicy", vec_env, n_steps=STEPS, batch_size=512, n_epochs=4, seed=seed, device="cpu")
        returns, total = Returns(), rollouts * NUM_ENVS * STEPS
        model.learn(NUM_ENVS * STEPS, callback=returns)
        with Clock() as clock:
            model.learn(total, callback=returns, reset_num_timesteps=False)
    finally:
        vec_env.close()
    return Training(returns.found, total, clock.seconds)


def train_sac(env_id: str, steps: int, who: str, seed: int) -> Training:
    """Train SAC for so many steps of each env: all wait for the updates, so that nothing depends on time."""
    vec_env = envs(env_id, who)
    try:
        arguments = {"train_freq": 16, "gradient_steps": 1, "learning_starts": 1000, "buffer_size": 50_000}
        model = SAC("MlpPolicy", vec_env, policy_kwargs={"net_arch": [64, 64]}, seed=seed, device="cpu", **arguments)
        returns, total = Returns(), steps * NUM_ENVS
        model.learn(NUM_ENVS, callback=returns)
        with Clock() as clock:
            model.learn(total, callback=returns, reset_num_timesteps=False)
    finally:
        vec_env.close()
    return Training(returns.found, total, clock.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small gain nothing from more
    names = {"theirs": "DummyVecEnv", "ours": "shoal.make(api='sb3')"}
    cells = [
        Cell("PPO", "CartPole-v1", **names, train=functools.partial(train, "CartPole-v1", 20)),
        Cell("PPO", "HalfCheetah-v5", **names, train=functools.partial(train, "HalfCheetah-v5", 10)),
        Cell("SAC", "HalfCheetah-v5", **names, train=functools.partial(train_sac, "HalfCheetah-v5", 1050)),
    ]
    climb("Stable-Baselines3", ["stable-baselines3", "gymnasium", "torch"], cells)
