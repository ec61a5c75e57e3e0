"""These tests need TensorFlow and TF-Agents, whose pins do not go with the others': `make test-tf` runs them."""

from __future__ import annotations

import importlib.util
import os

from shoal.backends import launch

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before anybody imports TensorFlow: TF-Agents is written for Keras 2

collect_ignore_glob = [] if importlib.util.find_spec("tf_agents") else ["test_*.py"]

# A worker whose env is of TF-Agents imports it, for seconds: the forkserver of the tests has it already. That of a
# script has not, and its workers import it as those of users do.
if not collect_ignore_glob:
    launch.PRELOAD.append("tf_agents.environments")
