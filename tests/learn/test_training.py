"""Whole trainings: they learn, stop when they should, write what they say, and go on bit for bit."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learn.kit import Recall
from shoal.cli.main import main
from shoal.errors import DataError
from shoal.learn import load_policy, train
from shoal.learn.checkpoint import read
from shoal.learn.logs import RecentEpisodes
from shoal.learn.training import policy_function

QUICK: dict[str, Any] = {"steps": 16, "epochs": 2, "learner_threads": 1}


def weights(result: Any) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in result.policy.parameters()])


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("CartPole-v1", {"backend": "serial"}),
        ("CartPole-v1", {"backend": "processes", "overlap": True}),
        ("CartPole-v1", {"backend": "compiled"}),
        ("Pendulum-v1", {"backend": "compiled"}),
        (Recall, {"backend": "serial", "memory": "lstm"}),
        ("Pendulum-v1", {"backend": "serial"}),
    ],
    ids=["host", "overlap", "compiled", "compiled-floats", "memory", "floats"],
)
def test_a_training_that_was_stopped_goes_on_bit_for_bit(env: Any, options: Any, tmp_path: Path) -> None:
    same = {**QUICK, **options, "seed": 3}
    whole = train(env, 8, updates=6, **same)
    train(env, 8, updates=3, folder=tmp_path, **same)
    rest = train(env if callable(env) else None, folder=tmp_path, resume=True, updates=6, trusted=True)
    assert torch.equal(weights(whole), weights(rest))
    assert [row["steps"] for row in rest.history] == [row["steps"] for row in whole.history[3:]]
    with (tmp_path / "progress.csv").open() as file:
        assert [int(row["steps"]) for row in csv.DictReader(file)] == [int(row["steps"]) for row in whole.history]
    for mine, theirs in zip(rest.history, whole.history[3:], strict=True):
        assert mine["value_loss"] == theirs["value_loss"]


def test_cartpole_is_learned() -> None:
    settings: dict[str, Any] = {"learning_rate": 2e-3, "clip_values": False, "normalize_reward": True, "steps": 32}
    result = train("CartPole-v1", 128, backend="compiled", target_return=195, total_steps=400_000, **settings)
    assert result.solved
    choose = policy_function(result.policy)
    assert choose(np.zeros((5, 4), np.float32)).shape == (5,)


def test_goals_end_a_training(tmp_path: Path) -> None:
    late = train("CartPole-v1", 4, backend="serial", minutes=1e-9, **QUICK)
    assert len(late.history) == 1
    short = train("CartPole-v1", 4, backend="serial", total_steps=100, **QUICK)
    assert [row["steps"] for row in short.history] == [64, 128]


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    result = train("CartPole-v1", 4, backend="serial", folder=tmp_path, total_steps=10**9, **QUICK)
    timer.join()
    assert result.interrupted
    assert read(tmp_path / "checkpoint.pt")["updates"] == len(result.history)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="learning_rat"):
        train("CartPole-v1", 4, learning_rat=1.0)
    with pytest.raises(ValueError, match="folder"):
        train("CartPole-v1", 4, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing of use")
    with pytest.raises(DataError, match="no checkpoint"):
        train("CartPole-v1", 4, resume=True, folder=tmp_path)
    train("CartPole-v1", 4, backend="serial", folder=tmp_path, updates=1, **QUICK)
    from gymnasium import spaces

    with pytest.raises(DataError, match="other spaces"):
        load_policy(tmp_path / "checkpoint.pt", spaces.Box(-1, 1, (9,), np.float32), spaces.Discrete(2))


def test_the_mean_is_of_the_last_hundred_episodes() -> None:
    recent = RecentEpisodes()
    for k in range(30):
        recent.add(10, 10.0 * k, 20.0 * k)
    assert (recent.count, recent.total) == (100, 300)
    assert recent.mean_return == pytest.approx(np.mean(range(20, 30)))
    again = RecentEpisodes()
    again.load(recent.state())
    assert (again.mean_return, again.mean_length, again.total) == (recent.mean_return, recent.mean_length, 300)


def test_the_commands_train_and_play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot, video = tmp_path / "run", tmp_path / "curve.png", tmp_path / "play.mp4"
    words = ["train", "CartPole-v1", "-n", "4", "--backend", "serial", "--steps", "200", "--learner-threads", "1"]
    assert main([*words, "--set", "steps=16", "hidden=32,32", "--out", str(out), "--plot", str(plot)]) == 0
    assert main(["train", "--resume", "--out", str(out), "--steps", "400"]) == 0
    assert main(["play", str(out), "--no-render", "--episodes", "2"]) == 0
    assert main(["play", str(out), "--video", str(video), "--episodes", "1"]) == 0
    said = capsys.readouterr().out
    assert "mean return" in said
    assert "of 2 episodes" in said
    assert plot.stat().st_size > 5000
    assert video.stat().st_size > 1000
    with (out / "progress.csv").open() as file:
        assert int(list(csv.DictReader(file))[-1]["steps"]) >= 400
    assert main(["train", "--resume"]) == 2
    assert main(["train", "NoSuchEnv-v0"]) == 2
    assert main(["train", "CartPole-v1", "--set", "nonsense"]) == 2


RANKS = """
import sys, torch
from shoal.learn import train
result = train("CartPole-v1", 4, backend="serial", steps=16, epochs=1, minibatches=1, updates=3, seed=2,
               learner_threads=1, normalize_obs=True, normalize_reward=True, folder=sys.argv[1])
whole = torch.cat([one.detach().reshape(-1) for one in result.policy.parameters()])
torch.save([whole, result.history[-1]["steps"]], f"{sys.argv[1]}/weights.{torch.distributed.get_rank()}")
"""


def test_two_ranks_learn_one_policy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first, steps), (second, _) = (torch.load(tmp_path / f"weights.{rank}") for rank in (0, 1))
    assert torch.equal(first, second)
    assert steps == 3 * 2 * 4 * 16
    assert sorted(path.name for path in tmp_path.glob("*checkpoint.pt")) == ["0.checkpoint.pt", "1.checkpoint.pt"]


def test_two_ranks_make_the_gradient_of_one_learner() -> None:
    """The gradient of two halves, summed by hand as ranks do it, is that of the whole."""
    from gymnasium import spaces

    from shoal.learn.ppo import Experience, Hyperparameters, Learner, Policy
    from shoal.ranks import Ranks

    box = spaces.Box(-1, 1, (3,), np.float32)
    settings = Hyperparameters(epochs=1, minibatches=1, max_gradient=1e6)
    torch.manual_seed(0)
    policy = Policy(box, spaces.Discrete(2), settings)
    whole = Experience.empty(policy, 5, 6)
    whole.obs.normal_(), whole.reward.normal_(), whole.valid.fill_(True)
    whole.valid[2, 4] = False
    alone = Learner(policy, 6)
    targets = alone.targets(whole)
    alone.gradient.zero_()
    alone.loss(next(alone.minibatches(targets, torch.arange(6)))).backward()
    expected = alone.gradient.clone()
    parts = [next(alone.minibatches(targets, torch.arange(6)[half])) for half in (slice(0, 4), slice(4, 6))]
    moments = [
        torch.stack([n[4], n[2] * n[4], n[2] * n[2] * n[4]]).flatten(1).sum(1) for n in (p.numbers for p in parts)
    ]
    total = torch.zeros_like(expected)
    for part in parts:
        one = Learner(policy, 6, ranks=Ranks(0, 2), reduce=lambda value: value.copy_(sum(moments)))  # type: ignore[arg-type]
        one.gradient.zero_()
        one.loss(part).backward()
        total += one.gradient
    torch.testing.assert_close(total / 2, expected, atol=1e-6, rtol=1e-4)
