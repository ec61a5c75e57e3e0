"""The RLlib example trains: in an environment of its own, see `make test-rllib`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rllib_ppo.py"
MISSING = any(importlib.util.find_spec(name) is None for name in ("ray", "tree", "pyarrow"))  # which RLlib needs


@pytest.mark.skipif(MISSING, reason="RLlib is not installed: make test-rllib does that, in an environment of its own")
@pytest.mark.timeout(600)
def test_rllib_learns_on_shoals_envs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--iterations", "20", "--reward", "150"],
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"mean return ([\d.]+) after", done.stdout)
    assert found is not None
    assert float(found.group(1)) >= 150
