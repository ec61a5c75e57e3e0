"""Envs of the caller's own block that are replaced by others of the caller's."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv, SpaceEnv


@pytest.mark.parametrize("backend", ["serial", "hybrid"])
def test_another_env_in_the_place_of_one(backend: str) -> None:
    with shoal.Pool(CountEnv, 4, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        other = gymnasium.wrappers.TimeLimit(CountEnv(50), 2)
        other.reset(seed=9)
        pool.local_envs[0] = other
        assert pool.local_envs[0] is other
        assert pool.call("length")[0] == 50
        batches = [pool.step(np.zeros(4, np.int64)) for _ in range(2)]
        assert [batch.truncated[0] for batch in batches] == [False, True]


def test_slices_and_copies() -> None:
    with shoal.Pool(CountEnv, 3, backend="serial") as pool:
        others = [CountEnv(n) for n in (5, 6, 7)]
        pool.local_envs[:] = others
        assert pool.call("length") == [5, 6, 7]
        with pytest.raises(ValueError):
            pool.local_envs[:] = others[:2]
        assert type(pickle.loads(pickle.dumps(pool.local_envs))) is list


def test_what_does_not_fit_is_refused() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        with pytest.raises(shoal.errors.SpaceMismatch, match="place 1 has other spaces"):
            pool.local_envs[1] = SpaceEnv(gymnasium.spaces.Discrete(3))
        with pytest.raises(IndexError):
            pool.local_envs[2] = CountEnv()
        envs = pool.local_envs
    with pytest.raises(shoal.errors.PoolClosed):
        envs[0] = CountEnv()
