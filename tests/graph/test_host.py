"""What the three frameworks share: which envs a graph takes, and whose errors come out of it."""

from __future__ import annotations

import gc
import weakref
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv, SpaceEnv
from faults.kit import DeedEnv
from shoal.graph import own_errors
from shoal.graph.host import GraphHost
from shoal.wrappers import Normalize, wrap


def test_a_pool_and_what_stands_on_one_will_do() -> None:
    with shoal.Pool(CountEnv, 3, backend="serial") as pool:
        assert GraphHost(pool).pool is pool
    for api in ("gymnasium", "sb3", "baselines", *(["dm_env"] if find_spec("dm_env") else [])):
        envs = shoal.make(CountEnv, 3, api=api, backend="serial")
        assert GraphHost(envs).pool is envs.pool
        envs.close()


def test_a_closed_pool_is_refused_at_once() -> None:
    envs = shoal.make(CountEnv, 2, backend="serial")
    envs.close()
    for closed in (envs, envs.pool):
        with pytest.raises(shoal.PoolClosed, match="make a new one"):
            GraphHost(closed)


def test_wrappers_are_refused_rather_than_stepped_past() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        with pytest.raises(shoal.errors.BadEnv, match="has wrappers, which a graph would step past"):
            GraphHost(wrap(pool, Normalize()))
    envs = shoal.make(CountEnv, 2, backend="serial")
    with pytest.raises(shoal.errors.BadEnv, match="has wrappers"):
        GraphHost(gymnasium.wrappers.vector.NormalizeReward(envs))
    envs.close()
    inner = shoal.make(CountEnv, 2, backend="serial")
    passing_on = type("PassingOn", (), {"__getattr__": lambda self, name: getattr(inner, name)})()
    assert passing_on.pool is inner.pool
    with pytest.raises(shoal.errors.BadEnv, match="has wrappers"):
        GraphHost(passing_on)
    inner.close()
    for nothing in (None, 3, CountEnv(), "CartPole-v1"):
        with pytest.raises(shoal.errors.BadEnv, match=r"expected a shoal\.Pool or a vector env"):
            GraphHost(nothing)


def test_spaces_without_numbers_are_named() -> None:
    space = gymnasium.spaces.Dict(word=gymnasium.spaces.Text(3), number=gymnasium.spaces.Discrete(2))
    with shoal.Pool(lambda: SpaceEnv(space), 2, backend="serial") as pool:
        with pytest.raises(shoal.errors.BadEnv, match=r"observation space\['word'\] is a text"):
            GraphHost(pool)
    with shoal.Pool(lambda: SpaceEnv(gymnasium.spaces.Discrete(2), space), 2, backend="serial") as pool:
        with pytest.raises(shoal.errors.BadEnv, match=r"action space\['word'\] is a text"):
            GraphHost(pool)


def test_arrays_are_the_graphs_own(backend: Any) -> None:
    with shoal.Pool(CountEnv, 3, backend=backend, num_workers=min(3, 1 if backend == "serial" else 3)) as pool:
        host = GraphHost(pool)
        host.reset(seed=5)
        kept = [host.step(np.zeros(3, np.int32)) for _ in range(5)]
        assert [obs[0].tolist() for obs, *_ in kept] == [[5, 0, i] for i in range(1, 6)]
        assert all(reward.dtype == np.float32 for _, reward, *_ in kept)


def test_reset_rows_come_in_the_order_asked_for() -> None:
    with shoal.Pool(CountEnv, 4, backend="serial") as pool:
        host = GraphHost(pool)
        (obs,) = host.reset([3, 0, 2], seed=[30, 0, 20])
        assert obs.tolist() == [[30, 0, 0], [0, 0, 0], [20, 0, 0]]


def test_an_error_is_the_envs_own_whatever_was_made_of_it() -> None:
    with shoal.Pool(DeedEnv, 2, backend="serial") as pool:
        host = GraphHost(pool)
        host.reset(seed=0)
        pool.set_attr("deeds", {"step": "raise KeyError"}, env_ids=[1])

        def as_a_framework_does() -> None:
            try:
                host.step(np.zeros(2, np.int64))
            except Exception as error:
                raise RuntimeError(f"INTERNAL: callback failed: {error}") from None

        with pytest.raises(KeyError) as caught, own_errors():
            as_a_framework_does()
        assert isinstance(caught.value, shoal.EnvError)
        with pytest.raises(RuntimeError, match="something else"), own_errors():
            raise RuntimeError("something else")


def test_errors_that_nobody_asks_for_are_not_collected_for_ever() -> None:
    from shoal.graph import host as module

    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        host = GraphHost(pool)
        for _ in range(200):
            with pytest.raises(RuntimeError, match="must be reset"):
                host.step(np.zeros(2, np.int64))
        assert len(module._kept) <= module._KEPT


def test_errors_do_not_keep_the_envs() -> None:
    pool = shoal.Pool(CountEnv, 2, backend="serial")
    with pytest.raises(RuntimeError, match="must be reset"):
        GraphHost(pool).step(np.zeros(2, np.int64))
    kept = weakref.ref(pool)
    del pool
    gc.collect()
    assert kept() is None
