"""What README, docs and examples say about TensorFlow and TF-Agents, run as users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from contract.test_readme import run_example
from site_blocks import BLOCKS, ROOT, TENSORFLOW

pytestmark = pytest.mark.timeout(900)  # on a busy machine TensorFlow is slow
EXAMPLES = [block.text for block in BLOCKS if block.module in TENSORFLOW]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_of_the_docs_run(example: str, tmp_path: Path) -> None:
    run_example(example, tmp_path)


def test_there_are_some() -> None:
    assert len(EXAMPLES) >= 2


def last_return(name: str, *arguments: str) -> float:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"mean return +([\d.]+)", done.stdout)[-1])


def test_a_dqn_of_tf_agents_learns_cartpole() -> None:
    assert last_return("tf_agents_dqn.py", "--iterations", "2000") > 100
