"""The pool in EnvPool's words: answers, orders, names and types as EnvPool 1.2 has them, for any env."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envs import SPACES, CountEnv, FailEnv, GateEnv, InfoEnv, SpaceEnv
from shoal import BadAction, BadEnv, CallPending, EnvError, NothingPending, ResetNeeded
from shoal.dialects import envpool
from shoal.dialects.gymnasium import SyncVectorEnv
from shoal.support.optional_dependencies import install

SHORT = functools.partial(CountEnv, length=3)


def zeros(count: int) -> Any:
    return np.zeros(count, np.int32)


# ---- what is made --------------------------------------------------------------------------------------------------


def test_config_and_spec_say_what_was_asked_for() -> None:
    with envpool.make("CartPole-v1", env_type="gymnasium", num_envs=5, batch_size=2, seed=3, backend="serial") as env:
        assert env.config == {
            "num_envs": 5, "batch_size": 2, "num_threads": 0, "max_num_players": 1, "thread_affinity_offset": -1,
            "base_path": "", "seed": 3, "env_seed": [], "gym_reset_return_info": True, "max_episode_steps": 500,
            "reward_threshold": 475.0,
        }  # fmt: skip
        assert env.spec.config._asdict() == env.config
        assert (env.spec.id, env.spec.num_envs, env.spec.batch_size) == ("CartPole-v1", 5, 2)
        assert env.spec.reward_threshold == 475.0
        assert env.spec.observation_space == env.spec.gymnasium_observation_space == env.observation_space
        assert env.spec.action_space == env.spec.gymnasium_action_space == spaces.Discrete(2)
        assert len(env) == env.num_envs == 5
        assert env.is_async
        assert env.all_env_ids.tolist() == [0, 1, 2, 3, 4]
        assert env.all_env_ids.dtype == np.int32
        assert str(env) == repr(env)
        assert repr(env).startswith("GymnasiumEnvPool(num_envs=5, batch_size=2, num_threads=0")


def test_spaces_are_those_of_one_env() -> None:
    with envpool.make(SHORT, num_envs=3, backend="serial") as env:
        one = CountEnv()
        assert env.observation_space == env.single_observation_space == one.observation_space
        assert env.action_space == env.single_action_space == one.action_space
        assert not env.is_async
        assert env.spec.config.max_episode_steps is None


@pytest.mark.parametrize(
    "make", [envpool.make_gym, envpool.make_gymnasium, functools.partial(envpool.make, env_type="gym")]
)
def test_gym_is_gymnasium(make: Callable[..., Any]) -> None:
    with make("CartPole-v1", num_envs=2, backend="serial") as env:
        assert isinstance(env, gymnasium.vector.VectorEnv)
        assert isinstance(env, gymnasium.Env)
        assert env.is_vector_env
        assert len(env.reset()) == 2
        assert len(env.step(zeros(2))) == 5


def test_wrappers_of_single_envs_take_it() -> None:
    """As CleanRL wraps EnvPool's."""

    class Returns(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            obs, reward, *rest = self.env.step(action)
            return obs, 2 * reward, *rest  # type: ignore[operator]

    with envpool.make(SHORT, num_envs=2, backend="serial") as env:
        wrapped = Returns(env)
        wrapped.reset(seed=1)
        assert wrapped.step(zeros(2))[1].tolist() == [2, 2]


def test_a_spec_can_be_had_without_the_envs() -> None:
    spec = envpool.make_spec("CartPole-v1", num_envs=900, batch_size=7)
    assert (spec.num_envs, spec.batch_size, spec.config.seed) == (900, 7, 42)
    assert spec.action_space == spaces.Discrete(2)
    assert envpool.make_spec([CountEnv, CountEnv]).num_envs == 2


def test_registered_envs_are_listed_and_found() -> None:
    envpool.register("shoal-tests/Count-v0", CountEnv, aliases=["shoal-tests/Alias-v0"], max_episode_steps=4, length=9)
    try:
        assert {"CartPole-v1", "shoal-tests/Count-v0", "shoal-tests/Alias-v0"} <= set(envpool.list_all_envs())
        assert "shoal/Env-v0" not in envpool.list_all_envs()  # for gymnasium.make_vec only
        with envpool.make("shoal-tests/Alias-v0", num_envs=2, backend="processes", num_threads=1) as env:
            env.reset()
            truncated = [env.step(zeros(2))[3].tolist() for _ in range(4)]
            assert truncated == [[False, False]] * 3 + [[True, True]]
            assert env.spec.config.max_episode_steps == 4
    finally:
        for name in ("shoal-tests/Count-v0", "shoal-tests/Alias-v0"):
            gymnasium.registry.pop(name, None)
    with pytest.raises(TypeError, match=r"spec_cls is for EnvPool's C\+\+ envs"):
        envpool.register("x", "module", spec_cls="X")


def test_keywords_reach_the_env_or_the_pool() -> None:
    options = {"length": 2, "backend": "threads", "num_threads": 2, "env_kwargs": {"truncates": True}}
    with envpool.make(CountEnv, num_envs=3, **options) as env:
        assert (env.pool.plan.backend, env.pool.plan.num_workers) == ("threads", 2)
        assert env.pool.get_attr("length") == [2, 2, 2]
        assert env.pool.get_attr("truncates") == [True] * 3
        assert (env.config["length"], env.config["truncates"]) == (2, True)
        assert env.spec.config.length == 2


def test_lists_give_each_env_its_own() -> None:
    fns = [functools.partial(CountEnv, length=n) for n in (1, 2, 3)]
    with envpool.make(fns, backend="serial") as env:
        env.reset()
        assert env.step(zeros(3))[2].tolist() == [True, False, False]
        assert env.config["num_envs"] == env.config["batch_size"] == 3


@pytest.mark.parametrize("task", ["CartPole-v1", gymnasium.spec("CartPole-v1"), lambda: gymnasium.make("CartPole-v1")])
def test_time_limits_replace_those_of_the_env(task: Any) -> None:
    with envpool.make(task, num_envs=3, max_episode_steps=2, backend="serial") as env:
        env.reset()
        assert not env.step(zeros(3))[3].any()
        _, _, terminated, truncated, info = env.step(zeros(3))
        assert truncated.all()
        assert not terminated.any()
        assert info["elapsed_step"].tolist() == [2, 2, 2]
        assert env.config["max_episode_steps"] == 2


# ---- answers -------------------------------------------------------------------------------------------------------


def test_names_types_and_shapes_are_those_of_envpool(backend: Any) -> None:
    with envpool.make("CartPole-v1", num_envs=7, num_threads=3, backend=backend) as env:
        obs, info = env.reset()
        assert (obs.shape, obs.dtype) == ((7, 4), np.float32)
        assert list(info) == ["env_id", "players", "elapsed_step"]
        obs, reward, terminated, truncated, info = env.step(zeros(7), info["env_id"])
        assert (obs.shape, obs.dtype) == ((7, 4), np.float32)
        assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, np.bool_, np.bool_)
        assert reward.shape == terminated.shape == truncated.shape == (7,)
        assert info["env_id"].dtype == info["elapsed_step"].dtype == info["players"]["env_id"].dtype == np.int32
        assert info["env_id"].tolist() == info["players"]["env_id"].tolist() == list(range(7))
        assert info["elapsed_step"].tolist() == [1] * 7


def test_steps_are_bit_for_bit_those_of_gymnasium(backend: Any) -> None:
    plain = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 7)
    plain.action_space.seed(0)
    with envpool.make("CartPole-v1", num_envs=7, num_threads=3, seed=5, backend=backend) as env:
        assert (env.reset()[0] == plain.reset(seed=5)[0]).all()
        for _ in range(60):
            actions = plain.action_space.sample()
            expected, found = plain.step(actions), env.step(actions)
            for one, other in zip(expected[:4], found[:4], strict=True):
                assert (one == other).all()


def test_an_env_that_has_ended_is_reset_by_its_next_action() -> None:
    with envpool.make(SHORT, num_envs=2, seed=10, backend="serial") as env:
        env.reset()
        seen = []
        for _ in range(5):
            obs, reward, terminated, _, info = env.step(np.array([1, 2]))
            seen.append((obs[1].tolist(), reward[1], terminated[1], info["elapsed_step"][1]))
        assert seen == [
            ([11, 0, 1], 201, False, 1),
            ([11, 0, 2], 202, False, 2),
            ([11, 0, 3], 203, True, 3),
            ([11, 1, 0], 0, False, 0),
            ([11, 1, 1], 201, False, 1),
        ]
        assert env.pool.get_attr("last_action") == [1, 2]


def test_seeds_are_spread_as_envpool_does() -> None:
    with envpool.make(CountEnv, num_envs=3, backend="serial") as env:
        assert env.reset()[0][:, 0].tolist() == [42, 43, 44]
        assert env.reset()[0].tolist() == [[42, 1, 0], [43, 1, 0], [44, 1, 0]]  # goes on, and does not begin again
    with envpool.make(CountEnv, num_envs=3, seed=[7, 1, 5], backend="serial") as env:
        assert (env.config["seed"], env.config["env_seed"]) == (0, [7, 1, 5])
        assert env.reset()[0][:, 0].tolist() == [7, 1, 5]
        assert env.reset(np.array([2, 0]), seed=20)[0][:, 0].tolist() == [22, 20]
        assert env.reset(np.array([2, 0]), seed=[3, 4])[0][:, 0].tolist() == [3, 4]
    with envpool.make(CountEnv, num_envs=2, env_seed=np.array([8, 9]), backend="serial") as env:
        assert env.reset()[0][:, 0].tolist() == [8, 9]
    with envpool.make(CountEnv, num_envs=2, seed=None, backend="serial") as env:
        assert env.reset()[0][:, 0].tolist() == [-1, -1]
        with pytest.warns(UserWarning, match="pass seed= to make"):
            env.seed(3)


def test_elapsed_steps_count_from_the_step_that_is_a_reset() -> None:
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        obs, reward, _, _, info = env.step(np.array([3, 3, 3]))
        assert obs.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
        assert reward.tolist() == [0, 0, 0]
        assert info["elapsed_step"].tolist() == [0, 0, 0]
        assert env.step(zeros(3))[4]["elapsed_step"].tolist() == [1, 1, 1]
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        env.reset([1])
        with pytest.raises(ResetNeeded, match="env 0"):
            env.step(zeros(3))


def test_infos_of_the_envs_are_as_gymnasium_has_them() -> None:
    fns = [functools.partial(InfoEnv, "everything")] * 5
    with envpool.make(fns, seed=1, backend="serial") as env, SyncVectorEnv(fns) as plain:
        _, expected = plain.reset(seed=1)
        _, info = env.reset()
        for _ in range(12):
            assert set(info) == set(expected) | {"env_id", "players", "elapsed_step"}
            for key, value in expected.items():
                assert repr(info[key]) == repr(value)
            *_, expected = plain.step(zeros(5))
            *_, info = env.step(zeros(5))


def test_infos_have_the_rows_of_the_batch() -> None:
    with envpool.make(functools.partial(InfoEnv, "nested"), num_envs=7, batch_size=3, seed=0, backend="serial") as env:
        env.async_reset()
        told = 0
        for _ in range(40):
            *_, info = env.recv()
            assert len(info["env_id"]) == len(info["elapsed_step"]) == 3
            if "outer" in info:
                told += 1
                inner, has = info["outer"]["inner"], info["outer"]["_inner"]
                assert inner.shape == has.shape == info["_outer"].shape == (3,)
                assert (inner[has] == info["elapsed_step"][has]).all()
                assert info["outer"]["deeper"]["deepest"].shape == (3, 2)
            env.send(zeros(3), info["env_id"])
        assert told > 5


class Impostor(CountEnv):
    """Has infos under EnvPool's own names."""

    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], {"env_id": -1, "players": "none", "elapsed_step": -1, "mine": self.steps})


def test_names_of_envpool_are_not_taken_by_envs() -> None:
    with envpool.make(Impostor, num_envs=2, backend="serial") as env:
        env.reset()
        *_, info = env.step(zeros(2))
        assert set(info) == {"env_id", "players", "elapsed_step", "mine", "_mine"}
        assert info["env_id"].tolist() == [0, 1]
        assert info["mine"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["box 0-d", "image", "box float64", "nested", "tuple", "text", "dict with objects"])
@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 0]])
def test_observations_of_all_kinds_keep_their_rows(name: str, ids: list[int]) -> None:
    make = functools.partial(SpaceEnv, SPACES[name])
    with envpool.make(make, num_envs=3, seed=4, backend="threads", num_threads=2) as env:
        env.reset()
        alone = [make() for _ in range(3)]
        for i, one in enumerate(alone):
            one.reset(seed=4 + i)
        obs = env.step(zeros(len(ids)), np.array(ids))[0]
        for place, env_id in enumerate(ids):
            expected = alone[env_id].step(0)[0]
            assert same(SPACES[name], pick(SPACES[name], obs, place), expected)


def pick(space: Any, batch: Any, place: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: pick(part, batch[key], place) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(pick(part, batch[i], place) for i, part in enumerate(space.spaces))
    return batch[place]


def same(space: Any, one: Any, other: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return all(same(part, one[key], other[key]) for key, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return all(same(part, one[i], other[i]) for i, part in enumerate(space.spaces))
    if isinstance(space, spaces.Graph):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)
    return bool(np.array_equal(one, other))


# ---- some envs -----------------------------------------------------------------------------------------------------


def test_rows_come_in_the_order_of_the_ids(backend: Any) -> None:
    with envpool.make(CountEnv, num_envs=7, num_threads=3, seed=0, backend=backend) as env:
        env.reset()
        obs, reward, _, _, info = env.step(np.array([1, 2, 3]), np.array([6, 0, 3]))
        assert info["env_id"].tolist() == info["players"]["env_id"].tolist() == [6, 0, 3]
        assert obs.tolist() == [[6, 0, 1], [0, 0, 1], [3, 0, 1]]
        assert reward.tolist() == [101, 201, 301]
        obs, _, _, _, info = env.step(zeros(7), np.arange(7)[::-1])
        assert info["env_id"].tolist() == [6, 5, 4, 3, 2, 1, 0]
        assert info["elapsed_step"].tolist() == [2, 1, 1, 2, 1, 1, 2]
        assert obs[:, 0].tolist() == [6, 5, 4, 3, 2, 1, 0]
        obs, info = env.reset(np.array([5, 1]))
        assert obs.tolist() == [[5, 1, 0], [1, 1, 0]]
        assert info["env_id"].tolist() == [5, 1]
        assert env.step(zeros(7))[4]["elapsed_step"].tolist() == [3, 1, 2, 3, 2, 1, 3]


def test_a_full_recv_takes_all_that_was_sent() -> None:
    with envpool.make(CountEnv, num_envs=5, seed=0, backend="threads", num_threads=2) as env:
        env.reset()
        env.send(zeros(2), np.array([4, 1]))
        env.send(zeros(1), np.array([0]))
        *_, info = env.recv()
        assert info["env_id"].tolist() == [4, 1, 0]
        env.send(zeros(2), np.array([2, 3]))
        env.reset(np.array([3]))  # what was pending of env 3 is dropped
        assert env.recv()[4]["env_id"].tolist() == [2]


def test_masks_and_options_of_a_reset() -> None:
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        env.reset()
        obs, info = env.reset(options={"reset_mask": np.array([True, False, True]), "level": 3})
        assert obs[:, 1].tolist() == [1, 1]
        assert info["env_id"].tolist() == [0, 2]
        assert env.pool.get_attr("options_given") == [{"level": 3}, None, {"level": 3}]
        with pytest.raises(ValueError, match="found both"):
            env.reset(np.array([0]), options={"reset_mask": np.ones(3, np.bool_)})
        with pytest.raises(ValueError, match="3 bools"):
            env.reset(options={"reset_mask": np.zeros(3, np.bool_)})


def test_actions_may_be_dicts_as_envpool_takes_them() -> None:
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        env.reset()
        sent = {"action": np.array([2, 1]), "env_id": np.array([2, 0]), "players": {"env_id": np.array([2, 0])}}
        _, reward, _, _, info = env.step(sent)
        assert info["env_id"].tolist() == [2, 0]
        assert reward.tolist() == [201, 101]
        with pytest.raises(BadAction, match="expected 'action' and 'env_id'"):
            env.step({"move": zeros(3)})
    space = spaces.Dict(env_id=spaces.Discrete(3), push=spaces.Box(-1, 1, (2,)))
    with envpool.make(functools.partial(SpaceEnv, spaces.Discrete(2), space), num_envs=2, backend="serial") as env:
        env.reset()
        actions = {"env_id": np.array([2, 2]), "push": np.zeros((2, 2), np.float32)}  # here it is the env's own
        assert env.step(actions)[4]["env_id"].tolist() == [0, 1]


# ---- asynchronous --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [CountEnv, "CartPole-v1"], ids=["count", "cartpole"])
def test_partial_batches_reach_every_env(backend: Any, make: Any) -> None:
    """Seven envs, three workers, batches of three, as EnvPool's users write the loop."""
    with envpool.make(make, num_envs=7, batch_size=3, num_threads=3, seed=0, backend=backend) as env:
        env.async_reset()
        steps, ended, seen = np.full(7, -1), np.zeros(7, np.bool_), np.zeros(7, np.int64)
        while (seen < 20).any():  # on a busy machine, a worker may have to wait for a core
            obs, reward, terminated, truncated, info = env.recv()
            env_id = info["env_id"]
            assert len(obs) == len(reward) == len(env_id) == 3
            assert env_id.tolist() == sorted(set(env_id.tolist()))
            # Every env goes on from where it was: nothing is lost, and nothing told twice.
            assert (info["elapsed_step"] == np.where(ended[env_id], 0, steps[env_id] + 1)).all()
            steps[env_id] = info["elapsed_step"]
            ended[env_id] = terminated | truncated
            seen[env_id] += 1
            env.send(np.ones(3, np.int32), env_id)


def test_those_that_wait_do_not_hold_up_the_others(gate: Path) -> None:
    with envpool.make(
        functools.partial(GateEnv, gate, length=99), num_envs=4, batch_size=2, num_threads=4, backend="threads"
    ) as env:
        env.async_reset()
        seen = np.concatenate([env.recv()[4]["env_id"] for _ in range(2)])
        assert sorted(seen.tolist()) == [0, 1, 2, 3]
        env.send(np.array([3, 0, 3, 0]), np.arange(4))
        for _ in range(5):
            *_, info = env.recv()
            assert info["env_id"].tolist() == [1, 3]
            env.send(zeros(2), info["env_id"])
        gate.touch()
        assert sorted(np.concatenate([env.recv()[4]["env_id"] for _ in range(2)]).tolist()) == [0, 1, 2, 3]


def test_a_reset_of_all_gives_the_first_batch_and_one_of_some_gives_these() -> None:
    with envpool.make(CountEnv, num_envs=5, batch_size=2, seed=0, backend="threads", num_threads=2) as env:
        obs, info = env.reset()
        assert obs.shape == (2, 3)
        rest, others = env.recv(reset=True)
        assert rest.shape == (2, 3)
        ids = [*info["env_id"].tolist(), *others["env_id"].tolist()]
        assert len(set(ids)) == 4
        obs, info = env.reset(np.array([4, 0, 2]))
        assert info["env_id"].tolist() == [4, 0, 2]
        assert obs[:, 0].tolist() == [4, 0, 2]
        *_, info = env.step(zeros(3), np.array([4, 0, 2]))
        assert len(info["env_id"]) == 2


def test_a_step_of_some_gives_the_first_batch() -> None:
    with envpool.make(CountEnv, num_envs=4, batch_size=2, seed=0, backend="serial") as env:
        *_, info = env.reset()
        *_, info = env.step(zeros(2), info["env_id"])
        assert len(info["env_id"]) == 2


def test_one_env_alone() -> None:
    with envpool.make(CountEnv, backend="serial") as env:
        assert (len(env), env.is_async) == (1, False)
        env.reset()
        assert env.step(zeros(1))[1].tolist() == [1]


# ---- wrong use -----------------------------------------------------------------------------------------------------


def test_wrong_calls_are_refused_and_nothing_moves() -> None:
    with envpool.make(CountEnv, num_envs=4, batch_size=2, seed=0, backend="serial") as env:
        with pytest.raises(NothingPending):
            env.recv()
        env.async_reset()
        with pytest.raises(CallPending, match=r"envs \[0, 1, 2, 3\]"):
            env.send(zeros(4))
        *_, info = env.recv()
        ids = info["env_id"]
        with pytest.raises(BadAction):
            env.send(zeros(3), ids)
        with pytest.raises(BadAction, match="found 9"):
            env.send(np.array([0, 9]), ids)
        with pytest.raises(BadAction, match="no env 7"):
            env.send(zeros(2), np.array([7, 1]))
        with pytest.raises(BadAction, match="more than once"):
            env.send(zeros(2), np.array([1, 1]))
        with pytest.raises(BadAction):
            env.send(np.zeros(2, np.float32), ids)
        env.send(zeros(2), ids)
        with pytest.raises(CallPending):
            env.send(zeros(2), ids)
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        env.reset()
        with pytest.raises(NothingPending):
            env.recv()
        with pytest.raises(BadAction):
            env.step(zeros(2))
        assert env.step(zeros(3))[4]["elapsed_step"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stack_num": 4}, TypeError, r"stack_num is for EnvPool's own envs.*FrameStackObservation.*env_kwargs="),
        ({"img_height": 84}, TypeError, r"img_height is for EnvPool's own.*AtariPreprocessing"),
        ({"batch_size": 5}, ValueError, "batch_size: expected a whole number from 1 to 4"),
        ({"num_threads": -1}, ValueError, "num_threads"),
        ({"num_threads": 2, "num_workers": 3}, ValueError, "leave one out"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps"),
        ({"max_episode_steps": 9, "backend": "jax"}, ValueError, "steps all envs as one"),
        ({"max_num_players": 2}, ValueError, "one player"),
        ({"gym_reset_return_info": False}, ValueError, "always returns an info"),
        ({"autoreset": "same_step"}, ValueError, "next_step"),
        ({"seed": "x"}, TypeError, "seed"),
        ({"seed": [1, 2]}, ValueError, "expected 4 seeds"),
        ({"env_type": "old"}, ValueError, "'gymnasium', 'gym', 'dm', found 'old'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        envpool.make(CountEnv, num_envs=4, **{"backend": "serial", **options})


def test_what_is_no_env_is_refused() -> None:
    with pytest.raises(BadEnv, match="no registered env"):
        envpool.make("NoSuchEnv-v5", num_envs=2)
    with pytest.raises(BadEnv, match="already made"):
        envpool.make(CountEnv(), num_envs=2)
    with pytest.raises(BadEnv, match="num_envs"):
        envpool.make(CountEnv, num_envs=0)
    with pytest.raises(BadEnv, match="leave num_envs out"):
        envpool.make([CountEnv, CountEnv], num_envs=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        envpool.make(CountEnv, num_envs=2, depth=3, backend="serial")


def test_options_of_envpools_atari_go_to_an_env_that_takes_them() -> None:
    class Stacked(CountEnv):
        def __init__(self, stack_num: int):
            super().__init__()
            self.stack_num = stack_num

    with envpool.make(Stacked, num_envs=2, backend="serial", env_kwargs={"stack_num": 3}) as env:
        assert env.pool.get_attr("stack_num") == [3, 3]


def test_an_env_that_raises_is_named_and_can_be_reset(backend: Any) -> None:
    with envpool.make(FailEnv, num_envs=5, num_threads=2, seed=0, backend=backend) as env:
        env.reset()
        with pytest.raises(EnvError, match="env 2 raised in step") as caught:
            env.step(np.array([0, 3]), np.array([4, 2]))
        assert isinstance(caught.value, ValueError)
        with pytest.raises(ResetNeeded):
            env.step(zeros(1), np.array([2]))
        env.reset(np.array([2]))
        assert env.step(zeros(5))[4]["elapsed_step"].tolist() == [1, 1, 1, 1, 2]
    with envpool.make(functools.partial(FailEnv, "reset"), num_envs=2, backend="serial") as env:
        with pytest.raises(EnvError, match="raised in reset"):
            env.reset()


def test_nothing_is_left_in_the_middle_of_a_batch(nothing_left_behind: None) -> None:
    env = envpool.make(CountEnv, num_envs=3, batch_size=2, num_threads=2, backend="processes")
    env.async_reset()
    env.recv()
    assert not env.closed
    env.close(terminate=True)  # as Gymnasium's may be called
    assert env.closed


def test_an_env_that_was_forgotten_is_closed() -> None:
    env = envpool.make(CountEnv, num_envs=3, batch_size=2, num_threads=2, backend="processes")
    env.async_reset()
    env.recv()
    pool, workers = weakref.ref(env.pool), [worker.pid for worker in env.pool.workers]
    del env
    gc.collect()
    assert pool() is None
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_frames_are_those_of_the_envs_asked_for() -> None:
    with envpool.make(CountEnv, num_envs=3, render_mode="rgb_array", backend="serial") as env:
        assert env.render_mode == "rgb_array"
        env.reset()
        env.step(zeros(1), np.array([2]))
        assert env.render().shape == (1, 2, 3, 3)
        assert env.render([2, 0])[:, 0, 0, 0].tolist() == [1, 0]
    with envpool.make(CountEnv, num_envs=3, backend="serial") as env:
        with pytest.raises(RuntimeError, match='render_mode="rgb_array"'):
            env.render()


# ---- dm ------------------------------------------------------------------------------------------------------------


def test_dm_answers_with_time_steps(backend: Any) -> None:
    dm_env = pytest.importorskip("dm_env")
    with envpool.make_dm(SHORT, num_envs=7, num_threads=3, seed=0, backend=backend) as env:
        assert isinstance(env, dm_env.Environment)
        first = env.reset()
        assert isinstance(first, dm_env.TimeStep)
        assert first.observation._fields == ("env_id", "players", "obs")
        assert first.first().all()
        assert first.observation.obs[:, 0].tolist() == first.observation.env_id.tolist() == list(range(7))
        kinds = []
        for _ in range(4):
            step = env.step(np.ones(7, np.int32), first.observation.env_id)
            kinds.append((step.step_type[3], step.reward[3], step.discount[3]))
        assert kinds == [(1, 101, 1), (1, 102, 1), (2, 103, 0), (0, 0, 1)]
        assert (step.step_type.dtype, step.reward.dtype, step.discount.dtype) == (np.int32, np.float32, np.float32)
        assert step.observation.players.env_id.dtype == np.int32
        part = env.step(zeros(2), np.array([5, 2]))
        assert part.observation.env_id.tolist() == [5, 2]
        assert part.observation.obs.tolist() == [[5, 1, 1], [2, 1, 1]]
        assert env.reset(np.array([6, 1])).observation.obs.tolist() == [[6, 2, 0], [1, 2, 0]]


def test_dm_says_what_its_time_steps_hold() -> None:
    dm_env = pytest.importorskip("dm_env")
    with envpool.make("CartPole-v1", "dm", num_envs=3, backend="serial") as env:
        found = env.observation_spec()
        assert found.env_id == found.players.env_id == dm_env.specs.DiscreteArray(3, np.int32, "env_id")
        assert found.obs.shape == (4,)
        found.obs.validate(env.reset().observation.obs[0])
        assert env.action_spec() == env.spec.action_spec() == dm_env.specs.DiscreteArray(2, np.int64, "action")
        assert env.reward_spec() == dm_env.specs.Array((), np.float32, "reward")
        assert env.discount_spec().maximum == 1
        with pytest.raises(NotImplementedError, match='env_type="gymnasium"'):
            env.xla()
    with envpool.make("CartPole-v1", num_envs=3, backend="serial") as env:
        assert env.spec.observation_spec().obs.shape == (4,)
        assert env.spec.action_spec().num_values == 2


def test_dm_partial_batches_reach_every_env(backend: Any) -> None:
    pytest.importorskip("dm_env")
    with envpool.make(SHORT, "dm", num_envs=7, batch_size=3, num_threads=3, seed=0, backend=backend) as env:
        env.async_reset()
        expected = np.zeros(7, np.int64)  # where each env is in its life of first, mid, mid, last
        seen = np.zeros(7, np.int64)
        while (seen < 9).any():
            step = env.recv()
            ids = step.observation.env_id
            seen[ids] += 1
            assert (step.observation.obs[:, 2] == expected[ids]).all()
            assert step.step_type.tolist() == [[0, 1, 1, 2][one] for one in expected[ids]]
            assert step.discount.tolist() == [float(one != 3) for one in expected[ids]]
            expected[ids] = (expected[ids] + 1) % 4
            env.send(zeros(3), ids)


def test_dm_names_the_parts_of_an_observation() -> None:
    pytest.importorskip("dm_env")
    space = spaces.Dict(
        {"position": spaces.Box(-1, 1, (2,), np.float64), "in": spaces.Dict({"a-b": spaces.Discrete(3)})}
    )
    with envpool.make(functools.partial(SpaceEnv, space), "dm", num_envs=3, backend="serial") as env:
        found = env.reset().observation
        assert found._fields == ("env_id", "players", "_2", "position")  # "in" can be nobody's name
        assert found.position.shape == (3, 2)
        assert found.position.dtype == np.float64
        assert found[2].a_b.shape == (3,)
        assert env.observation_spec()._fields == found._fields


def test_dm_environments_keep_their_own_specs_and_discounts() -> None:
    pytest.importorskip("dm_env")
    from dialects.test_dm_env import Catch, makers

    with envpool.make(makers(5, discount=0.5), "dm", batch_size=2, backend="serial") as env:
        assert env.observation_spec().side == Catch().observation_spec()["side"]
        assert env.action_spec() == Catch().action_spec()
        env.async_reset()
        for turn in range(20):
            step = env.recv()
            assert (step.discount == np.choose(step.step_type, [1, 0.5, 0])).all(), turn
            assert step.observation.side.dtype == np.int32
            env.send(zeros(2), step.observation.env_id)
    with envpool.make(Catch, num_envs=2, max_episode_steps=2, backend="serial") as env:
        env.reset()
        env.step(zeros(2))
        assert env.step(zeros(2))[3].all()


def test_infos_beside_time_steps() -> None:
    pytest.importorskip("dm_env")
    with envpool.make(functools.partial(InfoEnv, "int"), "dm", num_envs=3, seed=0, backend="serial") as env:
        env.reset()
        assert env.infos[0]["fresh"]


# ---- JAX -----------------------------------------------------------------------------------------------------------


def test_xla_gives_four_that_step_inside_of_jax() -> None:
    jax = pytest.importorskip("jax")
    with envpool.make(CountEnv, num_envs=4, batch_size=2, seed=0, backend="serial") as env:
        env.async_reset()
        handle, recv, send, step = env.xla()

        def turn(carry: Any, _: Any) -> Any:
            handle, (_, _, _, _, info) = recv(carry)
            handle = send(handle, jax.numpy.zeros(2, int), info["env_id"])
            return handle, info["env_id"]

        handle, ids = jax.jit(lambda handle: jax.lax.scan(turn, handle, None, length=20))(handle)
        assert ids.shape == (20, 2)
        assert set(np.asarray(ids).ravel().tolist()) == {0, 1, 2, 3}
        handle, (obs, reward, terminated, truncated, info) = recv(handle)
        assert (obs.shape, reward.dtype, terminated.shape, truncated.shape) == ((2, 3), np.float32, (2,), (2,))
        handle, (*_, info) = step(handle, jax.numpy.zeros(2, int), info["env_id"])
        assert info["players"]["env_id"].shape == (2,)
        jax.block_until_ready(handle)
    with envpool.make(CountEnv, num_envs=3, seed=0, backend="serial") as env:
        env.reset()
        handle, recv, send, step = env.xla()
        handle, (obs, *_, info) = step(handle, jax.numpy.zeros(3, int))
        assert np.asarray(obs).tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
        assert np.asarray(info["env_id"]).tolist() == [0, 1, 2]


def test_xla_without_jax_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "shoal.graph.jax", raising=False)
    with envpool.make(CountEnv, num_envs=2, backend="serial") as env:
        with pytest.raises(ImportError, match=re.escape(install("jax"))):
            env.xla()


# ---- as a user has it ----------------------------------------------------------------------------------------------


def test_a_training_loop_as_users_of_envpool_write_it() -> None:
    """A policy is searched for over asynchronous batches until it holds the pole longer than chance does."""
    env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=6, batch_size=3, seed=0, backend="serial")
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(6, 4))
    returns, best = np.zeros(6), (0.0, np.zeros(4))
    env.async_reset()
    for _ in range(1500):
        obs, rew, term, trunc, info = env.recv()
        env_id = info["env_id"]
        returns[env_id] += rew
        for one in env_id[term | trunc]:
            best = max(best, (float(returns[one]), weights[one].copy()), key=lambda found: found[0])
            returns[one], weights[one] = 0, best[1] + rng.normal(size=4) * 0.5
        action = (np.einsum("ij,ij->i", obs, weights[env_id]) > 0).astype(np.int32)
        env.send(action, env_id)
    env.close()
    assert best[0] > 60


def test_the_import_line_is_all_that_changes(tmp_path: Path) -> None:
    """EnvPool's opening example, in a script, with an env of the script's own beside it. No frameworks are loaded."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import sys
import gymnasium, numpy as np
from shoal.dialects import envpool

class Own(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(9), gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}
    def step(self, action):
        return int(action) + 1, 0.5, False, False, {}

for task in ("CartPole-v1", Own):
    env = envpool.make(task, env_type="gymnasium", num_envs=8)
    obs, info = env.reset()
    act = np.zeros(8, dtype=int)
    obs, rew, term, trunc, info = env.step(act, env_id=info["env_id"])
    print(len(obs), env.spec.id, rew.sum())
    env.close()
assert not {"dm_env", "jax", "envpool", "tensorflow", "torch"} & set(sys.modules)
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "8 CartPole-v1 8.0\n8 Own 4.0\n"), done.stderr


def test_envpool_itself_answers_alike() -> None:
    """Everything but the numbers, which come from its own generators."""
    theirs = pytest.importorskip("envpool")
    pytest.importorskip("dm_env")

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return (getattr(value, "_fields", None), *map(shape, value))
        return value.shape, value.dtype

    for kind in ("gymnasium", "dm"):
        asked = {"env_type": kind, "num_envs": 5, "seed": 1}
        env, model = envpool.make("CartPole-v1", backend="serial", **asked), theirs.make("CartPole-v1", **asked)
        assert {key: value for key, value in env.config.items() if key != "base_path"} == {
            key: value for key, value in model.config.items() if key != "base_path"
        }
        assert shape(env.reset()) == shape(model.reset())
        for ids in (None, np.array([3, 1])):
            count = 5 if ids is None else 2
            assert shape(env.step(zeros(count), ids)) == shape(model.step(zeros(count), ids))
        env.close()
