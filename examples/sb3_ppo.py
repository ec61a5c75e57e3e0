"""Train CartPole to a mean return of 475 with Stable-Baselines3's PPO on Shoal's SubprocVecEnv.

    python examples/sb3_ppo.py

Nothing but the import of `SubprocVecEnv` and `make_vec_env` differs from the script that you have.
"""

from __future__ import annotations

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback, StopTrainingOnRewardThreshold
from stable_baselines3.common.evaluation import evaluate_policy

from shoal.dialects.sb3 import SubprocVecEnv, make_vec_env


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000, help="at most so many")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the cores are for the envs

    envs = make_vec_env("CartPole-v1", options.envs, seed=options.seed, vec_env_cls=SubprocVecEnv)
    # As many as episodes in an evaluation: all of them at once.
    eval_envs = make_vec_env("CartPole-v1", 20, seed=options.seed + 1000, vec_env_cls=SubprocVecEnv)
    good_enough = StopTrainingOnRewardThreshold(reward_threshold=490, verbose=1)
    callback = EvalCallback(
        eval_envs, callback_on_new_best=good_enough, eval_freq=4096 // options.envs, n_eval_episodes=20, verbose=0
    )
    model = PPO(
        "MlpPolicy", envs, n_steps=256 // options.envs or 1, batch_size=256, n_epochs=20, gae_lambda=0.8, gamma=0.98,
        learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, seed=options.seed, verbose=0,
    )  # fmt: skip
    model.learn(options.steps, callback=callback)
    mean, spread = evaluate_policy(model, eval_envs, n_eval_episodes=40)
    print(f"mean return {mean:.1f} +- {spread:.1f} after {model.num_timesteps} steps")
    envs.close()
    eval_envs.close()


if __name__ == "__main__":
    main()
