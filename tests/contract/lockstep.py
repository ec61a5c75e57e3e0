"""Runs two vector envs side by side and compares all that they say, to the last bit, type and key."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)
SHOAL_MODES = {
    AutoresetMode.NEXT_STEP: "next_step",
    AutoresetMode.SAME_STEP: "same_step",
    AutoresetMode.DISABLED: "disabled",
}


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal in type, dtype, shape, structure and value, at every depth."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} is not {type(theirs)}"
    if isinstance(theirs, dict):
        assert sorted(ours) == sorted(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs), where
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(our, their, f"{where}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        if theirs.dtype == object:
            assert_same(ours.tolist(), theirs.tolist(), where)
        else:
            np.testing.assert_array_equal(ours, theirs, where, strict=True)
    else:
        assert ours == theirs, where


def sample_actions(envs: gymnasium.vector.VectorEnv[Any, Any, Any], steps: int, seed: int = 7) -> list[Any]:
    """Batches of actions that do not depend on who steps them."""
    space = copy.deepcopy(envs.action_space)
    space.seed(seed)
    return [space.sample() for _ in range(steps)]


def play(
    envs: gymnasium.vector.VectorEnv[Any, Any, Any], actions: Sequence[Any], seed: Any = 123
) -> Iterator[tuple[str, Any]]:
    """Reset and step; under DISABLED also reset by mask whoever is done. Yields (what, its result)."""
    yield "reset", envs.reset(seed=seed)
    for i, action in enumerate(actions):
        result = envs.step(copy.deepcopy(action))
        yield f"step {i}", result
        done = result[2] | result[3]
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and done.any():
            yield f"reset after step {i}", envs.reset(options={"reset_mask": done, "why": "done"})


def assert_lockstep(
    ours: gymnasium.vector.VectorEnv[Any, Any, Any],
    theirs: gymnasium.vector.VectorEnv[Any, Any, Any],
    steps: int = 25,
    seed: Any = 123,
    ends: bool = True,
) -> None:
    """The same seeds and actions give the same results. `ends`: without ends the test says too little."""
    actions = sample_actions(theirs, steps)
    ended = 0
    for (what, our), (_, their) in zip(play(ours, actions, seed), play(theirs, actions, seed), strict=True):
        assert_same(our, their, what)
        ended += 0 if len(their) == 2 else int((their[2] | their[3]).sum())
    assert ended > 0 or not ends, "no episode ended: nothing was seen of autoreset"
