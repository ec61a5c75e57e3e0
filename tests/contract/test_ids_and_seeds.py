"""Env ids and seeds: who gets which, and what is refused before anything has moved."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv
from shoal import Pool
from shoal.dialects.gymnasium import VectorEnv


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


# ---- seeds ----------------------------------------------------------------------------------------------------

SEEDS = {
    "int": (10, [10, 11, 12]),
    "zero": (0, [0, 1, 2]),
    "large": (2**33, [2**33, 2**33 + 1, 2**33 + 2]),
    "np.int64": (np.int64(10), [10, 11, 12]),
    "np.uint8": (np.uint8(254), [254, 255, 256]),  # not 0: the sum does not wrap
    "list": ([5, 3, 9], [5, 3, 9]),
    "tuple": ((5, 3, 9), [5, 3, 9]),
    "array": (np.array([5, 3, 9], np.int32), [5, 3, 9]),
    "list of np.int64": ([np.int64(5), 3, np.int64(9)], [5, 3, 9]),
}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_of_a_pool(backend: str, name: str) -> None:
    seed, given = SEEDS[name]
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        np.testing.assert_array_equal(pool.reset(seed=seed).obs[:, 0], given)
        assert pool.get_attr("seed_given") == given
        assert {type(one) for one in pool.get_attr("seed_given")} == {int}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds_of_the_gymnasium_face(name: str) -> None:
    seed, given = SEEDS[name]
    envs = VectorEnv(CountEnv, 3, backend="serial")
    np.testing.assert_array_equal(envs.reset(seed=seed)[0][:, 0], given)
    np.testing.assert_array_equal(envs.np_random_seed, given)
    envs.close()


def test_none_leaves_a_generator_as_it_is(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=5)
        np.testing.assert_array_equal(pool.reset().obs, [[5, 1, 0], [6, 1, 0], [7, 1, 0]])
        np.testing.assert_array_equal(pool.reset(seed=[None, 30, None]).obs, [[5, 2, 0], [30, 0, 0], [7, 2, 0]])


def test_without_a_seed_envs_differ(backend: str) -> None:
    with Pool("CartPole-v1", 3, backend=backend, num_workers=2) as pool:
        first, second = pool.reset().obs.copy(), pool.reset().obs
        assert len(np.unique(np.concatenate([first, second]), axis=0)) == 6


def test_the_pools_own_seed_is_for_the_first_reset(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2, seed=8) as pool:
        np.testing.assert_array_equal(pool.reset().obs[:, :2], [[8, 0], [9, 0], [10, 0]])
        np.testing.assert_array_equal(pool.reset().obs[:, :2], [[8, 1], [9, 1], [10, 1]])


def test_a_seed_of_the_first_reset_goes_before_the_pools_own(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2, seed=8) as pool:
        np.testing.assert_array_equal(pool.reset(seed=1).obs[:, 0], [1, 2, 3])


def test_the_pools_own_seed_reaches_every_env_that_is_reset_for_the_first_time(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2, seed=8) as pool:
        np.testing.assert_array_equal(pool.reset([1]).obs[:, 0], [9])
        np.testing.assert_array_equal(pool.reset([2, 0]).obs[:, 0], [8, 10])


def test_seeds_of_some_envs(backend: str) -> None:
    """An int gives env i `seed + i`, also where only some are reset; a list goes by the ids' order."""
    with Pool(CountEnv, 5, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        batch = pool.reset([4, 1], seed=100)
        np.testing.assert_array_equal(batch.env_id, [1, 4])
        np.testing.assert_array_equal(batch.obs[:, 0], [101, 104])
        batch = pool.reset(np.array([3, 0]), seed=[33, 55])
        np.testing.assert_array_equal(batch.env_id, [0, 3])
        np.testing.assert_array_equal(batch.obs[:, 0], [55, 33])
        assert pool.get_attr("seed_given") == [55, 101, 2, 33, 104]


def test_options_of_all_and_of_some(backend: str) -> None:
    with Pool(CountEnv, 4, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0, options={"level": 1})
        pool.reset([2], options={"level": 2})
        pool.async_reset([0, 3])
        pool.wait_reset([0, 3])
        assert pool.get_attr("options_given") == [None, {"level": 1}, {"level": 2}, None]


BAD_SEEDS = {
    "too few": ([1, 2], ValueError),
    "too many": ([1, 2, 3, 4], ValueError),
    "array too short": (np.array([1, 2]), ValueError),
    "text": ("123", (TypeError, ValueError)),
    "float": (1.5, TypeError),
    "set": ({1, 2, 3}, TypeError),
}


@pytest.mark.parametrize("name", BAD_SEEDS)
def test_bad_seeds_touch_nothing(backend: str, name: str) -> None:
    seed, error = BAD_SEEDS[name]
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(error, match="seed"):
            pool.reset(seed=seed)
        with pytest.raises(error, match="seed"):
            pool.async_reset(seed=seed)
        assert len(pool.pending) == 0
        np.testing.assert_array_equal(pool.step(zeros(3)).obs, [[0, 0, 1], [1, 0, 1], [2, 0, 1]])


def test_as_many_seeds_as_ids(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(ValueError, match="2 seeds"):
            pool.reset([0, 1], seed=[1, 2, 3])
        np.testing.assert_array_equal(pool.step(zeros(3)).obs[:, 0], [0, 1, 2])


@pytest.mark.parametrize("seed", [[1, 2], [1, 2, 3, 4], np.array([1, 2])], ids=str)
def test_a_wrong_number_of_seeds_as_gymnasium_says_it(seed: Any) -> None:
    envs = VectorEnv(CountEnv, 3, backend="serial")
    with pytest.raises(ValueError, match="length must match num_envs=3"):
        envs.reset(seed=seed)
    envs.reset(seed=4)
    assert envs.np_random_seed == (4, 5, 6)
    envs.close()


# ---- ids ------------------------------------------------------------------------------------------------------

GOOD_IDS = {
    "list": [2, 0],
    "tuple": (2, 0),
    "array": np.array([2, 0]),
    "int32": np.array([2, 0], np.int32),
    "uint8": np.array([2, 0], np.uint8),
    "range": range(2, -1, -2),
    "not contiguous": np.array([2, 9, 0, 9])[::2],
}


@pytest.mark.parametrize("name", GOOD_IDS)
def test_ways_to_write_ids(backend: str, name: str) -> None:
    with Pool(CountEnv, 4, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("seed_given", GOOD_IDS[name]) == [2, 0]
        pool.send([3, 1], GOOD_IDS[name])
        np.testing.assert_array_equal(pool.recv().reward, [101, 301])


def test_one_id_may_stand_alone(backend: str) -> None:
    with Pool(CountEnv, 4, backend=backend, num_workers=2, batch_size=1) as pool:
        pool.reset(seed=0)
        pool.send([2], 3)
        batch = pool.recv()
        assert (batch.env_id.tolist(), batch.reward.tolist()) == ([3], [201.0])
        assert pool.reset(np.int64(2), seed=5).obs.tolist() == [[7, 0, 0]]


BAD_IDS: dict[str, Any] = {
    "beyond the last": [0, 4],
    "negative": [-1, 0],
    "named twice": [1, 1],
    "none at all": [],
    "fractions": [0.0, 1.0],
    "flags": [True, False],
    "text": "01",
    "two dimensions": [[0, 1]],
    "ragged": [[0], [1, 2]],
}


@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids_touch_nothing(backend: str, name: str) -> None:
    ids = BAD_IDS[name]
    with Pool(CountEnv, 4, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.reset(seed=0)
        for attempt in (
            lambda: pool.send(zeros(2), ids),
            lambda: pool.reset(ids, seed=9),
            lambda: pool.async_reset(ids),
            lambda: pool.call("add", 1, env_ids=ids),
            lambda: pool.get_attr("value", ids),
            lambda: pool.set_attr("value", "changed", ids),
            lambda: pool.render(ids),
        ):
            with pytest.raises(shoal.BadAction, match="env_ids"):
                attempt()
        assert len(pool.pending) == 0
        assert pool.get_attr("value") == ["untouched"] * 4
        np.testing.assert_array_equal(pool.step(zeros(4)).obs, [[lane, 0, 1] for lane in range(4)])


@pytest.mark.parametrize(("count", "ids"), [(3, [0, 1]), (1, [0, 1]), (4, [0, 1, 2])])
def test_as_many_actions_as_ids(backend: str, count: int, ids: list[int]) -> None:
    with Pool(partial(CountEnv, length=9), 4, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.BadAction, match=f"{len(ids)} envs"):
            pool.send(zeros(count), ids)
        assert len(pool.pending) == 0
        np.testing.assert_array_equal(pool.step(zeros(4)).obs[:, 2], [1, 1, 1, 1])
