"""Infos that travelled as notes, all lanes at once, against Gymnasium's way of adding them up one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from shoal.memory.infos import stacked

INFOS: list[Any] = [
    [{"a": 1.5, "b": 3}, {"a": -2.0, "b": 4}],
    [{"a": True}, {"a": False}],
    [{"a": 1}],
]
ODD: list[Any] = [
    [{}, {}], [{"a": 1}, {"a": 1.5}], [{"a": 1}, {"b": 1}], [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    [{"a": "x"}, {"a": "y"}], [{"a": {"b": 1}}, {"a": {"b": 2}}], [{"a": np.ones(2)}, {"a": np.ones(2)}],
    [{"final_obs": 1}, {"final_obs": 2}], [{"a": 1, "_a": 2}, {"a": 1, "_a": 2}], [{"a": np.float32(1)}] * 2,
]  # fmt: skip


@pytest.mark.parametrize("infos", INFOS, ids=repr)
def test_numbers_are_stacked_as_gymnasium_does_it(infos: list[dict[str, Any]]) -> None:
    envs, expected = VectorEnv(), dict[str, Any]()
    envs.num_envs = len(infos)
    for lane, info in enumerate(infos):
        expected = envs._add_info(expected, info, lane)
    found = stacked(dict(enumerate(infos)), len(infos), envs._add_info)
    assert found is not None
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert found[key].tolist() == value.tolist()


@pytest.mark.parametrize("infos", ODD, ids=repr)
def test_anything_else_is_left_to_gymnasium(infos: list[dict[str, Any]]) -> None:
    assert stacked(dict(enumerate(infos)), len(infos), VectorEnv()._add_info) is None


def test_lanes_without_an_info_are_left_to_gymnasium() -> None:
    assert stacked({1: {"a": 1}}, 2, VectorEnv()._add_info) is None
