"""The examples of README and of the site's first pages, run as they stand there; `make docs-test` runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remote.mpi.mpiexec import ROOT_MAY, launcher
from site_blocks import BLOCKS, README, ROOT, Block

pytestmark = pytest.mark.timeout(600)  # a training takes long on a busy machine
EXAMPLES = [block for block in BLOCKS if block.can_run and (block.page == README or block.page.parent.name == "start")]


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
    assert len(EXAMPLES) >= 5
    assert len(BLOCKS) >= 50


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.name)
def test_examples_run_as_scripts(block: Block, tmp_path: Path) -> None:
    if "stable_baselines3" in block.text:
        pytest.importorskip("stable_baselines3", reason="this example trains with Stable-Baselines3")
    run_example(block.text, tmp_path)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 130
