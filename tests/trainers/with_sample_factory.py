"""Sample Factory's PPO over its own batched envs and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

import functools
import logging
import tempfile
from typing import Any

import gymnasium
import torch
from ladder import OURS, Cell, Clock, Training, climb
from sample_factory.algo.utils.misc import EPISODIC
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sample_factory.utils.utils import log

from shoal.dialects.sample_factory import make_env

NUM_ENVS = 16


def make_one(env_id: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> Any:
    """Return one env, of which Sample Factory batches as many as `num_envs_per_worker` says."""
    return gymnasium.make(env_id, render_mode=render_mode)


def config(env_id: str, who: str, seed: int, steps: int, folder: str) -> Any:
    """Return the settings of a run in one process, which is deterministic."""
    settings = {
        "env": env_id, "experiment": who, "train_dir": folder, "device": "cpu", "seed": seed, "num_workers": 1,
        "num_envs_per_worker": 1 if who == OURS else NUM_ENVS, "worker_num_splits": 1, "batched_sampling": True,
        "serial_mode": True, "async_rl": False, "rollout": 32, "batch_size": 512, "use_rnn": False, "recurrence": 1,
        "train_for_env_steps": steps, "save_every_sec": 3600, "decorrelate_experience_max_seconds": 0,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    parser, _ = parse_sf_args(arguments)
    parser.add_argument("--env_agents", type=int, default=NUM_ENVS)
    return parse_full_cfg(parser, arguments)


def train(env_id: str, steps: int, who: str, seed: int) -> Training:
    """Train for so many steps."""
    register_env(env_id, functools.partial(make_env, backend="hybrid") if who == OURS else make_one)
    returns: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        _, runner = make_runner(config(env_id, who, seed, steps, folder))
        runner.register_episodic_stats_handler(
            lambda runner, message, policy: returns.extend(message[EPISODIC]["reward"].tolist())
        )
        runner.init()
        with Clock() as clock:
            runner.run()
    return Training(returns, sum(runner.env_steps.values()), clock.seconds)


if __name__ == "__main__":
    log.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = {"theirs": "its batched envs", "ours": "shoal.dialects.sample_factory"}
    cells = [
        Cell("PPO", "CartPole-v1", **names, train=functools.partial(train, "CartPole-v1", 30_000)),
        Cell("PPO", "HalfCheetah-v5", **names, train=functools.partial(train, "HalfCheetah-v5", 20_000)),
    ]
    climb("Sample Factory", ["sample-factory", "gymnasium", "torch"], cells)
