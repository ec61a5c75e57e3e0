"""Every example of the site, run as it stands there: `make docs-test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.test_readme import run_example
from site_blocks import BLOCKS, Block

pytestmark = pytest.mark.timeout(600)  # a training takes long on a busy machine


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.can_run], ids=lambda block: block.name)
def test_examples_run_as_scripts(block: Block, tmp_path: Path) -> None:
    run_example(block.text, tmp_path)


def test_what_is_left_to_other_environments() -> None:
    """Says which examples were not run here; `make docs-test` has an environment for each of them."""
    left = sorted({block.module for block in BLOCKS if not block.can_run})
    assert set(left) <= {"cupy", "dm_control", "envpool", "gymnax", "pufferlib", "rllib", "skrl", "tensorflow",
                         "tf_agents", "torchrl", "tianshou", "stable_baselines3", "ray", "jax", "numba", "mpi4py",
                         "pettingzoo"}  # fmt: skip
