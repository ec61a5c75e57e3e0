"""Rollouts in single precision, in one kernel, against rollouts step by step and in double precision."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import compiled
from shoal.errors import BadCall

pytest.importorskip("numba", reason="compiled envs need numba")

ALL_ENVS = bool(os.environ.get("SHOAL_ALL_ENVS"))  # see test_envs
NAMES = (
    "obs",
    "actions",
    "reward",
    "terminated",
    "truncated",
    "began",
    "episode_return",
    "episode_length",
    "final_obs",
)


def pool(name: str, count: int, mode: str = "next_step", workers: int = 2, **kwargs: Any) -> Any:
    kwargs = {"precision": "single", **kwargs}
    return shoal.Pool(name, count, backend="compiled", num_workers=workers, autoreset=mode, env_kwargs=kwargs)


def weights(*widths: int) -> list[Any]:
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(0, 0.5, pair), rng.normal(0, 0.1, pair[1])) for pair in itertools.pairwise(widths)]
    return [np.asarray(part, np.float32) for pair in pairs for part in pair]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("name", ["CartPole-v1", *["Pendulum-v1", "CliffWalkingSlippery-v1"] * ALL_ENVS])
def test_a_rollout_is_what_its_steps_are(name: str, mode: str) -> None:
    """The actions of a rollout, stepped one by one, bring the same bits."""
    with pool(name, 150, mode) as at_once, pool(name, 150, mode, 1) as stepped:
        for one in (at_once, stepped):
            one.reset(seed=3)
        for turn in range(2):
            rollout = at_once.rollout("random", 70, seed=turn)
            answers = iter(rollout.actions)
            again = stepped.rollout(lambda obs, answers=answers: next(answers), 70)
            for field in NAMES:
                a, b = getattr(rollout, field), getattr(again, field)
                assert (a is None) == (b is None)
                if a is None:
                    continue
                assert a.dtype == b.dtype
                if field in ("episode_return", "reward"):  # sums of 32 bits
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
                else:
                    np.testing.assert_array_equal(a, b)
        assert rollout.reward.dtype == np.float32
        assert rollout.episode_length.dtype == np.int32
        assert at_once.stats().episodes == stepped.stats().episodes


def test_random_actions_are_those_of_double_precision() -> None:
    with pool("CartPole-v1", 90) as single, shoal.Pool("CartPole-v1", 90, backend="compiled") as exact:
        for one in (single, exact):
            one.reset(seed=3)
        np.testing.assert_array_equal(
            single.rollout("random", 20, seed=4).actions, exact.rollout("random", 20, seed=4).actions
        )


def test_threads_and_blocks_make_no_difference() -> None:
    with pool("CartPole-v1", 1111, workers=1) as one, pool("CartPole-v1", 1111, workers=5) as five:
        for each in (one, five):
            each.reset(seed=0)
        a, b = one.rollout("random", 130, seed=1), five.rollout("random", 130, seed=1)
        for field in NAMES[:-1]:
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    ("name", "widths", "activation"),
    [
        ("CartPole-v1", (4, 7, 2), "relu"),
        *[
            ("CartPole-v1", (4, 64, 64, 2), "tanh"),
            ("Pendulum-v1", (3, 10, 5, 1), "tanh"),
            ("Acrobot-v1", (6, 3), "tanh"),
        ]
        * ALL_ENVS,
    ],
)
def test_networks_choose_as_in_double_precision(name: str, widths: Any, activation: str, sample: bool) -> None:
    network, params = compiled.Mlp(activation, sample), weights(*widths)
    with pool(name, 140) as single, shoal.Pool(name, 140, backend="compiled") as exact:
        for one in (single, exact):
            one.reset(seed=3)
        a = single.rollout(network, 10, params=params, seed=4)
        b = exact.rollout(network, 10, params=params, seed=4)
    if np.issubdtype(a.actions.dtype, np.floating):
        np.testing.assert_allclose(a.actions, b.actions, atol=1e-3)
    else:  # two outputs may be closer to each other than either precision tells
        assert (a.actions != b.actions).mean() < 0.002


def test_a_network_in_plain_python() -> None:
    network, params = compiled.Mlp("relu"), weights(4, 5, 2)
    with (
        shoal.Pool("CartPole-v1", 9, backend="compiled") as exact,
        shoal.Pool(compiled_class("CartPole-v1"), 9, backend="serial") as plain,
    ):
        for one in (exact, plain):
            one.reset(seed=3)
        a, b = (one.rollout(network, 12, params=params, seed=4) for one in (exact, plain))
        np.testing.assert_array_equal(a.actions, b.actions)


def compiled_class(name: str) -> Any:
    from shoal.compiled import library

    return library.find(name)


def test_params_of_another_shape_are_refused() -> None:
    with pool("CartPole-v1", 4) as one, pytest.raises(BadCall, match=r"from 4 numbers of an observation to 2 outputs"):
        one.rollout(compiled.Mlp(), 3, params=weights(5, 2))
    with pytest.raises(ValueError, match="'tanh', 'relu'"):
        compiled.Mlp("sigmoid")


@compiled.policy
def lean(obs: Any, action: Any, rng: Any, gains: Any) -> None:
    total = 0.0
    for i in range(4):
        total += gains[i] * obs[i]
    action[0] = 1 if total > 0.0 else 0


def test_a_linear_policy() -> None:
    gains = np.array([0.1, 0.3, 1.0, 0.8])
    with pool("CartPole-v1", 200) as single:
        single.reset(seed=3)
        rollout = single.rollout(lean, 60, params=[gains])
        np.testing.assert_array_equal(rollout.actions, (rollout.obs[:-1] @ gains > 0).astype(int))
        assert not rollout.terminated.any()


def test_large_rollouts_are_written_past_the_caches() -> None:
    with pool("CartPole-v1", 2050) as large, pool("CartPole-v1", 3, workers=1) as small:
        for one in (large, small):
            one.reset(seed=0)
        a, b = large.rollout("random", 200, seed=1), small.rollout("random", 200, seed=1)
        for field in NAMES[:-1]:
            np.testing.assert_array_equal(getattr(a, field)[:, :3], getattr(b, field))


def test_memory_is_used_again_where_the_caller_has_let_it_go() -> None:
    with pool("CartPole-v1", 4000) as one:
        one.reset(seed=0)
        kept = one.rollout("random", 10)
        rows = dataclasses.asdict(kept)
        before = {name: np.array(array) for name, array in rows.items() if array is not None}
        view = one.rollout("random", 10).obs[3:4]
        shown, seen = view.copy(), set()
        for _ in range(6):
            seen.add(one.rollout("random", 10).reward.ctypes.data)
            gc.collect()
        assert len(seen) <= 2
        np.testing.assert_array_equal(view, shown)
        for name, array in before.items():
            np.testing.assert_array_equal(getattr(kept, name), array)
