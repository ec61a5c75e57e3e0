"""Pools in single precision: states, params, snapshots, partial batches, classes that cannot be vectorized, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from compiled.kit import assert_same
from shoal import compiled
from shoal.compiled.single.columns import Columns
from shoal.errors import BadEnv, EnvError

pytest.importorskip("numba", reason="compiled envs need numba")

SINGLE = {"precision": "single"}


def test_fields_and_params_of_each_env() -> None:
    with shoal.Pool("CartPole-v1", 40, backend="compiled", env_kwargs=SINGLE) as pool:
        pool.reset(seed=0)
        states = pool.local_envs[0].states
        assert isinstance(states, Columns)
        assert states["x"].dtype == states.x.dtype == np.float32
        pool.set_attr("gravity", list(np.linspace(1.0, 20.0, 40)))
        assert pool.get_attr("gravity")[0] == 1.0
        states["theta"] = 0.1
        before = states[3]
        pool.step(np.zeros(40, int))
        assert len(np.unique(states.omega)) == 40  # each falls as its own gravity lets it
        states[3] = before
        assert states[3] == before
        assert np.asarray(states)["theta"][3] == np.float32(0.1)
        with pytest.raises(AttributeError, match="its fields are x, v"):
            states.y  # noqa: B018


def test_snapshots_go_on_to_the_same_bits() -> None:
    options: dict[str, Any] = {"backend": "compiled", "env_kwargs": SINGLE}
    with shoal.Pool("CartPole-v1", 20, **options) as pool, shoal.Pool("CartPole-v1", 20, **options) as other:
        pool.reset(seed=1)
        pool.rollout("random", 50, seed=2)
        other.restore(pool.snapshot())
        for row in np.random.default_rng(0).integers(0, 2, (60, 20)):
            assert_same(pool.step(row), other.step(row))


def test_partial_batches() -> None:
    options: dict[str, Any] = {"backend": "compiled", "env_kwargs": SINGLE}
    with (
        shoal.Pool("CartPole-v1", 21, batch_size=7, order="fifo", num_workers=2, **options) as partial,
        shoal.Pool("CartPole-v1", 21, **options) as whole,
    ):
        first = whole.reset(seed=3)
        partial.async_reset(seed=3)
        actions = np.random.default_rng(0).integers(0, 2, (40, 21))
        for row in actions:
            for _ in range(3):
                batch = partial.recv()
                np.testing.assert_array_equal(batch.obs, first.obs[batch.env_id])
                partial.send(row[batch.env_id], batch.env_id)
            first = whole.step(row)


class Careful(compiled.Env):
    """It raises, so it is stepped lane by lane."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(3)
    state = {"x": float}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = compiled.uniform(rng, 0.0, 1.0)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if action == 2:
            raise ValueError("no such thing")
        state.x += 0.5 * action
        return state.x, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.x


def test_a_class_that_raises() -> None:
    with shoal.Pool(Careful, 8, backend="compiled", env_kwargs={"debug": True, **SINGLE}) as pool:
        pool.reset(seed=0)
        with pytest.raises(EnvError, match="no such thing") as raised:
            pool.step(np.array([0, 1, 0, 2, 0, 0, 0, 0]))
        assert raised.value.env_id == 3


class Mixed(compiled.Env):
    """Whole numbers beside floats, in every operator."""

    observation_space = spaces.Box(-np.inf, np.inf, (9,), np.float32)
    action_space = spaces.Discrete(7)
    state = {"n": int, "x": float, "on": bool}
    params = {"scale": 3}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.n = compiled.integer(rng, -50, 50)
        state.x = compiled.normal(rng, 0.0, 3.0)
        state.on = compiled.uniform(rng) < 0.5

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.n = state.n + action * state.scale - 9
        state.x = (state.x * 0.9 + action / 7) % 5 - 1
        state.on = not state.on
        return state.n // 2 + state.x, state.n > 500

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.n / 7
        obs[1] = state.x // 1
        obs[2] = state.x**2 + state.x**3
        obs[3] = max(state.n, state.x) + min(state.x, 1.0, state.n)
        obs[4] = abs(state.x) ** 0.5 + float(state.n)
        obs[5] = state.n % 7
        obs[6] = state.on * 2.5
        obs[7] = 1.0 if state.x < state.n else -1.0
        obs[8] = np.float64(state.x) + np.arctan2(state.x, 2)


def test_operators_mean_what_they_mean_in_python() -> None:
    with (
        shoal.Pool(Mixed, 200, backend="compiled") as exact,
        shoal.Pool(Mixed, 200, backend="compiled", env_kwargs=SINGLE) as single,
    ):
        a, b = exact.reset(seed=5), single.reset(seed=5)
        assert isinstance(single.local_envs[0].states, Columns)
        for row in np.random.default_rng(0).integers(0, 7, (20, 200)):
            rare = np.abs(a.obs - b.obs) > 1e-3  # a floor or a remainder on the other side of an edge
            assert rare.mean() < 0.001
            wide, narrow = exact.local_envs[0].states, single.local_envs[0].states
            for field in narrow.dtype.names:
                narrow[field][...] = wide[field]
                wide[field][...] = narrow[field]
            a, b = exact.step(row), single.step(row)
            np.testing.assert_array_equal(a.terminated, b.terminated)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="'double', 'single'"):
        shoal.Pool("CartPole-v1", 2, backend="compiled", env_kwargs={"precision": "half"})
    with pytest.raises(BadEnv, match=r"Broken\.step"):
        shoal.Pool(Broken, 2, backend="compiled", env_kwargs=SINGLE)


class Broken(Careful):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.x += state.y
        return 0.0, False
