"""`shoal.torchrl.ShoalEnv` beside TorchRL's own SerialEnv and ParallelEnv: specs, rollouts, masks, seeds, trainers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from dialects.torchrl_envs import OBSERVATIONS, SPACES, OptionsEnv, SampleEnv, WaitingEnv
from shoal.errors import BadEnv, EnvError

pytest.importorskip("torchrl", reason="needs TorchRL: the extra `torchrl`")
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import Composite, Unbounded
from torchrl.envs import (
    AsyncEnvPool,
    Compose,
    EnvBase,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    check_env_specs,
    default_info_dict_reader,
)
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from shoal.torchrl import ShoalEnv

pytestmark = pytest.mark.timeout(120)
COUNTS = {1: 1, 3: 2, 7: 3}  # envs, and workers for them


def theirs(make: Any, count: int = 3, **options: Any) -> Any:
    """TorchRL's own batch of Gymnasium envs."""
    return SerialEnv(count, lambda: GymWrapper(make(), **options))


def rollout(env: Any, steps: int = 40, seed: int = 5, **how: Any) -> Any:
    torch.manual_seed(1)
    env.set_seed(seed)
    return env.rollout(steps, **({"break_when_any_done": False} | how))


def assert_same(ours: Any, others: Any) -> None:
    assert ours.batch_size == others.batch_size
    keys = sorted(map(str, others.keys(True, True)))
    assert sorted(map(str, ours.keys(True, True))) == keys
    for key in others.keys(True, True):
        left, right = ours.get(key), others.get(key)
        assert left.dtype == right.dtype, key
        assert left.shape == right.shape, key
        assert bool((left == right).all()), key


def leaves(spec: Any) -> dict[Any, Any]:
    return dict(spec.items(True, True))


def check(make: Any, count: int = 3, options: Any = None, **pool_options: Any) -> None:
    """Specs and rollouts are those of TorchRL's own batch."""
    options = options or {}
    with ShoalEnv(make, count, **pool_options, **options) as ours:
        other = theirs(make, count, **options)
        for name in ("full_observation_spec", "full_action_spec", "full_reward_spec", "full_done_spec"):
            assert leaves(getattr(ours, name)) == leaves(getattr(other, name)), name
        check_env_specs(ours)
        assert_same(rollout(ours), rollout(other))
        other.close()


# ---- specs and rollouts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "numbers"])
def test_observations_are_those_of_torchrl(name: str, categorical: bool) -> None:
    options = {"categorical_action_encoding": categorical}
    check(functools.partial(SampleEnv, observation=name), options=options, backend="serial")


@pytest.mark.parametrize("name", [name for name in SPACES if name not in ("tuple", "half-bounded")])
@pytest.mark.parametrize("categorical", [False, True], ids=["one-hot", "numbers"])
def test_actions_are_those_of_torchrl(name: str, categorical: bool) -> None:
    options = {"categorical_action_encoding": categorical}
    check(functools.partial(SampleEnv, action=name), options=options, backend="serial")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("backend", ["serial", "threads", "processes"])
def test_any_number_of_envs_and_workers(count: int, backend: str) -> None:
    workers = {} if backend == "serial" else {"num_workers": COUNTS[count]}
    check(functools.partial(SampleEnv, "float64", "discrete"), count, backend=backend, **workers)


@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1"])
def test_gymnasium_envs(name: str) -> None:
    with ShoalEnv(name, 4, backend="serial") as ours, ShoalEnv(name, 4, backend="processes", num_workers=2) as apart:
        other = SerialEnv(4, lambda: GymEnv(name))
        for how in ({}, {"break_when_any_done": True}, {"break_when_all_done": True}):
            expected = rollout(other, 60, **how)
            assert_same(rollout(ours, 60, **how), expected)
            assert_same(rollout(apart, 60, **how), expected)
        other.close()


def test_parallel_env_gives_the_same() -> None:
    other = ParallelEnv(2, functools.partial(GymEnv, "CartPole-v1"))
    try:
        with ShoalEnv("CartPole-v1", 2, backend="processes") as ours:
            assert_same(rollout(ours, 50), rollout(other, 50))
    finally:
        other.close()


def test_make_knows_it() -> None:
    with shoal.make("CartPole-v1", 2, api="torchrl", backend="serial") as env:
        assert type(env) is ShoalEnv is shoal.torchrl.ShoalEnv
        assert isinstance(env, EnvBase)
        assert env.batch_size == (2,)
        assert env.num_envs == env.pool.num_envs == 2


# ---- seeds, masks, options ----------------------------------------------------------------------------------------


def test_seeds_follow_as_those_of_serial_env() -> None:
    other = SerialEnv(3, lambda: GymEnv("CartPole-v1"))
    with ShoalEnv("CartPole-v1", 3, backend="serial") as ours:
        for arguments in ({"seed": 3}, {"seed": 3, "static_seed": True}, {"seed": None}):
            assert ours.set_seed(**arguments) == other.set_seed(**arguments)
            if arguments["seed"] is not None:
                assert_same(ours.reset(), other.reset())
    other.close()


def test_a_seed_of_reset_is_spread_as_by_gymnasium() -> None:
    with ShoalEnv("CartPole-v1", 3, backend="serial") as env:
        expected = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3).reset(seed=4)[0]
        assert (env.reset(seed=4)["observation"].numpy() == expected).all()
        assert (env.reset(seed=[4, 5, 6])["observation"].numpy() == expected).all()


def test_options_go_to_each_env() -> None:
    with ShoalEnv(OptionsEnv, 3, backend="serial") as env:
        assert env.reset(options={"start": 4.0})["observation"].tolist() == [[4.0, 4.0]] * 3
        each = [{"options": {"start": float(i)}} for i in range(3)]
        assert env.reset(list_of_kwargs=each)["observation"][:, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_mask_resets_only_its_envs(backend: str) -> None:
    other = theirs(SampleEnv)
    with ShoalEnv(SampleEnv, 3, backend=backend) as ours:
        found = []
        for env in (ours, other):
            torch.manual_seed(0)
            env.set_seed(9)
            data = env.step_mdp(env.rand_step(env.reset()))
            before = data["observation"].clone()
            data["_reset"] = torch.tensor([[False], [True], [False]])
            data = env.reset(data)
            assert (data["observation"][[0, 2]] == before[[0, 2]]).all()
            assert (data["observation"][1] != before[1]).all()
            found.append(env.rand_step(data))
        assert_same(*found)
        calls = ours.pool.get_attr("left")
        ours.reset(data.exclude("next").set("_reset", torch.zeros(3, 1, dtype=torch.bool)))
        assert ours.pool.get_attr("left") == calls
    other.close()


def test_only_the_envs_of_step_are_stepped() -> None:
    other = theirs(SampleEnv)
    with ShoalEnv(SampleEnv, 3, backend="serial") as ours:
        found = []
        for env in (ours, other):
            torch.manual_seed(0)
            env.set_seed(9)
            data = env.rand_action(env.reset())
            if env is ours:
                before = env.pool.get_attr("left")
            found.append(env.step(data.set("_step", torch.tensor([True, False, True]))))
        assert_same(found[0].exclude("_step"), found[1].exclude("_step"))
        assert [a - b for a, b in zip(before, ours.pool.get_attr("left"), strict=True)] == [1, 0, 1]
    other.close()


def test_envs_may_be_stepped_after_their_episodes_as_by_torchrl() -> None:
    other = TransformedEnv(theirs(lambda: gymnasium.make("CartPole-v1")), FrameSkipTransform(4))
    with ShoalEnv("CartPole-v1", 3, backend="serial") as base:
        ours = TransformedEnv(base, FrameSkipTransform(4))
        assert_same(rollout(ours), rollout(other))
    other.close()


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["frames", "float64", "dict"])
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_what_is_kept_never_changes(name: str, backend: str) -> None:
    """A loop keeps every TensorDict by reference, as rollouts and collectors do; nothing of it is written again."""
    with ShoalEnv(functools.partial(SampleEnv, name), 3, backend=backend) as env:
        env.set_seed(3)
        kept, copies, data = [], [], env.reset()
        for _ in range(30):
            result, data = env.step_and_maybe_reset(env.rand_action(data))
            kept.append(result)
            copies.append(result.clone())
        assert_same(torch.stack(kept), torch.stack(copies))


def test_views_are_valid_for_as_long_as_the_pool_says() -> None:
    make = functools.partial(SampleEnv, "frames")
    with ShoalEnv(make, 2, backend="serial", copy=False, frames=100) as views:
        with ShoalEnv(make, 2, backend="serial") as copies:
            assert_same(rollout(views, 30), rollout(copies, 30))
        data = views.step(views.rand_action(views.reset()))
        place = data["next", "observation"].data_ptr()
        frame = views.pool.data.take_obs(views.pool.data.whole(views.pool.wait_any(0)))
        assert place == frame.ctypes.data


def test_large_observations_are_the_memory_of_the_pool_and_never_change() -> None:
    make = functools.partial(SampleEnv, "large")
    with ShoalEnv(make, 3, backend="serial", frames=8) as env, ShoalEnv(make, 3, backend="serial", copy=True) as other:
        assert env.pool.data.lends
        for steps in (5, 20):  # fewer and more than there are frames
            assert_same(rollout(env, steps), rollout(other, steps))
        slab = env.pool.data._obs[0]
        first, size = slab.ctypes.data, slab.nbytes
        env.reset()
        data, kept = env.reset(), []
        for _ in range(10):
            result, data = env.step_and_maybe_reset(env.rand_action(data))
            kept.append(result["next", "observation"])
        inside = [first <= one.data_ptr() < first + size for one in kept]
        assert inside[:4] == [True] * 4
        assert not all(inside)


# ---- infos --------------------------------------------------------------------------------------------------------


def test_infos_are_read_as_by_gym_env() -> None:
    def with_reader(env: Any) -> Any:
        return env.set_info_dict_reader(default_info_dict_reader(["left", "pair"], spec()))

    def spec() -> Any:
        return [Unbounded((), dtype=torch.int64), Unbounded((2,), dtype=torch.float64)]

    other = SerialEnv(3, lambda: with_reader(GymWrapper(SampleEnv())))
    with ShoalEnv(SampleEnv, 3, backend="serial") as ours:
        assert with_reader(ours) is ours
        check_env_specs(ours)
        assert_same(rollout(ours), rollout(other))
    other.close()


def test_all_infos_are_registered() -> None:
    with ShoalEnv(SampleEnv, 3, backend="serial") as base:
        env = base.auto_register_info_dict()
        check_env_specs(env)
        found = rollout(env)
        assert found["next", "pair"].shape == (3, 40, 2)
        assert (found["next", "pair"][..., 0] == found["next", "left"]).all()


# ---- transforms, collectors ---------------------------------------------------------------------------------------


def transformed(env: Any) -> Any:
    return TransformedEnv(
        env,
        Compose(
            InitTracker(), StepCounter(12), RewardSum(),
            ObservationNorm(0.5, 2.0, in_keys=["observation"], standard_normal=True),
        ),
    )  # fmt: skip


def test_transforms() -> None:
    other = transformed(SerialEnv(3, lambda: GymEnv("CartPole-v1")))
    with ShoalEnv("CartPole-v1", 3, backend="serial") as base:
        ours = transformed(base)
        check_env_specs(ours)
        assert_same(rollout(ours, 80), rollout(other, 80))
    other.close()


def test_images() -> None:
    make = functools.partial(SampleEnv, "image")
    other = TransformedEnv(theirs(make), ToTensorImage())
    with ShoalEnv(make, 3, backend="processes") as base:
        ours = TransformedEnv(base, ToTensorImage())
        assert_same(rollout(ours), rollout(other))
    other.close()


@pytest.mark.parametrize("buffers", [True, False])
def test_collectors(buffers: bool) -> None:
    def collected(env: Any) -> Any:
        torch.manual_seed(2)
        policy = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"])
        actor = ProbabilisticActor(
            policy, in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
        )
        env.set_seed(4)  # a collector's own set_seed comes after its first reset, whose observation it keeps
        collector = Collector(env, actor, frames_per_batch=96, total_frames=288, use_buffers=buffers)
        found = [data.clone() for data in collector]
        collector.shutdown()
        return found

    expected = collected(transformed(SerialEnv(3, lambda: GymEnv("CartPole-v1"))))
    ours = collected(transformed(ShoalEnv("CartPole-v1", 3, backend="serial")))
    assert len(ours) == len(expected) == 3
    for left, right in zip(ours, expected, strict=True):
        assert_same(left, right)


# ---- some envs at a time ------------------------------------------------------------------------------------------


@pytest.fixture(params=["threads", "processes"])
def waiters(request: pytest.FixtureRequest, gate: Path) -> Iterator[Any]:
    make = functools.partial(WaitingEnv, str(gate))
    with ShoalEnv(make, 4, backend=request.param, num_workers=4, categorical_action_encoding=True) as env:
        yield env


def test_the_first_that_are_done_are_received(waiters: Any, gate: Path) -> None:
    waiters.async_reset_send()
    data = waiters.async_reset_recv(min_get=4)
    assert data["env_index"] == [0, 1, 2, 3]
    data["action"] = torch.tensor([0, 6, 0, 6])
    waiters.async_step_send(data)
    early = waiters.async_step_recv(min_get=2)
    assert early["env_index"] == [0, 2]
    assert early["next", "observation"].tolist() == [[1.0], [1.0]]
    assert early["action"].tolist() == [0, 0]
    again = waiters.step_mdp(early)
    again["action"] = torch.tensor([1, 2])
    waiters.async_step_send(again, env_index=[0, 2])
    with pytest.raises(RuntimeError, match="busy"):
        waiters.async_step_send(again, env_index=[0, 2])
    with pytest.raises(RuntimeError, match="receive them"):
        waiters.reset()
    gate.touch()
    rest = waiters.async_step_recv(min_get=4)
    assert rest["env_index"] == [0, 1, 2, 3]
    assert rest["next", "reward"].flatten().tolist() == [1.0, 6.0, 2.0, 6.0]
    assert rest["next", "observation"].flatten().tolist() == [2.0, 1.0, 2.0, 1.0]
    assert waiters.reset().batch_size == (4,)


def test_one_env_is_waited_for(waiters: Any) -> None:
    data = waiters.reset()
    data["action"] = torch.tensor([0, 3, 0, 0])
    waiters.async_step_send(data)
    one = waiters.async_step_recv(env_index=1)
    assert one.batch_size == ()
    assert (one["env_index"], one["next", "reward"].item()) == (1, 3.0)
    assert waiters.async_step_recv(max_get=2).batch_size == (2,)
    assert waiters.async_step_recv().batch_size == (1,)
    with pytest.raises(RuntimeError):
        waiters.async_step_recv()


def received_by_and_by(waiters: Any, count: int) -> list[int]:
    """Take what is there after short waits, until it was so many envs; return their numbers."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.suppress(TimeoutError):
            found += waiters.async_step_recv(min_get=1, timeout=0.05)["env_index"]
    return sorted(found)


def test_a_timeout_loses_nothing(waiters: Any, gate: Path) -> None:
    data = waiters.reset()
    data["action"] = torch.tensor([0, 5, 0, 5])
    waiters.async_step_send(data)
    with pytest.raises(TimeoutError):
        waiters.async_step_recv(min_get=4, timeout=0.2)
    assert received_by_and_by(waiters, 2) == [0, 2]
    gate.touch()
    assert received_by_and_by(waiters, 2) == [1, 3]
    for wrong in ({"min_get": 0}, {"max_get": 0}, {"timeout": -1.0}):
        waiters.async_reset_send(env_index=[0])
        with pytest.raises(ValueError):
            waiters.async_step_recv(**wrong)
        assert waiters.async_reset_recv()["env_index"] == [0]


def test_steps_and_resets_fly_side_by_side(waiters: Any) -> None:
    data = waiters.reset()
    data["action"] = torch.tensor([1, 1, 1, 1])
    waiters.async_step_send(data[:2], env_index=[0, 1])
    waiters.async_reset_send(env_index=[2, 3])
    assert waiters.async_reset_recv(min_get=2)["env_index"] == [2, 3]
    assert waiters.async_step_recv(min_get=2)["env_index"] == [0, 1]


def test_envs_are_reset_after_their_last_step(waiters: Any) -> None:
    """The same data as TorchRL's AsyncEnvPool, step by step."""
    makers = [functools.partial(GymWrapper, WaitingEnv(), categorical_action_encoding=True) for _ in range(4)]
    other = AsyncEnvPool(makers, backend="threading")
    found = []
    for env in (waiters, other):
        data, steps = env.reset(), []
        for turn in range(7):
            data["action"] = torch.zeros(4, dtype=torch.int64)
            env.async_step_and_maybe_reset_send(data, env_index=[0, 1, 2, 3])
            result, data = env.async_step_and_maybe_reset_recv(min_get=4)
            steps += [result.exclude("env_index"), data.exclude("env_index").select("observation", "done")]
            assert result["env_index"] == data["env_index"] == [0, 1, 2, 3], turn
        found.append(steps)
    other.close()
    for left, right in zip(*found, strict=True):
        assert_same(left, right)


# ---- what is refused, and how it ends -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (gymnasium.spaces.Text(5), "holds numbers"),
        (gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(0, 1, (2,))]), "use a Dict"),
        (gymnasium.spaces.MultiDiscrete([[2, 3], [2, 3]]), "flatten"),
    ],
)
def test_spaces_without_a_spec_are_refused(space: Any, words: str) -> None:
    class Odd(SampleEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = space

    with pytest.raises(BadEnv, match=words):
        ShoalEnv(Odd, 2, backend="serial")


def test_a_discrete_space_may_begin_anywhere() -> None:
    class Shifted(SampleEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = self.action_space = gymnasium.spaces.Discrete(3, start=5)

        def step(self, action: Any) -> Any:
            assert action in self.action_space
            return (action, *super().step(action)[1:])

    for categorical in (False, True):
        with ShoalEnv(Shifted, 2, backend="serial", categorical_action_encoding=categorical) as env:
            check_env_specs(env)
            found = rollout(env, 20)
            assert (found["next", "observation"] == found["action"]).all()


def test_only_the_mode_without_autoreset_is_taken() -> None:
    with pytest.raises(ValueError, match="disabled"):
        ShoalEnv("CartPole-v1", 2, autoreset="same_step", backend="serial")


def test_an_error_of_an_env_is_named_and_leaves_the_others() -> None:
    class Failing(SampleEnv):
        def step(self, action: Any) -> Any:
            if float(action[0]) > 0.5:
                raise KeyError("too much")
            return super().step(action)

    with ShoalEnv(Failing, 3, backend="serial") as env:
        data = env.reset()
        with pytest.raises(EnvError, match="env 1"):
            env.step(data.set("action", torch.tensor([[0.0], [1.0], [0.0]])))
        data = env.reset()
        assert env.step(data.set("action", torch.zeros(3, 1)))["next", "observation"].shape == (3, 1)


def test_it_may_be_closed_twice() -> None:
    env = ShoalEnv("CartPole-v1", 2, backend="processes", num_workers=1)
    env.reset()
    env.close()
    env.close()
    assert env.is_closed
    assert env.pool.closed
    assert "closed" in repr(env)


# ---- GymWrapper over shoal.make -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disabled", "same_step"])
def test_gym_wrapper_takes_our_vector_env(mode: str) -> None:
    envs = [lambda: gymnasium.make("CartPole-v1")] * 3
    modes = gymnasium.vector.AutoresetMode
    other = GymWrapper(gymnasium.vector.SyncVectorEnv(envs, autoreset_mode=getattr(modes, mode.upper())))
    ours = GymWrapper(shoal.make("CartPole-v1", 3, autoreset=mode, backend="serial"))
    check_env_specs(ours)
    assert_same(rollout(ours, 60), rollout(other, 60))
    ours.close()
    other.close()


def test_gym_wrapper_refuses_next_step_of_ours_as_of_gymnasiums() -> None:
    own = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    ours = shoal.make("CartPole-v1", 1, backend="serial")
    for envs in (own, ours):
        with pytest.raises(RuntimeError, match="SAME_STEP or DISABLED"):
            GymWrapper(envs)
        envs.close()


def test_composites_are_real() -> None:
    with ShoalEnv(functools.partial(SampleEnv, "dict"), 2, backend="serial") as env:
        assert isinstance(env.observation_spec["b"], Composite)
        assert env.observation_spec["b"].shape == (2,)
        assert env.reset()["b"].batch_size == (2,)
        assert np.asarray(env.reset()["a"]).dtype == np.float32
