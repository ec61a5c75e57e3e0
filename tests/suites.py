"""The two halves of the tests: "frameworks" has the files that import torch, JAX or Numba, "engine" has the others.

A process that has imported all of them takes seconds to start and thrice as long to fork, so `make test` runs the
halves in processes of their own: `pytest --suite engine` and `pytest --suite frameworks`. What a file says decides, so
a new file needs no row anywhere.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

NAMES = "torch|torchrl|tensordict|jax|numba|stable_baselines3|sb3_contrib|tianshou|skrl|flax|optax"
FRAMEWORK = re.compile(
    rf"^\s*(import|from) ({NAMES})\b"
    rf"|importorskip\(f?\"({NAMES})\b"
    r"|shoal\.(compiled|torchrl|learn)\b|from shoal import compiled"
    r"|\bstable_baselines\(",  # of tests/wrappers/kit.py
    re.MULTILINE,
)


@functools.cache
def suite_of(path: Path) -> str:
    """Return the suite that a test file belongs to."""
    return "frameworks" if FRAMEWORK.search(path.read_text()) else "engine"
