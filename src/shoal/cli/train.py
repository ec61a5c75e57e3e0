"""`shoal train`: trains a policy by PPO; `shoal play` (see `play`) shows what was learned."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.cli import report, work
from shoal.errors import ShoalError
from shoal.support.optional_dependencies import require
from shoal.support.usage import UsageError


def run(options: argparse.Namespace) -> int:
    """Run `shoal train`. Ctrl-C ends it after the present update, with a checkpoint."""
    with work.refusing("shoal train", ImportError):
        training = require("shoal.learn.training", "shoal train needs torch", "learn")
    if options.plot:
        report.check_plot(options.plot)
    if options.video and options.env is None:
        raise UsageError("a video needs the env's id")
    if options.env is None and not options.resume:
        raise UsageError("which env? Give a Gymnasium id or module:callable, or --resume with --out FOLDER")
    if options.env is not None:
        work.look_here(options.env)
    try:
        result = training.train(_env(options), options.envs, **_chosen(options))
    except (ShoalError, ValueError, TypeError, ImportError, FileNotFoundError) as error:
        raise UsageError(work.first_line(str(error))) from error
    console = Console()
    last = result.history[-1] if result.history else None
    if last is not None:
        state = "solved" if result.solved else "interrupted" if result.interrupted else "done"
        console.print(
            f"{state}: mean return {last['return']:.1f} after {int(last['steps']):,} steps in {last['seconds']:.1f} s, "
            f"{last['steps_per_s']:,.0f} steps/s",
            highlight=False,
        )
    if options.out:
        console.print(f"checkpoint and progress.csv are in {options.out}; shoal play {options.out} shows it")
    if options.plot and result.history:
        logs = require("shoal.learn.logs", "a plot needs torch", "learn")
        logs.plot(result.history, options.plot, str(options.env or options.out), options.target_return)
        console.print(f"plot saved to {options.plot}")
    if options.video:
        from shoal.cli import play

        play.record(options.env, result.policy, options.video, episodes=1, seed=options.seed)
        console.print(f"video saved to {options.video}")
    return 130 if result.interrupted else 0


def _env(options: argparse.Namespace) -> Any:
    """Return what is trained: an id as it is, because a checkpoint can keep that, or what a path names."""
    if options.env is None or ":" not in options.env:
        return options.env
    return work.env_fn(options.env)


def _chosen(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `shoal.learn.train`."""
    given: dict[str, Any] = {
        "backend": options.backend, "device": options.device, "seed": options.seed, "folder": options.out,
        "resume": options.resume, "trusted": options.trust, "target_return": options.target_return,
        "minutes": options.minutes, "screen": True, "tensorboard": options.tensorboard, "wandb": options.wandb,
        "learner_threads": options.learner_threads, "overlap": options.overlap, "options": {},
    }  # fmt: skip
    if options.plan:
        given["options"]["plan"] = str(options.plan)
    if options.workers:
        given["options"]["num_workers"] = options.workers
    if options.steps:
        given["total_steps"] = options.steps
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set: expected NAME=VALUE, such as learning_rate=1e-3, found {text!r}")
        given[name.strip()] = _value(value)
    return given


def _value(text: str) -> Any:
    """Read a hyperparameter: a number, true, false, none, numbers with commas between them, or a word."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(_value(part) for part in text.split(",") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def checkpoint_of(path: Path) -> Path:
    """Return the checkpoint that is meant: a file, or the one in a folder."""
    found = path / "checkpoint.pt" if path.is_dir() else path
    if not found.exists():
        raise UsageError(f"there is no checkpoint {str(found)!r}")
    return found
