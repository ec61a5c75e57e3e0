"""`api="dm_env"`, and dm_env environments as envs: batched TimeSteps, without TensorFlow."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv, SpaceEnv
from faults.kit import DeedEnv
from shoal import Pool
from shoal.support.optional_dependencies import install

dm_env = pytest.importorskip("dm_env", reason="these are its environments")
specs = pytest.importorskip("dm_env.specs")


class Catch(dm_env.Environment):  # type: ignore[misc]
    """Counts to its number plus three, says so, and ends as it is told."""

    def __init__(self, number: int = 0, end: float = 0.0, discount: float = 1.0):
        self.number, self.end, self.discount = number, end, discount
        self.count = self.episode = self.given = 0
        self.over = True

    def observation_spec(self) -> Any:
        return {"count": specs.Array((2,), np.float64, "count"), "side": specs.DiscreteArray(9, np.int32, "side")}

    def action_spec(self) -> Any:
        return specs.BoundedArray((), np.int32, -1, 1, "move")

    def observation(self) -> Any:
        return {"count": np.array([self.episode, self.count], np.float64), "side": np.int32(self.given)}

    def reset(self) -> Any:
        self.count, self.episode, self.over = 0, self.episode + 1, False
        return dm_env.restart(self.observation())

    def step(self, action: Any) -> Any:
        assert not self.over
        assert action.dtype == np.int32
        self.count += 1
        if self.count < 3 + self.number:
            return dm_env.transition(float(action), self.observation(), self.discount)
        self.over = True
        return dm_env.TimeStep(dm_env.StepType.LAST, float(action), self.end, self.observation())

    def seed(self, seed: int) -> None:
        self.given = seed % 9


class TextEnv(Catch):
    def observation_spec(self) -> Any:
        return specs.StringArray((), name="words")


class TwoRewards(Catch):
    def reward_spec(self) -> Any:
        return specs.Array((2,), np.float32, "reward")


def makers(count: int, **options: Any) -> list[Any]:
    return [functools.partial(Catch, i, **options) for i in range(count)]


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize(("end", "discount"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.9)])
def test_rows_are_what_each_env_says(backend: Any, count: int, end: float, discount: float) -> None:
    """LAST, then FIRST with the action ignored, row by row, whatever the discounts are."""
    alone = [make() for make in makers(count, end=end, discount=discount)]
    with shoal.make(
        makers(count, end=end, discount=discount), api="dm_env", backend=backend, num_workers=min(3, count)
    ) as env:
        assert isinstance(env, dm_env.Environment)
        assert env.batch_size == count
        expected = [one.reset() for one in alone]
        step = env.reset()
        for turn in range(12):
            assert isinstance(step, dm_env.TimeStep)
            for i, one in enumerate(expected):
                assert step.step_type[i] == one.step_type
                assert step.reward[i] == (0.0 if one.reward is None else one.reward)
                assert step.discount[i] == np.float64(1.0 if one.discount is None else one.discount)
                assert step.observation["count"][i].tolist() == one.observation["count"].tolist()
            assert (step.first() == [one.first() for one in expected]).all()
            assert (step.last() == [one.last() for one in expected]).all()
            action = (np.arange(count) + turn) % 3 - 1
            step = env.step(action)
            expected = [
                own.reset() if one.last() else own.step(np.int32(move))
                for own, one, move in zip(alone, expected, action, strict=True)
            ]


def test_specs_are_of_one_env_and_in_its_own_words() -> None:
    with shoal.make(makers(3), api="dm_env", backend="serial") as env:
        assert env.observation_spec()["count"] == specs.Array((2,), np.float64, "count")
        assert env.observation_spec()["side"] == specs.DiscreteArray(9, np.int32, "side")
        assert env.action_spec() == specs.BoundedArray((), np.int32, -1, 1, "move")
        assert env.reward_spec() == Catch().reward_spec()
        step = env.reset()
        assert step.observation["side"].dtype == np.int32
        assert step.observation["count"].shape == (3, 2)


def test_seeds_reach_envs_that_take_them() -> None:
    with shoal.make(makers(3), api="dm_env", backend="serial") as env:
        assert env.reset(seed=4).observation["side"].tolist() == [4, 5, 6]
        assert env.reset(seed=[8, 1, 0]).observation["side"].tolist() == [8, 1, 0]


def test_gymnasium_envs_answer_with_time_steps() -> None:
    make = functools.partial(CountEnv, length=2)
    with shoal.make(make, 3, api="dm_env", backend="serial") as env:
        step = env.step(np.zeros(3, np.int64))
        assert step.first().all()  # nobody had reset it
        assert step.reward.tolist() == [0, 0, 0]
        assert env.step(np.zeros(3, np.int64)).mid().all()
        last = env.step(np.zeros(3, np.int64))
        assert last.last().all()
        assert last.discount.tolist() == [0, 0, 0]
        assert env.step(np.zeros(3, np.int64)).first().all()
    with shoal.make(functools.partial(CountEnv, length=2, truncates=True), 3, api="dm_env", backend="serial") as env:
        env.reset()
        env.step(np.zeros(3, np.int64))
        last = env.step(np.zeros(3, np.int64))
        assert last.last().all()
        assert last.discount.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Box(0, 255, (3, 4), np.uint8),
        gymnasium.spaces.Box(-1, 1, (), np.float64),
        gymnasium.spaces.Discrete(5, start=2),
        gymnasium.spaces.MultiBinary((2, 2)),
        gymnasium.spaces.Dict(a=gymnasium.spaces.MultiDiscrete([3, 4]), b=gymnasium.spaces.Tuple(())),
    ],
    ids=str,
)
def test_spaces_become_specs_that_hold(space: Any) -> None:
    with shoal.make(functools.partial(SpaceEnv, space), 2, api="dm_env", backend="serial") as env:
        step = env.reset(seed=0)

        def check(spec: Any, value: Any) -> None:
            if isinstance(spec, dict):
                for key in spec:
                    check(spec[key], value[key])
            elif isinstance(spec, tuple):
                assert len(spec) == len(value)
            else:
                for row in value:
                    spec.validate(np.asarray(row))

        check(env.observation_spec(), step.observation)


def test_a_pool_and_a_vector_env_take_dm_env_environments() -> None:
    with Pool(makers(4), batch_size=2, backend="threads", num_workers=2) as pool:
        pool.async_reset()
        batch = pool.recv()
        assert batch.obs["count"].tolist() == [[1, 0], [1, 0]]
    with shoal.make(makers(3, end=1.0), backend="serial") as envs:
        assert envs.single_action_space == gymnasium.spaces.Discrete(3, start=-1)
        envs.reset(seed=0)
        for _ in range(3):
            _, _, terminated, truncated, _ = envs.step(np.zeros(3, np.int64))
        assert truncated.tolist() == [True, False, False]
        assert not terminated.any()
        snapshot = envs.pool.snapshot()
        before = envs.step(np.zeros(3, np.int64))[0]["count"].copy()
        envs.pool.restore(snapshot)
        assert (envs.step(np.zeros(3, np.int64))[0]["count"] == before).all()


def test_what_has_no_numbers_is_named() -> None:
    with pytest.raises(TypeError, match=r"StringArray.*only numbers"):
        shoal.make(TextEnv, 2, api="dm_env", backend="serial")
    with pytest.raises(TypeError, match=r"reward_spec.*only rewards of one number"):
        shoal.make(TwoRewards, 2, api="dm_env", backend="serial")
    words = functools.partial(SpaceEnv, gymnasium.spaces.Text(5))
    with pytest.raises(TypeError, match=r"observation space Text.*has no spec"):
        shoal.make(words, 2, api="dm_env", backend="serial")
    with pytest.raises(TypeError, match="already made"):
        shoal.make(Catch(), 2, api="dm_env")
    with pytest.raises(ValueError, match="next_step"):
        shoal.make(Catch, 2, api="dm_env", autoreset="disabled")


def test_missing_dm_env_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dm_env", None)
    monkeypatch.delitem(sys.modules, "shoal.dialects.dm_env", raising=False)
    with pytest.raises(ImportError, match=re.escape(install("dm-env"))):
        shoal.make(Catch, 2, api="dm_env")


class BoolEnv(dm_env.Environment):  # type: ignore[misc]
    """Takes a mask, or one flag, and shows what it chose."""

    def __init__(self, shape: tuple[int, ...] = (3,)):
        self.shape = shape
        self.seed = 4  # no method: some envs have it as an attribute

    def observation_spec(self) -> Any:
        return specs.Array((3,), np.float32, "chosen")

    def action_spec(self) -> Any:
        return specs.BoundedArray(self.shape, bool, False, True, "mask")

    def reset(self) -> Any:
        return dm_env.restart(np.zeros(3, np.float32))

    def step(self, action: Any) -> Any:
        assert action.dtype == np.bool_
        chosen = np.zeros(3, np.float32)
        chosen[action] = 1
        return dm_env.transition(0.0, chosen)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_flags_are_actions_too(shape: tuple[int, ...]) -> None:
    with shoal.make(functools.partial(BoolEnv, shape), 2, api="dm_env", backend="serial") as env:
        env.reset(seed=0)
        action = np.array([[True, False, True], [False, True, False]]) if shape else np.array([True, False])
        step = env.step(action)
        assert step.observation.tolist() == (action.astype(float).tolist() if shape else [[1, 1, 1], [0, 0, 0]])


def test_a_discount_in_a_gymnasium_info_is_only_an_info() -> None:
    class Shop(CountEnv):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return (*rest, {"discount": "10%"})

    with shoal.make(functools.partial(Shop, length=1), 2, api="dm_env", backend="serial") as env:
        env.reset()
        assert env.step(np.zeros(2, int)).discount.tolist() == [0, 0]
        assert env.infos[0] == {"discount": "10%"}


def test_batch_sizes_and_failed_resets() -> None:
    with shoal.make(makers(2), api="dm_env", backend="serial", batch_size=2) as env:
        assert env.reset().first().all()
    with pytest.raises(ValueError, match="a row for each env"):
        shoal.make(makers(2), api="dm_env", backend="serial", batch_size=1)
    with shoal.make(DeedEnv, 2, api="dm_env", backend="serial") as env:
        env.pool.set_attr("deeds", {"reset": "raise"}, env_ids=[1])
        with pytest.raises(ValueError, match="bad joint"):
            env.reset()
        env.pool.set_attr("deeds", {}, env_ids=[1])
        assert env.step(np.zeros(2, int)).first().all()  # nobody had reset it yet
