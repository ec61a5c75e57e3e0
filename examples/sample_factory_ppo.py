"""Train CartPole with Sample Factory's PPO, whose worker steps Shoal's envs as one batched env.

    pip install torch sample-factory shoal "gymnasium>=1.1" "numpy<2"
    python examples/sample_factory_ppo.py

Sample Factory asks the function that `register_env` is given for an env; with batched sampling this may be a batch of
envs, of which each is an agent. That function is all that differs from Sample Factory's own example.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from typing import Any

import torch
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from shoal.dialects.sample_factory import make_env


def config(options: argparse.Namespace, folder: str) -> Any:
    """Return the settings of a run: one worker with one batch of envs, which learns as soon as a batch is full."""
    settings = {
        "env": options.env, "experiment": "shoal", "train_dir": folder, "device": "cpu", "seed": 1,
        # One env for each worker: ours, which is a batch. Double buffering would need two.
        "batched_sampling": True, "num_workers": 1, "num_envs_per_worker": 1, "worker_num_splits": 1,
        "serial_mode": True, "async_rl": False, "rollout": 32, "batch_size": 512, "num_epochs": 4,
        "use_rnn": False, "recurrence": 1, "reward_scale": 0.1, "learning_rate": 1e-3, "gamma": 0.98,
        "train_for_env_steps": options.steps, "save_every_sec": 3600, "decorrelate_experience_max_seconds": 0,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args(arguments)
    parser.add_argument("--env_agents", type=int, default=options.envs, help="envs in a batch")
    return parse_full_cfg(parser, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--steps", type=int, default=150_000)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--backend", default="serial", help='how the worker steps them: "processes" with CPUs to spare')
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the cores are for the envs

    register_env(options.env, functools.partial(make_env, backend=options.backend))
    with tempfile.TemporaryDirectory() as folder:
        _, runner = make_runner(config(options, folder))
        runner.init()
        runner.run()
    returns = list(runner.policy_avg_stats["reward"][0])
    print(f"mean return {sum(returns) / len(returns):.1f} of the last {len(returns)} episodes")


if __name__ == "__main__":
    main()
