"""Compiled envs answer exactly as the same class in plain Python does, whoever steps them and however."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from compiled.envs import ALL, CartPole, Nested, Tag
from compiled.kit import assert_same
from shoal.state.datafile import read_file, write_file

pytest.importorskip("numba", reason="compiled envs need numba")


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("env", ALL)
def test_bit_by_bit(env: Any, mode: Any) -> None:
    options: dict[str, Any] = {"num_envs": 5, "autoreset": mode}
    with (
        shoal.Pool(env, backend="serial", **options) as plain,
        shoal.Pool(env, backend="compiled", num_workers=1, **options) as one,
        shoal.Pool(env, backend="compiled", num_workers=3, **options) as three,
    ):
        pools = (plain, one, three)
        plain.action_space.seed(1)
        answers = [pool.reset(seed=11) for pool in pools]
        began = 0
        for _ in range(80):
            for other in answers[1:]:
                assert_same(answers[0], other)
            began += int(answers[0].began.sum())
            if mode == "disabled" and answers[0].done.any():
                ended = np.flatnonzero(answers[0].done)
                resets = [pool.reset(ended) for pool in pools]
                for other in resets[1:]:
                    assert_same(resets[0], other)
            actions = plain.action_space.sample()
            answers = [pool.step(actions) for pool in pools]
        assert began > plain.num_envs or mode == "disabled"


def test_seeds_are_the_lanes_own_whatever_their_number() -> None:
    with shoal.Pool(CartPole, 3, backend="compiled") as few, shoal.Pool(CartPole, 7, backend="compiled") as many:
        np.testing.assert_array_equal(few.reset(seed=40).obs, many.reset(seed=38).obs[2:5])
        first = many.reset(seed=38).obs
        assert not np.array_equal(many.reset().obs, first)  # the next episode
        np.testing.assert_array_equal(many.reset(seed=38).obs, first)
        assert len(np.unique(first, axis=0)) == 7


def test_many_threads_give_what_one_gives() -> None:
    number = 6001  # enough for threads to be worth it
    actions = np.random.default_rng(0).integers(0, 2, (60, number))
    with (
        shoal.Pool(CartPole, number, backend="compiled", num_workers=1) as one,
        shoal.Pool(CartPole, number, backend="compiled", num_workers=5) as five,
    ):
        assert_same(one.reset(seed=0), five.reset(seed=0))
        for row in actions:
            assert_same(one.step(row), five.step(row))
        assert one.stats().steps == five.stats().steps
        assert one.stats().episodes == five.stats().episodes


@pytest.mark.parametrize("env", [CartPole, Nested])
def test_partial_batches_answer_like_plain_ones(env: Any) -> None:
    options: dict[str, Any] = {"num_envs": 7, "batch_size": 3, "order": "fifo"}
    with (
        shoal.Pool(env, backend="serial", **options) as plain,
        shoal.Pool(env, backend="compiled", num_workers=2, **options) as compiled,
    ):
        plain.single_action_space.seed(2)
        for pool in (plain, compiled):
            pool.async_reset(seed=3)
        for _ in range(60):
            a, b = plain.recv(), compiled.recv()
            assert_same(a, b)
            rows = [plain.single_action_space.sample() for _ in a.env_id]
            actions: Any = np.array(rows) if env is CartPole else tuple(map(np.stack, zip(*rows, strict=True)))
            plain.send(actions, a.env_id)
            compiled.send(actions, a.env_id)


def test_agents_are_lanes_of_one_env() -> None:
    with shoal.Pool(Tag, 4, backend="compiled") as pool:
        assert (pool.num_envs, pool.lanes_per_env) == (12, 3)
        pool.reset(seed=0)
        with pytest.raises(shoal.BadCall, match="lanes 3 to 5 are those of one env"):
            pool.send(np.zeros(2, int), [3, 4])
        pool.send(np.zeros(3, int), [3, 4, 5])
        assert pool.pending.tolist() == [3, 4, 5]


@pytest.mark.parametrize("env", ALL)
def test_snapshots_go_on_as_before(env: Any, tmp_path: Any) -> None:
    with shoal.Pool(env, 3, backend="compiled") as pool:
        pool.reset(seed=5)
        pool.action_space.seed(0)
        for _ in range(7):
            pool.step(pool.action_space.sample())
        pool.snapshot(tmp_path / "state")
        actions = [pool.action_space.sample() for _ in range(40)]
        expected = [_copied(pool.step(action)) for action in actions]
        pool.restore(tmp_path / "state")
        for action, batch in zip(actions, expected, strict=True):
            assert_same(pool.step(action), batch)
    with shoal.Pool(env, 3, backend="compiled", num_workers=2) as other:
        other.restore(tmp_path / "state")
        assert_same(other.step(actions[0]), expected[0])


@pytest.mark.parametrize("name", ["state", "rng", "seed", "episode"])
def test_a_state_of_another_size_is_refused(name: str, tmp_path: Any) -> None:
    with shoal.Pool(CartPole, 2, backend="compiled") as pool:
        pool.reset(seed=5)
        pool.snapshot(tmp_path / "state")
        content = read_file(tmp_path / "state")
        content["envs"][1][1][name] = np.zeros(0, np.uint8)
        write_file(tmp_path / "state", content)
        with pytest.raises(shoal.DataError, match="was not saved by backend"):
            pool.restore(tmp_path / "state")


def _copied(batch: shoal.Batch) -> shoal.Batch:
    import copy

    return shoal.Batch(*(copy.deepcopy(field) for field in batch))
