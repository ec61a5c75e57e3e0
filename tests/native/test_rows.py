"""Rows of agents' answers in C and in Python: the same, and only where everything is exactly as the batch has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import native
from shoal.native import twin

KINDS = [twin] if native.core is None else [twin, native.core]
IDS = ["twin", "native"][: len(KINDS)]
NAMES = ("a", "b", "c")


@pytest.fixture(params=KINDS, ids=IDS)
def core(request: pytest.FixtureRequest) -> Any:
    return request.param


def call(core: Any, observations: Any, targets: Any, paths: Any = ((),), **changes: Any) -> tuple[bool, Any]:
    """Whether it was written, and the rewards; agents a, b, c have the rows 0, 3, 1 of 4."""
    reward = np.full(4, 7.0)
    given = {
        "rewards": {"a": 1, "b": np.float32(2.5), "c": 3.0},
        "terminated": dict.fromkeys(NAMES, False),
        "truncated": {"a": np.False_},
        **changes,
    }
    written = core.write_rows(
        NAMES, (0, 3, 1), observations, given["rewards"], given["terminated"], given["truncated"], reward, targets,
        paths,
    )  # fmt: skip
    return written, reward.tolist()


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i1", "i4", "i8", "?", "f2", "u8"])
@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3, 4)])
def test_arrays(core: Any, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    observations = {name: rng.integers(0, 2, shape).astype(dtype) for name in NAMES}
    target = np.full((4, *shape), 1, dtype)
    before = target[2].copy()
    assert call(core, observations, (target,)) == (True, [1, 3, 7, 2.5])
    for name, row in zip(NAMES, (0, 3, 1), strict=True):
        assert np.array_equal(target[row], observations[name])
    assert np.array_equal(target[2], before)


def test_whole_numbers_and_nested_parts(core: Any) -> None:
    observations = {
        name: {"n": number, "parts": (np.full(2, i, np.float32),)}
        for i, (name, number) in enumerate(zip(NAMES, (5, np.int64(-6), np.int8(7)), strict=True))
    }
    numbers, parts = np.zeros(4, np.int64), np.zeros((4, 2), np.float32)
    written, _ = call(core, observations, (numbers, parts), (("n",), ("parts", 0)))
    assert written
    assert (numbers.tolist(), parts[:, 0].tolist()) == ([5, 7, 0, -6], [0, 2, 0, 1])


FINE = {name: np.zeros(2, np.float32) for name in NAMES}


@pytest.mark.parametrize(
    ("observations", "changes"),
    [
        (FINE, {"terminated": {"c": True}}),
        (FINE, {"truncated": {"a": np.True_}}),
        (FINE, {"rewards": {"a": 1, "b": 1}}),
        (FINE, {"rewards": {"a": 1, "b": 1, "c": "much"}}),
        (FINE, {"rewards": None}),
        ({"a": FINE["a"]}, {}),
        ({**FINE, "b": np.zeros(2)}, {}),
        ({**FINE, "b": np.zeros(3, np.float32)}, {}),
        ({**FINE, "b": np.zeros((1, 2), np.float32)}, {}),
        ({**FINE, "b": np.zeros(2, np.int32)}, {}),
        ({**FINE, "b": [0.0, 0.0]}, {}),
        ({**FINE, "b": None}, {}),
        ({**FINE, "b": b"12345678"}, {}),
        ({**FINE, "b": np.zeros(2, ">f4")}, {}),
    ],
)
def test_all_else_is_left_to_others(core: Any, observations: Any, changes: Any) -> None:
    written, _ = call(core, observations, (np.zeros((4, 2), np.float32),), **changes)
    assert not written


def test_parts_that_are_not_there(core: Any) -> None:
    for path in (("x",), (0, 0), ("x", "y")):
        written, _ = call(core, {name: {"z": 1} for name in NAMES}, (np.zeros(4, np.int64),), (path,))
        assert not written


def test_numbers_that_do_not_fit(core: Any) -> None:
    for value in (0.5, "1", 2**70, None):
        written, _ = call(core, {"a": 1, "b": value, "c": 1}, (np.zeros(4, np.int64),))
        assert not written


@pytest.mark.skipif(native.core is None, reason="only the C core reads memory by itself")
@pytest.mark.parametrize("rows", [(0, 1, 4), (0, 1, -1), (0, 1), (0, 1, "2")])
def test_rows_that_are_not_there(rows: Any) -> None:
    reward, target = np.zeros(4), np.zeros((4, 2), np.float32)
    rewards = dict.fromkeys(NAMES, 1.0)
    assert not native.core.write_rows(NAMES, rows, FINE, rewards, {}, {}, reward, (target,), ((),))


@pytest.mark.skipif(native.core is None, reason="only the C core reads memory by itself")
def test_targets_that_do_not_fit() -> None:
    rewards = dict.fromkeys(NAMES, 1.0)
    for reward, target in (
        (np.zeros(4), np.zeros((3, 2), np.float32)),
        (np.zeros(4, np.float32), np.zeros((4, 2), np.float32)),
        (np.zeros(4), np.zeros((4, 4), np.float32)[:, ::2]),
        (np.zeros(4), np.array(1.0, np.float32)),
    ):
        assert not native.core.write_rows(NAMES, (0, 1, 2), FINE, rewards, {}, {}, reward, (target,), ((),))
