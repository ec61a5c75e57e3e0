"""These tests need TensorFlow and TF-Agents, whose pins do not go with the others': `make test-tf` runs them."""

from __future__ import annotations

import importlib.util
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before anybody imports TensorFlow: TF-Agents is written for Keras 2

collect_ignore_glob = [] if importlib.util.find_spec("tf_agents") else ["test_*.py"]
