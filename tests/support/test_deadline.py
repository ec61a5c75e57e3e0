"""A deadline counts from now, never runs backwards, and refuses what is no span of time."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np
import pytest

from shoal.support.deadline import NEVER, Deadline


@pytest.mark.parametrize("seconds", [None, math.inf])
def test_for_ever(seconds: Any) -> None:
    deadline = Deadline.after(seconds)
    assert deadline == NEVER
    assert (deadline.left, deadline.passed, deadline.at_ns) == (None, False, -1)


@pytest.mark.parametrize("seconds", [0, 0.0])
def test_at_once(seconds: Any) -> None:
    deadline = Deadline.after(seconds)
    assert (deadline.left, deadline.passed) == (0.0, True)


@pytest.mark.parametrize(
    "seconds", [30, 30.0, np.float64(30), np.float32(30), np.int64(30)], ids=lambda s: type(s).__name__
)
def test_counts_from_now(seconds: Any) -> None:
    before = time.monotonic_ns()
    deadline = Deadline.after(seconds)
    assert before + 30e9 <= deadline.at_ns <= time.monotonic_ns() + 30e9
    assert deadline.left is not None
    assert 0 < deadline.left <= 30
    assert not deadline.passed
    assert deadline.seconds == 30


@pytest.mark.parametrize("seconds", [-1, -0.001, math.nan, -math.inf, "1", [1], object], ids=repr)
def test_refuses_what_is_no_span(seconds: Any) -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        Deadline.after(seconds)


@pytest.mark.parametrize("seconds", [1e10, 1e300, sys.maxsize])
def test_longer_than_the_clock_is_for_ever(seconds: Any) -> None:
    """The clock's word has 63 bits: 292 years."""
    deadline = Deadline.after(seconds)
    assert deadline.at_ns < 2**63
    assert not deadline.passed


def test_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(5)
    monkeypatch.setattr(time, "monotonic_ns", lambda: deadline.at_ns + 1)
    assert (deadline.left, deadline.passed) == (0.0, True)
