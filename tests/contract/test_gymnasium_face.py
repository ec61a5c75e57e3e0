"""The Gymnasium face: what gymnasium.vector promises, said by Shoal's VectorEnv, SyncVectorEnv, AsyncVectorEnv."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers

import shoal
from contract.lockstep import MODES, assert_lockstep, assert_same, sample_actions
from envs import SPACES, CountEnv, FailEnv, GateEnv, InfoEnv, SpaceEnv
from shoal.dialects.gymnasium import AsyncVectorEnv, SyncVectorEnv, VectorEnv

VecEnv = gymnasium.vector.VectorEnv[Any, Any, Any]
SPACE_NAMES = ("single_observation_space", "observation_space", "single_action_space", "action_space")


def zeros(n: int = 3) -> Any:
    return np.zeros(n, np.int64)


@pytest.fixture
def envs(backend: str) -> Iterator[VectorEnv]:
    """Three counting envs on each backend."""
    made = VectorEnv(partial(CountEnv, render_mode="rgb_array"), 3, backend=backend, num_workers=2)
    yield made
    made.close()


# ---- attributes ---------------------------------------------------------------------------------------------


def test_attributes_are_those_of_gymnasium(envs: VectorEnv) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([partial(CountEnv, render_mode="rgb_array")] * 3)
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    for name in (*SPACE_NAMES, "num_envs", "metadata", "render_mode", "spec", "closed", "autoreset_mode", "copy"):
        assert getattr(envs, name) == getattr(theirs, name), name
    assert envs.observation_mode == theirs.observation_mode
    assert envs.unwrapped is envs
    assert repr(envs) == "VectorEnv(num_envs=3)"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_autoreset_mode_by_enum_by_string_and_by_our_name(mode: AutoresetMode) -> None:
    ours = {
        AutoresetMode.NEXT_STEP: "next_step",
        AutoresetMode.SAME_STEP: "same_step",
        AutoresetMode.DISABLED: "disabled",
    }
    for name in (mode, mode.value, ours[mode]):
        envs = VectorEnv(CountEnv, 2, autoreset_mode=name, backend="serial")
        assert envs.metadata["autoreset_mode"] is mode
        envs.close()
    assert "autoreset_mode" not in CountEnv.metadata


def test_an_unknown_autoreset_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes"):
        VectorEnv(CountEnv, 2, autoreset_mode="sometimes", backend="serial")


def test_partial_batches_are_for_the_pool() -> None:
    with pytest.raises(ValueError, match=r"shoal\.Pool"):
        VectorEnv(CountEnv, 4, batch_size=2, backend="serial")


@pytest.mark.parametrize("env", ["CartPole-v1", gymnasium.spec("CartPole-v1")], ids=["id", "spec"])
def test_make_notes_the_spec(env: Any) -> None:
    envs = shoal.make(env, 3, backend="serial")
    assert repr(envs) == "VectorEnv(CartPole-v1, num_envs=3)"
    again = gymnasium.make_vec(envs.spec)
    assert (again.spec.id, again.num_envs) == ("CartPole-v1", 3)
    assert gymnasium.spec("CartPole-v1").kwargs == {}
    envs.close()
    again.close()


def test_make_refuses_an_unknown_api() -> None:
    with pytest.raises(ValueError, match="gymnasium"):
        shoal.make("CartPole-v1", 3, api="morse")


# ---- seeds and generators -----------------------------------------------------------------------------------


def test_each_envs_own_generator(envs: VectorEnv) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([CountEnv] * 3)
    for seed in (5, [7, None, 9], None):  # None leaves a generator as it is
        envs.reset(seed=seed)
        theirs.reset(seed=seed)
        assert_same(envs.np_random_seed, theirs.np_random_seed, "np_random_seed")
    ours = [generator.random() for generator in envs.np_random]
    assert ours == [generator.random() for generator in theirs.np_random]


def test_options_reach_every_env_and_stay_the_callers(envs: VectorEnv) -> None:
    options = {"level": 3}
    envs.reset(seed=0, options=options)
    assert envs.get_attr("options_given") == ({"level": 3},) * 3
    mask = np.array([False, True, False])
    envs.reset(options={"reset_mask": mask, "level": 4})
    assert envs.get_attr("options_given") == ({"level": 3}, {"level": 4}, {"level": 3})
    assert options == {"level": 3}


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True, False, False], TypeError),
        (np.array([1, 0, 0]), TypeError),
        (np.array([True, False]), ValueError),
        (np.array([[True, False, False]]), ValueError),
        (np.zeros(3, np.bool_), ValueError),
    ],
    ids=["list", "integers", "too short", "two dimensions", "nobody"],
)
def test_bad_reset_masks(mask: Any, error: type[Exception]) -> None:
    envs = SyncVectorEnv([CountEnv] * 3)
    theirs = gymnasium.vector.SyncVectorEnv([CountEnv] * 3)
    for either in (envs, theirs):
        either.reset(seed=0)
        with pytest.raises(error, match="reset_mask"):
            either.reset(options={"reset_mask": mask})
    assert_same(envs.step(zeros()), theirs.step(zeros()), "the envs go on")
    envs.close()


# ---- the state of a call ------------------------------------------------------------------------------------

STARTS: dict[str, Callable[[Any], None]] = {
    "reset": lambda envs: envs.reset_async(seed=3),
    "step": lambda envs: envs.step_async(zeros()),
    "call": lambda envs: envs.call_async("add", 1, b=2),
}
WAITS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda envs: envs.reset_wait(),
    "step": lambda envs: envs.step_wait(timeout=30),
    "call": lambda envs: envs.call_wait(timeout=30),
}
USES: dict[str, Callable[[Any], Any]] = {
    **{f"{name}_async": start for name, start in STARTS.items()},
    "reset": lambda envs: envs.reset(),
    "step": lambda envs: envs.step(zeros()),
    "call": lambda envs: envs.call("add", 1),
    "get_attr": lambda envs: envs.get_attr("length"),
    "set_attr": lambda envs: envs.set_attr("length", 9),
    "render": lambda envs: envs.render(),
}


def test_halves_of_a_call_give_what_the_whole_gives(envs: VectorEnv) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([partial(CountEnv, render_mode="rgb_array")] * 3)
    envs.reset_async(seed=3)
    assert_same(envs.reset_wait(timeout=30), theirs.reset(seed=3), "reset")
    for step in range(12):
        actions = (zeros() + step) % 4
        envs.step_async(actions)
        assert_same(envs.step_wait(), theirs.step(actions), f"step {step}")
        envs.call_async("add", step, b=2)
        assert_same(envs.call_wait(), theirs.call("add", step, b=2), f"call {step}")


@pytest.mark.parametrize("pending", STARTS)
def test_nothing_else_while_a_call_is_pending(envs: VectorEnv, pending: str) -> None:
    envs.reset(seed=0)
    STARTS[pending](envs)
    for name, use in USES.items():
        with pytest.raises(AlreadyPendingCallError, match=f"`{pending}`") as caught:
            use(envs)
        assert caught.value.name == pending, name
    for name, wait in WAITS.items():
        if name != pending:
            with pytest.raises(NoAsyncCallError, match=f"{name}_async") as none:
                wait(envs)
            assert none.value.name == name
    WAITS[pending](envs)
    assert envs.call("add", 1) == {"reset": (2, 2, 2), "step": (3, 3, 3), "call": (2, 2, 2)}[pending]


@pytest.mark.parametrize("name", WAITS)
def test_waiting_for_nothing(envs: VectorEnv, name: str) -> None:
    envs.reset(seed=0)
    with pytest.raises(NoAsyncCallError, match=f"without any prior call to `{name}_async`"):
        WAITS[name](envs)
    envs.step(zeros())


@pytest.mark.usefixtures("nothing_left_behind")
def test_use_after_close(backend: str) -> None:
    envs = VectorEnv(CountEnv, 3, backend=backend, num_workers=2)
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert envs.closed
    for name, use in {**USES, **{f"{name}_wait": wait for name, wait in WAITS.items()}}.items():
        with pytest.raises(ClosedEnvironmentError, match="after a call to `close") as caught:
            use(envs)
        assert "VectorEnv" in str(caught.value), name


def make_gates(gate: Path, backend: str) -> VectorEnv:
    return VectorEnv(partial(GateEnv, gate), 3, backend=backend, num_workers=3)


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
def test_step_wait_times_out_and_the_late_answer_is_dropped(backend: str, gate: Path) -> None:
    envs = make_gates(gate, backend)
    envs.reset(seed=0)
    envs.step_async(np.array([0, 0, 3]))
    with pytest.raises(multiprocessing.TimeoutError, match="step_wait"):
        envs.step_wait(timeout=0.05)
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    gate.touch()
    np.testing.assert_array_equal(envs.step(zeros())[1], [2, 2, 2])
    envs.close()


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
def test_reset_wait_times_out(backend: str, gate: Path) -> None:
    env_fns = [CountEnv, CountEnv, partial(GateEnv, gate, at_reset=True)]
    envs = VectorEnv(env_fns, backend=backend, num_workers=3)
    envs.reset_async(seed=1)
    with pytest.raises(multiprocessing.TimeoutError, match="reset_wait"):
        envs.reset_wait(timeout=0.05)
    gate.touch()
    np.testing.assert_array_equal(envs.reset(seed=20)[0][:, 0], [20, 21, 22])
    envs.close()


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_call_wait_times_out(backend: str, gate: Path) -> None:
    envs = make_gates(gate, backend)
    envs.reset(seed=0)
    envs.call_async("wait")
    with pytest.raises(multiprocessing.TimeoutError, match="call_wait"):
        envs.call_wait(timeout=0.05)
    gate.touch()
    assert envs.call("add", 1, 1) == (2, 2, 2)
    np.testing.assert_array_equal(envs.step(zeros())[1], [1, 1, 1])
    envs.close()


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize("how", [{"terminate": True}, {"timeout": 0.1}, {"timeout": 0}], ids=str)
def test_close_while_a_step_hangs(gate: Path, how: dict[str, Any]) -> None:
    envs = make_gates(gate, "processes")
    pids = [worker.pid for worker in envs.pool.workers]
    envs.reset(seed=0)
    envs.step_async(np.array([0, 3, 0]))
    with pytest.warns(UserWarning, match="pending call to `step`"):
        envs.close(**how)
    assert envs.closed
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.usefixtures("nothing_left_behind")
def test_an_env_that_is_let_go_closes_itself(backend: str) -> None:
    envs = VectorEnv(CountEnv, 3, backend=backend, num_workers=2)
    pids = [worker.pid for worker in envs.pool.workers if worker.pid is not None]
    envs.reset(seed=0)
    del envs
    gc.collect()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_an_exception_of_an_env_keeps_its_type(backend: str) -> None:
    envs = VectorEnv(partial(FailEnv, "step"), 3, backend=backend, num_workers=2)
    envs.reset(seed=0)
    for attempt in (lambda: envs.step(np.array([0, 3, 0])), step_in_halves(envs, np.array([0, 3, 0]))):
        with pytest.raises(ValueError, match="bad joint") as caught:
            attempt()
        assert caught.value.args == ("bad joint",)
        obs, _ = envs.reset(seed=10)
        np.testing.assert_array_equal(obs[:, 0], [10, 11, 12])
        np.testing.assert_array_equal(envs.step(zeros())[1], [1, 1, 1])
    envs.close()


def step_in_halves(envs: VectorEnv, actions: Any) -> Callable[[], Any]:
    def step() -> Any:
        envs.step_async(actions)
        return envs.step_wait()

    return step


# ---- calls --------------------------------------------------------------------------------------------------


def test_calls_give_tuples_as_gymnasium_does(envs: VectorEnv) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([partial(CountEnv, render_mode="rgb_array")] * 3)
    for either in (envs, theirs):
        either.reset(seed=0)
        either.step(zeros())
        either.set_attr("value", "one for all")
        either.set_attr("length", [7, 8, 9])
        either.set_attr("options_given", ("a", None, ["c"]))
    for name in ("value", "length", "options_given", "seed_given"):
        assert_same(envs.get_attr(name), theirs.get_attr(name), name)
    assert_same(envs.call("add", 1, b=4), theirs.call("add", 1, b=4), "call")
    assert_same(envs.render(), theirs.render(), "render")
    for either in (envs, theirs):
        with pytest.raises(ValueError, match="values"):
            either.set_attr("value", [1, 2])
        with pytest.raises(AttributeError, match="no_such_thing"):
            either.get_attr("no_such_thing")
        with pytest.raises(KeyError, match="no such fish"):
            either.call("complain")
    assert_same(envs.step(zeros()), theirs.step(zeros()), "the envs go on")


@pytest.mark.parametrize("name", ["reset", "step", "close"])
def test_methods_with_a_door_of_their_own_cannot_be_called(envs: VectorEnv, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        envs.call(name)


# ---- observation_mode ---------------------------------------------------------------------------------------


def boxed(high: float, shape: tuple[int, ...] = (2,), dtype: type = np.float32) -> SpaceEnv:
    return SpaceEnv(spaces.Box(-high, high, shape, dtype))


def acting(n: int) -> SpaceEnv:
    return SpaceEnv(SPACES["box"], spaces.Discrete(n))


SMALL, LARGE = partial(boxed, 1), partial(boxed, 2)
CUSTOM = (spaces.Box(-9, 9, (2, 2), np.float32), spaces.Box(-9, 9, (2,), np.float32))


@pytest.mark.parametrize(
    ("env_fns", "mode"),
    [([SMALL, SMALL], "same"), ([SMALL, LARGE], "different"), ([SMALL, LARGE], CUSTOM)],
    ids=["same", "different", "a pair of spaces"],
)
@pytest.mark.parametrize("classes", [(SyncVectorEnv, {}), (AsyncVectorEnv, {"max_concurrency": 2})])
def test_observation_modes(env_fns: Any, mode: Any, classes: Any) -> None:
    make, options = classes
    theirs = gymnasium.vector.SyncVectorEnv(env_fns, observation_mode=mode)
    ours = make(env_fns, observation_mode=mode, **options)
    for name in SPACE_NAMES:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert_lockstep(ours, theirs)
    ours.close()


@pytest.mark.usefixtures("nothing_left_behind")
@pytest.mark.parametrize(
    ("env_fns", "mode", "error"),
    [
        ([SMALL, LARGE], "same", RuntimeError),
        ([SMALL, partial(boxed, 1, (3,))], "different", RuntimeError),
        ([SMALL, partial(boxed, 1, dtype=np.float64)], "different", RuntimeError),
        ([SMALL, partial(boxed, 1, (3,))], CUSTOM, RuntimeError),
        ([partial(acting, 2), partial(acting, 3)], "same", RuntimeError),
        ([SMALL, SMALL], "whatever", ValueError),
        ([SMALL, SMALL], (1, 2), TypeError),
    ],
    ids=["bounds", "shape", "dtype", "shape against custom", "actions", "unknown mode", "no spaces"],
)
def test_envs_that_do_not_fit_together(backend: str, env_fns: Any, mode: Any, error: type[Exception]) -> None:
    with pytest.raises((error, ValueError)):  # Gymnasium promises RuntimeError and forgets it for "different"
        gymnasium.vector.SyncVectorEnv(env_fns, observation_mode=mode)
    with pytest.raises(error) as caught:
        VectorEnv(env_fns, observation_mode=mode, backend=backend, num_workers=2)
    if error is RuntimeError:
        assert "env 1" in str(caught.value)


# ---- the two drop-ins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_drop_ins_take_the_same_arguments_in_the_same_places(name: str) -> None:
    theirs = inspect.signature(getattr(gymnasium.vector, name)).parameters
    ours = inspect.signature({"SyncVectorEnv": SyncVectorEnv, "AsyncVectorEnv": AsyncVectorEnv}[name]).parameters
    shared = [parameter for parameter in ours.values() if parameter.name in theirs]
    assert [p.name for p in shared] == list(theirs)
    assert [p.default for p in shared] == [p.default for p in theirs.values()]


@pytest.mark.parametrize("ours", [SyncVectorEnv, AsyncVectorEnv])
def test_drop_ins_are_instances_of_what_they_replace(ours: type[VectorEnv]) -> None:
    """By direct bases, which is what some libraries look at; and nothing of theirs runs."""
    theirs = getattr(gymnasium.vector, ours.__name__)
    assert theirs in ours.__bases__
    inherited = {name for name in vars(theirs) if getattr(ours, name, None) is vars(theirs)[name]}
    assert {name for name in inherited if not name.startswith("_")} == set()
    assert ours.__init__ is not theirs.__init__
    assert ours.__del__ is not getattr(theirs, "__del__", None)


def test_sync_envs_are_at_hand() -> None:
    envs = SyncVectorEnv([partial(CountEnv, length) for length in (2, 3)])
    assert [env.length for env in envs.envs] == [2, 3]
    assert len(envs.env_fns) == 2
    envs.reset(seed=0)
    envs.envs[1].length = 1
    np.testing.assert_array_equal(envs.step(zeros(2))[2], [False, True])
    assert repr(envs) == "SyncVectorEnv(num_envs=2)"
    envs.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shared_memory": False},
        {"daemon": False},
        {"copy": False},
        {"context": "forkserver"},
        {"context": "spawn"},
        {"context": "fork"},
        {"max_concurrency": 1},
        {"max_concurrency": np.int64(2)},
        {"autoreset_mode": "SameStep"},
        {"autoreset_mode": AutoresetMode.DISABLED},
        {"observation_mode": "different"},
    ],
    ids=str,
)
def test_async_arguments(arguments: dict[str, Any]) -> None:
    env_fns = [partial(InfoEnv, "everything")] * 3
    same = {name: arguments[name] for name in ("autoreset_mode", "observation_mode") if name in arguments}
    theirs = gymnasium.vector.SyncVectorEnv(env_fns, **same)
    ours = AsyncVectorEnv(env_fns, **arguments)
    assert os.getpid() not in [worker.pid for worker in ours.pool.workers]
    assert None not in [worker.pid for worker in ours.pool.workers]
    for name, value in arguments.items():
        if name != "autoreset_mode":
            assert getattr(ours, name) == value, name
    assert_lockstep(ours, theirs)
    assert repr(ours) == "AsyncVectorEnv(num_envs=3)"
    ours.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_concurrency": -2}, "max_concurrency"),
        ({"max_concurrency": 1.5}, "max_concurrency"),
        ({"max_concurrency": "2"}, "max_concurrency"),
        ({"worker": print}, "worker"),
        ({"context": "teleport"}, "start_method|context"),
    ],
    ids=str,
)
def test_async_arguments_that_make_no_sense(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AsyncVectorEnv([CountEnv] * 2, **arguments)


def test_max_concurrency_is_the_number_of_workers() -> None:
    envs = AsyncVectorEnv([CountEnv] * 5, max_concurrency=2)
    assert len(envs.pool.workers) == 2
    envs.close()


def test_only_observations_are_shared_without_copy(backend: str) -> None:
    """As in Gymnasium: copy=False is about observations; rewards and flags are always the caller's own."""
    envs = VectorEnv(partial(CountEnv, length=3), 3, copy=False, backend=backend, num_workers=2)
    envs.reset(seed=0)
    results = [envs.step(zeros()) for _ in range(6)]
    np.testing.assert_array_equal([result[1][0] for result in results], [1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal([result[2][0] for result in results], [0, 0, 1, 0, 0, 0])
    envs.close()


def test_copies_are_the_default_and_the_callers_own(envs: VectorEnv) -> None:
    results = [envs.reset(seed=0)[0], *(envs.step(zeros())[0] for _ in range(4))]
    np.testing.assert_array_equal([obs[:, 2] for obs in results], [[step] * 3 for step in range(5)])


# ---- actions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "actions"),
    [
        ("CartPole-v1", [0, 1, 1]),
        ("CartPole-v1", (1, 1, 0)),
        ("CartPole-v1", np.array([0, 1, 1], np.int32)),
        ("CartPole-v1", np.array([0, 9, 1, 9, 0, 9])[::2]),
        ("Pendulum-v1", np.full((3, 1), 5.0, np.float32)),  # out of bounds: many envs clip by themselves
        ("Pendulum-v1", np.zeros((1, 3), np.float32).T),
    ],
    ids=["list", "tuple", "int32", "not contiguous", "out of bounds", "transposed"],
)
def test_actions_that_gymnasium_takes(backend: str, env_id: str, actions: Any) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, env_id)] * 3)
    ours = VectorEnv(env_id, 3, backend=backend, num_workers=2)
    for either in (ours, theirs):
        either.reset(seed=0)
    for step in range(3):
        assert_same(ours.step(actions), theirs.step(actions), f"step {step}")
    ours.close()


def test_actions_become_the_type_of_the_space(backend: str) -> None:
    """Gymnasium hands on what it was given; here float64 becomes the float32 that the space asks for."""
    theirs = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, "Pendulum-v1")] * 3)
    ours = VectorEnv("Pendulum-v1", 3, backend=backend, num_workers=2)
    actions = np.array([[0.1], [0.2], [0.3]])
    for either in (ours, theirs):
        either.reset(seed=0)
    assert_same(ours.step(actions), theirs.step(actions.astype(np.float32)), "step")
    ours.close()


# ---- Gymnasium's own wrappers on top ------------------------------------------------------------------------


class NoClock(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Takes the wall-clock time out of RecordEpisodeStatistics: it is never the same twice."""

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        for key in ("t", "_t"):
            result[4].get("episode", {}).pop(key, None)
        return result


def cleanrl_stack(envs: VecEnv) -> VecEnv:
    """What CleanRL's continuous-action PPO puts around each env, on the batch."""
    envs = NoClock(wrappers.RecordEpisodeStatistics(envs))
    envs = wrappers.NormalizeObservation(wrappers.ClipAction(envs))
    envs = wrappers.TransformObservation(envs, lambda obs: np.clip(obs, -10, 10))
    return wrappers.TransformReward(wrappers.NormalizeReward(envs, gamma=0.99), lambda r: np.clip(r, -10, 10))


CARTPOLE, PENDULUM = (partial(gymnasium.make, name, max_episode_steps=9) for name in ("CartPole-v1", "Pendulum-v1"))
IMAGE, DICT = (partial(SpaceEnv, SPACES[name]) for name in ("image", "dict"))
UNIT = partial(SpaceEnv, SPACES["box"])
INFO = partial(InfoEnv, "everything")
WRAPPERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "RecordEpisodeStatistics": (CARTPOLE, lambda envs: NoClock(wrappers.RecordEpisodeStatistics(envs))),
    "DictInfoToList": (INFO, wrappers.DictInfoToList),
    "NormalizeObservation": (CARTPOLE, wrappers.NormalizeObservation),
    "NormalizeReward": (PENDULUM, wrappers.NormalizeReward),
    "ClipAction": (PENDULUM, wrappers.ClipAction),
    "RescaleAction": (PENDULUM, lambda envs: wrappers.RescaleAction(envs, -1.0, 1.0)),
    "TransformAction": (CARTPOLE, lambda envs: wrappers.TransformAction(envs, lambda actions: 1 - actions)),
    "ClipReward": (PENDULUM, lambda envs: wrappers.ClipReward(envs, -1.0, 0.0)),
    "TransformReward": (PENDULUM, lambda envs: wrappers.TransformReward(envs, lambda rewards: 2 * rewards)),
    "TransformObservation": (CARTPOLE, lambda envs: wrappers.TransformObservation(envs, lambda obs: 2 * obs)),
    "VectorizeTransformObservation": (
        CARTPOLE,
        lambda envs: wrappers.VectorizeTransformObservation(
            envs, gymnasium.wrappers.TransformObservation, func=lambda obs: obs + 1, observation_space=None
        ),
    ),
    "FilterObservation": (DICT, lambda envs: wrappers.FilterObservation(envs, ["a"])),
    "FlattenObservation": (DICT, wrappers.FlattenObservation),
    "GrayscaleObservation": (IMAGE, wrappers.GrayscaleObservation),
    "ReshapeObservation": (IMAGE, lambda envs: wrappers.ReshapeObservation(envs, (6, 24))),
    "RescaleObservation": (UNIT, lambda envs: wrappers.RescaleObservation(envs, np.float32(0), np.float32(2))),
    "DtypeObservation": (CARTPOLE, lambda envs: wrappers.DtypeObservation(envs, np.float64)),
    "all of CleanRL's": (PENDULUM, cleanrl_stack),
}
WRAPPERS_FOR_SAME_STEP = ("RecordEpisodeStatistics", "DictInfoToList", "ClipReward")  # the others refuse it


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, AutoresetMode.NEXT_STEP) for name in WRAPPERS]
    + [(name, AutoresetMode.SAME_STEP) for name in WRAPPERS_FOR_SAME_STEP],
)
def test_gymnasium_wrappers_on_top(backend: str, name: str, mode: AutoresetMode) -> None:
    make_env, wrap = WRAPPERS[name]
    theirs = wrap(gymnasium.vector.SyncVectorEnv([make_env] * 3, autoreset_mode=mode))
    ours = wrap(VectorEnv(make_env, 3, autoreset_mode=mode, backend=backend, num_workers=2))
    for space in SPACE_NAMES:
        assert getattr(ours, space) == getattr(theirs, space), space
    assert_lockstep(ours, theirs)
    ours.close()
    assert ours.closed


# ---- gymnasium.make_vec -------------------------------------------------------------------------------------


def test_make_vec_by_the_registered_id(backend: str) -> None:
    envs = gymnasium.make_vec("shoal/Env-v0", env="CartPole-v1", num_envs=3, backend=backend, num_workers=2)
    theirs = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    assert isinstance(envs, VectorEnv)
    assert (envs.num_envs, envs.pool.plan.backend, envs.spec.id) == (3, backend, "shoal/Env-v0")
    assert_lockstep(envs, theirs, steps=60)
    again = gymnasium.make_vec(envs.spec)
    assert (again.num_envs, again.pool.plan.backend) == (3, backend)
    for either in (envs, theirs, again):
        either.close()


@pytest.fixture
def registered(backend: str) -> Iterator[str]:
    env_id = f"contract/Counting-{backend}-v0"
    gymnasium.register(
        env_id, CountEnv, max_episode_steps=6, kwargs={"truncates": True},
        vector_entry_point=shoal.entry_point(CountEnv, backend=backend, num_workers=2),
    )  # fmt: skip
    yield env_id
    del gymnasium.registry[env_id]


def test_make_vec_by_an_entry_point_of_ones_own(registered: str, backend: str) -> None:
    for kwargs in ({"length": 4}, {"length": 99}, {"length": 99, "truncates": False}):
        ours = gymnasium.make_vec(registered, num_envs=3, **kwargs)
        theirs = gymnasium.make_vec(registered, num_envs=3, vectorization_mode="sync", **kwargs)
        assert isinstance(ours, VectorEnv)
        assert ours.pool.plan.backend == backend
        assert_lockstep(ours, theirs)
        ours.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_install_and_uninstall(mode: str) -> None:
    ours = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}
    originals = (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv)
    theirs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    shoal.install()
    try:
        shoal.install()
        envs = gymnasium.make_vec(
            "CartPole-v1", 3, vectorization_mode=mode, vector_kwargs={"copy": True},
            wrappers=[gymnasium.wrappers.TimeAwareObservation], sutton_barto_reward=True,
        )  # fmt: skip
        assert type(envs) is ours[mode]
        assert gymnasium.vector.SyncVectorEnv is SyncVectorEnv
    finally:
        shoal.uninstall()
    assert (gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv) == originals
    shoal.uninstall()
    assert (envs.spec.id, envs.num_envs) == ("CartPole-v1", 3)
    assert envs.single_observation_space.shape == (5,)
    for either, actions in zip((envs, theirs), 2 * [sample_actions(theirs, 1)[0]], strict=True):
        either.reset(seed=0)
        either.step(actions)
    np.testing.assert_array_equal(envs.step([0, 0, 0])[0][:, :4], theirs.step([0, 0, 0])[0].astype(np.float64))
    envs.close()


# ---- what may be given as an env ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "num_envs", "options"),
    [
        ("CartPole-v1", 3, {}),
        ("CartPole-v1", 3, {"env_kwargs": {"max_episode_steps": 7}}),
        (lambda: gymnasium.make("CartPole-v1"), 3, {}),
        ([lambda: gymnasium.make("CartPole-v1")] * 3, None, {}),
    ],
    ids=["id", "id with arguments", "function", "list"],
)
def test_make(backend: str, env: Any, num_envs: Any, options: dict[str, Any]) -> None:
    kwargs = options.get("env_kwargs", {})
    theirs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", **kwargs)] * 3)
    ours = shoal.make(env, num_envs, backend=backend, num_workers=2, **options)
    assert_lockstep(ours, theirs, steps=40)
    ours.close()


def test_make_chooses_a_backend_by_itself() -> None:
    theirs = gymnasium.vector.SyncVectorEnv([CARTPOLE] * 3)
    ours = shoal.make(CARTPOLE, num_envs=3)
    assert ours.pool.plan.backend in ("serial", "threads", "processes", "hybrid")
    assert_lockstep(ours, theirs)
    ours.close()


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_the_pools_own_word_for_autoreset_is_understood(mode: str) -> None:
    envs = shoal.make(CountEnv, num_envs=2, backend="serial", autoreset=mode)
    assert envs.pool.autoreset == mode
    envs.close()
    with pytest.raises(ValueError, match=r"'next_step', 'same_step', 'disabled', found 'never'"):
        shoal.make(CountEnv, num_envs=2, backend="serial", autoreset="never")


def test_ids_with_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_envs.py").write_text(
        "import gymnasium\ngymnasium.register('TheirEnv-v0', entry_point='envs:CountEnv', max_episode_steps=9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = shoal.make("their_envs:TheirEnv-v0", num_envs=2, backend="processes", num_workers=1)
    assert envs.reset(seed=4)[0].tolist() == [[4, 0, 0], [5, 0, 0]]
    assert envs.spec is not None
    assert envs.spec.id == "TheirEnv-v0"
    envs.close()
    gymnasium.registry.pop("TheirEnv-v0")


def test_it_is_a_context_manager() -> None:
    with shoal.make(CountEnv, 3, backend="serial") as envs:
        envs.reset(seed=0)
    assert envs.closed
    assert envs.pool.closed
