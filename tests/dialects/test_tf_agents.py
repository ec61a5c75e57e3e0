"""`shoal.dialects.tf_agents` against TF-Agents itself: same TimeSteps, and its drivers, buffers and wrappers on top."""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from tf_agents.drivers import dynamic_episode_driver, dynamic_step_driver, py_driver
from tf_agents.environments import (
    batched_py_environment,
    parallel_py_environment,
    py_environment,
    tf_py_environment,
    wrappers,
)
from tf_agents.environments import utils as environment_utils
from tf_agents.metrics import tf_metrics
from tf_agents.policies import random_py_policy, random_tf_policy
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

import shoal
from dialects.py_envs import (
    CountPyEnv,
    MaskEnv,
    NestedPyEnv,
    OtherSpecEnv,
    Pair,
    RaisingEnv,
    RandomEnv,
    SavedEnv,
    VectorRewardEnv,
)
from envs import CountEnv, SpaceEnv
from shoal.dialects.tf_agents import BatchedPyEnvironment, ParallelPyEnvironment
from shoal.graph.host import GraphHost
from shoal.support.optional_dependencies import install

pytestmark = pytest.mark.timeout(120)


def made(cls: Any, count: int, **options: Any) -> list[Any]:
    return [functools.partial(cls, i, **options) for i in range(count)]


def ours(kind: str, cls: Any, count: int, **options: Any) -> Any:
    """One of our environments over so many envs of a class."""
    if kind == "instances":
        return BatchedPyEnvironment([make() for make in made(cls, count, **options)], multithreading=False)
    if kind == "instances in processes":
        return BatchedPyEnvironment([make() for make in made(cls, count, **options)], backend="processes")
    if kind == "instances, default":
        return BatchedPyEnvironment([make() for make in made(cls, count, **options)])
    if kind == "parallel":
        return ParallelPyEnvironment(made(cls, count, **options), num_workers=min(3, count))
    return shoal.make(made(cls, count, **options), api="tf_agents", backend=kind, num_workers=min(3, count))


def same(found: ts.TimeStep, expected: ts.TimeStep) -> None:
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# A worker process takes seconds to import TensorFlow: one size each.
SIZES = [
    ("instances", 1), ("instances", 7), ("instances in processes", 7), ("serial", 3), ("instances, default", 7),
    ("parallel", 7), ("hybrid", 1),
]  # fmt: skip


# ---- the same as TF-Agents -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"truncates": True}, {"discount": 0.9}], ids=["ends", "truncates", "discounts"]
)
@pytest.mark.parametrize(("kind", "count"), SIZES)
def test_time_steps_are_those_of_tf_agents(kind: str, count: int, options: dict[str, Any]) -> None:
    """Resets, MID, LAST, then FIRST with the action ignored, row by row; discounts; the same types."""
    envs = [make() for make in made(CountPyEnv, count, **options)]
    theirs = batched_py_environment.BatchedPyEnvironment(envs, multithreading=False)
    env = ours(kind, CountPyEnv, count, **options)
    with env:
        same(env.reset(), theirs.reset())
        for turn in range(12):
            action = (np.arange(count, dtype=np.int32) + turn) % 4
            same(env.step(action), theirs.step(action))
            same(env.current_time_step(), theirs.current_time_step())


@pytest.mark.parametrize("kind", ["instances", "parallel", "hybrid"])
def test_nested_specs_keep_their_types(kind: str) -> None:
    envs = [make() for make in made(NestedPyEnv, 5)]
    theirs = batched_py_environment.BatchedPyEnvironment(envs, multithreading=False)
    with ours(kind, NestedPyEnv, 5) as env:
        assert env.observation_spec() == theirs.observation_spec()
        assert env.action_spec() == theirs.action_spec()
        same(env.reset(), theirs.reset())
        for turn in range(8):
            push = np.linspace(-1, 1, 10, dtype=np.float32).reshape(5, 2)
            action = Pair(push, [1 + (np.arange(5, dtype=np.int32) + turn) % 3])
            same(env.step(action), theirs.step(action))


def test_specs_have_no_batch_dimension() -> None:
    theirs = batched_py_environment.BatchedPyEnvironment([CountPyEnv(i) for i in range(3)])
    with BatchedPyEnvironment([CountPyEnv(i) for i in range(3)], multithreading=False) as env:
        assert env.batched
        assert env.batch_size == 3
        assert env.observation_spec() == theirs.observation_spec()
        assert env.action_spec() == theirs.action_spec()
        assert env.time_step_spec() == theirs.time_step_spec()
        assert env.reward_spec() == theirs.reward_spec()
        assert env.discount_spec() == theirs.discount_spec()
        assert isinstance(env, py_environment.PyEnvironment)
    theirs.close()


@pytest.mark.parametrize("kind", ["instances", "parallel"])
def test_it_passes_the_check_of_tf_agents(kind: str) -> None:
    with ours(kind, CountPyEnv, 3) as env:
        environment_utils.validate_py_environment(env, episodes=3)


# ---- what is refused -------------------------------------------------------------------------------------------


def test_wrong_numbers_of_actions_are_refused() -> None:
    with ours("serial", CountPyEnv, 3) as env:
        env.reset()
        for bad in (np.zeros(2, np.int32), np.zeros(4, np.int32), np.int32(0)):
            with pytest.raises(ValueError, match="3 envs"):
                env.step(bad)
        with pytest.raises(ValueError, match="for env 1: expected 0 to 3, found 9"):
            env.step(np.array([0, 9, 0], np.int32))
        assert (env.step(np.zeros(3, np.int32)).observation[:, 2] == 1).all()  # nothing had moved


def test_differing_specs_are_refused() -> None:
    with pytest.raises(ValueError, match="same time_step_spec"):
        BatchedPyEnvironment([CountPyEnv(), OtherSpecEnv()], multithreading=False)
    with pytest.raises(ValueError, match="same time_step_spec: env 1"):
        BatchedPyEnvironment([CountPyEnv, OtherSpecEnv], multithreading=False)
    with pytest.raises(ValueError, match="same time_step_spec: env 2 has the observation space"):
        ParallelPyEnvironment([CountPyEnv, CountPyEnv, NestedPyEnv])


def test_what_makes_no_batch_is_refused() -> None:
    with pytest.raises(IndexError):
        BatchedPyEnvironment([])  # as in TF-Agents
    with pytest.raises(ValueError, match="list or tuple"):
        BatchedPyEnvironment(CountPyEnv())
    with BatchedPyEnvironment([CountPyEnv(), CountPyEnv()], multithreading=False) as env:
        with pytest.raises(ValueError, match=r"already batched: \[\(1, "):
            BatchedPyEnvironment([CountPyEnv(), env])
        with pytest.raises(ValueError, match="batched already"):
            shoal.make(lambda: env, api="tf_agents", num_envs=1, backend="serial")
    with pytest.raises(TypeError, match="Found non-callable `env_constructors`"):
        ParallelPyEnvironment([CountPyEnv, CountPyEnv()])
    with pytest.raises(ValueError, match="rewards of one number"):
        shoal.make(VectorRewardEnv, 2, backend="serial")
    with pytest.raises(ValueError, match="next_step"):
        shoal.make(CountPyEnv, 2, api="tf_agents", autoreset="same_step")


# ---- everything else it does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["instances", "parallel"])
def test_seed_info_and_render(kind: str) -> None:
    with ours(kind, CountPyEnv, 3) as env:
        assert env.seed([7, 8, 9]) == [[7], [8], [9]]
        assert env.reset().observation[:, 0].tolist() == [7, 8, 9]
        assert env.seed(40) == [[40], [41], [42]]
        with pytest.raises(ValueError, match="expected 3 seeds"):
            env.seed([1, 2])
        with pytest.raises(TypeError, match="seed: expected an int"):
            env.seed("lucky")
        env.step(np.zeros(3, np.int32))
        info = env.get_info()
        assert info["count"].tolist() == [1, 1, 1]
        assert info["where"].tolist() == [[0, 1], [1, 1], [2, 1]]
        frames = env.render()
        assert frames.shape == (3, 4, 5, 3)
        assert (frames == 1).all()
        if kind == "parallel":
            with pytest.raises(NotImplementedError, match="Only rgb_array rendering mode is supported"):
                env.render("human")
        else:
            assert env.render("human").shape == (3, 4, 5, 3)  # the env decides


@pytest.mark.parametrize("kind", ["instances", "parallel"])
def test_a_state_that_is_set_again_goes_on_as_before(kind: str) -> None:
    actions = np.random.default_rng(0).integers(0, 4, (20, 3)).astype(np.int32)
    with ours(kind, RandomEnv, 3) as env:
        env.reset()
        for action in actions[:4]:
            env.step(action)
        state = env.get_state()
        before = env.current_time_step()
        first = [env.step(action) for action in actions[4:]]
        env.set_state(state)
        same(env.current_time_step(), before)
        for action, expected in zip(actions[4:], first, strict=True):
            same(env.step(action), expected)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_envs_that_know_their_own_state_go_on_too(kind: str, wrapped: bool, tmp_path: Path) -> None:
    """Also those of another pool: what a PyEnvironment keeps beside its state goes along."""
    options: dict[str, Any] = {"backend": "serial"} if kind == "serial" else {"backend": "processes", "num_workers": 1}
    make = (lambda: wrappers.PyEnvironmentBaseWrapper(SavedEnv(length=50))) if wrapped else SavedEnv
    action = np.ones(2, np.int32)
    with shoal.make(make, 2, api="tf_agents", **options) as env:
        env.reset()
        env.step(action)
        state = env.get_state()
        env.pool.snapshot(tmp_path / "state")
        first = [env.step(action) for _ in range(6)]
        env.set_state(state)
        for expected in first:
            same(env.step(action), expected)
    with shoal.make(make, 2, api="tf_agents", **options) as env:
        env.reset()
        env.pool.restore(tmp_path / "state")
        for expected in first:
            same(env.step(action), expected)


def test_masks_are_actions_too() -> None:
    with shoal.make(MaskEnv, 2, api="tf_agents", backend="serial") as env:
        tf_env = tf_py_environment.TFPyEnvironment(env)
        tf_env.reset()
        mask = tf.constant([[True, False, False, True], [False, True, False, False]])
        np.testing.assert_array_equal(tf_env.step(mask).observation, [[1, 0, 0, 1], [0, 1, 0, 0]])


def test_a_wrapper_of_tf_agents_is_not_stepped_past() -> None:
    with BatchedPyEnvironment([CountPyEnv(), CountPyEnv()], multithreading=False) as env:
        GraphHost(env)
        with pytest.raises(shoal.errors.BadEnv, match="has wrappers"):
            GraphHost(wrappers.PyEnvironmentBaseWrapper(env))


def test_envs_are_themselves_here_and_stand_ins_elsewhere() -> None:
    envs = [CountPyEnv(i) for i in range(3)]
    with BatchedPyEnvironment(envs, multithreading=False) as env:
        assert env.envs == envs
        env.reset()
        assert envs[0].episode == 1
    assert all(one.closed for one in envs)
    with ParallelPyEnvironment(made(CountPyEnv, 3)) as env:
        env.reset()
        assert [one.number for one in env.envs] == [0, 1, 2]
        assert env.envs[2].get_info()["where"].tolist() == [2, 1]
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = env.envs[0].no_such_thing


def test_envs_that_cannot_travel_are_stepped_here() -> None:
    envs = [CountPyEnv(i) for i in range(3)]
    for env in envs:
        env.lock = __import__("threading").Lock()
    with BatchedPyEnvironment(envs) as env:
        assert env.pool.plan.backend == "serial"  # threads help where envs wait
        env.reset()
        assert env.step(np.ones(3, np.int32)).reward.tolist() == [11, 11, 11]


def test_blocking_steps_them_one_after_the_other() -> None:
    with ParallelPyEnvironment(made(CountPyEnv, 3), blocking=True, flatten=True, start_serially=False) as env:
        assert len(env.pool.workers) == 1
        env.start()
        assert env.reset().is_first().all()


# ---- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["instances", "parallel"])
def test_an_envs_error_is_its_own(kind: str) -> None:
    with ours(kind, RaisingEnv, 3) as env:
        env.reset()
        action = np.zeros(3, np.int32)
        env.step(action)
        env.step(action)
        with pytest.raises(KeyError, match="no such joint") as caught:
            env.step(action)
        assert isinstance(caught.value, shoal.EnvError)
        assert env.reset().is_first().all()  # and goes on
        assert env.step(action).is_mid().all()


def test_a_killed_worker_is_named_or_replaced() -> None:
    with ParallelPyEnvironment(made(CountPyEnv, 3), num_workers=3) as env:
        env.reset()
        os.kill(env.pool.workers[1].pid, signal.SIGKILL)
        with pytest.raises(shoal.WorkerDied, match="SIGKILL"):
            env.step(np.zeros(3, np.int32))
    with ParallelPyEnvironment(made(CountPyEnv, 3, length=100), num_workers=3, on_error="restart") as env:
        env.reset()
        env.step(np.zeros(3, np.int32))
        os.kill(env.pool.workers[1].pid, signal.SIGKILL)
        seen = [env.step(np.zeros(3, np.int32)) for _ in range(4)]
        lasts = np.array([step.is_last() for step in seen])
        assert lasts.sum(0).tolist() == [0, 1, 0]
        cut = seen[int(lasts[:, 1].argmax())]
        assert cut.discount.tolist() == [1, 1, 1]  # cut short, not over


# ---- Gymnasium and dm_env envs ---------------------------------------------------------------------------------


def test_a_gymnasium_id_is_as_good_as_a_py_environment() -> None:
    with shoal.make("CartPole-v1", 5, api="tf_agents", backend="serial") as env:
        assert env.action_spec() == array_spec.BoundedArraySpec((), np.int64, 0, 1, "action")
        env.seed(3)
        step = env.reset()
        reference = gymnasium.make("CartPole-v1")
        for i in range(5):
            np.testing.assert_array_equal(step.observation[i], reference.reset(seed=3 + i)[0])
        assert env.get_info() == ({},) * 5
        lasts = 0
        for _ in range(60):
            ended = step.is_last()
            step = env.step(np.zeros(5, np.int64))
            assert (step.is_first() == ended).all()
            assert (step.discount == np.where(step.is_last(), 0, 1)).all()
            lasts += int(step.is_last().sum())
        assert lasts > 10
    with BatchedPyEnvironment(["CartPole-v1", lambda: gymnasium.make("CartPole-v1")]) as env:
        assert env.reset().observation.shape == (2, 4)
    with ParallelPyEnvironment(["CartPole-v1"] * 3) as env:
        environment_utils.validate_py_environment(env, episodes=1)


def test_spaces_become_specs() -> None:
    space = gymnasium.spaces.Dict(
        image=gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
        arm=gymnasium.spaces.Tuple(
            (gymnasium.spaces.Box(-1, 1, (), np.float64), gymnasium.spaces.Discrete(5, start=2))
        ),
        bits=gymnasium.spaces.MultiBinary((2, 2)),
        many=gymnasium.spaces.MultiDiscrete([3, 4]),
    )
    with shoal.make(functools.partial(SpaceEnv, space), 2, api="tf_agents", backend="serial") as env:
        step = env.reset()
        tf.nest.assert_same_structure(step.observation, env.observation_spec())
        for array, spec in zip(tf.nest.flatten(step.observation), tf.nest.flatten(env.observation_spec()), strict=True):
            assert array.dtype == spec.dtype
            assert array.shape == (2, *spec.shape)


def test_py_environments_and_gymnasium_envs_in_one_pool() -> None:
    """They must only agree in their spaces."""

    class GymCount(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = gymnasium.spaces.Box(-1, 1e6, (4,), np.float32)
        action_space = gymnasium.spaces.Discrete(4)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(4, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.ones(4, np.float32), 2.0, False, False, {}

    with shoal.make([CountPyEnv, GymCount], api="tf_agents", backend="serial") as env:
        assert env.reset().observation[:, 1].tolist() == [1, 0]
        assert env.step(np.ones(2, np.int64)).reward.tolist() == [11, 2]
    with shoal.make([CountPyEnv, GymCount], backend="processes", num_workers=2) as vector:
        vector.reset(seed=5)
        _, reward, *_ = vector.step(np.ones(2, np.int64))
        assert reward.tolist() == [11, 2]


def test_py_environments_through_the_other_faces() -> None:
    with shoal.make(made(CountPyEnv, 3), backend="hybrid", num_workers=2) as vector:
        obs, _ = vector.reset(seed=5)
        assert obs[:, 0].tolist() == [5, 6, 7]
        for _ in range(3):
            _, _, terminated, truncated, _ = vector.step(np.zeros(3, np.int64))
        assert terminated.tolist() == [True, False, False]
        assert not truncated.any()
    with shoal.Pool(made(CountPyEnv, 4, discount=0.5), batch_size=2, num_workers=2, backend="processes") as pool:
        pool.async_reset()
        batch = pool.recv()
        pool.send(np.zeros(2, np.int64), batch.env_id)
        seen: set[int] = set()
        while len(seen) < 4:
            batch = pool.recv()
            seen |= set(batch.env_id.tolist())
            assert all(info == {"discount": 0.5} for info in batch.info.values())
            pool.send(np.zeros(2, np.int64), batch.env_id)


# ---- drivers, buffers, networks --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["instances", "parallel", "hybrid"])
def test_a_dynamic_step_driver_fills_a_replay_buffer(kind: str) -> None:
    with ours(kind, CountPyEnv, 4) as env:
        tf_env = tf_py_environment.TFPyEnvironment(env)
        assert tf_env.batch_size == 4
        policy = random_tf_policy.RandomTFPolicy(tf_env.time_step_spec(), tf_env.action_spec())
        buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(policy.trajectory_spec, 4, 100)
        driver = dynamic_step_driver.DynamicStepDriver(tf_env, policy, [buffer.add_batch], num_steps=40)
        driver.run()
        frames = buffer.gather_all()
        # Env i counts to 3 + i % 3, then begins again, and nothing is left out.
        for i, counts in enumerate(frames.observation[:, :, 2].numpy().astype(int).tolist()):
            length = 3 + i % 3
            assert counts[: length + 1] == list(range(length + 1))
            assert counts[length + 1] == 0
        assert (frames.step_type[:, 0] == ts.StepType.FIRST).numpy().all()


def test_a_dynamic_episode_driver_counts_episodes() -> None:
    with ours("parallel", CountPyEnv, 3) as env:
        tf_env = tf_py_environment.TFPyEnvironment(env)
        policy = random_tf_policy.RandomTFPolicy(tf_env.time_step_spec(), tf_env.action_spec())
        episodes, length = tf_metrics.NumberOfEpisodes(), tf_metrics.AverageEpisodeLengthMetric(batch_size=3)
        driver = dynamic_episode_driver.DynamicEpisodeDriver(tf_env, policy, [episodes, length], num_episodes=9)
        driver.run()
        assert int(episodes.result()) >= 9
        assert 3 <= float(length.result()) <= 5


def test_a_py_driver_collects_from_it() -> None:
    with ours("instances", CountPyEnv, 3) as env:
        policy = random_py_policy.RandomPyPolicy(env.time_step_spec(), env.action_spec())
        seen: list[Any] = []
        driver = py_driver.PyDriver(env, policy, [seen.append], max_steps=30)
        step, _ = driver.run(env.reset())
        assert len(seen) >= 10
        assert seen[0].is_first().all()
        assert step.observation.shape == (3, 4)


def test_the_examples_of_the_guide() -> None:
    """Batch size, reset, step, and a loop until all are done."""

    class DummyEnv(py_environment.PyEnvironment):
        def __init__(self) -> None:
            super().__init__()
            self._state, self._steps = np.zeros(2, np.float32), 0

        def action_spec(self) -> Any:
            return array_spec.BoundedArraySpec((), np.int32, 0, 1, "action")

        def observation_spec(self) -> Any:
            return array_spec.ArraySpec((2,), np.float32, "observation")

        def _reset(self) -> Any:
            self._state, self._steps = np.random.rand(2).astype(np.float32), 0
            return ts.restart(self._state)

        def _step(self, action: Any) -> Any:
            if self._steps >= 10:
                return ts.termination(self._state, 0.0)
            self._state = self._state + np.float32(0.1) * action
            self._steps += 1
            return ts.transition(self._state, reward=1.0)

    with BatchedPyEnvironment([DummyEnv() for _ in range(3)]) as batched_env:
        assert batched_env.batch_size == 3
        first = batched_env.reset()
        assert first.observation.shape == (3, 2)
        assert first.step_type.tolist() == [0, 0, 0]
        step = batched_env.step(np.array([0, 1, 0], np.int32))
        assert step.reward.tolist() == [1, 1, 1]
        np.testing.assert_allclose(step.observation - first.observation, [[0, 0], [0.1, 0.1], [0, 0]], atol=1e-6)
        for _ in range(2):
            step, steps = batched_env.reset(), 0
            while not step.is_last().all():
                step, steps = batched_env.step(np.random.randint(0, 2, 3).astype(np.int32)), steps + 1
            assert steps == 11


def test_an_env_that_returns_no_time_step_is_told_what_to_return() -> None:
    class Raw(CountPyEnv):
        def _reset(self) -> Any:
            return np.zeros(4, np.float32)

    with BatchedPyEnvironment([Raw()], multithreading=False) as env:
        with pytest.raises(TypeError, match=r"reset must return a TimeStep, such as restart\(observation\)"):
            env.reset()


def test_missing_tf_agents_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import sys

    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tf_agents"):
            raise ImportError("No module named 'tf_agents'")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "shoal.dialects.tf_agents")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=re.escape(install("tf-agents"))):
        shoal.make(CountEnv, 2, api="tf_agents")


def test_theirs_is_left_as_it_was() -> None:
    """Ours stand beside TF-Agents' classes; nothing of theirs is replaced."""
    assert batched_py_environment.BatchedPyEnvironment is not BatchedPyEnvironment
    assert not issubclass(parallel_py_environment.ParallelPyEnvironment, ParallelPyEnvironment)
