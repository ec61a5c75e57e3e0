"""A Ray cluster of several nodes on this machine, one for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes with two CPUs each; this process is connected to it. Tests may add nodes, and kill those."""
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[ray]"')
    from ray.cluster_utils import Cluster

    # Actors find the tests' envs by name, as this process does.
    here = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2, labels={"kind": "simulator"})
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
