"""Fixtures of the SB3 face. Nothing of SB3 is imported here, nor of torch: other tests of this folder need neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dialects.sb3_envs import RGB
from shoal.dialects import sb3 as face

MAKERS: dict[str, Callable[[Any], Any]] = {
    "dummy": face.DummyVecEnv,
    "subproc": lambda fns: face.SubprocVecEnv(fns, num_workers=2),
    "hybrid": lambda fns: face.SubprocVecEnv(fns, backend="hybrid", num_workers=2),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Each way of making one."""
    return MAKERS[request.param]


@pytest.fixture
def venv(make: Callable[[Any], Any]) -> Iterator[Any]:
    """Three counting envs, each way."""
    made = make([RGB] * 3)
    yield made
    made.close()
