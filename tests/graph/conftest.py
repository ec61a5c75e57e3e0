"""Which of these tests can run here, and how: most of their time goes into compiling.

Those of functional envs take gymnax and Gymnasium's own functional envs as peers, which the environment of `make
test-tf` has: gymnax wants an older Gymnasium than the other tests. JAX is not for Python 3.10.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

NEEDS = {
    "test_torch.py": ["torch"],
    "test_torch_cuda.py": ["torch"],
    "test_jax_bind.py": ["jax"],
    "test_jax_pool.py": ["jax"],
    "test_jax_functional.py": ["jax", "gymnax", "flax"],
}
collect_ignore = [
    name for name, modules in NEEDS.items() if any(importlib.util.find_spec(module) is None for module in modules)
]

# Before anybody imports JAX: code that runs once need not be good.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where several tests make the same program, JAX compiles it for the first of them only."""
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
