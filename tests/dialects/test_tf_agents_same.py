"""TF-Agents' own BatchedPyEnvironment and ParallelPyEnvironment beside ours: whatever is done to both has one outcome.

An outcome is a value, compared with its nest, types and bits, or an error, compared by its class. What differs on
purpose is in the table of docs/migrate/index.md, and in `DEVIATIONS`, which names its rows.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import gin
import numpy as np
import pytest
import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.agents.ppo import ppo_clip_agent
from tf_agents.drivers import dynamic_episode_driver, dynamic_step_driver, py_driver
from tf_agents.environments import (
    batched_py_environment,
    parallel_py_environment,
    suite_gym,
    tf_py_environment,
    wrappers,
)
from tf_agents.environments import utils as environment_utils
from tf_agents.metrics import py_metrics
from tf_agents.networks import actor_distribution_network, q_network, value_network
from tf_agents.policies import random_py_policy, random_tf_policy
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.specs import array_spec
from tf_agents.system import system_multiprocessing
from tf_agents.trajectories import time_step as ts

import shoal
from dialects import odd_py_envs
from dialects.deviations import documented_rows
from dialects.py_envs import CountPyEnv, NestedPyEnv, OtherSpecEnv, Pair, RaisingEnv
from shoal.dialects.tf_agents import BatchedPyEnvironment, ParallelPyEnvironment

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

THEIRS = {
    "batched": batched_py_environment.BatchedPyEnvironment,
    "parallel": parallel_py_environment.ParallelPyEnvironment,
}
OURS = {"batched": BatchedPyEnvironment, "parallel": ParallelPyEnvironment}
COUNTS = (1, 3)
PLAIN, ODD = ([cls.__name__ for cls in classes] for classes in (odd_py_envs.PLAIN, odd_py_envs.ODD))
WRAPPED = list(odd_py_envs.WRAPPED)
MOST = {"multithreading": False}, {"multithreading": True}


@pytest.fixture(scope="session", autouse=True)
def _processes() -> None:
    """TF-Agents starts processes only where it was told that it may."""
    system_multiprocessing.enable_interactive_mode()


def opened(where: dict[str, Any], kind: str, name: str, count: int, **options: Any) -> Any:
    makers = [functools.partial(odd_py_envs.make, name, i) for i in range(count)]
    return where[kind](makers if kind == "parallel" else [make() for make in makers], **options)


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return "value", function()
    except Exception as error:
        return "error", error


def equal(found: Any, expected: Any) -> None:
    """Same nest of the same containers, same types, same bits."""
    assert found[0] == expected[0], (found, expected)
    if found[0] == "error":
        theirs = type(expected[1])
        if theirs.__mro__[1].__qualname__ == theirs.__qualname__:  # gin raises a proxy of a constructor's error
            theirs = theirs.__mro__[1]
        assert isinstance(found[1], theirs), (found, expected)
        return
    assert type(found[1]) is type(expected[1])
    tf.nest.assert_same_structure(found[1], expected[1])
    for one, other in zip(tf.nest.flatten(found[1]), tf.nest.flatten(expected[1]), strict=True):
        if isinstance(other, np.ndarray):
            assert isinstance(one, np.ndarray)
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert [*one.flat] == [*other.flat]
        else:
            assert one == other


def alike(behaviour: Callable[[Any], Any], ours: Any, theirs: Any, fails: Any = ()) -> None:
    """Do the same to both. Theirs may raise only what was foreseen: a test whose every step fails shows nothing."""
    expected = outcome(lambda: behaviour(theirs))
    assert expected[0] == "value" or isinstance(expected[1], fails), expected
    equal(outcome(lambda: behaviour(ours)), expected)


def both(
    kind: str,
    name: str,
    count: int,
    *behaviours: Callable[[Any], Any],
    fails: type[Exception] | tuple[type[Exception], ...] = (),
    **options: Any,
) -> None:
    """Do the same to both, one behaviour after the other; `fails` are the errors that theirs may raise."""
    theirs, ours = (opened(where, kind, name, count, **options) for where in (THEIRS, OURS))
    try:
        for behaviour in behaviours:
            alike(behaviour, ours, theirs, fails)
    finally:
        ours.close()
        theirs.close()


def step_with(turn: int) -> Callable[[Any], Any]:
    """Step by actions that the turn decides."""

    def step(env: Any) -> Any:
        rng = np.random.RandomState(turn)
        spec = env.action_spec()
        actions = [array_spec.sample_spec_nest(spec, rng) for _ in range(env.batch_size)]
        return env.step(tf.nest.map_structure(lambda *rows: np.stack(rows), *actions))

    return step


def reset(env: Any) -> Any:
    return env.reset()


def current(env: Any) -> Any:
    return env.current_time_step()


EPISODES = (*(step for turn in range(12) for step in (step_with(turn), current)), reset, *map(step_with, range(4)))


# ---- TimeSteps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", [*PLAIN, *ODD, *WRAPPED])
def test_batched_time_steps(name: str, count: int, options: dict[str, Any]) -> None:
    both("batched", name, count, current, reset, *EPISODES, fails=ValueError, **options)


@pytest.mark.parametrize("options", [{}, {"flatten": True}, {"blocking": True}, {"start_serially": False}], ids=str)
@pytest.mark.parametrize("name", ["CountPyEnv", "NestedPyEnv", "ListEnv", "OtherNestEnv", "several"])
def test_parallel_time_steps(name: str, options: dict[str, Any]) -> None:
    both("parallel", name, 3, current, reset, *EPISODES, fails=ValueError, **options)


@pytest.mark.parametrize("name", ["ByTurnsEnv", "NeverResetsEnv", "TwoRewardsEnv", "WordsEnv", "FixedLength"])
def test_more_parallel_time_steps(name: str) -> None:
    both("parallel", name, 2, reset, *EPISODES)


def test_parallel_of_one() -> None:
    both("parallel", "ListEnv", 1, reset, *EPISODES)


@pytest.mark.parametrize("name", ["ListEnv", "CountPyEnv", "several"])
@pytest.mark.parametrize("count", COUNTS)
def test_a_step_comes_first(name: str, count: int) -> None:
    both("batched", name, count, step_with(0), step_with(1), current)


@pytest.mark.parametrize("name", ["ListEnv", "several", "ByTurnsEnv", "TwoRewardsEnv"])
def test_copies_in_processes_answer_alike(name: str) -> None:
    theirs = opened(THEIRS, "batched", name, 3)
    ours = opened(OURS, "batched", name, 3, backend="processes", num_workers=2)
    with ours, theirs:
        for behaviour in (reset, *EPISODES):
            alike(behaviour, ours, theirs)


# ---- what they say of themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", [*PLAIN, *ODD, *WRAPPED])
def test_batched_describes_itself(name: str, count: int) -> None:
    names = ("observation_spec", "action_spec", "time_step_spec", "reward_spec", "discount_spec")
    theirs, ours = (opened(where, "batched", name, count, multithreading=False) for where in (THEIRS, OURS))
    with ours, theirs:
        for what in names:
            found, expected = getattr(ours, what)(), getattr(theirs, what)()
            assert found == expected, what
            assert repr(found) == repr(expected)
        assert (ours.batched, ours.batch_size) == (theirs.batched, theirs.batch_size)
        assert isinstance(ours, batched_py_environment.BatchedPyEnvironment)


def test_parallel_describes_itself() -> None:
    theirs, ours = (opened(where, "parallel", "NestedPyEnv", 2) for where in (THEIRS, OURS))
    with ours, theirs:
        for what in ("observation_spec", "action_spec", "time_step_spec", "reward_spec", "discount_spec"):
            assert repr(getattr(ours, what)()) == repr(getattr(theirs, what)())
        assert (ours.batched, ours.batch_size) == (theirs.batched, theirs.batch_size)
        assert isinstance(ours, parallel_py_environment.ParallelPyEnvironment)
        assert len(ours.envs) == len(theirs.envs) == 2
        for one, other in zip(ours.envs, theirs.envs, strict=True):
            assert one.access("number") == other.access("number") == one.number == other.number
            assert one.call("seed", 7)() == other.call("seed", 7)()
            equal(("value", one.reset()), ("value", other.reset()))


@pytest.mark.parametrize("name", ["CountPyEnv", "ListEnv", "several", "TimeLimit"])
def test_both_pass_the_check_of_tf_agents(name: str) -> None:
    found = []
    for where in (THEIRS, OURS):
        with opened(where, "batched", name, 3) as env:
            found.append(outcome(lambda env=env: environment_utils.validate_py_environment(env, episodes=2)))  # type: ignore[misc]
    equal(found[1], found[0])


# ---- actions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("value", [9, -1, 2])
@pytest.mark.parametrize("make", [np.array, tf.constant])
@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
def test_batched_passes_actions_on(options: dict[str, Any], make: Any, value: int, count: int) -> None:
    """The envs say which actions they take. They may be arrays or tensors."""
    action = make([value] * count)
    both("batched", "LooseEnv", count, reset, lambda env: env.step(action), **options)


@pytest.mark.parametrize("size", [0, 2, 4])
def test_wrong_numbers_of_actions(size: int) -> None:
    wrong = lambda env: env.step(np.zeros(size, np.int32))  # noqa: E731
    both("batched", "CountPyEnv", 3, reset, wrong, step_with(1), current, fails=ValueError)
    both("batched", "CountPyEnv", 1, reset, wrong, step_with(1), current, fails=ValueError)


def test_wrong_numbers_of_actions_in_words() -> None:
    for where in (THEIRS, OURS):
        with opened(where, "batched", "CountPyEnv", 3) as env:
            env.reset()
            with pytest.raises(ValueError, match=r"Primary dimension of action items .* batch size: 2 vs\. 3"):
                env.step(np.zeros(2, np.int32))


@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "make",
    [np.float64, np.float32, np.int64, np.uint8, np.bool_, lambda each: each, tuple, tf.constant, np.int16],
    ids=["float64", "float32", "int64", "uint8", "bool", "list", "tuple", "tensor", "int16"],
)
def test_actions_arrive_as_they_are(make: Any, count: int, options: dict[str, Any]) -> None:
    """Of whatever type, shape and container: the env says what it was given."""
    given = lambda env: env.step(make([1] * count))  # noqa: E731
    told = lambda env: [(type(one.given_action), str(one.given_action)) for one in env.envs]  # noqa: E731
    both("batched", "TellingEnv", count, reset, given, told, fails=(ValueError, TypeError), **options)


def test_nests_of_actions_may_be_otherwise() -> None:
    both(
        "batched",
        "NestedPyEnv",
        2,
        reset,
        lambda env: env.step(Pair(np.zeros((2, 2), np.float32), [np.ones(2, np.int32)])),
        lambda env: env.step(Pair(np.full((2, 2), 7, np.float32), [np.full(2, 2, np.int32)])),
    )


# ---- rendering, seeds, infos, states ------------------------------------------------------------------------------


def render(mode: str) -> Callable[[Any], Any]:
    return lambda env: env.render(mode)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["CountPyEnv", "TalkingEnv", "MuteEnv", "several"])
def test_batched_renders(name: str, count: int) -> None:
    modes = (lambda env: env.render(), render("rgb_array"), render("human"), render("text"))
    fails = NotImplementedError if name == "MuteEnv" else ()
    both("batched", name, count, reset, *modes, step_with(1), *modes, fails=fails)


@pytest.mark.parametrize("name", ["CountPyEnv", "TalkingEnv"])
def test_parallel_renders(name: str) -> None:
    both(
        "parallel",
        name,
        2,
        reset,
        lambda env: env.render(),
        render("rgb_array"),
        render("human"),
        render("text"),
        fails=NotImplementedError,
    )


def test_parallel_refuses_other_modes_in_words() -> None:
    for where in (THEIRS, OURS):
        with opened(where, "parallel", "CountPyEnv", 1) as env:
            with pytest.raises(NotImplementedError, match=r"Only rgb_array rendering mode is supported. Got human"):
                env.render("human")


def test_parallel_seeds() -> None:
    seeds = (lambda env: env.seed([1, 2]), reset, lambda env: env.seed([1]), lambda env: env.seed(["11", 2.0]))
    both("parallel", "CountPyEnv", 2, *seeds, step_with(0), reset, fails=ValueError)
    for where in (THEIRS, OURS):
        with opened(where, "parallel", "CountPyEnv", 1) as env:
            with pytest.raises(ValueError, match="Number of seeds should match the number of parallel_envs"):
                env.seed([1, 2])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["CountPyEnv", "MuteEnv", "several"])
def test_batched_infos(name: str, count: int) -> None:
    fails = NotImplementedError if name == "MuteEnv" else ()
    info = lambda env: env.get_info()  # noqa: E731
    both("batched", name, count, reset, info, step_with(1), info, fails=fails)


# ---- what is refused, in the same words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("envs", "words"),
    [
        (lambda: CountPyEnv(), "envs must be a list or tuple"),
        (lambda: {1: CountPyEnv()}, "envs must be a list or tuple"),
        (lambda: [CountPyEnv(), OtherSpecEnv()], "All environments must have the same time_step_spec"),
        (lambda: [CountPyEnv(), NestedPyEnv()], "All environments must have the same action spec"),
        (lambda: [wrappers.RunStats(CountPyEnv()), OtherSpecEnv()], "the same time_step_spec.  Saw: "),
    ],
)
def test_batched_refuses(envs: Any, words: str) -> None:
    for where in (THEIRS, OURS):
        with pytest.raises(ValueError, match=words):
            where["batched"](envs())


@pytest.mark.parametrize("kind", ["batched", "parallel"])
def test_of_nothing(kind: str) -> None:
    equal(*(outcome(lambda w=where: w[kind]([])) for where in (OURS, THEIRS)))  # type: ignore[misc]


def test_batched_refuses_batched_ones() -> None:
    for where in (THEIRS, OURS):
        with where["batched"]([CountPyEnv()]) as env:
            with pytest.raises(ValueError, match="Some of the envs are already batched: "):
                where["batched"]([CountPyEnv(), env])


def test_parallel_refuses() -> None:
    for where in (THEIRS, OURS):
        with pytest.raises(TypeError, match="Found non-callable `env_constructors` in `ParallelPyEnvironment`"):
            where["parallel"]([CountPyEnv, CountPyEnv()])
        with pytest.raises(ValueError, match="All environments must have the same time_step_spec"):
            where["parallel"]([CountPyEnv, OtherSpecEnv])
        with pytest.raises(ValueError, match="All environments must have the same action spec"):
            where["parallel"]([CountPyEnv, odd_py_envs.PushEnv])


@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
def test_an_envs_error_is_the_same(options: dict[str, Any]) -> None:
    for where in (THEIRS, OURS):
        with where["batched"]([RaisingEnv(i) for i in range(2)], **options) as env:
            env.reset()
            env.step(np.zeros(2, np.int32))
            env.step(np.zeros(2, np.int32))
            with pytest.raises(KeyError, match="no such joint"):
                env.step(np.zeros(2, np.int32))


# ---- the envs stay the user's --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
@pytest.mark.parametrize("count", COUNTS)
def test_envs_are_the_users_own_and_called_alike(count: int, options: dict[str, Any]) -> None:
    """Nothing is called before the user does, and then the same, on the very objects."""
    found = []
    for where in (THEIRS, OURS):
        envs = [odd_py_envs.CalledEnv(i) for i in range(count)]
        env = where["batched"](envs, **options)
        assert env.envs is envs
        assert [one.calls for one in envs] == [[]] * count
        env.reset()
        for turn in range(7):
            step_with(turn)(env)
        envs[0].count = 100
        env.close()
        found.append([(one.calls, one.episode, one.count) for one in envs])
    assert found[0] == found[1]


@pytest.mark.parametrize("options", MOST, ids=["serial", "threads"])
def test_one_env_may_be_there_twice(options: dict[str, Any]) -> None:
    found = []
    for where in (THEIRS, OURS):
        one = odd_py_envs.CalledEnv(0)
        with where["batched"]([one, one], **options) as env:
            seen = [outcome(lambda b=b, e=env: b(e)) for b in (reset, *map(step_with, range(8)))]  # type: ignore[misc]
        found.append((seen if not options["multithreading"] else [], sorted(one.calls)))
    for ours, theirs in zip(found[1][0], found[0][0], strict=True):
        equal(ours, theirs)
    assert found[1][1] == found[0][1]


def test_gin_configures_both() -> None:
    """What a gin file says of TF-Agents' classes holds for ours; an argument goes before it."""
    for where in (THEIRS, OURS):
        with gin.unlock_config():
            gin.parse_config("BatchedPyEnvironment.multithreading = False")
            gin.parse_config("ParallelPyEnvironment.flatten = True")
        try:
            with where["batched"]([CountPyEnv(), CountPyEnv()]) as env:
                assert env._parallel_execution is False
            with where["batched"]([CountPyEnv(), CountPyEnv()], multithreading=True) as env:
                assert env._parallel_execution is True
            with where["parallel"]([odd_py_envs.ListEnv]) as env:
                assert env.reset().observation.tolist() == [0]  # flat, so nested as the spec says
        finally:
            gin.clear_config()


def test_constructors_are_called_once() -> None:
    found = []
    for where in (THEIRS, OURS):
        with opened(where, "parallel", "CalledEnv", 2) as env:
            before = [one.calls for one in env.envs]
            env.reset()
            step_with(1)(env)
            found.append((before, [one.calls for one in env.envs]))
    assert found[0] == found[1] == ([[], []], [["reset", "step"]] * 2)


def test_envs_wait_beside_each_other() -> None:
    """With threads, envs that wait for each other meet."""

    class Meeting(CountPyEnv):
        barrier: threading.Barrier

        def _step(self, action: Any) -> ts.TimeStep:
            self.barrier.wait(20)
            return super()._step(action)

    for where in (THEIRS, OURS):
        Meeting.barrier = threading.Barrier(3)
        with where["batched"]([Meeting(i) for i in range(3)]) as env:
            env.reset()
            assert step_with(1)(env).is_mid().all()


def test_envs_that_begin_to_wait_later_meet_as_well() -> None:
    """Long after it was found that a thread for each is not worth it."""

    class Meeting(CountPyEnv):
        barrier = threading.Barrier(3)

        def _step(self, action: Any) -> ts.TimeStep:
            if self.episode * 10 + self.count == 1002:
                self.barrier.wait(20)
            return super()._step(action)

    with BatchedPyEnvironment([Meeting(0, length=5) for _ in range(3)]) as env:
        env.reset()
        for _ in range(700):
            step_with(1)(env)
        assert not Meeting.barrier.broken
        assert env.envs[0].episode > 100


def test_sixteen_envs_are_stepped_at_the_same_time() -> None:
    everyone = threading.Barrier(16)

    class Meeting(CountPyEnv):
        def _step(self, action: Any) -> ts.TimeStep:
            everyone.wait(60)
            return super()._step(action)

    with BatchedPyEnvironment([Meeting(i) for i in range(16)]) as env:
        env.reset()
        assert step_with(1)(env).is_mid().all()


# ---- wrappers and drivers around ----------------------------------------------------------------------------------


AROUND: dict[str, Callable[[Any], Any]] = {
    "base": wrappers.PyEnvironmentBaseWrapper,
    "FlattenAction": wrappers.FlattenActionWrapper,
    "ActionOffset": wrappers.ActionOffsetWrapper,
    "ObservationFilter": lambda env: wrappers.ObservationFilterWrapper(env, idx=[1, 2]),
    "ExtraDisabledActions": lambda env: wrappers.ExtraDisabledActionsWrapper(env, 2),
    "History": wrappers.HistoryWrapper,
    "RunStats": wrappers.RunStats,
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 3),
}


@pytest.mark.parametrize("around", list(AROUND))
def test_wrappers_around(around: str) -> None:
    found = []
    for where in (THEIRS, OURS):
        with opened(where, "batched", "Numbered", 3) as env:
            wrapped = outcome(lambda env=env: AROUND[around](env))  # type: ignore[misc]
            found.append([wrapped] if wrapped[0] == "error" else [
                outcome(lambda b=b, e=wrapped[1]: b(e)) for b in (reset, *map(step_with, range(8)), current)
            ])  # fmt: skip
    for ours, theirs in zip(found[1], found[0], strict=True):
        equal(ours, theirs)


@pytest.mark.parametrize("isolation", [False, True])
@pytest.mark.parametrize("name", ["CountPyEnv", "ListEnv", "NestedPyEnv", "several", "TwoRewardsEnv"])
def test_tf_py_environment_around(name: str, isolation: bool) -> None:
    found = []
    for where in (THEIRS, OURS):
        env = opened(where, "batched", name, 3)
        tf_env = tf_py_environment.TFPyEnvironment(env, isolation=isolation)
        rng, seen = np.random.RandomState(0), [outcome(tf_env.reset)]
        for _ in range(8):
            rows = [array_spec.sample_spec_nest(env.action_spec(), rng) for _ in range(3)]
            action = tf.nest.map_structure(lambda *parts: tf.constant(np.stack(parts)), *rows)
            seen.append(outcome(lambda a=action, e=tf_env: e.step(a)))  # type: ignore[misc]
        seen.append(outcome(tf_env.current_time_step))
        found.append([(kind, tf.nest.map_structure(np.asarray, value)) for kind, value in seen])
        env.close()  # the close of an isolated TFPyEnvironment waits for its thread before it is told to end
    for ours, theirs in zip(found[1], found[0], strict=True):
        equal(ours, theirs)


@pytest.mark.parametrize("driver", ["step", "episode"])
@pytest.mark.parametrize("name", ["CountPyEnv", "ListEnv", "several"])
def test_dynamic_drivers(name: str, driver: str) -> None:
    found = []
    for where in (THEIRS, OURS):
        tf.random.set_seed(3)
        with opened(where, "batched", name, 3) as env:
            tf_env = tf_py_environment.TFPyEnvironment(env)
            policy = random_tf_policy.RandomTFPolicy(tf_env.time_step_spec(), tf_env.action_spec())
            seen: list[Any] = []
            keep = lambda trajectory, seen=seen: tf.py_function(  # noqa: E731
                lambda *parts: seen.append([part.numpy() for part in parts]), tf.nest.flatten(trajectory), []
            )
            if driver == "step":
                run = dynamic_step_driver.DynamicStepDriver(tf_env, policy, [keep], num_steps=20).run
            else:
                run = dynamic_episode_driver.DynamicEpisodeDriver(tf_env, policy, [keep], num_episodes=5).run
            result = outcome(lambda run=run: tf.nest.map_structure(np.asarray, run()[0]))  # type: ignore[misc]
            found.append((result, seen))
    equal(found[1][0], found[0][0])
    equal(("value", found[1][1]), ("value", found[0][1]))


@pytest.mark.parametrize("name", ["CountPyEnv", "ListEnv", "several"])
def test_py_drivers(name: str) -> None:
    found = []
    for where in (THEIRS, OURS):
        with opened(where, "batched", name, 3) as env:
            policy = random_py_policy.RandomPyPolicy(env.time_step_spec(), env.action_spec(), seed=5)
            seen: list[Any] = []
            length = py_metrics.AverageEpisodeLengthMetric(batch_size=3)
            driver = py_driver.PyDriver(env, policy, [seen.append, length], max_steps=30)
            last, _ = driver.run(env.reset())
            found.append((last, seen, float(length.result())))
    equal(("value", found[1]), ("value", found[0]))


# ---- envs of suite_gym ----------------------------------------------------------------------------------------------


def cartpole(seed: int) -> Any:
    env = suite_gym.load("CartPole-v1")
    env.seed(seed)
    return env


@pytest.mark.parametrize("options", [*MOST, {"backend": "processes"}], ids=["serial", "threads", "processes"])
def test_suite_gym_in_batches(options: dict[str, Any]) -> None:
    theirs = batched_py_environment.BatchedPyEnvironment([cartpole(i) for i in range(3)], multithreading=False)
    ours = BatchedPyEnvironment([cartpole(i) for i in range(3)], **options)
    with ours, theirs:
        assert repr(ours.time_step_spec()) == repr(theirs.time_step_spec())
        for behaviour in (reset, *map(step_with, range(60)), reset):
            alike(behaviour, ours, theirs)


def test_suite_gym_in_processes() -> None:
    makers = [functools.partial(cartpole, i) for i in range(2)]
    theirs, ours = (where["parallel"](makers) for where in (THEIRS, OURS))
    with ours, theirs:
        for behaviour in (reset, *map(step_with, range(60)), reset):
            alike(behaviour, ours, theirs)


# ---- agents ---------------------------------------------------------------------------------------------------------


def weights_after_training(make_agent: Callable[[Any], Any], env: Any) -> list[Any]:
    """Collect and train some times; return the weights, which depend on all that was collected."""
    tf_env = tf_py_environment.TFPyEnvironment(env)
    tf.keras.utils.set_random_seed(7)
    agent = make_agent(tf_env)
    agent.initialize()
    buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(agent.collect_data_spec, env.batch_size, 20)
    driver = dynamic_step_driver.DynamicStepDriver(tf_env, agent.collect_policy, [buffer.add_batch], num_steps=60)
    step = tf_env.reset()
    for _ in range(3):
        step, _ = driver.run(step)
        experience = buffer.gather_all()
        if agent.train_sequence_length is not None:
            experience = tf.nest.map_structure(lambda part: part[:, : agent.train_sequence_length], experience)
        agent.train(experience)
        buffer.clear()
    return [variable.numpy() for variable in agent.variables if variable.dtype.is_floating]


def make_dqn(env: Any) -> Any:
    network = q_network.QNetwork(env.observation_spec(), env.action_spec(), fc_layer_params=(16,))
    return dqn_agent.DqnAgent(env.time_step_spec(), env.action_spec(), network, tf.keras.optimizers.legacy.Adam(1e-3))


def make_ppo(env: Any) -> Any:
    return ppo_clip_agent.PPOClipAgent(
        env.time_step_spec(),
        env.action_spec(),
        tf.keras.optimizers.legacy.Adam(1e-3),
        actor_net=actor_distribution_network.ActorDistributionNetwork(
            env.observation_spec(), env.action_spec(), fc_layer_params=(16,)
        ),
        value_net=value_network.ValueNetwork(env.observation_spec(), fc_layer_params=(16,)),
        num_epochs=2,
    )


@pytest.mark.parametrize("make_agent", [make_dqn, make_ppo])
@pytest.mark.parametrize("options", [*MOST, {"backend": "processes"}], ids=["serial", "threads", "processes"])
def test_agents_learn_the_same(make_agent: Any, options: dict[str, Any]) -> None:
    with batched_py_environment.BatchedPyEnvironment([cartpole(i) for i in range(3)], multithreading=False) as env:
        expected = weights_after_training(make_agent, env)
    with BatchedPyEnvironment([cartpole(i) for i in range(3)], **options) as env:
        found = weights_after_training(make_agent, env)
    assert expected
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- what differs on purpose ----------------------------------------------------------------------------------------


def test_ours_can_more() -> None:
    with BatchedPyEnvironment([CountPyEnv(i) for i in range(2)]) as env:
        assert env.seed(4) == [[4], [5]]
        env.reset()
        state = env.get_state()
        after = step_with(1)(env)
        env.set_state(state)
        equal(("value", step_with(1)(env)), ("value", after))
        env.pool.restore(state[0])  # past the face, as it were
        equal(("value", step_with(1)(env)), ("value", after))
        env.close()
        env.close()


DEVIATIONS: dict[str, tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what is done: the row of the table, the class, before it, and the act
    "floats for whole numbers": ("actions", "parallel", reset, lambda env: env.step(np.full(3, 1.0))),
    "too few actions": ("actions", "parallel", reset, lambda env: env.step(np.zeros(1, np.int32))),
    "too many actions": ("actions", "parallel", reset, lambda env: env.step(np.zeros(4, np.int32))),
    "a step after close": ("closed", "parallel", lambda env: env.close(), step_with(0)),
    "a step after close, batched": ("closed", "batched", lambda env: (env.reset(), env.close()), step_with(0)),
    "two closes": ("more", "batched", lambda env: env.close(), lambda env: env.close()),
    "seeds": ("more", "batched", lambda env: None, lambda env: env.seed(3)),
    "states": ("more", "batched", reset, lambda env: env.get_state()),
    "infos of processes": ("more", "parallel", reset, lambda env: env.get_info()),
    "processes": ("workers", "parallel", reset, lambda env: len({one.call("_process_id")() for one in env.envs})),
}


@pytest.mark.parametrize("what", list(DEVIATIONS))
def test_what_differs_is_in_the_table(what: str) -> None:
    """Each deviation names its row; one that is no deviation any more has no place here."""
    row, kind, before, act = DEVIATIONS[what]
    assert row in documented_rows()
    found = []
    for where in (THEIRS, OURS):
        env = opened(where, kind, "NumberedProcessEnv", 3)
        try:
            before(env)
            found.append(outcome(lambda env=env: act(env)))  # type: ignore[misc]
        finally:
            with contextlib.suppress(Exception):
                env.close()
    with pytest.raises(AssertionError):
        equal(found[1], found[0])


def test_an_error_in_a_process_is_the_envs_own() -> None:
    """Row "errors": theirs is an Exception whose text is a traceback, and the process is gone."""
    assert "errors" in documented_rows()
    for where, kind in ((THEIRS, Exception), (OURS, KeyError)):
        with where["parallel"]([functools.partial(RaisingEnv, i) for i in range(2)]) as env:
            env.reset()
            env.step(np.zeros(2, np.int32))
            env.step(np.zeros(2, np.int32))
            with pytest.raises(Exception, match="no such joint") as caught:
                env.step(np.zeros(2, np.int32))
            assert type(caught.value) is kind or (where is OURS and isinstance(caught.value, KeyError))
            if where is OURS:
                assert isinstance(caught.value, shoal.EnvError)
                assert env.reset().is_first().all()


def test_an_image_is_an_image() -> None:
    with BatchedPyEnvironment(["CartPole-v1"], multithreading=False) as env:
        env.reset()
        with pytest.raises(NotImplementedError, match="render_mode"):
            env.render()


def test_make_is_strict() -> None:
    """A pool that is read directly must not hold zeros where an observation does not fit."""
    with shoal.make(odd_py_envs.ListEnv, 2, api="tf_agents", backend="serial") as env:
        assert [part.tolist() for part in env.reset().observation] == [[0, 0]]
        with pytest.raises(ValueError, match="expected 0 to 3, found 9"):
            env.step(np.full(2, 9, np.int32))
    with shoal.make(odd_py_envs.ListForRowEnv, 2, api="tf_agents", backend="serial") as env:
        assert [part.tolist() for part in env.reset().observation] == [[0, 0], [1, 1], [0, 0], [-1, -1]]
    with pytest.raises(shoal.errors.BadEnv, match="only numbers"):
        shoal.make(odd_py_envs.WordsEnv, 2, api="tf_agents", backend="serial")
