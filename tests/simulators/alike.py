"""Steps two vector envs with the same actions and compares all that they answer."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

# `make test-simulators` takes many steps. In the other suites a few show that nothing is mixed up.
STEPS = int(os.environ.get("SHOAL_SIMULATOR_STEPS", "30"))


def assert_alike(one: Any, other: Any, steps: int = STEPS, seed: int = 3, finals: bool = False) -> int:
    """Compare the reset and some steps with random actions, bit for bit; return how many episodes have ended."""
    _assert_same("reset", one.reset(seed=seed), other.reset(seed=seed), finals)
    other.action_space.seed(seed)
    ended = 0
    for step in range(steps):
        actions = other.action_space.sample()
        answer, expected = one.step(actions), other.step(actions)
        _assert_same(f"step {step}", answer, expected, finals)
        ended += int((expected[2] | expected[3]).sum())
    return ended


def _assert_same(when: str, answer: Any, expected: Any, finals: bool) -> None:
    names = ("observations", "rewards", "terminated", "truncated")
    for name, found, wanted in zip(names, answer[:-1], expected[:-1], strict=False):
        np.testing.assert_array_equal(found, wanted, err_msg=f"{when}: {name}")
        assert found.dtype == wanted.dtype, f"{when}: {name}"
    _assert_infos(when, answer[-1], expected[-1])


def _assert_infos(when: str, infos: Any, expected: Any) -> None:
    assert set(infos) == set(expected), when
    for key, wanted in expected.items():
        if isinstance(wanted, dict):
            _assert_infos(f"{when}: {key}", infos[key], wanted)
        elif wanted.dtype == object:
            for found, one in zip(infos[key], wanted, strict=True):
                np.testing.assert_array_equal(found, one, err_msg=f"{when}: {key}")
        else:
            np.testing.assert_array_equal(infos[key], wanted, err_msg=f"{when}: {key}")
            assert infos[key].dtype == wanted.dtype, f"{when}: {key}"
