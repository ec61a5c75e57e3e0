"""The README's examples, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "README.md", ROOT / "docs" / "wrappers.md"]
EXAMPLES = [one for text in TEXTS for one in re.findall(r"```python\n(.*?)```", text.read_text(), re.DOTALL)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run_as_scripts(example: str, tmp_path: Path) -> None:
    if "stable_baselines3" in example:
        pytest.importorskip("stable_baselines3", reason="this example trains with Stable-Baselines3")
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch with a thread for each core is slow beside other tests
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
