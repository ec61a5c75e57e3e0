"""FrameStack against a deque of frames per env, and against Stable-Baselines3's own."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv
from shoal.wrappers import FrameStack, wrap
from wrappers.kit import (
    HOSTS,
    IMAGE_FIRST,
    IMAGE_LAST,
    MANY,
    MODES,
    VECTOR,
    NoisyEnv,
    Row,
    action,
    assert_same,
    follow,
    play,
    stable_baselines,
    take,
)

# By key of MANY: the channels of images, the last axis of all else.
AXES: dict[str | None, int] = {"last": 2, "first": 0, "vector": 0, "matrix": 1}


class Stacks:
    """The naive way: each env has its own deque."""

    def __init__(self, size: int, axes: dict[str | None, int], padding: str = "zero"):
        self.size, self.axes, self.padding = size, axes, padding
        self.frames: dict[int, deque[Any]] = {}

    def expect(self, env_id: int, row: Row) -> tuple[Any, Any]:
        """The stacked observation, and the stacked last one of an episode that ended."""
        final = None
        if row.final_obs is not None:
            self.frames[env_id].append(row.final_obs)
            final = self._joined(self.frames[env_id])
        if row.began:
            self.frames[env_id] = deque([self._before(row.obs)] * self.size, self.size)
        self.frames[env_id].append(row.obs)
        return self._joined(self.frames[env_id]), final

    def _before(self, first: Any) -> Any:
        if self.padding == "first":
            return first
        return {k: np.zeros_like(v) for k, v in first.items()} if isinstance(first, dict) else np.zeros_like(first)

    def _joined(self, frames: Iterable[Any]) -> Any:
        if None in self.axes:
            return np.concatenate(list(frames), self.axes[None])
        return {key: np.concatenate([frame[key] for frame in frames], self.axes[key]) for key in next(iter(frames))}


def check(envs: Any, make: Any, stacks: Stacks, turns: int = 40) -> None:
    ended = 0
    for answer, rows in follow(envs, make, turns):
        for i, row in enumerate(rows):
            obs, final = stacks.expect(answer.ids[i], row)
            assert_same(take(answer.obs, i), obs)
            assert envs.single_observation_space.contains(take(answer.obs, i))
            assert answer.reward[i] == row.reward
            ended += row.done
            if final is not None:
                assert_same(answer.finals[i], final)
    assert ended > 3, "too few episodes to say anything"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_stacks_are_those_of_a_deque_per_env(host: str, mode: str) -> None:
    make = partial(NoisyEnv, MANY)
    envs = wrap(HOSTS[host](make, mode), FrameStack(3))
    try:
        check(envs, make, Stacks(3, AXES))
    finally:
        envs.close()


BOXES: dict[str, tuple[spaces.Box, Any, int]] = {
    "channels last, found": (IMAGE_LAST, None, 2),
    "channels last, said": (IMAGE_LAST, "last", 2),
    "channels last, overruled": (IMAGE_LAST, "first", 0),
    "channels first, found": (IMAGE_FIRST, None, 0),
    "channels first, overruled": (IMAGE_FIRST, "last", 2),
    "float64": (VECTOR, None, 0),
    "float64, first": (VECTOR, "first", 0),
    "no image: floats": (spaces.Box(0.0, 255.0, (2, 5, 6), np.float32), None, 2),
    "no image: two axes": (spaces.Box(0, 255, (2, 5), np.uint8), None, 1),
    "no image: other bounds": (spaces.Box(0, 254, (2, 5, 6), np.uint8), None, 2),
    "nothing in it": (spaces.Box(-1.0, 1.0, (2, 0), np.float32), None, 1),
}


@pytest.mark.parametrize("name", BOXES)
@pytest.mark.parametrize("size", [1, 4])
def test_the_axis_is_that_of_the_channels(name: str, size: int) -> None:
    box, order, axis = BOXES[name]
    make = partial(NoisyEnv, box)
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset="same_step"), FrameStack(size, order)) as pool:
        expected = list(box.shape)
        expected[axis] *= size
        assert pool.single_observation_space.shape == tuple(expected)
        assert pool.observation_space.shape == (3, *expected)
        assert pool.single_observation_space.dtype == box.dtype
        stacks = Stacks(size, {None: axis})
        for answer, rows in follow(pool, make, 10):
            for i, row in enumerate(rows):
                assert_same(answer.obs[i], stacks.expect(answer.ids[i], row)[0])


@pytest.mark.parametrize("mode", MODES)
def test_padding_may_repeat_the_first_observation(mode: str) -> None:
    make = partial(NoisyEnv, MANY)
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset=mode), FrameStack(4, padding="first")) as pool:  # type: ignore[arg-type]
        check(pool, make, Stacks(4, AXES, "first"))


def test_each_key_may_have_its_own_order_and_others_are_found() -> None:
    make = partial(NoisyEnv, MANY)
    with wrap(shoal.Pool(make, 2, backend="serial"), FrameStack(2, {"matrix": "first", "last": "first"})) as pool:
        check(pool, make, Stacks(2, AXES | {"matrix": 0, "last": 0}))


def test_bounds_are_repeated_frame_by_frame() -> None:
    box = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32))
    with wrap(shoal.Pool(partial(NoisyEnv, box), 1, backend="serial"), FrameStack(3)) as pool:
        assert pool.single_observation_space.low.tolist() == [-1, 0] * 3
        assert pool.single_observation_space.high.tolist() == [1, 5] * 3


@pytest.mark.parametrize("host", ["pool of 7 on 3 processes", "pool, 2 of 5", "gymnasium"])
@pytest.mark.parametrize("mode", MODES)
def test_stacks_that_were_given_out_never_change(host: str, mode: str) -> None:
    envs = wrap(HOSTS[host](partial(NoisyEnv, MANY), mode), FrameStack(2))
    held = [(answer.obs, copy.deepcopy(answer.obs), answer.finals, copy.deepcopy(answer.finals))
            for answer in play(envs, 12)]  # fmt: skip
    envs.close()
    for obs, kept, finals, kept_finals in held:
        assert_same(obs, kept)
        for row, final in finals.items():
            assert_same(final, kept_finals[row])


def test_the_caller_may_write_into_stacks() -> None:
    make = partial(NoisyEnv, VECTOR)
    with wrap(shoal.Pool(make, 2, backend="serial"), FrameStack(2)) as pool:
        stacks = Stacks(2, {None: 0})
        for answer, rows in follow(pool, make, 8):
            for i, row in enumerate(rows):
                assert_same(answer.obs[i], stacks.expect(i, row)[0])
            answer.obs[:] = -1e9


def test_a_reset_halfway_through_episodes_begins_stacks_anew() -> None:
    with wrap(shoal.Pool(partial(CountEnv, 50), 3, backend="serial"), FrameStack(2)) as pool:
        pool.reset(seed=0)
        pool.step([0, 0, 0])
        assert pool.reset([1]).obs.tolist() == [[0, 0, 0, 1, 1, 0]]
        assert pool.step([0, 0, 0]).obs.tolist() == [[0, 0, 1, 0, 0, 2], [1, 1, 0, 1, 1, 1], [2, 0, 1, 2, 0, 2]]
        assert pool.reset().obs[:, :3].tolist() == [[0, 0, 0]] * 3


BAD = {
    "no frames": (lambda: FrameStack(0), VECTOR, "n_stack"),
    "half a frame": (lambda: FrameStack(1.5), VECTOR, "n_stack"),  # type: ignore[arg-type]
    "padding": (lambda: FrameStack(2, padding="last"), VECTOR, "padding.*'zero'.*'first'"),  # type: ignore[arg-type]
    "order": (lambda: FrameStack(2, "middle"), VECTOR, "channels_order.*'first', 'last' or None.*'middle'"),  # type: ignore[arg-type]
    "order of a key": (lambda: FrameStack(2, {"last": "up"}), MANY, "channels_order.*'up'"),  # type: ignore[dict-item]
    "order of a key that is not there": (lambda: FrameStack(2, {"lost": "last"}), MANY, "lost"),
    "no axis": (lambda: FrameStack(2), spaces.Box(-1.0, 1.0, (), np.float32), "axis"),
    "no box": (lambda: FrameStack(2), spaces.Discrete(3), "Discrete"),
    "no box in a dict": (lambda: FrameStack(2), spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), "'b'(?!.*name the keys)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_stacked_is_refused_with_a_reason(name: str) -> None:
    make, space, reason = BAD[name]
    with shoal.Pool(partial(NoisyEnv, space), 1, backend="serial") as pool:
        with pytest.raises(ValueError, match=reason):
            wrap(pool, make())


@pytest.mark.parametrize("name", ["image last", "image first", "vector", "many"])
def test_stacks_are_those_of_stable_baselines(name: str) -> None:
    vec_env = stable_baselines()
    space = {"image last": IMAGE_LAST, "image first": IMAGE_FIRST, "vector": VECTOR, "many": MANY}[name]
    make = partial(NoisyEnv, space)
    theirs = vec_env.VecFrameStack(vec_env.DummyVecEnv([make] * 3), 4)
    theirs.seed(0)
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset="same_step"), FrameStack(4)) as ours:
        assert ours.single_observation_space == theirs.observation_space
        assert_same(ours.reset(seed=0).obs, theirs.reset())
        for turn in range(30):
            actions = np.stack([action(i, turn) for i in range(3)])
            batch, (obs, _, _, infos) = ours.step(actions), theirs.step(actions)
            assert_same(batch.obs, obs)
            for env_id, final in batch.final_obs.items():
                assert_same(final, infos[env_id]["terminal_observation"])
    theirs.close()
