"""A function made anew for a compiler: its constants are what the target wants them to be."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compiled.narrow import narrow_constant
from shoal.compiled.rebuild import Rebuilder

SCALE = 0.5


def function(x: Any, low: float = 1.5, *, high: float = 2.5, name: str = "kept") -> Any:
    inner = [x * 3.5 for _ in range(2)]
    return x * SCALE, low, high, 4.5, inner[1], name


def test_floats_become_narrow_wherever_they_stand() -> None:
    made = Rebuilder(lambda one: one, {}, narrow_constant)(function)
    *numbers, name = made(np.float32(2.0))
    assert [type(one) for one in numbers] == [np.float32] * 5
    assert [float(one) for one in numbers] == [1.0, 1.5, 2.5, 4.5, 7.0]
    assert name == "kept"
    assert function.__kwdefaults__ == {"high": 2.5, "name": "kept"}
