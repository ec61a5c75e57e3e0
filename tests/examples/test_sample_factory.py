"""The Sample Factory example trains: in the environment of its trainer, see `make test-trainers`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sample_factory_ppo.py"
MISSING = importlib.util.find_spec("sample_factory") is None


@pytest.mark.skipif(MISSING, reason="Sample Factory is not installed: make test-trainers does that")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_sample_factory_learns_on_shoals_envs(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "50000", "--backend", backend],
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"mean return ([\d.]+) of", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found.group(1)) >= 100
