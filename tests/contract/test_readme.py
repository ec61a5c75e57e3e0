"""The examples of README and docs, run as they stand there. "```python jax" is for where that module is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from remote.mpi.mpiexec import ROOT_MAY, launcher

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)  # a training takes long on a busy machine
DOCS = ("wrappers.md", "graph.md", "compiled.md", "distributed.md", "guides/simulators.md")
TEXTS = [ROOT / "README.md", *(ROOT / "docs" / name for name in DOCS)]
BLOCK = re.compile(r"```python ?(\w*)\n(.*?)```", re.DOTALL)  # (module, example)
ALL = [found for text in TEXTS for found in BLOCK.findall(text.read_text())]
TENSORFLOW = ("tensorflow", "tf_agents")  # in tests/examples/test_tensorflow.py
EXAMPLES = [one for module, one in ALL if not module or (module not in TENSORFLOW and find_spec(module))]


def run_example(example: str, folder: Path) -> None:
    """As a script, in an empty folder."""
    script = folder / "example.py"
    script.write_text(example)
    env = dict(os.environ)
    env.pop("TF_USE_LEGACY_KERAS", None)  # which the tests set for themselves
    command = [*(launcher(3) if "shoal.serve()" in example else []), sys.executable, str(script)]
    env |= ROOT_MAY
    env["RAY_ADDRESS"] = "local"  # and not a cluster that another test has started, and kills nodes of
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_there_are_examples() -> None:
    assert len(ALL) >= 12


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run_as_scripts(example: str, tmp_path: Path) -> None:
    if "stable_baselines3" in example:
        pytest.importorskip("stable_baselines3", reason="this example trains with Stable-Baselines3")
    run_example(example, tmp_path)
