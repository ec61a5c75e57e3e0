"""The controller that plans on compiled lanes earns more than chance does, on lanes of plain Python as well."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mpc_cem.py"


def returns(*arguments: str) -> tuple[float, float]:
    done = subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = re.search(r"random torques (-?\d+), of planned torques (-?\d+)", done.stdout)
    assert found is not None, done.stdout
    return float(found.group(1)), float(found.group(2))


def test_a_few_futures_in_plain_python() -> None:
    small = "--lanes 8 --horizon 10 --rounds 2 --steps 40"
    chance, planned = returns("--backend", "serial", *small.split())
    assert planned > chance


def test_many_futures_compiled() -> None:
    pytest.importorskip("numba", reason='this test compiles: pip install ".[compiled]"')
    chance, planned = returns(*["--lanes", "256", "--horizon", "20", "--rounds", "2"])
    assert planned > -400 > chance
