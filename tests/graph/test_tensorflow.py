"""Envs inside of TensorFlow graphs: every step in its turn, every type, and the envs' own errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import SPACES, CountEnv, SpaceEnv
from faults.kit import DeedEnv
from shoal import Pool
from shoal.dialects.batch_env import BatchEnv, ExternalProcess

tf = pytest.importorskip("tensorflow")

from shoal.graph.tensorflow import (  # noqa: E402
    Algorithm,
    InGraphBatchEnv,
    InGraphEnv,
    function,
    own_errors,
    simulate,
)
from shoal.support.optional_dependencies import install  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # tracing is slow on a busy machine

Make = Callable[..., Pool]


@pytest.fixture
def pool_of() -> Iterator[Make]:
    """Makes pools, and closes them at the end."""
    made: list[Pool] = []

    def make(env: Any, num_envs: int | None = None, **options: Any) -> Pool:
        options = {"backend": "serial", "autoreset": "disabled", "seed": 10, **options}
        made.append(Pool(env, num_envs, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def leaves(nest: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(nest)]


def assert_same(found: Any, expected: Any) -> None:
    """In structure, shape, type and value."""
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# ---- trajectories ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_envs", "options"),
    [(1, {}), (7, {}), (7, {"backend": "processes", "num_workers": 3}), (7, {"backend": "threads", "num_workers": 3})],
)
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_trajectories_are_those_of_the_pool(
    pool_of: Make, num_envs: int, options: dict[str, Any], autoreset: str
) -> None:
    plain = pool_of("CartPole-v1", num_envs, autoreset=autoreset)
    envs = InGraphBatchEnv(pool_of("CartPole-v1", num_envs, autoreset=autoreset, **options))
    actions = np.random.default_rng(0).integers(0, 2, (60, num_envs))

    @function
    def rollout(actions: Any) -> Any:
        envs.reset()
        first = envs.observ.read_value()
        rows = tf.TensorArray(tf.float32, 60)
        more = tf.TensorArray(tf.float32, 60)
        for t in tf.range(60):
            observ, reward, done = envs.step(actions[t])
            rows = rows.write(t, envs.observ)
            rest = [observ[:, 0], reward, tf.cast(done, tf.float32)]
            rest += [envs.reward.read_value()]
            rest += [tf.cast(flag.read_value(), tf.float32) for flag in (envs.done, envs.terminated, envs.truncated)]
            more = more.write(t, tf.stack(rest))
        return first, rows.stack(), more.stack()

    first, rows, more = (value.numpy() for value in rollout(actions))
    np.testing.assert_array_equal(first, plain.reset().obs)
    for t in range(60):
        batch = plain.step(actions[t])
        np.testing.assert_array_equal(rows[t], batch.obs)
        done = batch.terminated | batch.truncated
        expected = [batch.obs[:, 0], batch.reward, done, batch.reward, done, batch.terminated, batch.truncated]
        np.testing.assert_array_equal(more[t], np.stack(expected).astype(np.float32))
    assert more[:, 2].any(), "no episode has ended in this test"


def test_steps_are_carried_out_in_order_and_none_is_dropped(pool_of: Make) -> None:
    pool = pool_of(CountEnv, 3, env_kwargs={"length": 1000})
    envs = InGraphBatchEnv(pool)

    @function
    def go(n: Any) -> Any:
        envs.reset()
        envs.step([1, 1, 1])  # nobody looks at what these return
        envs.step([2, 2, 2])
        middle = envs.reward.read_value()
        for _ in tf.range(n):
            envs.step([0, 0, 0])
        after_loop = envs.observ.read_value()
        envs.step([3, 3, 3])
        if n > 3:
            envs.step([1, 1, 1])
        envs.step([2, 2, 2])
        return middle, after_loop

    middle, after_loop = go(tf.constant(5))
    assert middle.numpy().tolist() == [202.0] * 3
    assert after_loop.numpy()[:, 2].tolist() == [7] * 3
    assert pool.get_attr("steps") == [10] * 3
    assert envs.observ.numpy().tolist() == [[10 + i, 0, 10] for i in range(3)]
    assert envs.reward.numpy().tolist() == [210.0] * 3
    assert envs.action.numpy().tolist() == [2] * 3
    go(tf.constant(2))
    assert pool.get_attr("steps") == [2 + 2 + 1 + 1] * 3


def test_a_reset_waits_for_the_loop_before_it_and_the_loop_after_it_for_the_reset(pool_of: Make) -> None:
    pool = pool_of(CountEnv, 3, env_kwargs={"length": 1000})
    envs = InGraphBatchEnv(pool)
    envs.reset()

    @function
    def go() -> Any:
        for _ in tf.range(20):
            envs.step([0, 0, 0])
        envs.reset([1])
        between = envs.observ.read_value()
        for _ in tf.range(3):
            envs.step([0, 0, 0])
        return between

    assert go().numpy().tolist() == [[10, 0, 20], [11, 1, 0], [12, 0, 20]]
    assert envs.observ.numpy().tolist() == [[10, 0, 23], [11, 1, 3], [12, 0, 23]]


def test_calls_of_functions_within_functions_keep_their_order(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 2, env_kwargs={"length": 1000}))
    inner = function(lambda action: envs.simulate(action)[1])

    @function
    def outer() -> Any:
        envs.reset()
        rewards = [inner(tf.constant([i, i])) for i in range(4)]
        return tf.stack(rewards)[:, 0]

    assert outer().numpy().tolist() == [1.0, 102.0, 203.0, 304.0]


def test_a_step_works_eagerly_too(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 2))
    assert envs.reset().numpy().tolist() == [[10, 0, 0], [11, 0, 0]]
    observ, reward, done = envs.step([0, 1])
    assert observ.numpy().tolist() == envs.observ.numpy().tolist() == [[10, 0, 1], [11, 0, 1]]
    assert reward.numpy().tolist() == [1.0, 101.0]
    assert done.numpy().tolist() == [False, False]
    assert envs.reset([1]).numpy().tolist() == [[11, 1, 0]]


# ---- reset -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["disabled", "next_step", "same_step"])
def test_reset_of_some_changes_just_their_rows(pool_of: Make, autoreset: str) -> None:
    pool = pool_of(CountEnv, 7, backend="processes", num_workers=3, autoreset=autoreset, env_kwargs={"length": 3})
    envs = InGraphBatchEnv(pool)
    assert envs.done.numpy().all(), "no episode is under way before the first reset"

    @function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def reset(indices: Any) -> Any:
        return envs.reset(indices)

    envs.reset()
    assert not envs.done.numpy().any()
    for _ in range(2):
        envs.step(np.ones(7, int))
    before = envs.observ.numpy()
    rows = reset([5, 0, 2])
    assert rows.numpy().tolist() == [[15, 1, 0], [10, 1, 0], [12, 1, 0]]
    after = envs.observ.numpy()
    assert after[[5, 0, 2]].tolist() == rows.numpy().tolist()
    kept = [1, 3, 4, 6]
    assert after[kept].tolist() == before[kept].tolist()
    assert envs.reward.numpy().tolist() == [0.0 if i in (0, 2, 5) else 102.0 for i in range(7)]
    envs.step(np.zeros(7, int))
    assert envs.done.numpy().tolist() == [i in kept for i in range(7)]
    reset(np.flatnonzero(envs.done))
    assert not envs.done.numpy().any()
    assert not envs.terminated.numpy().any()
    assert envs.reward.numpy().tolist() == [1.0 if i in (0, 2, 5) else 0.0 for i in range(7)]


@pytest.mark.parametrize("nothing", [[], np.zeros(0, np.int64), np.zeros(0, np.int32)])
def test_reset_of_nobody(pool_of: Make, nothing: Any) -> None:
    pool = pool_of(CountEnv, 3)
    envs = InGraphBatchEnv(pool)
    reset = function(lambda indices: envs.reset(indices), reduce_retracing=True)
    envs.reset()
    envs.step([0, 0, 0])
    for given in (nothing, tf.constant([], tf.int64), tf.where(envs.done)[:, 0]):
        assert reset(given).shape == (0, 3)
    assert function(lambda: envs.reset(nothing))().shape == (0, 3)
    assert pool.get_attr("episode") == [0, 0, 0]
    assert envs.observ.numpy()[:, 2].tolist() == [1, 1, 1]
    assert envs.reward.numpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("indices", "says"),
    [([3], "3"), ([-1], "-1"), ([1, 1], "1"), ([True, False, True], "mask"), ([0.5], "float32"), ([[0]], "shape")],
)
def test_reset_of_who_is_not_there(pool_of: Make, indices: Any, says: str) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 3))
    envs.reset()
    with pytest.raises(shoal.errors.BadAction, match=says):
        function(lambda: envs.reset(indices))()
    assert function(lambda: envs.step([0, 0, 0])[1])().numpy().tolist() == [1.0] * 3


def test_static_shapes_are_known(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 3))

    @function
    def shapes() -> Any:
        assert envs.reset().shape == (3, 3)
        assert envs.reset([0, 1]).shape == (2, 3)
        assert envs.reset(tf.where(envs.done)[:, 0]).shape.as_list() == [None, 3]
        observ, reward, done = envs.step([0, 0, 0])
        assert observ.shape == (3, 3)
        assert reward.shape == done.shape == (3,)

    shapes()


# ---- types -----------------------------------------------------------------------------------------------------

NUMERIC = {
    **{
        f"box {np.dtype(kind)}": spaces.Box(0, 100, (2, 3), kind)
        for kind in (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
                     np.float16, np.float32, np.float64)
    },
    "box uint64 large": spaces.Box(0, 2**64 - 1, (3,), np.uint64),
    **{
        name: SPACES[name]
        for name in (
            "box 0-d", "box unbounded", "box int64", "box of nothing", "box bool", "image", "discrete",
            "discrete start", "discrete int32", "multi discrete", "multi discrete 2-d", "multi binary",
            "multi binary 2-d", "dict", "tuple", "deep", "empty dict",
        )
    },
    "nested": spaces.Dict(
        pair=spaces.Tuple((spaces.Dict(z=spaces.MultiBinary(2), y=spaces.Discrete(4)), spaces.Box(-1, 1, (), float))),
        image=spaces.Box(0, 255, (4, 4), np.uint8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMERIC)
def test_every_numeric_space_of_observations(pool_of: Make, name: str) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        return SpaceEnv(NUMERIC[name])

    plain = pool_of(make, 3, autoreset="next_step", copy=True)
    envs = InGraphBatchEnv(pool_of(make, 3, autoreset="next_step"))

    @function
    def start() -> Any:
        return envs.reset()

    @function
    def step(action: Any) -> Any:
        return envs.step(action)[0]

    @function
    def reset(indices: Any) -> Any:
        return envs.reset(indices)

    expected = plain.reset().obs
    assert_same(start(), expected)
    assert_same(envs.observ, expected)
    for turn in range(3):
        expected = plain.step(np.full(3, turn)).obs
        assert_same(step(tf.fill([3], turn)), expected)
        assert_same(envs.observ, expected)
    rows = tf.nest.map_structure(lambda leaf: leaf[::-1], plain.reset([0, 2]).obs)
    assert_same(reset(tf.constant([2, 0])), rows)
    for leaf, row, old in zip(leaves(envs.observ), leaves(rows), leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf[[2, 0]], row)
        np.testing.assert_array_equal(leaf[1], old[1])


@pytest.mark.parametrize("name", NUMERIC)
def test_every_numeric_space_of_actions(pool_of: Make, name: str) -> None:
    """The reward is a fingerprint of the action, its types included."""
    space = NUMERIC[name]

    def make() -> gymnasium.Env[Any, Any]:
        return SpaceEnv(spaces.Discrete(2), space)

    plain = pool_of(make, 3, autoreset="next_step")
    envs = InGraphBatchEnv(pool_of(make, 3, autoreset="next_step"))
    plain.reset()
    envs.reset()
    batched = plain.action_space
    batched.seed(4)
    step = function(envs.step)
    for _ in range(2):
        actions = batched.sample()
        step(tf.nest.map_structure(tf.constant, actions))
        np.testing.assert_array_equal(envs.reward, plain.step(actions).reward.astype(np.float32))
        assert_same(envs.action, actions)


def test_actions_of_another_type(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 2, env_kwargs={"length": 100}))
    envs.reset()
    step = function(lambda action: envs.step(action)[1])
    for turn, kind in enumerate((np.int32, np.uint8, np.int16, np.uint64), 1):
        assert step(np.array([1, 2], kind)).numpy().tolist() == [turn + 100.0, turn + 200.0]
        assert envs.action.numpy().tolist() == [1, 2]
        assert envs.action.dtype == tf.int64
    with pytest.raises(shoal.errors.BadAction, match="expected type int64, found float32"):
        step(tf.constant([1.0, 2.0]))
    with pytest.raises(shoal.errors.BadAction, match="4"):
        step(tf.constant([1, 4]))
    with pytest.raises(shoal.errors.BadAction, match=r"expected shape \(2,\), found \(3,\)"):
        step(tf.constant([1, 1, 1]))
    with pytest.raises(shoal.errors.BadAction, match=r"expected shape \(2,\), found \(3,\)"):
        envs.step([1, 1, 1])
    assert envs.action.numpy().tolist() == [1, 2], "the variables are as before the step"
    assert step(tf.constant([0, 0])).numpy().tolist() == [5.0, 5.0]


def test_an_action_without_one_of_its_parts(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(lambda: SpaceEnv(spaces.Discrete(2), SPACES["dict"]), 2))
    envs.reset()
    with pytest.raises(shoal.errors.BadAction, match=r"no part \['a'\]"):
        function(envs.step)({"b": tf.constant([0, 1])})


@pytest.mark.parametrize("name", ["text", "graph", "sequence", "one of", "custom", "dict with objects"])
def test_spaces_without_numbers_are_named_at_construction(pool_of: Make, name: str) -> None:
    with pytest.raises(shoal.errors.BadEnv, match="observation space"):
        InGraphBatchEnv(pool_of(lambda: SpaceEnv(SPACES[name]), 1))
    with pytest.raises(shoal.errors.BadEnv, match="action space"):
        InGraphBatchEnv(pool_of(lambda: SpaceEnv(spaces.Discrete(2), SPACES[name]), 1))


def test_a_type_that_tensorflow_does_not_have_is_named_at_construction(pool_of: Make) -> None:
    space = spaces.Dict(fine=spaces.Discrete(2), wide=spaces.Box(0, 1, (2,), np.longdouble))
    with pytest.raises(shoal.errors.BadEnv, match=rf"observation space\['wide'\] is of {np.dtype(np.longdouble)}"):
        InGraphBatchEnv(pool_of(lambda: SpaceEnv(space), 1))


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_stay_as_they_were_when_the_envs_go_on(copy: bool) -> None:
    """Large observations, which a pool lends rather than copies."""

    class Big(CountEnv):
        def __init__(self) -> None:
            super().__init__(length=1000)
            self.observation_space = spaces.Box(0, 255, (128, 256), np.uint8)

        def _observation(self) -> Any:
            return np.full((128, 256), self.steps, np.uint8)

    with InGraphBatchEnv(shoal.make(Big, num_envs=5, backend="serial", copy=copy)) as envs:
        envs.reset()
        step = function(lambda: envs.step([0] * 5)[0])
        kept = [step() for _ in range(12)]
        envs.reset([1])
        rows = envs.observ.numpy()
        assert (rows[1] == 0).all()
        assert (np.delete(rows, 1, 0) == 12).all()
        kept += [step() for _ in range(5)]
        for turn, tensor in enumerate(kept, 1):
            expected = np.full(5, turn)
            if turn > 12:
                expected[1] -= 12
            assert (tensor.numpy() == expected[:, None, None]).all()


# ---- what it may be given --------------------------------------------------------------------------------------


def test_a_vector_env_of_make() -> None:
    vector = shoal.make(CountEnv, num_envs=3, backend="serial")
    with InGraphBatchEnv(vector) as envs:
        assert len(envs) == envs.batch_size == 3
        assert envs.pool is vector.pool
        assert envs.observation_space == vector.single_observation_space
        assert envs.action_space == vector.single_action_space
        envs.reset()
        assert function(lambda: envs.step([0, 1, 2])[1])().numpy().tolist() == [1.0, 101.0, 201.0]
    assert vector.pool.closed


@pytest.mark.parametrize("external", [False, True])
def test_a_batch_env(external: bool) -> None:
    def make() -> CountEnv:
        return CountEnv(length=3, truncates=True)

    batch = BatchEnv([ExternalProcess(make) if external else make() for _ in range(3)], blocking=not external)
    with InGraphBatchEnv(batch) as envs:

        @function
        def go() -> Any:
            envs.reset()
            for _ in tf.range(2):
                envs.step([0, 1, 2])
            envs.reset([2, 0])
            between = envs.observ.read_value()
            envs.step([0, 1, 2])
            return between

        assert go().numpy()[:, 1:].tolist() == [[1, 0], [0, 2], [1, 0]]
        assert envs.observ.numpy()[:, 1:].tolist() == [[1, 1], [0, 3], [1, 1]]
        assert envs.reward.numpy().tolist() == [1.0, 103.0, 201.0]
        assert envs.done.numpy().tolist() == envs.truncated.numpy().tolist() == [False, True, False]
        assert not envs.terminated.numpy().any()
        assert envs.reset([]).shape == (0, 3)


def test_a_batch_envs_error_is_its_own() -> None:
    batch = BatchEnv([DeedEnv(), DeedEnv()])
    with InGraphBatchEnv(batch) as envs:
        step = function(lambda: envs.step([0, 0])[1])
        envs.reset()
        batch[1].deeds = {"step": "raise KeyError"}
        with pytest.raises(KeyError, match="no such fish"):
            step()
        batch[1].deeds = {}
        envs.reset()
        assert step().numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("what", [3, "CartPole-v1", CountEnv, object()])
def test_what_is_no_batch_of_envs(what: Any) -> None:
    with pytest.raises(shoal.errors.BadEnv, match=r"expected a shoal\.Pool"):
        InGraphBatchEnv(what)


# ---- one env ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [CountEnv, CountEnv(), lambda: CountEnv(), "pool"])
def test_one_env(pool_of: Make, what: Any) -> None:
    pool = pool_of(CountEnv, 1) if what == "pool" else None
    with InGraphEnv(pool or what) as env:
        assert env.observ.shape == (3,)
        assert env.reward.shape == env.done.shape == env.action.shape == ()

        @function
        def go() -> Any:
            first = env.reset()
            observ, reward, done = env.step(3)
            assert observ.shape == (3,)
            while not env.done:
                env.step(tf.constant(1, tf.int32))
            return first, observ, reward, done

        first, observ, reward, done = go()
        assert first.numpy()[1:].tolist() == [0, 0]
        assert observ.numpy()[1:].tolist() == [0, 1]
        assert reward.numpy() == 301.0
        assert not done.numpy()
        assert env.observ.numpy()[1:].tolist() == [0, 5]
        assert env.reward.numpy() == 105.0
        assert env.action.numpy() == 1
        assert env.terminated.numpy()
        assert not env.truncated.numpy()
        env.reset()
        assert env.observ.numpy()[1:].tolist() == [1, 0]
        assert env.reward.numpy() == 0.0
        assert not env.done.numpy()
    assert env.pool is not None
    assert env.pool.closed


def test_one_env_by_its_id_and_with_nested_spaces() -> None:
    with InGraphEnv("CartPole-v1") as env:
        assert function(env.reset)().shape == (4,)
    nested = InGraphEnv(lambda: SpaceEnv(NUMERIC["nested"], NUMERIC["dict"]))
    observ = function(nested.reset)()
    assert NUMERIC["nested"].contains(tf.nest.map_structure(lambda leaf: leaf.numpy(), observ))
    action = {"b": tf.constant(2), "a": tf.constant([0.0, 1.0])}
    observ, _, _ = function(nested.step)(action)
    assert_same(nested.observ, tf.nest.map_structure(lambda leaf: leaf.numpy(), observ))
    assert nested.action["a"].numpy().tolist() == [0.0, 1.0]
    nested.close()


def test_one_env_of_the_old_gym() -> None:
    class Old:
        observation_space, action_space = spaces.Box(0.0, 1.0, (), np.float64), spaces.Discrete(2)

        def reset(self) -> Any:
            return 0.5

        def step(self, action: Any) -> Any:
            return 0.25, 2.0, True, {}

    with InGraphEnv(Old()) as env:
        assert function(env.reset)().numpy() == 0.5
        observ, reward, done = function(env.step)(1)
        assert (observ.numpy(), reward.numpy(), done.numpy()) == (0.25, 2.0, True)
        assert observ.dtype == tf.float64


def test_one_env_is_not_seven(pool_of: Make) -> None:
    with pytest.raises(shoal.errors.BadEnv, match="expected one env, found 7"):
        InGraphEnv(pool_of(CountEnv, 7))


# ---- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize(("deed", "kind"), [("raise", ValueError), ("raise KeyError", KeyError)])
@pytest.mark.parametrize("in_loop", [False, True])
def test_an_envs_error_comes_out_as_it_is_and_the_pool_goes_on(
    pool_of: Make, backend: str, deed: str, kind: type[Exception], in_loop: bool
) -> None:
    pool = pool_of(DeedEnv, 3, backend=backend, env_kwargs={"length": 1000})
    envs = InGraphBatchEnv(pool)

    @function
    def step() -> Any:
        if in_loop:
            tf.while_loop(lambda i: i < 10, lambda i: [i + 1 + 0 * tf.size(envs.step([0, 0, 0])[1])], [0])
        else:
            envs.step([0, 0, 0])
        return envs.observ.read_value()

    each = 10 if in_loop else 1
    envs.reset()
    assert step().numpy()[:, 2].tolist() == [each] * 3
    pool.set_attr("deeds", {"step": deed}, env_ids=[1])
    with pytest.raises(kind) as caught:
        step()
    assert isinstance(caught.value, shoal.EnvError)
    assert caught.value.env_id == 1
    assert not isinstance(caught.value, tf.errors.OpError)
    assert envs.observ.numpy()[:, 2].tolist() == [each] * 3, "the variables are as before the step"
    pool.set_attr("deeds", {})
    pool.reset(seed=20)
    envs.reset()
    assert step().numpy().tolist() == [[20 + i, 1, each] for i in range(3)]


def test_errors_of_reset_of_misuse_and_after_close(pool_of: Make) -> None:
    pool = pool_of(DeedEnv, 2, env_kwargs={"length": 1})
    envs = InGraphBatchEnv(pool)
    step, reset = function(lambda: envs.step([0, 0])), function(lambda: envs.reset([1]))
    with pytest.raises(shoal.errors.ResetNeeded):
        step()
    envs.reset()
    step()
    with pytest.raises(shoal.errors.ResetNeeded):
        step()
    pool.set_attr("deeds", {"reset": "raise"})
    with pytest.raises(ValueError, match="bad joint") as caught:
        reset()
    assert isinstance(caught.value, shoal.EnvError)
    assert envs.done.numpy().tolist() == [True, True], "the variables are as before the reset"
    assert envs.reward.numpy().tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="bad joint"):
        envs.reset()  # eagerly
    pool.close()
    with pytest.raises(shoal.errors.PoolClosed):
        step()


def test_around_a_plain_function_and_around_what_is_no_env(pool_of: Make) -> None:
    pool = pool_of(DeedEnv, 2)
    envs = InGraphBatchEnv(pool)
    envs.reset()
    pool.set_attr("deeds", {"step": "raise"})
    step = tf.function(lambda: envs.step([0, 0]))
    with pytest.raises(tf.errors.OpError):
        step()
    envs.reset()
    with pytest.raises(ValueError, match="bad joint"), own_errors():
        step()
    with pytest.raises(tf.errors.InvalidArgumentError):
        function(lambda x: tf.debugging.check_numerics(x, "not from an env"))(tf.constant(np.nan))


def test_function_is_a_tf_function(pool_of: Make) -> None:
    @function
    def plain(x: Any) -> Any:
        """Twice."""
        return 2 * x

    @function(input_signature=[tf.TensorSpec([], tf.float32)], autograph=False)
    def with_options(x: Any) -> Any:
        return x + 1

    class Learner:
        def __init__(self, factor: float):
            self.factor, self.traces = factor, 0

        @function
        def method(self, x: Any) -> Any:
            self.traces += 1
            return self.factor * x

    assert plain(tf.constant(2)).numpy() == 4
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Twice."
    assert plain.get_concrete_function(tf.constant(1))(tf.constant(3)).numpy() == 6
    assert with_options(2).numpy() == 3.0
    one, other = Learner(3.0), Learner(5.0)
    assert [one.method(tf.constant(2.0)).numpy() for _ in range(3)] == [6.0] * 3
    assert other.method(tf.constant(2.0)).numpy() == 10.0
    assert (one.traces, other.traces) == (1, 1)


def test_without_tensorflow_one_sentence_says_what_to_do() -> None:
    code = "import sys; sys.modules['tensorflow'] = None; import shoal.graph.tensorflow"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: ")
    assert said.endswith(install("tensorflow"))


# ---- learning --------------------------------------------------------------------------------------------------


def test_a_tape_around_steps(pool_of: Make) -> None:
    """Gradients stop at the envs, and go through all that is around them."""
    envs = InGraphBatchEnv(pool_of("CartPole-v1", 4, autoreset="next_step"))
    weights = tf.Variable(tf.zeros([4, 2]))
    factor = tf.Variable(1.0)

    @function
    def learn() -> Any:
        envs.reset()
        loss = 0.0
        with tf.GradientTape() as tape:
            for _ in tf.range(8):
                logits = tf.matmul(envs.observ, weights)
                action = tf.random.categorical(logits, 1)[:, 0]
                _, reward, _ = envs.step(action)
                log_prob = tf.nn.sparse_softmax_cross_entropy_with_logits(action, logits)
                loss += tf.reduce_sum(log_prob * reward) * factor
        slope, other = tape.gradient(loss, [weights, factor])
        weights.assign_sub(0.1 * slope)
        return loss, slope, other

    loss, slope, other = learn()
    assert np.isclose(loss.numpy(), 32 * np.log(2), rtol=1e-5)
    assert np.isclose(other.numpy(), loss.numpy(), rtol=1e-5)
    assert np.abs(slope.numpy()).max() > 0
    np.testing.assert_allclose(weights.numpy(), -0.1 * slope.numpy())
    assert not any(variable.trainable for variable in [envs.observ, envs.action, envs.reward, envs.done])


def test_the_example_learns() -> None:
    example = Path(__file__).parents[2] / "examples" / "ingraph_tensorflow.py"
    done = subprocess.run(
        [sys.executable, str(example), "--envs", "32", "--iterations", "120"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    returns = [float(found) for found in re.findall(r"mean return ([\d.]+)", done.stdout)]
    assert len(returns) == 20
    assert returns[0] < 40
    assert max(returns[-5:]) > 80


# ---- simulate --------------------------------------------------------------------------------------------------


class Noting(Algorithm):
    """Counts what it is told; acts by the env's own number of steps, so that rewards say whose action it was."""

    def __init__(self, n: int, steps: int):
        zeros = tf.zeros([n], tf.int32)
        self.begun, self.ended = (tf.Variable(zeros) for _ in range(2))
        self.seen = tf.Variable(tf.zeros([steps, n, 9], tf.float32))
        self.turn = tf.Variable(0)

    def begin(self, indices: Any) -> None:
        self.begun.scatter_nd_add(indices[:, None], tf.ones_like(indices, tf.int32))

    def perform(self, observ: Any) -> Any:
        if observ[0, 2] > 10**6:  # a condition on a tensor: autograph sees these methods as well
            return tf.zeros_like(observ[:, 2])
        return tf.minimum(observ[:, 2], 3)

    def experience(self, observ: Any, action: Any, reward: Any, done: Any, next_observ: Any) -> None:
        rest = [tf.cast(value, tf.float32)[:, None] for value in (action, reward, done)]
        row = tf.concat([tf.cast(observ, tf.float32), *rest, tf.cast(next_observ, tf.float32)], 1)
        self.seen.scatter_nd_update([[self.turn]], row[None])
        self.turn.assign_add(1)

    def end(self, indices: Any) -> None:
        self.ended.scatter_nd_add(indices[:, None], tf.ones_like(indices, tf.int32))


@pytest.mark.parametrize("autoreset", ["disabled", "next_step"])
def test_simulate_tells_of_every_step_and_episode(pool_of: Make, autoreset: str) -> None:
    lengths = [2, 3, 5]
    pool = pool_of([lambda n=n: CountEnv(length=n) for n in lengths], autoreset=autoreset)
    envs, noting = InGraphBatchEnv(pool), Noting(3, 11)
    run = function(lambda steps, state: simulate(envs, noting, steps, state))

    first = function(lambda: simulate(envs, noting, 7))()
    assert noting.begun.numpy().tolist() == [4, 3, 2]
    assert noting.ended.numpy().tolist() == [3, 2, 1]
    scores = {n: sum(t + 1 + 100.0 * min(t, 3) for t in range(n)) for n in lengths}
    assert first.episodes.numpy() == 6
    assert np.isclose(first.score.numpy(), (3 * scores[2] + 2 * scores[3] + scores[5]) / 6)
    assert np.isclose(first.length.numpy(), (3 * 2 + 2 * 3 + 5) / 6)
    assert first.state.length.numpy().tolist() == [1, 1, 2]

    second = run(tf.constant(4), first.state)  # from within the episodes: 10 ends at 8, 11 at 9, 12 at 10
    assert second.episodes.numpy() == 2 + 1 + 1
    assert np.isclose(second.score.numpy(), (2 * scores[2] + scores[3] + scores[5]) / 4)

    for turn, rows in enumerate(noting.seen.numpy()):
        for lane, (n, row) in enumerate(zip(lengths, rows, strict=True)):
            episode, step = divmod(turn, n)
            action = min(step, 3)
            expected = [10 + lane, episode, step, action, step + 1 + 100 * action, step + 1 == n]
            assert row.tolist() == [*expected, 10 + lane, episode, step + 1]


def test_simulate_with_a_function_and_without_an_end(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of("CartPole-v1", 2))
    found = function(lambda: simulate(envs, lambda observ: tf.cast(observ[:, 2] > 0, tf.int32), 3))()
    assert found.episodes.numpy() == 0
    assert np.isnan(found.score.numpy())
    assert found.state.score.numpy().tolist() == [3.0, 3.0]
    assert envs.reward.numpy().tolist() == [1.0, 1.0]


def test_simulate_raises_the_envs_error(pool_of: Make) -> None:
    pool = pool_of(DeedEnv, 2)
    envs = InGraphBatchEnv(pool)
    run = function(lambda: simulate(envs, lambda observ: tf.zeros([2], tf.int64), 12).episodes)
    assert run().numpy() == 4
    pool.set_attr("deeds", {"step": "raise KeyError"}, env_ids=[0])
    with pytest.raises(KeyError, match="no such fish"):
        run()
    pool.set_attr("deeds", {})
    envs.reset()
    assert run().numpy() == 4


def test_simulate_resets_by_itself(pool_of: Make) -> None:
    envs = InGraphBatchEnv(pool_of(CountEnv, 2, autoreset="same_step"))
    with pytest.raises(ValueError, match="same_step"):
        simulate(envs, lambda observ: tf.zeros([2], tf.int64), 1)
