"""A few hundred damaged files for each loader: `make fuzz` takes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.fuzz import fuzz
from fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_a_damaged_file_is_refused_or_sound(target: str, tmp_path: Path) -> None:
    outcomes, harm = fuzz(target, seed=0, count=300, kept=tmp_path)
    assert not harm, "\n".join(harm)
    assert outcomes.total() == 300
    assert outcomes["refused"] < 300, "no change was one that a sound file may have"
