"""Rows of infos, copied word by word in C and in Python: the same, and only where all lanes look alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import native
from shoal.native import twin
from shoal.native.layout import INFO_BYTES, STATUS_FINAL, STATUS_INFO, STATUS_NOTE

KINDS = [twin] if native.core is None else [twin, native.core]
IDS = ["twin", "native"][: len(KINDS)]
HEAD = b"\x03\0\0\0\0\0\0\0\x02\x02\x05"


@pytest.fixture(params=KINDS, ids=IDS)
def take(request: pytest.FixtureRequest) -> Any:
    return request.param.take_infos


def infos(lanes: int) -> tuple[Any, Any]:
    """Flags and rows of lanes that all look alike; their values are anything, NaNs included."""
    rows = np.random.default_rng(lanes).integers(0, 256, (lanes, INFO_BYTES), np.uint8)
    rows[:, : len(HEAD)] = np.frombuffer(HEAD, np.uint8)
    return np.full(lanes, STATUS_INFO, np.uint8), rows


@pytest.mark.parametrize("lanes", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [2, 5, INFO_BYTES // 8])
def test_words_become_rows(take: Any, lanes: int, count: int) -> None:
    flags, rows = infos(lanes)
    words = np.empty((count, lanes))
    assert take(flags, rows, HEAD, words)
    assert words.T.tobytes() == rows[:, : count * 8].tobytes()


@pytest.mark.parametrize("flag", [0, STATUS_NOTE | STATUS_INFO, STATUS_FINAL | STATUS_INFO, STATUS_NOTE])
def test_a_lane_with_another_flag_is_refused(take: Any, flag: int) -> None:
    flags, rows = infos(5)
    flags[3] = flag
    assert not take(flags, rows, HEAD, np.empty((4, 5)))


@pytest.mark.parametrize("place", [0, 7, 8, 10])
def test_a_lane_with_another_head_is_refused(take: Any, place: int) -> None:
    flags, rows = infos(5)
    rows[4, place] ^= 1
    assert not take(flags, rows, HEAD, np.empty((4, 5)))


@pytest.mark.skipif(native.core is None, reason="the twin relies on NumPy's own checks")
def test_the_core_never_goes_out_of_bounds() -> None:
    flags, rows = infos(4)
    take, words = native.core.take_infos, np.empty((4, 4))
    for wrong in (
        (flags[:3], rows, HEAD, words),
        (flags, rows[:3], HEAD, words),
        (flags, rows, HEAD * 50, words),
        (flags, rows, HEAD, np.empty((65, 4))),
        (flags, rows, HEAD, np.empty(15)),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            take(*wrong)
    with pytest.raises(BufferError):
        take(flags, rows, HEAD, words.tobytes())
