"""The quick functions give what TF-Agents' own give, to the last bit and type, and can be taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_agents.trajectories
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

from dialects.py_envs import CountPyEnv
from shoal.dialects.tf_agents import BatchedPyEnvironment, quicken, slow_down

OBSERVATIONS: dict[str, Any] = {
    "array": np.arange(4, dtype=np.float32),
    "0-d": np.array(3.0),
    "image": np.zeros((4, 4, 3), np.uint8),
    "dict": {"b": np.ones(2), "a": np.zeros(3, np.int32)},
    "empty dict": {},
    "nested": {"a": {"b": np.ones(2)}, "c": (np.zeros(1), [np.ones(1)])},
    "scalar": np.float32(2.0),
    "python": 5.0,
    "list": [1.0, 2.0],
    "tensor": tf.ones(3),
    "dict of tensors": {"a": tf.ones(3)},
}
REWARDS: dict[str, Any] = {
    "float": 1.5, "int": 2, "float32": np.float32(0.1), "float64": np.float64(0.1), "0-d": np.array(0.3),
    "0-d float32": np.array(0.3, np.float32), "bool": True, "batch": np.array([1.0, 2.0]), "nested": {"a": 1.0},
    "nan": float("nan"), "None": None, "text": "1.5", "tensor": tf.constant(1.0),
}  # fmt: skip
NAMES = ["restart", "transition", "truncation", "termination"]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    slow_down()


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What it returns, leaf by leaf, or the type that it raises."""
    try:
        step = function(*args, **kwargs)
    except Exception as error:
        return type(error)
    assert isinstance(step, ts.TimeStep)
    leaves = [(type(leaf), np.asarray(leaf).dtype, np.asarray(leaf).tolist()) for leaf in tf.nest.flatten(step)]
    return step.observation is args[0], leaves


def check(name: str, *args: Any, **kwargs: Any) -> None:
    slow_down()
    expected = outcome(getattr(ts, name), *args, **kwargs)
    quicken()
    assert hasattr(getattr(ts, name), "__wrapped__")
    assert outcome(getattr(ts, name), *args, **kwargs) == expected


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("observation", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_they_give_the_same(observation: Any, reward: Any) -> None:
    check("restart", observation)
    for name in ("transition", "truncation", "termination"):
        check(name, observation, reward)
    for name in ("transition", "truncation"):
        check(name, observation, reward, 0.5)
        check(name, observation, reward, discount=np.float32(0.25))


def test_so_they_do_with_every_other_argument() -> None:
    for observation in OBSERVATIONS.values():
        check("restart", observation, batch_size=2)
        check("restart", observation, reward_spec=array_spec.ArraySpec((2,), np.float32))
        for discount in (0, np.array(0.5), np.ones(2), float("nan"), None):
            check("transition", observation, 1.0, discount)
        check("transition", observation, np.ones(2), outer_dims=(2,))
        check("truncation", observation, np.ones(2), 1.0, (2,))
        check("termination", observation, np.ones(2), outer_dims=(2,))


def test_steps_do_not_share_their_arrays() -> None:
    quicken()
    first, second = ts.restart(np.zeros(1)), ts.restart(np.zeros(1))
    first.reward[...] = 7
    first.discount[...] = 7
    assert (second.reward, second.discount) == (0, 1)
    last = ts.termination(np.zeros(1), 1.0)
    last.discount[...] = 7
    assert ts.termination(np.zeros(1), 1.0).discount == 0


def test_our_envs_put_them_in_place_and_slow_down_takes_them_back() -> None:
    before = {name: getattr(ts, name) for name in NAMES}
    with BatchedPyEnvironment([CountPyEnv()], multithreading=False) as env:
        assert ts.transition is not before["transition"]
        assert tf_agents.trajectories.transition is ts.transition
        assert ts.transition.__doc__ == before["transition"].__doc__
        assert env.reset().is_first().all()
    slow_down()
    slow_down()
    assert {name: getattr(ts, name) for name in NAMES} == before
    assert tf_agents.trajectories.termination is before["termination"]
