"""The examples of shoal.learn do what they say, run as users run them, for a short while."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_cartpole_is_solved() -> None:
    assert re.search(r"^solved: mean return", run("learn_cartpole.py", "--compiled", "--seed", "1"))


@pytest.mark.parametrize(
    ("name", "needs", "more"),
    [
        ("learn_pendulum.py", "numba", ()),
        ("learn_image_game.py", "numba", ("--envs", "4")),
        ("learn_cheetah.py", "mujoco", ()),
        ("learn_pong.py", "ale_py", ("--envs", "2", "--rollout", "8")),
    ],
)
def test_examples_run(name: str, needs: str, more: tuple[str, ...]) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"the example needs {needs}")
    assert "mean return" in run(name, "--minutes", "0.01", *more)
