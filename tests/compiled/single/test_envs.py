"""Every env of the library in single precision, against the same env in double precision."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import shoal
from compiled.envs import ALL, CartPole
from compiled.kit import assert_same
from shoal.compiled import library
from shoal.compiled.single.columns import Columns
from shoal.spaces.leaves import flatten, get_path

pytest.importorskip("numba", reason="compiled envs need numba")

SINGLE = {"precision": "single"}
# Compiling all of them three times over takes minutes: `make test-single` does.
NAMES = library.ids() if os.environ.get("SHOAL_ALL_ENVS") else ["CartPole-v1", "FrozenLake-v1"]
# The largest difference of an observation after one step from the same state, where it is not 0.
BOUNDS = {
    "CartPole-v1": 1e-6, "Pendulum-v1": 2e-6, "MountainCar-v0": 2e-7, "MountainCarContinuous-v0": 2e-7,
    "Acrobot-v1": 4e-6,
}  # fmt: skip
VECTORIZED = {"CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"}


def furthest(space: Any, a: Any, b: Any) -> float:
    """The largest difference of two observations."""
    pairs = [(get_path(a, leaf.path), get_path(b, leaf.path)) for leaf in flatten(space)]
    return max(float(np.abs(np.asarray(x, float) - np.asarray(y, float)).max()) for x, y in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_state_is_the_same(name: str) -> None:
    bound = BOUNDS.get(name, 0.0)
    with (
        shoal.Pool(name, 50, backend="compiled", num_workers=1) as exact,
        shoal.Pool(name, 50, backend="compiled", num_workers=2, env_kwargs=SINGLE) as single,
    ):
        exact.single_action_space.seed(1)
        a, b = exact.reset(seed=3), single.reset(seed=3)
        for _ in range(60):
            assert furthest(exact.single_observation_space, a.obs, b.obs) <= bound
            for field in ("terminated", "truncated", "began"):
                np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
            np.testing.assert_allclose(a.reward, b.reward, atol=10 * bound)
            wide, narrow = exact.local_envs[0].states, single.local_envs[0].states
            for field in narrow.dtype.names:  # both go on from a state that both can hold
                narrow[field][...] = wide[field]
                wide[field][...] = narrow[field]
            actions = exact.action_space.sample()
            a, b = exact.step(actions), single.step(actions)
        assert isinstance(narrow, Columns) == (name in VECTORIZED or not _has_arrays(wide.dtype))


def _has_arrays(dtype: Any) -> bool:
    return any(dtype[name].shape for name in dtype.names) or dtype.names[0] == "apples"


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("env", ALL if os.environ.get("SHOAL_ALL_ENVS") else [CartPole])
def test_threads_give_the_same_bits(env: Any, mode: Any) -> None:
    options: dict[str, Any] = {"num_envs": 37, "autoreset": mode, "env_kwargs": SINGLE, "backend": "compiled"}
    with shoal.Pool(env, num_workers=1, **options) as one, shoal.Pool(env, num_workers=3, **options) as three:
        one.action_space.seed(1)
        answers = [pool.reset(seed=11) for pool in (one, three)]
        for _ in range(40):
            assert_same(*answers)
            if mode == "disabled" and answers[0].done.any():
                ended = np.flatnonzero(answers[0].done)
                assert_same(*[pool.reset(ended) for pool in (one, three)])
            actions = one.action_space.sample()
            answers = [pool.step(actions) for pool in (one, three)]


def test_a_lane_does_not_know_its_neighbours() -> None:
    """Which lanes share a vector instruction, and which are left over, makes no difference."""
    actions = np.random.default_rng(0).integers(0, 2, (30, 300))
    with shoal.Pool("CartPole-v1", 300, backend="compiled", env_kwargs=SINGLE) as whole:
        first = whole.reset(seed=0).obs.copy()
        rows = [whole.step(row).obs.copy() for row in actions]
    for start, count in ((0, 1), (5, 3), (17, 130), (250, 50)):
        with shoal.Pool("CartPole-v1", count, backend="compiled", num_workers=1, env_kwargs=SINGLE) as part:
            np.testing.assert_array_equal(part.reset(seed=start).obs, first[start : start + count])
            for t, row in enumerate(actions):
                answer = part.step(row[start : start + count])
                np.testing.assert_array_equal(answer.obs, rows[t][start : start + count])


def episodes(name: str, single: bool, count: int, least: int) -> tuple[Any, Any]:
    """Returns and lengths of the first episode of so many envs, and of later ones up to `least`, by random actions."""
    options = SINGLE if single else {}
    with shoal.Pool(name, count, backend="compiled", seed=5 + 10**6 * single, env_kwargs=options) as pool:
        found: list[Any] = []
        for turn in range(200):
            rollout = pool.rollout("random", 500, seed=9 + turn + 10**6 * single)
            over = rollout.terminated | rollout.truncated
            found.append(np.stack([rollout.episode_return[over], rollout.episode_length[over]]).astype(np.float64))
            if sum(part.shape[1] for part in found) >= least:
                break
    whole = np.concatenate(found, axis=1)
    return whole[0], whole[1]


def distance(a: Any, b: Any) -> tuple[float, float]:
    """The largest difference of two empirical distributions (Kolmogorov and Smirnov), and what 1 in 10,000 exceeds."""
    places = np.sort(np.concatenate([a, b]))
    apart = [np.searchsorted(np.sort(one), places, "right") / len(one) for one in (a, b)]
    return float(np.abs(apart[0] - apart[1]).max()), 2.225 * np.sqrt((len(a) + len(b)) / (len(a) * len(b)))


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_episodes_are_distributed_alike(name: str) -> None:
    count = 50 if "Cliff" in name else 500 if name.startswith("shoal/") else 10_000
    least = {"shoal/Bricks-v0": 2000, "shoal/Orchard-v0": 2000, "CliffWalking-v1": 1000}.get(name, 10_000)
    exact, single = episodes(name, False, count, least), episodes(name, True, count, least)
    for a, b in zip(exact, single, strict=True):
        found, most = distance(a, b)
        assert found <= most
