"""`shoal play CHECKPOINT`: runs what `shoal train` has learned, in a window, in a video, or for its returns alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console

from shoal.cli import report, work
from shoal.cli.train import checkpoint_of
from shoal.errors import DataError
from shoal.support.optional_dependencies import require
from shoal.support.usage import UsageError

FPS = 30


def run(options: argparse.Namespace) -> int:
    """Run `shoal play`."""
    with work.refusing("shoal play", ImportError):
        training = require("shoal.learn.training", "shoal play needs torch", "learn")
    path = checkpoint_of(options.checkpoint)
    if options.video:
        report.check_file(options.video)
    try:
        env_id = options.env or training.checkpoint.read(path)["setup"]["env"]
        if env_id is None:
            raise UsageError("the checkpoint does not name its env, which was no id: give it by --env module:callable")
        work.look_here(env_id)
        env = _made(env_id, "rgb_array" if options.video else None if options.no_render else "human")
        policy = training.load_policy(path, env.observation_space, env.action_space)
    except DataError as error:
        raise UsageError(work.first_line(str(error))) from error
    env.close()
    mode = "rgb_array" if options.video else None if options.no_render else "human"
    returns = _play(env_id, policy, mode, options.episodes, options.seed, options.video)
    Console().print(
        f"{env_id}: mean return {np.mean(returns):.1f} of {len(returns)} episodes "
        f"({min(returns):.1f} to {max(returns):.1f})",
        highlight=False,
    )
    return 0


def record(env_id: str, policy: Any, path: Path, episodes: int, seed: int) -> None:
    """Write a video of some episodes."""
    _play(env_id, policy, "rgb_array", episodes, seed, path)


def _made(env_id: str, render_mode: str | None) -> Any:
    """Make the env. Those of Shoal's library step as Gymnasium's do, if they have the same ids."""
    if env_id in gymnasium.registry or ":" not in env_id:
        with work.refusing(f"{env_id!r} cannot be made to be shown"):
            if env_id not in gymnasium.registry:
                from shoal import compiled
                from shoal.compiled.library import find

                return compiled.as_gymnasium(find(env_id))
            return gymnasium.make(env_id, render_mode=render_mode)
    return work.env_fn(env_id)()


def _play(env_id: str, policy: Any, mode: str | None, episodes: int, seed: int, video: Path | None) -> list[float]:
    training = require("shoal.learn.training", "shoal play needs torch", "learn")
    env, returns, pictures = _made(env_id, mode), [], []
    if video is not None and env.render_mode != "rgb_array":
        raise UsageError(f"{env_id} cannot be rendered as pictures: its render_mode is {env.render_mode!r}")
    for episode in range(episodes):
        choose = training.policy_function(policy)
        obs, _ = env.reset(seed=seed + episode)
        total, over = 0.0, False
        while not over:
            if video is not None:
                pictures.append(env.render())
            batch = policy.encoder.emulation.unflatten(policy.encoder.emulation.flatten(obs)[None])
            action = _first(choose(batch))
            obs, reward, terminated, truncated, _ = env.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    if video is not None:
        imageio = require("imageio", "videos need imageio", "video")
        imageio.mimwrite(video, pictures, fps=env.metadata.get("render_fps", FPS))
    env.close()
    return returns


def _first(batch: Any) -> Any:
    """Return the only row of a batch of actions."""
    if isinstance(batch, dict):
        return {key: _first(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_first(value) for value in batch)
    return batch[0]
