"""The examples do what they say, run as users run them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytest.importorskip("stable_baselines3", reason="the examples train with Stable-Baselines3 and torch")


pytestmark = pytest.mark.timeout(900)  # on a busy machine torch is slow


def run(name: str, *arguments: str, timeout: float = 800) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found.group(1))


@pytest.mark.repeats("a short training of SB3's PPO is compared with SB3's own, weight by weight")
def test_ppo_learns_cartpole() -> None:
    assert number(r"mean return ([\d.]+)", run("sb3_ppo.py", "--seed", "1")) >= 475  # 1 is a quick one


def test_a_training_is_resumed(tmp_path: Path) -> None:
    first = run("sb3_resume.py", "--folder", str(tmp_path / "run"), "--steps", "1024")
    second = run("sb3_resume.py", "--folder", str(tmp_path / "run"), "--steps", "1024")
    assert "beginning" in first
    stop = number(r"stopped at step (\d+)", first)
    assert number(r"going on at step (\d+)", second) == stop
    assert number(r"stopped at step (\d+)", second) == 2 * stop
    seen = [number(r"stopped.*statistics of (\d+)", text) for text in (first, second)]
    assert number(r"going on.*statistics of (\d+)", second) == seen[0]
    assert seen[1] == 2 * seen[0]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ddpg_stores_only_what_has_happened() -> None:
    """Every stored transition is one of a pendulum: its next state follows from its state and action."""
    example = load("baselines_ddpg_noise")
    replay, returns = example.train(steps=450, num_env=3, seed=0)
    assert replay.count == 3 * 450
    assert len(returns) == 3 * 2
    obs, action, next_obs = (getattr(replay, name)[: replay.count] for name in ("obs", "action", "next_obs"))
    theta, speed = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    speed = np.clip(speed + (15 * np.sin(theta) + 3 * action[:, 0]) * 0.05, -8, 8)
    theta = theta + speed * 0.05
    expected = np.stack([np.cos(theta), np.sin(theta), speed], 1)
    assert np.abs(expected - next_obs).max() < 1e-3
    assert not replay.terminated.any()  # cut by time, which is no end


def test_ddpg_resets_the_noise_of_exactly_those_that_began() -> None:
    example = load("baselines_ddpg_noise")
    resets: list[Any] = []

    class Noted(example.OrnsteinUhlenbeck):  # type: ignore[misc]
        def reset(self, which: Any) -> None:
            resets.append(np.array(which))
            super().reset(which)
            assert (self.state[which] == 0).all()

    example.OrnsteinUhlenbeck = Noted
    example.train(steps=202, num_env=3, seed=1)
    assert [i for i, which in enumerate(resets) if which.any()] == [199]
    assert resets[199].all()


@pytest.mark.repeats("what it learns from is checked transition by transition")
def test_ddpg_learns() -> None:
    said = run("baselines_ddpg_noise.py", "--steps", "1100")  # of 4000: over 400 better by then
    first, last = (
        number(rf"mean return {pattern}", said) for pattern in (r"(-\d+) at first", r"-\d+ at first, (-\d+)")
    )
    assert last > first + 300


def test_two_halves_in_flight() -> None:
    said = run("double_buffer.py", "--batches", "20").replace(",", "")
    assert number(r"one batch: (\d+) steps/s", said) > 0
    assert number(r"two halves in turn: (\d+) steps/s", said) > 0


def test_self_play_learns_tic_tac_toe() -> None:
    pytest.importorskip("pettingzoo.classic.tictactoe_v3", reason="this example plays PettingZoo's tic-tac-toe")
    said = run("pettingzoo_selfplay.py", "--updates", "20")
    before, after = (number(rf"{when}: ([\d.]+)% won", said) for when in ("before", "after"))
    lost_before, lost_after = (number(rf"{when}: .*won, ([\d.]+)% lost", said) for when in ("before", "after"))
    assert after > before + 10
    assert lost_after < lost_before - 10
