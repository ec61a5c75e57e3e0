"""Spaces become leaves and back; actions are checked and observations are cast, or refused in so many words."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from envs import SPACES, EvenSpace
from shoal.errors import BadAction, BadObservation
from shoal.spaces.leaves import Kind, assemble, flatten, get_path, read_actions, write_observation

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
NESTED = spaces.Dict(
    pair=spaces.Tuple((spaces.Discrete(3, start=2), spaces.Dict(deep=BOX))),
    word=spaces.Text(max_length=4),
    graph=spaces.Graph(spaces.Discrete(2), None),
)


# ---- flatten and assemble ------------------------------------------------------------------------------------


def test_flatten_finds_the_leaves_in_gymnasiums_order() -> None:
    leaves = flatten(NESTED)
    below: dict[str, list[Any]] = {"pair": [(0,), (1, "deep")], "word": [()], "graph": [()]}
    assert [leaf.path for leaf in leaves] == [(key, *rest) for key in NESTED.spaces for rest in below[key]]
    by_path = {leaf.path: leaf for leaf in leaves}
    assert by_path["graph",].kind is Kind.OBJECT
    assert by_path["word",].kind is Kind.TEXT
    assert by_path["pair", 1, "deep"].kind is Kind.ARRAY
    assert by_path["pair", 1, "deep"].name == "['pair'][1]['deep']"


@pytest.mark.parametrize(
    ("space", "kind", "shape", "dtype", "code"),
    [
        (BOX, Kind.ARRAY, (2,), "f4", "f"),
        (spaces.Box(0, 255, (4, 3), np.uint8), Kind.ARRAY, (4, 3), "u1", "u"),
        (spaces.Box(0, 1, (), np.float64), Kind.ARRAY, (), "f8", "f"),
        (spaces.Box(0, 1, (3,), np.bool_), Kind.ARRAY, (3,), "?", "b"),
        (spaces.Discrete(4), Kind.ARRAY, (), "i8", "n"),
        (spaces.MultiDiscrete([2, 3]), Kind.ARRAY, (2,), "i8", "i"),
        (spaces.MultiBinary((2, 2)), Kind.ARRAY, (2, 2), "i1", "i"),
        (spaces.Text(max_length=7), Kind.TEXT, (), "<U7", "o"),
        (spaces.Text(max_length=7, charset="a\0"), Kind.OBJECT, (), "O", "o"),
        (spaces.Sequence(BOX), Kind.OBJECT, (), "O", "o"),
        (spaces.OneOf((BOX, BOX)), Kind.OBJECT, (), "O", "o"),
        (EvenSpace(), Kind.OBJECT, (), "O", "o"),
    ],
    ids=lambda value: str(value).replace("\0", "NUL"),
)
def test_each_space_has_its_leaf(space: Any, kind: Kind, shape: Any, dtype: str, code: str) -> None:
    [leaf] = flatten(space)
    assert (leaf.path, leaf.kind, leaf.shape, leaf.dtype, leaf.code) == ((), kind, shape, np.dtype(dtype), code)
    assert leaf.name == ""


@pytest.mark.parametrize(
    ("space", "low", "high"),
    [
        (spaces.Discrete(3, start=-1), -1, 1),
        (spaces.MultiDiscrete([2, 3], start=[5, 6]), [5, 6], [6, 8]),
        (spaces.MultiBinary(2), [0, 0], [1, 1]),
        (spaces.Box(-2, np.array([3, 4], np.int8), (2,), np.int8), [-2, -2], [3, 4]),
    ],
)
def test_bounds_are_inclusive_and_in_the_fields_type(space: Any, low: Any, high: Any) -> None:
    [leaf] = flatten(space)
    assert leaf.low is not None
    assert leaf.high is not None
    assert (leaf.low.tolist(), leaf.high.tolist()) == (low, high)
    assert (leaf.low.dtype, leaf.high.dtype) == (leaf.dtype, leaf.dtype)
    assert (leaf.low.shape, leaf.high.shape) == (leaf.shape, leaf.shape)
    assert leaf.discrete == (not isinstance(space, spaces.Box))


@pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))
def test_assemble_undoes_taking_apart(space: Any) -> None:
    leaves = flatten(space)
    sample = space.sample()
    again = assemble(space, [get_path(sample, leaf.path) for leaf in leaves])
    assert again is sample or type(again) is type(sample)
    for leaf in leaves:
        assert get_path(again, leaf.path) is get_path(sample, leaf.path)


# ---- actions -------------------------------------------------------------------------------------------------


def read(space: Any, actions: Any, ids: Any = (0, 1), check: Any = "all") -> Any:
    return read_actions(flatten(space), actions, ids, check)


BOX64 = spaces.Box(-1.0, 1.0, (2,), np.float64)
INTS = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "actions", "expected"),
    [
        (spaces.Discrete(3), [0, 2], [0, 2]),
        (spaces.Discrete(3), (0, 2), [0, 2]),
        (spaces.Discrete(3), np.array([0, 2], np.uint8), [0, 2]),
        (spaces.Discrete(3), np.array([0, 2], ">i4"), [0, 2]),
        (spaces.Discrete(3), [np.int64(0), np.int64(2)], [0, 2]),
        (spaces.Discrete(3, start=-1), [-1, 1], [-1, 1]),
        (BOX, [[0, 1], [-1, 0.5]], [[0, 1], [-1, 0.5]]),
        (BOX, np.zeros((2, 2), np.int64), [[0, 0], [0, 0]]),
        (BOX, np.zeros((2, 2), np.float16), [[0, 0], [0, 0]]),
        (BOX64, np.asfortranarray([[0.5, 1], [-1, 0.25]]), [[0.5, 1], [-1, 0.25]]),
        (INTS, [[0, 255], [1, 2]], [[0, 255], [1, 2]]),
        (spaces.Box(0, 1, (2,), np.bool_), np.array([[True, False], [False, True]]), [[True, False], [False, True]]),
        (spaces.MultiBinary(2), [[0, 1], [1, 0]], [[0, 1], [1, 0]]),
        (spaces.MultiDiscrete([2, 3]), [[0, 2], [1, 0]], [[0, 2], [1, 0]]),
        (spaces.Box(-1, 1, (), np.float32), [0.5, -0.5], [0.5, -0.5]),
    ],
)
def test_actions_are_read_into_the_fields_type(space: Any, actions: Any, expected: Any) -> None:
    [leaf] = flatten(space)
    [array] = read(space, actions)
    assert array.dtype == leaf.dtype
    assert array.tolist() == expected


def test_nested_actions_come_apart() -> None:
    graphs = [object(), object()]
    actions = {
        "pair": (np.array([2, 4]), {"deep": np.zeros((2, 2), np.float32)}),
        "word": ["ab", "c"],
        "graph": tuple(graphs),
    }
    values = dict(zip([leaf.path for leaf in flatten(NESTED)], read(NESTED, actions), strict=True))
    assert values["pair", 0].tolist() == [2, 4]
    assert values["word",] == ["ab", "c"]
    assert values["graph",] == graphs
    assert read(NESTED, OrderedDict(actions))


TEXT = spaces.Text(max_length=3)

BAD_ACTIONS = [
    # what is wrong, space, actions, words of the message
    ("too few", spaces.Discrete(3), [0], ["(2,)", "(1,)", "2 envs"]),
    ("too many", spaces.Discrete(3), [0, 1, 2], ["(2,)", "(3,)"]),
    ("a single number", spaces.Discrete(3), 1, ["(2,)", "()"]),
    ("a column", spaces.Discrete(3), [[0], [1]], ["(2,)", "(2, 1)"]),
    ("none", spaces.Discrete(3), None, ["int64", "object"]),
    ("no array", spaces.Discrete(3), object(), ["int64", "object"]),
    ("text for a number", spaces.Discrete(3), ["0", "1"], ["int64", "<U1"]),
    ("float for a number", spaces.Discrete(3), [0.0, 1.0], ["int64", "float64"]),
    ("complex for a number", spaces.Discrete(3), [0j, 1j], ["int64", "complex128"]),
    ("too large", spaces.Discrete(3), [0, 3], ["[1]", "env 7", "0 to 2", "found 3"]),
    ("too small", spaces.Discrete(3), [-1, 0], ["[0]", "env 4", "0 to 2", "found -1"]),
    ("before the start", spaces.Discrete(3, start=5), [5, 4], ["env 7", "5 to 7", "found 4"]),
    ("does not fit int64", spaces.Discrete(3), np.array([0, 2**63], np.uint64), ["env 7", "0 to 2"]),
    ("ragged", BOX, [[0, 1], [0]], ["cannot be made into one array"]),
    ("transposed", spaces.Box(0, 1, (3,)), np.zeros((3, 2), np.float32), ["(2, 3)", "(3, 2)"]),
    ("complex", BOX, np.zeros((2, 2), complex), ["float32", "complex"]),
    ("out of a box", BOX, [[0, 0], [0, 1.5]], ["[1][1]", "env 7", "-1.0 to 1.0", "found 1.5"]),
    ("nan", BOX, np.array([[np.nan, 0], [0, 0]], np.float32), ["[0][0]", "env 4", "found nan"]),
    ("nan in another type", BOX, np.array([[np.nan, 0], [0, 0]]), ["[0][0]", "env 4", "found nan"]),
    ("nan without bounds", spaces.Box(-np.inf, np.inf, (1,)), np.float32([[0], [np.nan]]), ["env 7", "nan"]),
    ("a byte that is none", INTS, [[0, 0], [300, 0]], ["[1][0]", "env 7", "0 to 255", "found 300"]),
    ("a negative byte", INTS, [[0, -1], [0, 0]], ["[0][1]", "env 4", "found -1"]),
    ("float bytes", INTS, [[0.0, 1.0], [0, 0]], ["uint8", "float64"]),
    ("not binary", spaces.MultiBinary(2), [[0, 1], [2, 0]], ["env 7", "0 to 1", "found 2"]),
    ("one of several", spaces.MultiDiscrete([2, 3]), [[0, 2], [0, 3]], ["[1][1]", "env 7", "0 to 2", "found 3"]),
    ("a missing key", spaces.Dict(a=BOX, b=BOX), {"a": np.zeros((2, 2))}, ["['b']", "'a'"]),
    ("no dict", spaces.Dict(a=BOX), np.zeros((2, 2)), ["['a']", "ndarray"]),
    ("a short tuple", spaces.Tuple((BOX, BOX)), (np.zeros((2, 2)),), ["[1]", "tuple"]),
    ("in the depth", NESTED, {"graph": [1, 2], "pair": ([2, 9], {"deep": np.zeros((2, 2))}), "word": ["", ""]},
     ["actions['pair'][0][1]", "env 7", "2 to 4", "found 9"]),
    ("a text too long", TEXT, ["abc", "abcd"], ["[1]", "at most 3", "'abcd'"]),
    ("no text", TEXT, ["abc", 5], ["[1]", "text", "5"]),
    ("one text for all", TEXT, "ab", ["2 items", "str"]),
    ("one text too few", TEXT, ["ab"], ["2 items", "found 1"]),
    ("objects: too few", EvenSpace(), [4], ["2 items", "found 1"]),
    ("objects: no sequence", EvenSpace(), 4, ["2 items", "int"]),
    ("objects: a text", EvenSpace(), "ab", ["2 items", "str"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("space", "actions", "words"), [row[1:] for row in BAD_ACTIONS], ids=[r[0] for r in BAD_ACTIONS]
)
def test_bad_actions_are_refused_in_so_many_words(space: Any, actions: Any, words: list[str]) -> None:
    with pytest.raises(BadAction) as caught:
        read(space, actions, ids=[4, 7])
    for word in words:
        assert word in str(caught.value)


def test_box_bounds_may_be_left_alone_and_others_may_not() -> None:
    [array] = read(BOX, [[5, 0], [0, np.nan]], check="discrete")
    assert array[0, 0] == 5
    assert np.isnan(array[1, 1])
    with pytest.raises(BadAction):
        read(spaces.Discrete(3), [0, 3], check="discrete")


def test_a_box_number_that_does_not_fit_its_type_never_wraps() -> None:
    """300 must not become 44, whether bounds are checked or not."""
    with pytest.raises(BadAction):
        read(INTS, [[300, 0], [0, 0]], check="discrete")


@pytest.mark.parametrize("dtype", [np.float16, np.bool_])
def test_types_the_core_does_not_know_are_checked_too(dtype: Any) -> None:
    space = spaces.Box(0, 1, (2,), dtype) if dtype is np.bool_ else spaces.Box(0.0, 0.5, (2,), dtype)
    [array] = read(space, np.zeros((2, 2), dtype))
    assert array.dtype == dtype
    if dtype is np.float16:
        with pytest.raises(BadAction, match=r"found 1\.0"):
            read(space, np.ones((2, 2), dtype))


# ---- observations --------------------------------------------------------------------------------------------


def write(space: Any, observation: Any) -> tuple[list[Any], list[Any]]:
    """The arrays after a write at frame 1, lane 2 of [2, 3], and the objects."""
    leaves = flatten(space)
    arrays = [None if leaf.kind is Kind.OBJECT else np.zeros((2, 3, *leaf.shape), leaf.dtype) for leaf in leaves]
    objects = write_observation(leaves, arrays, (1, 2), observation)
    for array in arrays:
        if array is not None:
            rest = array.copy()
            rest[1, 2] = np.zeros((), array.dtype)
            assert not rest.astype(bool).any(), "only its own row is written"
    return [None if array is None else array[1, 2].tolist() for array in arrays], objects


@pytest.mark.parametrize(
    ("space", "observation", "stored"),
    [
        (BOX, np.array([0.5, -3], np.float32), [0.5, -3]),  # bounds are advice
        (BOX, np.array([0.5, np.nan]), [0.5, np.nan]),
        (BOX, [1, 0], [1, 0]),
        (BOX, (True, False), [1, 0]),
        (BOX, np.array([1, 0], ">f8"), [1, 0]),
        (INTS, np.array([1, 255], np.uint16), [1, 255]),
        (INTS, np.array([True, False]), [1, 0]),
        (spaces.Discrete(3), 2, 2),
        (spaces.Discrete(3), np.int8(2), 2),
        (spaces.Discrete(3), np.array(2), 2),
        (spaces.Discrete(3), 7, 7),
        (spaces.MultiBinary(2), [True, False], [1, 0]),
        (spaces.Box(0, 1, (), np.float32), 0.5, 0.5),
        (TEXT, "", ""),
        (TEXT, "abc", "abc"),
    ],
    ids=str,
)
def test_observations_are_cast_where_nothing_is_lost_in_kind(space: Any, observation: Any, stored: Any) -> None:
    [value], objects = write(space, observation)
    assert str(value) == str(stored) or value == stored
    assert objects == []


def test_objects_are_handed_back_in_order() -> None:
    one, other = object(), object()
    space = spaces.Dict(a=EvenSpace(), b=BOX, c=spaces.Sequence(BOX))
    _, objects = write(space, {"a": one, "b": [0, 0], "c": other})
    assert objects == [one, other]


BAD_OBSERVATIONS = [
    ("shape", BOX, np.zeros(3, np.float32), ["expected shape (2,)", "found (3,)"]),
    ("an axis too many", BOX, np.zeros((1, 2), np.float32), ["(1, 2)"]),
    ("a number", BOX, 1.0, ["expected shape (2,)", "found ()"]),
    ("ragged", spaces.Box(0, 1, (2, 2)), [[1, 2], [3]], ["cannot be made into one array"]),
    ("complex", BOX, np.zeros(2, complex), ["float32", "complex128"]),
    ("float for int", INTS, [0.0, 1.0], ["uint8", "float64"]),
    ("int for bool", spaces.Box(0, 1, (2,), np.bool_), [0, 1], ["bool", "int64"]),
    ("too large for its type", INTS, np.array([1, 300], np.uint16), ["300", "uint8"]),
    ("float for a number", spaces.Discrete(3), 2.0, ["int64", "float64"]),
    ("None", spaces.Discrete(3), None, ["object"]),
    ("huge", spaces.Discrete(3), 2**63, ["9223372036854775808"]),
    ("missing key", spaces.Dict(a=BOX, b=BOX), {"a": [0, 0], "c": 1}, ["['b']", "keys are ['a', 'c']"]),
    ("no dict", spaces.Dict(a=BOX), 5, ["['a']", "type int"]),
    ("in the depth", spaces.Tuple((BOX, spaces.Dict(x=BOX))), ([0, 0], {"x": [0]}), ["observation[1]['x']", "(1,)"]),
    ("text too long", TEXT, "abcd", ["at most 3", "'abcd'"]),
    ("no text", TEXT, b"abc", ["text", "b'abc'"]),
]


@pytest.mark.parametrize(
    ("space", "observation", "words"), [row[1:] for row in BAD_OBSERVATIONS], ids=[r[0] for r in BAD_OBSERVATIONS]
)
def test_bad_observations_are_refused_in_so_many_words(space: Any, observation: Any, words: list[str]) -> None:
    with pytest.raises(BadObservation) as caught:
        write(space, observation)
    for word in words:
        assert word in str(caught.value)
