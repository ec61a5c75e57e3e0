"""Every example of the site, run as it stands there: `make docs-test`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contract.test_readme import run_example
from site_blocks import BLOCKS, Block

pytestmark = pytest.mark.timeout(600)  # a training takes long on a busy machine
# By default all that can be run here; SHOAL_ONLY names modules, for an environment that was made for these.
ONLY = os.environ.get("SHOAL_ONLY", "").split()
CHOSEN = [block for block in BLOCKS if (block.module in ONLY if ONLY else block.can_run)]
# Modules of which the examples run elsewhere: in the environment of peers, in `make test-tf`, and on a GPU.
ELSEWHERE = {"cupy", "dm_control", "envpool", "gymnax", "pufferlib", "rllib", "skrl", "tensorflow", "tf_agents"}


@pytest.mark.parametrize("block", CHOSEN, ids=lambda block: block.name)
def test_examples_run_as_scripts(block: Block, tmp_path: Path) -> None:
    run_example(block.text, tmp_path)


def test_no_example_is_left_out() -> None:
    if not ONLY:
        assert {block.module for block in BLOCKS if not block.can_run} <= ELSEWHERE
