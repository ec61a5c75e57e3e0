"""Normalize against two passes over everything seen so far, and against Stable-Baselines3's own."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.wrappers import ExtractDictObs, FrameStack, Normalize, RunningMeanStd, wrap
from wrappers.kit import (
    HOSTS,
    IMAGE_FIRST,
    MANY,
    MODES,
    VECTOR,
    NoisyEnv,
    Row,
    action,
    assert_same,
    follow,
    is_pool,
    play,
    stable_baselines,
    take,
)

START = 1e-4  # so many observations of mean 0 and variance 1 were seen before the first


def moments(seen: list[Any]) -> tuple[Any, Any]:
    """Mean and variance of all values, in two passes."""
    values = np.asarray(seen, np.float64)
    total = len(values) + START
    mean = values.sum(0) / total
    return mean, (((values - mean) ** 2).sum(0) + START * (1.0 + mean**2)) / total


class Reference:
    """The naive way: keeps everything, and counts it all again at each batch."""

    def __init__(self, keys: tuple[str, ...] | None = None, clip: float = 10.0, gamma: float = 0.99, eps: float = 1e-8):
        self.keys, self.clip, self.gamma, self.eps = keys, clip, gamma, eps
        self.obs: list[Any] = []
        self.all_returns: list[float] = []
        self.returns: dict[int, float] = {}

    def learn(self, ids: list[int], rows: list[Row]) -> None:
        for env_id, row in zip(ids, rows, strict=True):
            self.obs.append(row.obs)
            if not row.began or row.done:  # the answer to a step
                self.returns[env_id] = self.returns.get(env_id, 0.0) * self.gamma + row.reward
                self.all_returns.append(self.returns[env_id])
            if row.began or row.done:
                self.returns[env_id] = 0.0

    def obs_of(self, raw: Any) -> Any:
        if self.keys is None:
            return self._scaled(raw, *moments(self.obs))
        parts = {key: self._scaled(raw[key], *moments([one[key] for one in self.obs])) for key in self.keys}
        return {**raw, **parts}

    def reward_of(self, raw: float) -> Any:
        var = moments(self.all_returns)[1] if self.all_returns else 1.0
        return np.clip(raw / np.sqrt(var + self.eps), -self.clip, self.clip)

    def _scaled(self, raw: Any, mean: Any, var: Any) -> Any:
        return np.clip((raw - mean) / np.sqrt(var + self.eps), -self.clip, self.clip).astype(np.float32)


def assert_close(one: Any, other: Any) -> None:
    if isinstance(other, dict):
        assert list(one) == list(other)
        for key in other:
            assert_close(one[key], other[key])
    else:
        assert (np.asarray(one).dtype, np.shape(one)) == (np.asarray(other).dtype, np.shape(other))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def check(envs: Any, make: Any, normalize: Normalize, reference: Reference, turns: int = 25) -> None:
    for answer, rows in follow(envs, make, turns):
        reference.learn(answer.ids, rows)
        for i, row in enumerate(rows):
            assert_close(take(answer.obs, i), reference.obs_of(row.obs))
            if not row.began or row.done:  # what answers a reset has no reward
                np.testing.assert_allclose(answer.reward[i], reference.reward_of(row.reward), rtol=1e-5)
            if row.final_obs is not None:
                assert_close(answer.finals[i], reference.obs_of(row.final_obs))
    np.testing.assert_allclose(normalize.ret_rms.mean, moments(reference.all_returns)[0], rtol=1e-9)
    np.testing.assert_allclose(normalize.ret_rms.var, moments(reference.all_returns)[1], rtol=1e-9)
    assert normalize.ret_rms.count == pytest.approx(len(reference.all_returns) + START)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_numbers_are_those_of_two_passes(host: str, mode: str) -> None:
    envs = wrap(HOSTS[host](partial(NoisyEnv, VECTOR), mode), normalize := Normalize(gamma=0.9))
    try:
        check(envs, partial(NoisyEnv, VECTOR), normalize, Reference(gamma=0.9))
    finally:
        envs.close()


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_dicts_are_normalized_and_the_others_left_alone(mode: str) -> None:
    make = partial(NoisyEnv, MANY)
    normalize = Normalize(norm_obs_keys=["matrix", "first"], clip_obs=1.5, clip_reward=1.5)
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset=mode), normalize) as pool:  # type: ignore[arg-type]
        check(pool, make, normalize, Reference(("matrix", "first"), clip=1.5))
        assert pool.single_observation_space["first"] == spaces.Box(-1.5, 1.5, IMAGE_FIRST.shape, np.float32)
        assert pool.single_observation_space["last"] == MANY["last"]


def test_all_parts_of_a_dict_are_normalized_by_default() -> None:
    make = partial(NoisyEnv, MANY)
    with wrap(shoal.Pool(make, 2, backend="serial"), normalize := Normalize()) as pool:
        check(pool, make, normalize, Reference(tuple(MANY.spaces)))
        assert set(normalize.obs_rms) == set(MANY.spaces)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8])
@pytest.mark.parametrize("mode", MODES)
def test_observations_without_axes_are_normalized(dtype: Any, mode: str) -> None:
    """A Box of shape () has batches of one axis, and last observations that are numbers."""
    make = partial(NoisyEnv, spaces.Box(0, 200, (), dtype))
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset=mode), normalize := Normalize()) as pool:  # type: ignore[arg-type]
        check(pool, make, normalize, Reference())
        assert normalize.normalize_obs(np.float32(5.0)).dtype == np.float32


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("norm_reward", [False, True])
def test_each_half_can_be_switched_off(norm_obs: bool, norm_reward: bool) -> None:
    make = partial(NoisyEnv, VECTOR)
    normalize = Normalize(norm_obs=norm_obs, norm_reward=norm_reward)
    with wrap(shoal.Pool(make, 3, backend="serial"), normalize) as pool:
        reference = Reference()
        for answer, rows in follow(pool, make, 12):
            reference.learn(answer.ids, rows)
            for i, row in enumerate(rows):
                assert_close(answer.obs[i], reference.obs_of(row.obs) if norm_obs else row.obs)
                expected = reference.reward_of(row.reward) if norm_reward else row.reward
                np.testing.assert_allclose(answer.reward[i], expected, rtol=1e-5)
        assert (normalize.obs_rms is None) == (not norm_obs)


@pytest.mark.parametrize("host", ["pool of 7 on 3 processes", "pool, 2 of 5", "shoal.make", "gymnasium"])
@pytest.mark.parametrize("mode", MODES)
def test_the_originals_of_the_last_batch_are_there(host: str, mode: str) -> None:
    """As many rows as were given out, also after a reset of some envs of a vector env."""
    make = partial(NoisyEnv, MANY)
    envs = wrap(HOSTS[host](make, mode), normalize := Normalize())
    try:
        for answer, rows in follow(envs, make, 10):
            original, reward = normalize.get_original_obs(), normalize.get_original_reward()
            given = len(answer.ids) if is_pool(envs) else envs.num_envs
            assert len(original["vector"]) == given
            places = range(given) if is_pool(envs) or len(rows) == given else answer.ids
            for place, row in zip(places, rows, strict=True):
                assert_same(take(original, place), row.obs)
            if len(rows) == given:
                assert reward.tolist() == [row.reward for row in rows]
            original["vector"][:] = 0  # it is a copy
            assert_same(take(normalize.get_original_obs(), next(iter(places))), rows[0].obs)
    finally:
        envs.close()


def test_without_training_nothing_is_learnt() -> None:
    make = partial(NoisyEnv, VECTOR)
    with wrap(shoal.Pool(make, 3, backend="serial"), normalize := Normalize()) as pool:
        list(play(pool, 10))
        known = copy.deepcopy((normalize.obs_rms.as_data(), normalize.ret_rms.as_data()))
        normalize.training = False
        for answer, rows in follow(pool, make, 10):
            for i, row in enumerate(rows):
                assert_same(answer.obs[i], normalize.normalize_obs(row.obs))
        assert_same({**normalize.obs_rms.as_data()}, known[0])
        assert_same({**normalize.ret_rms.as_data()}, known[1])


def test_unnormalize_is_the_way_back() -> None:
    with wrap(shoal.Pool(partial(NoisyEnv, MANY), 3, backend="serial"), normalize := Normalize(clip_obs=1e6)) as pool:
        for answer in play(pool, 10):
            original = normalize.get_original_obs()
            for key, part in normalize.unnormalize_obs(answer.obs).items():
                np.testing.assert_allclose(part, original[key], rtol=1e-4, atol=1e-3)
            back = normalize.unnormalize_reward(answer.reward)
            np.testing.assert_allclose(back, normalize.get_original_reward(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_given_out_never_changes(mode: str) -> None:
    envs = wrap(HOSTS["pool of 7 on 3 processes"](partial(NoisyEnv, MANY), mode), Normalize())
    held = [(answer, copy.deepcopy(answer)) for answer in play(envs, 10)]
    envs.close()
    for answer, kept in held:
        assert_same(answer.obs, kept.obs)
        assert_same(answer.reward, kept.reward)
        for row, final in answer.finals.items():
            assert_same(final, kept.finals[row])


def test_what_the_env_gave_is_not_written_to() -> None:
    """Parts that are left alone are the env's own arrays; those that are not are new ones."""
    with shoal.Pool(partial(NoisyEnv, MANY), 2, backend="serial", copy=True) as plain_pool:
        raw = plain_pool.reset(seed=0)
        before = copy.deepcopy(raw.obs)
        normalize = Normalize()
        wrap(plain_pool, normalize)
        normalize.obs_rms["vector"].update(raw.obs["vector"])
        normalize.normalize_obs(raw.obs)
        normalize.unnormalize_obs(raw.obs)
        assert_same(raw.obs, before)


def test_transforms_follow_each_other() -> None:
    """Normalize behind FrameStack knows stacks, and the other way round stacks are normalized."""
    make = partial(NoisyEnv, MANY)
    first, second = Normalize(), Normalize()
    one = wrap(shoal.Pool(make, 2, backend="serial"), ExtractDictObs("vector"), FrameStack(3), first)
    two = wrap(shoal.Pool(make, 2, backend="serial"), ExtractDictObs("vector"), second, FrameStack(3))
    one.reset(seed=0), two.reset(seed=0)
    assert first.obs_rms.mean.shape == (6,)
    assert second.obs_rms.mean.shape == (2,)
    assert one.single_observation_space.shape == two.single_observation_space.shape == (6,)
    for pool in (one, two):
        pool.close()


BAD = {
    "no box": ({}, spaces.Discrete(3), "Box.*Discrete"),
    "no box in a dict": ({}, spaces.Dict(a=VECTOR, b=spaces.Discrete(3)), "'b'.*name the keys"),
    "a key that is not there": ({"norm_obs_keys": ["lost"]}, MANY, "'lost'.*not there"),
    "keys without a dict": ({"norm_obs_keys": ["a"]}, VECTOR, "keys are for Dict"),
    "clip_obs": ({"clip_obs": -1.0}, VECTOR, "clip_obs"),
    "clip_reward": ({"clip_reward": "ten"}, VECTOR, "clip_reward"),
    "epsilon": ({"epsilon": -1.0}, VECTOR, "epsilon"),
    "gamma": ({"gamma": "high"}, VECTOR, "gamma"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_normalized_is_refused_with_a_reason(name: str) -> None:
    arguments, space, reason = BAD[name]
    with shoal.Pool(partial(NoisyEnv, space), 1, backend="serial") as pool:
        with pytest.raises((TypeError, ValueError), match=reason):
            wrap(pool, Normalize(**arguments))


def test_without_norm_obs_any_observation_will_do() -> None:
    class Words(NoisyEnv):
        def _draw(self, space: Any) -> Any:
            return 1

    with wrap(shoal.Pool(partial(Words, spaces.Discrete(3)), 2, backend="serial"), Normalize(norm_obs=False)) as pool:
        assert pool.reset(seed=0).obs.tolist() == [1, 1]
        assert pool.step(np.zeros((2, 2), np.float32)).reward.dtype == np.float32


@pytest.mark.parametrize("space", [VECTOR, MANY], ids=["box", "dict"])
def test_numbers_are_those_of_stable_baselines(space: Any) -> None:
    vec_env = stable_baselines()
    make = partial(NoisyEnv, space)
    arguments: dict[str, Any] = {"clip_obs": 2.0, "clip_reward": 1.0, "gamma": 0.8, "epsilon": 1e-3}
    theirs = vec_env.VecNormalize(vec_env.DummyVecEnv([make] * 3), **arguments)
    theirs.seed(0)
    normalize = Normalize(**arguments)
    with wrap(shoal.Pool(make, 3, backend="serial", autoreset="same_step"), normalize) as ours:
        assert ours.single_observation_space == theirs.observation_space
        assert_close(ours.reset(seed=0).obs, theirs.reset())
        for turn in range(40):
            if turn == 30:
                theirs.training = normalize.training = False
            actions = np.stack([action(i, turn) for i in range(3)])
            batch, (obs, reward, _, infos) = ours.step(actions), theirs.step(actions)
            assert_close(batch.obs, obs)
            np.testing.assert_allclose(batch.reward, reward, rtol=1e-4)
            for env_id, final in batch.final_obs.items():
                assert_close(final, infos[env_id]["terminal_observation"])
        np.testing.assert_allclose(normalize.ret_rms.var, theirs.ret_rms.var)
        assert_same(normalize.get_original_obs(), theirs.get_original_obs())
        np.testing.assert_allclose(normalize.get_original_reward(), theirs.get_original_reward(), rtol=1e-6)
    theirs.close()


# ---- statistics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_statistics_are_those_of_two_passes(dtype: Any, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    known, seen = RunningMeanStd(shape=shape), []
    for size in (1, 5, 2, 0, 7):
        batch = generator.integers(0, 2 if dtype is np.bool_ else 100, (size, *shape)).astype(dtype)
        before = batch.copy()
        known.update(batch)
        assert_same(batch, before)
        seen += list(batch)
    mean, var = moments(seen)
    np.testing.assert_allclose(known.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(known.var, var, rtol=1e-9)
    assert known.count == pytest.approx(15 + START)


def test_statistics_far_from_zero_keep_their_variance() -> None:
    """Sums of squares would lose it all."""
    generator = np.random.default_rng(0)
    known = RunningMeanStd(epsilon=1e-30, shape=(2,))
    values = 1e9 + generator.normal(size=(5000, 2))
    for batch in np.split(values, 100):
        known.update(batch)
    np.testing.assert_allclose(known.var, values.var(0), rtol=1e-2)


def test_statistics_combine_and_copy() -> None:
    generator = np.random.default_rng(1)
    one, other, both = (RunningMeanStd(epsilon=1e-9, shape=(3,)) for _ in range(3))
    first, second = generator.normal(size=(40, 3)), generator.normal(5, 2, (60, 3))
    one.update(first), other.update(second), both.update(np.concatenate([first, second]))
    twin = one.copy()
    one.combine(other)
    np.testing.assert_allclose(one.mean, both.mean)
    np.testing.assert_allclose(one.var, both.var)
    np.testing.assert_allclose(twin.mean, first.mean(0))
    assert "count=100" in repr(one)
