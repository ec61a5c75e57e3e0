"""The example for compiled envs, run as users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="compiled envs need numba")

EXAMPLE = Path(__file__).parents[2] / "examples" / "write_a_compiled_env.py"


def test_the_example_says_what_it_promises() -> None:
    command = [sys.executable, str(EXAMPLE), "--num-envs", "64", "--seconds", "0.05"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["both classes step in the same way", "plain Python and compiled code give the same bits"]
    assert "mean reward of the policy" in lines[-1]
