"""Save a training with its normalization, and go on with it later, in another process if need be.

    python examples/sb3_resume.py --folder run

Each call trains for another stretch: the first one begins, all others go on where the last one stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from stable_baselines3 import PPO

from shoal.dialects.sb3 import SubprocVecEnv, VecNormalize, make_vec_env


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--envs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)

    options.folder.mkdir(parents=True, exist_ok=True)
    model_file, statistics_file = options.folder / "model.zip", options.folder / "normalize.npz"
    envs = make_vec_env("Pendulum-v1", options.envs, seed=0, vec_env_cls=SubprocVecEnv)
    if model_file.exists():
        envs = VecNormalize.load(statistics_file, envs)
        model = PPO.load(model_file, env=envs)
        print(f"going on at step {model.num_timesteps}, with statistics of {envs.obs_rms.count:.0f} observations")
    else:
        envs = VecNormalize(envs, gamma=0.9)
        model = PPO("MlpPolicy", envs, n_steps=256, gamma=0.9, learning_rate=1e-3, seed=0)
        print("beginning")
    model.learn(options.steps, reset_num_timesteps=False)
    model.save(model_file)
    envs.save(statistics_file)
    print(f"stopped at step {model.num_timesteps}, with statistics of {envs.obs_rms.count:.0f} observations")
    envs.close()


if __name__ == "__main__":
    main()
