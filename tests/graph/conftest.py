"""How these tests are run: most of their time goes into compiling."""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
from pathlib import Path

import pytest


def xla_flags() -> str:
    """Code that runs once need not be good: the older of XLA's two ways to emit it takes half the time.

    XLA ends the process for a flag that it does not know, so one that may go some day is looked for first.
    """
    flags, passing = "--xla_backend_optimization_level=0", "xla_cpu_use_fusion_emitters"
    jaxlib = importlib.util.find_spec("jaxlib")
    library = Path(jaxlib.origin).with_name("libjax_common.so") if jaxlib and jaxlib.origin else None
    if library is not None and library.exists():
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(passing.encode()) >= 0:
                flags += f" --{passing}=false"
    return flags


# Before anybody imports JAX.
os.environ.setdefault("XLA_FLAGS", xla_flags())


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where several tests make the same program, JAX compiles it for the first of them only."""
    if "jax" in sys.modules:
        jax = sys.modules["jax"]
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
