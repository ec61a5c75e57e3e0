"""One space for agents whose own differ: what goes in comes out again, and what cannot be joined is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces

from shoal.errors import BadAction, BadEnv, BadObservation
from shoal.spaces.leaves import flatten, get_path
from shoal.spaces.shared import SharedSpace

BOX = spaces.Box
BRIGHTEST = np.zeros((4, 5, 3), np.uint8)  # of images that are padded: 0 where neither has a pixel
BRIGHTEST[:, :1], BRIGHTEST[:2] = 9, 255
CASES: dict[str, tuple[list[Space[Any]], Any]] = {
    "equal": ([spaces.Discrete(3)] * 3, spaces.Discrete(3)),
    "boxes": ([BOX(-1, 1, (2,)), BOX(-3, 0.5, (4,))], BOX(np.float32([-3] * 4), np.float32([1, 1, 0.5, 0.5]))),
    "boxes away from 0": ([BOX(2, 3, (1,)), BOX(4, 9, (2,))], BOX(np.float32([2, 0]), np.float32([9, 9]))),
    "images": ([BOX(0, 255, (2, 5, 3), np.uint8), BOX(0, 9, (4, 1, 3), np.uint8)], BOX(0, BRIGHTEST, dtype=np.uint8)),
    "numbers": ([BOX(0, 1, ()), BOX(-1, 0, ())], BOX(-1, 1, ())),
    "only bounds differ": ([BOX(0, 1, (2,)), BOX(-1, 0, (2,))], BOX(-1, 1, (2,))),
    "discretes": ([spaces.Discrete(3), spaces.Discrete(4, start=-2), spaces.Discrete(7)], spaces.Discrete(9, start=-2)),
    "dicts": (
        [
            spaces.Dict({"observation": BOX(0, 1, (n,)), "action_mask": BOX(0, 1, (n + 1,), np.int8)}) for n in (2, 5)
        ],
        spaces.Dict({"observation": BOX(0, 1, (5,)), "action_mask": BOX(0, 1, (6,), np.int8)}),
    ),
    "tuples": (
        [spaces.Tuple((spaces.Discrete(n), spaces.Dict(a=BOX(0, 1, (n, 1))))) for n in (3, 2)],
        spaces.Tuple((spaces.Discrete(3), spaces.Dict(a=BOX(0, 1, (3, 1))))),
    ),
    # What follows can only be flattened: the second value is the width of a row.
    "box and discrete": ([BOX(-1, 1, (2, 2)), spaces.Discrete(3, start=5)], (4, np.float32)),
    "types": ([BOX(-1, 1, (2,), np.float32), BOX(-1, 1, (3,), np.float64)], (3, np.float64)),
    "dimensions": ([BOX(-1, 1, (2, 3)), BOX(-1, 1, (4,))], (6, np.float32)),
    "keys": ([spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=BOX(0, 1, (3,)), c=spaces.Discrete(2))], (5, "f")),
    "lengths": ([spaces.Tuple((spaces.Discrete(2),)), spaces.Tuple((spaces.Discrete(2),) * 2)], (4, np.float32)),
    "choices": ([spaces.MultiDiscrete([3, 2], start=[1, -1]), spaces.MultiDiscrete([[2], [4]])], (6, np.float32)),
    "large numbers": ([BOX(0, 2**31 - 1, (2,), np.int32), spaces.Discrete(3)], (3, np.float64)),
    "bits": ([spaces.MultiBinary((2, 2)), BOX(0, 255, (3,), np.uint8)], (4, np.float32)),
    "a part that cannot be padded": (
        [spaces.Dict(a=BOX(0, 1, (2,)), b=spaces.Discrete(2)), spaces.Dict(a=BOX(0, 1, (2,)), b=BOX(0, 1, (3,)))],
        (5, np.float32),
    ),
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other) and np.shape(one) == np.shape(other)


@pytest.mark.parametrize("case", CASES)
def test_observations_come_out_as_they_went_in(case: str) -> None:
    own, expected = CASES[case]
    names = [f"agent {i}" for i in range(len(own))]
    shared = SharedSpace("observation", names, own)
    if isinstance(expected, Space):
        assert shared.space == expected
        assert not shared.flat
    else:
        assert shared.flat
        assert (shared.space.shape, shared.space.dtype) == ((expected[0],), np.dtype(expected[1]))
    assert shared.same == (case == "equal")
    rows = [np.full((len(own), 5, *leaf.shape), 77, leaf.dtype) for leaf in shared.leaves]
    given = []
    for agent, space in enumerate(own):
        space.seed(agent)
        given.append([space.sample() for _ in range(5)])
        for row, value in enumerate(given[-1]):
            shared.write(agent, value, [array[agent] for array in rows], row)
    for agent, space in enumerate(own):
        batch = shared.take(agent, [array[agent] for array in rows])
        for row, value in enumerate(given[agent]):
            alone = shared.take(agent, [array[agent][row] for array in rows])
            assert same(alone, value)
            for leaf in flatten(space):
                part = get_path(batch, leaf.path)
                assert part.dtype == leaf.dtype
                assert np.array_equal(part[row], get_path(value, leaf.path))


def test_paddings_are_zeros_and_views_are_no_copies() -> None:
    own, _ = CASES["images"]
    shared = SharedSpace("observation", "ab", own)
    target = np.full((2, 4, 5, 3), 77, np.uint8)
    image = np.ones((2, 5, 3), np.uint8)
    shared.write(0, image, [target], 1)
    assert (target[1, :2] == 1).all()
    assert (target[1, 2:] == 0).all()
    assert (target[0] == 77).all()
    assert np.shares_memory(shared.take(0, [target]), target)


@pytest.mark.parametrize("case", ["boxes", "dicts", "tuples", "discretes", "images"])
def test_actions_come_out_as_they_went_in(case: str) -> None:
    own, _ = CASES[case]
    shared = SharedSpace("action", "abc"[: len(own)], own)
    for agent, space in enumerate(own):
        space.seed(agent)
        given = [space.sample() for _ in range(4)]
        leaves = shared.own_leaves[agent]
        batch = [np.array([get_path(value, leaf.path) for value in given]) for leaf in leaves]
        rows = [np.zeros((4, *leaf.shape), leaf.dtype) for leaf in shared.leaves]
        shared.put_actions(agent, batch, rows)
        for row, value in enumerate(given):
            action = shared.take_action(agent, rows, row)
            assert space.contains(action)
            assert same(action, value)


def test_actions_are_copies() -> None:
    shared = SharedSpace("action", "ab", [BOX(0, 1, (2,)), BOX(0, 1, (3,))])
    rows = [np.ones((2, 3), np.float32)]
    action = shared.take_action(0, rows, 0)
    rows[0][:] = 0
    assert action.tolist() == [1, 1]


def test_actions_that_are_not_the_agents_own() -> None:
    shared = SharedSpace("action", ["left", "right"], [spaces.Discrete(3), spaces.Discrete(5)])
    assert shared.take_action(1, [np.array([4, 4])], 1) == 4
    with pytest.raises(BadAction, match=r"'left'.*n=3.*0 to 2.*found 4"):
        shared.take_action(0, [np.array([4, 4])], 0)


@pytest.mark.parametrize("case", ["types", "choices", "keys", "box and discrete"])
def test_actions_are_never_flattened(case: str) -> None:
    with pytest.raises(BadEnv, match=r"(?s)'a' has .*, 'b' has .*wrapper"):
        SharedSpace("action", "ab", CASES[case][0])


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(2))])
def test_what_is_no_array_is_refused(space: Space[Any]) -> None:
    with pytest.raises(BadEnv, match="observation space"):
        SharedSpace("observation", "ab", [space, space])


@pytest.mark.parametrize(
    ("case", "value"),
    [
        ("boxes", np.zeros(4, np.float32)),
        ("dicts", {"observation": np.zeros(2)}),
        ("keys", {"b": np.zeros(3)}),
        ("dimensions", np.zeros(1)),
        ("dimensions", "text"),
        ("box and discrete", np.zeros((2, 3))),
    ],
)
def test_observations_that_do_not_fit_are_refused_by_name(case: str, value: Any) -> None:
    shared = SharedSpace("observation", ["left", "right"], CASES[case][0])
    rows = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in shared.leaves]
    with pytest.raises(BadObservation, match="agent 'left'"):
        shared.write(0, value, rows, 0)
