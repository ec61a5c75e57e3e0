"""`backend="jax"`: functional envs below a pool behave like all others, in every mode, dialect and wrapper."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shoal
from shoal import Pool
from shoal.graph.jax import BatchedFunctionalEnv
from shoal.wrappers import FrameStack, wrap

LENGTH = 4


class State(NamedTuple):
    number: Any
    count: Any


class Counting:
    """Draws a number at its start, and counts `length` steps."""

    def __init__(self, length: int = LENGTH, nested: bool = False):
        self.length, self.nested = length, nested

    def reset(self, key: Any) -> Any:
        state = State(jax.random.randint(key, (), 0, 1000), jnp.zeros((), jnp.int32))
        return self.look(state), state

    def step(self, key: Any, state: State, action: Any) -> Any:
        state = State(state.number, state.count + 1)
        return self.look(state), state, state.count + 10.0 * action, state.count >= self.length, {}

    def look(self, state: State) -> Any:
        both = jnp.stack([state.number, state.count]).astype(jnp.float32)
        return {"both": both, "count": state.count} if self.nested else both

    def observation_space(self) -> Any:
        both = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
        return gymnasium.spaces.Dict(both=both, count=gymnasium.spaces.Discrete(100)) if self.nested else both

    def action_space(self) -> Any:
        return gymnasium.spaces.Discrete(3)


class Twin(gymnasium.Env):  # type: ignore[type-arg]
    """The same as a Gymnasium env; its numbers are those that the functional one has drawn."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, numbers: list[float]):
        self.numbers = list(numbers)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.number, self.count = self.numbers.pop(0), 0
        return self.look(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.look(), self.count + 10.0 * action, self.count >= LENGTH, False, {}

    def look(self) -> Any:
        return np.array([self.number, self.count], np.float32)


def numbers_of(seed: int, lanes: int, episodes: int) -> Any:
    """The numbers that each lane draws, episode by episode."""
    with Pool(Counting(1), lanes, backend="jax", autoreset="disabled") as pool:
        found = [pool.reset(seed=seed).obs[:, 0].copy()]
        found += [pool.reset().obs[:, 0].copy() for _ in range(episodes - 1)]
    return np.array(found).T


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("lanes", [1, 7])
def test_it_is_stepped_as_any_other_env(mode: Any, lanes: int) -> None:
    numbers = numbers_of(3, lanes, 12)
    fns = [lambda i=i: Twin(numbers[i].tolist()) for i in range(lanes)]
    with (
        Pool(Counting(), lanes, backend="jax", autoreset=mode) as ours,
        Pool(fns, backend="serial", autoreset=mode) as plain,
    ):
        pairs = [(ours.reset(seed=3), plain.reset(seed=3))]
        rng = np.random.default_rng(0)
        for _ in range(20):
            if mode == "disabled":
                over = np.flatnonzero(pairs[-1][0].done)
                if len(over):
                    pairs.append((ours.reset(over), plain.reset(over)))
                    pairs.append((ours.step(np.zeros(lanes, int)), plain.step(np.zeros(lanes, int))))
                    continue
            actions = rng.integers(0, 3, lanes)
            pairs.append((ours.step(actions), plain.step(actions)))
            found, expected = pairs[-1]
            for name in found._fields:
                if name not in ("info", "mask"):
                    np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
            assert {i: v.tolist() for i, v in found.final_obs.items()} == {
                i: v.tolist() for i, v in expected.final_obs.items()
            }


def test_lanes_do_not_depend_on_how_many_there_are() -> None:
    assert numbers_of(5, 3, 4).tolist() == numbers_of(5, 7, 4)[:3].tolist()
    assert len(set(numbers_of(5, 7, 1)[:, 0].tolist())) == 7


def test_without_a_seed_every_run_is_another() -> None:
    with Pool(Counting(), 8, backend="jax") as one, Pool(Counting(), 8, backend="jax") as other:
        assert one.reset().obs[:, 0].tolist() != other.reset().obs[:, 0].tolist()


def test_partial_batches_and_resets_of_some() -> None:
    with Pool(Counting(100), 5, backend="jax", batch_size=2) as pool:
        pool.reset(seed=0)
        pool.send([1, 2], [4, 1])
        batch = pool.recv()
        assert batch.env_id.tolist() == [1, 4]
        assert batch.reward.tolist() == [21, 11]
        pool.reset([1], seed=[9])
        pool.send([0, 0], [1, 4])
        batch = pool.recv()
        assert batch.obs[:, 1].tolist() == [1, 2]
        assert batch.episode_return.tolist() == [1, 13]


def test_snapshots_go_on_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "pool.shoal"
    with Pool(Counting(), 3, backend="jax") as pool:
        pool.reset(seed=1)
        for _ in range(6):
            pool.step([0, 1, 2])
        pool.snapshot(path)
        first = [pool.step([2, 1, 0]).obs.tolist() for _ in range(10)]
        pool.restore(path)
        assert [pool.step([2, 1, 0]).obs.tolist() for _ in range(10)] == first
    with Pool(Counting(), 3, backend="jax") as pool:
        pool.restore(path)
        assert [pool.step([2, 1, 0]).obs.tolist() for _ in range(10)] == first


def test_nested_observations_the_other_faces_and_wrappers() -> None:
    with shoal.make(Counting(nested=True), 3, backend="jax") as envs:
        obs, _ = envs.reset(seed=0)
        assert obs["count"].tolist() == [0, 0, 0]
        obs, reward, *_ = envs.step(np.ones(3, int))
        assert obs["both"][:, 1].tolist() == [1, 1, 1]
        assert reward.tolist() == [11, 11, 11]
    vec_env = shoal.make(Counting, 3, backend="jax", api="sb3", env_kwargs={"length": 2})
    vec_env.reset()
    vec_env.step(np.zeros(3, int))
    _, _, dones, infos = vec_env.step(np.zeros(3, int))
    assert dones.all()
    assert infos[0]["terminal_observation"][1] == 2
    vec_env.close()
    with shoal.make(Counting, 3, backend="jax", api="dm_env") as env:
        assert env.reset().observation.shape == (3, 2)
    with Pool(Counting(), 3, backend="jax") as pool:
        stacked = wrap(pool, FrameStack(3))
        stacked.reset(seed=0)
        batch = stacked.step(np.zeros(3, int))
        assert batch.obs.shape == (3, 6)
        assert batch.obs[:, 1::2].tolist() == [[0, 0, 1]] * 3


def test_the_state_can_be_taken_out_and_put_back() -> None:
    with Pool(Counting(100), 3, backend="jax") as pool:
        pool.reset(seed=0)
        (device,) = pool.local_envs
        assert isinstance(device.functional, BatchedFunctionalEnv)
        kept = device.state
        pool.step([0, 0, 0])
        pool.step([0, 0, 0])
        device.state = kept
        assert pool.step([0, 0, 0]).obs[:, 1].tolist() == [1, 1, 1]
        assert pool.call("num_envs") == [3, 3, 3]
        state, out = device.functional.rollout(device.state, None, 10, collect=False)
        assert out.summary.steps.tolist() == [10, 10, 10]
        device.state = state
        assert pool.step([0, 0, 0]).obs[:, 1].tolist() == [12, 12, 12]


def test_a_pair_of_env_and_params_will_do() -> None:
    class Scaled(Counting):
        def step(self, key: Any, state: State, action: Any, params: Any) -> Any:  # type: ignore[override]
            obs, state, reward, done, info = super().step(key, state, action)
            return obs, state, reward * params, done, info

        def reset(self, key: Any, params: Any) -> Any:  # type: ignore[override]
            return super().reset(key)

    with Pool((Scaled(), 5.0), 2, backend="jax") as pool:
        pool.reset(seed=0)
        assert pool.step([0, 1]).reward.tolist() == [5, 55]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(TypeError, match="found the id 'CartPole-v1'"):
        Pool("CartPole-v1", 2, backend="jax")
    with pytest.raises(ValueError, match="none can be restarted alone"):
        Pool(Counting(), 2, backend="jax", on_error="restart")
    with pytest.raises(ValueError, match="cannot be timed out"):
        Pool(Counting(), 2, backend="jax", step_timeout=1.0)
    with pytest.raises(ValueError, match="num_envs"):
        Pool(Counting(), 0, backend="jax")
    with pytest.raises(TypeError, match="env_kwargs are for a class"):
        Pool(Counting(), 2, backend="jax", env_kwargs={"length": 3})
    with Pool(Counting(), 2, backend="jax") as pool:
        with pytest.raises(ValueError, match="take none"):
            pool.reset(options={"a": 1})
        pool.reset(seed=0)
        with pytest.raises(shoal.errors.BadAction, match="for env 1"):
            pool.step([0, 7])
        assert pool.step([0, 1]).reward.tolist() == [1, 11]


def test_an_error_while_tracing_says_where_it_comes_from() -> None:
    class Broken(Counting):
        def step(self, key: Any, state: State, action: Any) -> Any:
            raise KeyError("no such joint")

    with pytest.raises(shoal.errors.BadEnv, match=r"Broken's step cannot be traced.*no such joint"):
        Pool(Broken(), 2, backend="jax")


def test_nan_is_refused_where_asked() -> None:
    class Bad(Counting):
        def step(self, key: Any, state: State, action: Any) -> Any:
            obs, state, reward, done, info = super().step(key, state, action)
            return jnp.where(action == 1, jnp.nan, obs), state, jnp.where(action == 2, jnp.nan, reward), done, info

    with Pool(Bad(), 3, backend="jax", check_nan=True) as pool:
        pool.reset(seed=0)
        pool.step([0, 0, 0])
        with pytest.raises(shoal.errors.BadObservation, match="env 1: observation is nan"):
            pool.step([0, 1, 0])
        pool.reset(seed=0)
        with pytest.raises(shoal.errors.BadObservation, match="env 2: its reward is nan"):
            pool.step([0, 0, 2])


def test_observations_have_the_wider_type_of_reset_and_step() -> None:
    class Widens(Counting):
        def observation_space(self) -> Any:
            return gymnasium.spaces.Box(0, 1000, (2,), np.int32)

        def reset(self, key: Any) -> Any:
            obs, state = super().reset(key)
            return obs.astype(jnp.int32), state

        def look(self, state: State) -> Any:
            return super().look(state) + 0.5

    with Pool(Widens(), 2, backend="jax") as pool:
        pool.reset(seed=0)
        assert pool.step([0, 0]).obs[:, 1].tolist() == [1.5, 1.5]


def test_rollouts_without_autoreset_draw_new_actions_each_time() -> None:
    envs = BatchedFunctionalEnv(Counting(2), 4, autoreset="disabled")
    state, _ = envs.init(0)
    state, _ = envs.rollout(state, None, 5)  # all episodes are over by now
    state, first = envs.rollout(state, None, 16)
    state, second = envs.rollout(state, None, 16)
    assert (np.asarray(first.action) != np.asarray(second.action)).any()


def test_stats_count_one_step_for_all_lanes() -> None:
    with Pool(Counting(2), 4, backend="jax", autoreset="same_step") as pool:
        pool.reset(seed=0)
        before = pool.stats()
        for _ in range(6):
            pool.step(np.zeros(4, pool.single_action_space.dtype))
        stats = pool.stats() - before
        assert (stats.steps, stats.batches, stats.ended_episodes, stats.mean_length) == (24, 6, 12, 2.0)
        assert [(env.env_id, env.steps) for env in stats.envs] == [(0, 6)]
        assert 0 < stats.shares.resets < 1


def test_top_sees_it_by_the_name_of_its_env() -> None:
    from shoal.observe.top import Watch

    with Pool(Counting, 3, backend="jax") as pool:
        pool.reset(seed=0)
        for _ in range(LENGTH):
            pool.step(np.ones(3, np.int64))
        seen = [one for one in Watch(os.getpid()).look() if one.backend == "jax"]
        assert [(one.env, one.envs, one.steps, one.episodes) for one in seen] == [("Counting", 3, 3 + 3 * LENGTH, 3)]
        assert (seen[0].mean_return, seen[0].mean_length) == (50.0, LENGTH)
