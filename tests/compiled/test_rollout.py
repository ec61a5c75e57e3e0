"""Rollouts: the same whoever runs them, and the pool goes on where they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from compiled.envs import CartPole, Nested, Sized, Tag
from shoal import compiled

pytest.importorskip("numba", reason="compiled envs need numba")


def arrays(rollout: shoal.Rollout) -> list[Any]:
    found: list[Any] = []
    for value in vars(rollout).values():
        left = [value]
        while left:
            one = left.pop()
            if isinstance(one, dict):
                left += one.values()
            elif isinstance(one, tuple):
                left += one
            elif one is not None:
                found.append(one)
    return found


def assert_same(one: shoal.Rollout, other: shoal.Rollout) -> None:
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@compiled.function
def weighted(obs: Any, weights: Any) -> float:
    total = 0.0
    for i in range(len(weights)):
        total += obs[i] * weights[i]
    return total


@compiled.policy
def linear(obs: Any, action: Any, rng: Any, weights: Any, noise: Any) -> None:
    action[0] = 1 if weighted(obs, weights) + compiled.normal(rng) * noise[0] > 0.0 else 0


WEIGHTS = np.array([0.0, 0.5, 2.0, 1.0])


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("env", [CartPole, Nested, Tag, Sized])
def test_random_rollouts_are_those_of_plain_python(env: Any, mode: Any) -> None:
    rollouts = []
    for backend, workers in (("serial", 1), ("compiled", 1), ("compiled", 3)):
        with shoal.Pool(env, 3, backend=backend, num_workers=workers, autoreset=mode, seed=9) as pool:  # type: ignore[arg-type]
            first = pool.rollout("random", 70, seed=4)
            second = pool.rollout("random", 3, seed=5)
            step = pool.step(pool.action_space.sample())
            rollouts.append((first, second, step))
        assert second.reward.shape == (3, pool.num_envs)
        np.testing.assert_array_equal(first.began[-1], second.began[0])
    for first, second, step in rollouts[1:]:
        assert_same(rollouts[0][0], first)
        assert_same(rollouts[0][1], second)
        np.testing.assert_array_equal(rollouts[0][2].episode_length, step.episode_length)
    assert rollouts[0][0].began.sum() > len(rollouts[0][0].began[0])


def test_a_policy_of_ones_own_is_compiled() -> None:
    results = []
    for backend in ("serial", "compiled"):
        with shoal.Pool(CartPole, 5, backend=backend, seed=1) as pool:  # type: ignore[arg-type]
            results.append(pool.rollout(linear, 60, params=(WEIGHTS, 0.1), seed=2))
    assert_same(*results)
    assert results[0].episode_length.max() > 20  # it balances, somewhat
    assert set(np.unique(results[0].actions)) == {0, 1}


def test_a_rollout_is_a_row_of_steps() -> None:
    def policy(obs: Any) -> Any:
        return (obs[:, 2] > 0).astype(np.int64)

    with (
        shoal.Pool(CartPole, 4, backend="compiled", autoreset="same_step", seed=3) as pool,
        shoal.Pool(CartPole, 4, backend="compiled", autoreset="same_step", seed=3) as other,
    ):
        rollout = pool.rollout(policy, 40)
        batch = other.reset()
        for t in range(40):
            np.testing.assert_array_equal(rollout.obs[t], batch.obs)
            np.testing.assert_array_equal(rollout.began[t], batch.began)
            batch = other.step(rollout.actions[t])
            for name in ("reward", "terminated", "truncated", "episode_return", "episode_length"):
                np.testing.assert_array_equal(getattr(rollout, name)[t], getattr(batch, name))
            for lane, final in batch.final_obs.items():
                np.testing.assert_array_equal(rollout.final_obs[t, lane], final)
        np.testing.assert_array_equal(rollout.obs[40], batch.obs)
        assert rollout.truncated.any()


def test_any_pool_rolls_out() -> None:
    with shoal.Pool("CartPole-v1", 3, backend="serial", seed=0) as pool:
        rollout = pool.rollout(lambda obs: np.ones(3, np.int64), 30)
        assert rollout.obs.shape == (31, 3, 4)
        assert rollout.final_obs is None
        assert rollout.began[0].all()
        assert (rollout.began[1:] == (rollout.episode_length == 0)).all()
    box = spaces.Box(np.array([-1.0, -np.inf, 0.0]), np.array([1.0, np.inf, np.inf]), dtype=np.float64)

    class Any3(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Discrete(2), box

        def reset(self, **_: Any) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            return 1, 0.0, False, False, {}

    with shoal.Pool(Any3, 2, backend="serial") as pool:
        actions = pool.rollout("random", 50, seed=0).actions
        assert all(box.contains(one) for one in actions.reshape(-1, 3))
        assert len(np.unique(actions)) == actions.size


class Bad(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if state.gravity < 0.0:
            raise ValueError("no")
        return 1.0, False


def test_what_makes_no_sense_is_refused() -> None:
    with shoal.Pool(CartPole, 2, backend="compiled", autoreset="disabled") as pool:
        with pytest.raises(shoal.BadCall, match="autoreset"):
            pool.rollout("random", 3)
    with shoal.Pool(CartPole, 2, backend="compiled") as pool:
        with pytest.raises(shoal.BadCall, match="expected a policy"):
            pool.rollout("greedy", 3)
        with pytest.raises(shoal.BadCall, match="params are for"):
            pool.rollout(lambda obs: obs, 3, params=(1.0,))
        with pytest.raises(ValueError, match="steps"):
            pool.rollout("random", 0)
        pool.reset(seed=0)
        pool.send(np.zeros(2, int))
        with pytest.raises(shoal.CallPending):
            pool.rollout("random", 3)
    with shoal.Pool(Bad, 3, backend="compiled", seed=0) as pool:
        pool.rollout("random", 5)
        pool.set_attr("gravity", [1.0, -1.0, 1.0])
        with pytest.raises(shoal.EnvError, match="env 1"):
            pool.rollout("random", 5)
        with pytest.raises(shoal.ResetNeeded):
            pool.step(np.zeros(3, int))
        pool.set_attr("gravity", 1.0)
        assert pool.rollout("random", 5).reward.sum() == 15.0


@compiled.policy
def wrong(obs: Any, action: Any, rng: Any) -> None:
    action[0] = "left"


def test_a_policy_that_cannot_be_compiled_is_named() -> None:
    with shoal.Pool(CartPole, 2, backend="compiled") as pool:
        with pytest.raises(shoal.BadEnv, match=r"wrong cannot be compiled: .*action\[0\] = \"left\""):
            pool.rollout(wrong, 3)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("backend", ["serial", "compiled"])
def test_arrays_of_an_earlier_rollout_are_written_again(backend: Any, mode: Any) -> None:
    with (
        shoal.Pool(Nested, 3, backend=backend, autoreset=mode, seed=0) as reusing,
        shoal.Pool(Nested, 3, backend=backend, autoreset=mode, seed=0) as fresh,
    ):
        kept = reusing.rollout("random", 9, seed=1)
        fresh.rollout("random", 9, seed=1)
        for seed in (2, 3):
            again = reusing.rollout("random", 9, seed=seed, out=kept)
            assert again is kept
            other = fresh.rollout("random", 9, seed=seed)
            for mine, theirs in zip(arrays(kept), arrays(other), strict=True):
                np.testing.assert_array_equal(mine, theirs)
        for steps, out in ((8, kept), (9, "nonsense")):
            with pytest.raises(shoal.BadCall, match=f"an earlier rollout of {steps} steps"):
                reusing.rollout("random", steps, out=out)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["compiled", "serial"])
def test_arrays_that_cannot_be_written_again_are_refused(backend: Any) -> None:
    with shoal.Pool(CartPole, 3, backend=backend, seed=0) as pool:
        made = pool.rollout("random", 9)
        apart = np.zeros((20, 3, 4), np.float32)
        with pytest.raises(shoal.BadCall, match=r"out\.obs must be as the rollout has made it"):
            pool.rollout("random", 9, out=replace(made, obs=apart[::2]))
        assert not apart.any()
        made.reward.flags.writeable = False
        before = made.reward.copy()
        with pytest.raises(shoal.BadCall, match=r"out\.reward must be as the rollout has made it"):
            pool.rollout("random", 9, out=made)
        np.testing.assert_array_equal(made.reward, before)


def test_last_observations_of_another_mode_are_not_taken_for_this_ones() -> None:
    with (
        shoal.Pool(CartPole, 3, backend="compiled", autoreset="same_step") as one,
        shoal.Pool(CartPole, 3, backend="compiled", autoreset="next_step") as other,
    ):
        made = one.rollout("random", 9)
        with pytest.raises(shoal.BadCall, match="an earlier rollout of 9 steps of such a pool"):
            other.rollout("random", 9, out=made)
