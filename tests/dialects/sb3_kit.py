"""Runs our VecEnvs and Stable-Baselines3's side by side, and compares all that they say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from contract.lockstep import assert_same

# More threads than cores make torch fifty times slower.
torch.set_num_threads(1)

EnvFn = Callable[[], Any]


def zeros(n: int = 3) -> Any:
    """The first action for each of `n` envs."""
    return np.zeros(n, np.int64)


def actions_for(space: Any, num_envs: int, steps: int, seed: int = 7) -> list[Any]:
    """Batches of actions that do not depend on who steps them."""
    own = copy.deepcopy(space)
    own.seed(seed)
    return [np.array([own.sample() for _ in range(num_envs)]) for _ in range(steps)]


def plain(value: Any) -> Any:
    """A copy in which every dict is a plain one: SB3's DummyVecEnv has ordered ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(plain(item) for item in value)
    return copy.deepcopy(value)


def play(venv: Any, actions: Sequence[Any], seed: int | None = 5) -> Iterator[tuple[str, Any]]:
    """Seed, reset and step. Yields (what, its result)."""
    if seed is not None:
        venv.seed(seed)
    yield "reset", plain((venv.reset(), list(venv.unwrapped.reset_infos)))
    for i, action in enumerate(actions):
        obs, rewards, dones, infos = venv.step(copy.deepcopy(action))
        # SB3's SubprocVecEnv gives rewards as float64 and infos as a tuple, its DummyVecEnv float32 and a list.
        result = (obs, np.asarray(rewards, np.float32), dones, list(infos), list(venv.unwrapped.reset_infos))
        yield f"step {i}", plain(result)


def assert_lockstep(
    ours: Any,
    theirs: Any,
    steps: int = 30,
    same: Callable[[Any, Any, str], None] = assert_same,
    ends: bool = True,
    tidy: Callable[[Any], None] = lambda infos: None,
) -> None:
    """The same seeds and actions give the same results; both are closed. `tidy` takes out what cannot be the same."""
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    actions = actions_for(theirs.action_space, theirs.num_envs, steps)
    ended = 0
    for (what, our), (_, their) in zip(play(ours, actions), play(theirs, actions), strict=True):
        if what != "reset":
            ended += int(their[2].sum())
            tidy(our[3])
            tidy(their[3])
        same(our, their, what)
    assert ended or not ends, "no episode ended: nothing was seen of autoreset"
    ours.close()
    theirs.close()


def assert_close(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal in structure, shape and dtype, and nearly so in value."""
    if isinstance(theirs, dict):
        assert sorted(ours) == sorted(theirs), where
        for key in theirs:
            assert_close(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, tuple | list):
        assert len(ours) == len(theirs), where
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(our, their, f"{where}[{i}]")
    elif isinstance(theirs, np.ndarray | np.generic | float) and np.asarray(theirs).dtype.kind == "f":
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype, where
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=where)
    else:
        assert_same(ours, theirs, where)
