"""Small parts without a file of their own: seeds, blocks of lanes, common spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from shoal.backends.base import split
from shoal.errors import BadAction, SpaceMismatch
from shoal.memory.messages import BlockSummary
from shoal.planning.building import agree
from shoal.support.checks import check_ids, spread_seed, whole_number


@given(st.integers(1, 500), st.integers(1, 50))
def test_blocks_are_contiguous_and_even(count: int, parts: int) -> None:
    blocks = split(count, min(parts, count))
    sizes = [stop - start for start, stop in blocks]
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == count
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (None, [None, None]),
        (5, [7, 9]),
        (np.int32(5), [7, 9]),
        ([1, None], [1, None]),
        ((1, 2), [1, 2]),
        (np.array([1, 2]), [1, 2]),
    ],
)
def test_seeds_are_given_out_as_gymnasium_does(seed: Any, expected: list[int | None]) -> None:
    assert spread_seed(seed, np.array([2, 4])) == expected


@pytest.mark.parametrize("ids", [[0, 3], (3, 0), np.array([1], np.uint8), 2, np.int64(2), range(4)], ids=repr)
def test_env_ids_of_many_kinds(ids: Any) -> None:
    found = check_ids(ids, 4)
    assert found.dtype == np.int64
    assert found.flags.c_contiguous
    assert found.tolist() == np.atleast_1d(ids).tolist()


@pytest.mark.parametrize("ids", [np.array([2**64 - 1], np.uint64), [0, 0], 4, -1, [], None, {0}, "0"], ids=repr)
def test_env_ids_that_are_none(ids: Any) -> None:
    with pytest.raises(BadAction, match="env_ids"):
        check_ids(ids, 4)


def test_whole_numbers_of_any_integer_type() -> None:
    assert [whole_number("n", value, 1, 3) for value in (1, np.uint8(2), np.int64(3))] == [1, 2, 3]


def summary(*observations: Any, action: Any = None) -> BlockSummary:
    action = spaces.Discrete(2) if action is None else action
    return BlockSummary(
        [(obs, action) for obs in observations], list(range(len(observations))), {"a": 1}, "human", None
    )


SMALL, LARGE = spaces.Box(0, 1, (2,)), spaces.Box(0, 2, (2,))


def test_equal_spaces_are_batched() -> None:
    specs = agree([summary(SMALL, SMALL), summary(SMALL)], 3, "same")
    assert specs.observation_space.shape == (3, 2)
    assert specs.single_observation_space == SMALL
    assert specs.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert (specs.metadata, specs.render_mode) == ({"a": 1}, "human")


def test_bounds_may_differ_where_that_was_asked_for() -> None:
    with pytest.raises(SpaceMismatch, match=r"env 2 .*\n?.*different"):
        agree([summary(SMALL, SMALL), summary(LARGE)], 3, "same")
    specs = agree([summary(SMALL, SMALL), summary(LARGE)], 3, "different")
    assert specs.observation_space.high.max(axis=1).tolist() == [1, 1, 2]  # type: ignore[attr-defined]


def test_shape_and_type_may_never_differ() -> None:
    with pytest.raises(SpaceMismatch, match="env 1"):
        agree([summary(SMALL, spaces.Box(0, 1, (3,)))], 2, "different")
    with pytest.raises(SpaceMismatch, match=r"env 1.*action space"):
        agree([summary(SMALL), summary(SMALL, action=spaces.Discrete(3))], 2, "same")
