"""Envs that take liberties: they reuse what they gave out, return what has to be converted first, or raise."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import shoal
from contract.lockstep import MODES, assert_lockstep, assert_same
from envs import CountEnv, EvenSpace, FailEnv, InfoEnv, ReusedBufferEnv, ReusedInfoEnv
from shoal import Pool
from shoal.dialects.gymnasium import VectorEnv


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


# ---- what an env returns is converted as Gymnasium does --------------------------------------------------------


class OddEnv(gymnasium.Env[Any, Any]):
    """Returns `observation(t)`, `reward(t)` and flags of odd types."""

    def __init__(
        self,
        space: spaces.Space[Any],
        observation: Callable[[int], Any],
        reward: Callable[[int], Any] = float,
        flag: Callable[[bool], Any] = bool,
    ):
        self.observation_space, self.action_space = space, spaces.Discrete(2)
        self.observation, self.reward, self.flag = observation, reward, flag
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t += 1
        return self.observation(self.t), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        ends = self.t % 5 == 0
        return self.observation(self.t), self.reward(self.t), self.flag(ends), self.flag(False), {}


BOX = spaces.Box(-1000.0, 1000.0, (2, 3), np.float32)
PAIR = spaces.Dict(a=spaces.Discrete(100), b=spaces.Box(-9.0, 99.0, (2,), np.float32))


def grid(t: int, dtype: Any = np.float32) -> Any:
    return (np.arange(6).reshape(2, 3) / 3 + t).astype(dtype)


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


class Tagged(np.ndarray):  # type: ignore[type-arg]
    """A subclass, as unit and tracking libraries have them."""


OBSERVATIONS: dict[str, tuple[spaces.Space[Any], Callable[[int], Any]]] = {
    "float64 for float32": (BOX, partial(grid, dtype=np.float64)),
    "float16 for float32": (BOX, partial(grid, dtype=np.float16)),
    "integers for float32": (BOX, partial(grid, dtype=np.int64)),
    "nested lists": (BOX, lambda t: grid(t).tolist()),
    "Fortran order": (BOX, lambda t: np.asfortranarray(grid(t))),
    "a slice with steps": (BOX, lambda t: np.repeat(grid(t), 2, axis=1)[:, ::2]),
    "backwards": (BOX, lambda t: grid(t)[::-1, ::-1]),
    "broadcast": (BOX, lambda t: np.broadcast_to(np.float32(t), (2, 3))),
    "other byte order": (BOX, partial(grid, dtype=">f4")),
    "read-only": (BOX, lambda t: frozen(grid(t))),
    "a subclass of array": (BOX, lambda t: grid(t).view(Tagged)),
    "not finite": (BOX, lambda t: np.where(grid(t) % 2 < 1, np.nan, -np.inf).astype(np.float32)),
    "python float, no dimension": (spaces.Box(-9.0, 99.0, (), np.float32), lambda t: t / 3),
    "numpy float, no dimension": (spaces.Box(-9.0, 99.0, (), np.float64), lambda t: np.float32(t / 3)),
    "int for Discrete": (spaces.Discrete(100), lambda t: t),
    "int8 for Discrete": (spaces.Discrete(100), lambda t: np.int8(t)),
    "uint8 for Discrete": (spaces.Discrete(100), lambda t: np.uint8(t)),
    "0-d array for Discrete": (spaces.Discrete(100), lambda t: np.array(t)),
    "bool for Discrete": (spaces.Discrete(2), lambda t: t % 2 == 0),
    "bool for MultiBinary": (spaces.MultiBinary(3), lambda t: np.array([True, False, t % 2 == 0])),
    "list for MultiDiscrete": (spaces.MultiDiscrete([9, 100]), lambda t: [1, t]),
    "int32 for MultiDiscrete": (spaces.MultiDiscrete([9, 100]), lambda t: np.array([1, t], np.int32)),
    "bool for uint8": (spaces.Box(0, 255, (2,), np.uint8), lambda t: np.array([True, t % 2 == 0])),
    "keys in another order": (PAIR, lambda t: {"b": np.float32([t, 1]), "a": t}),
    "more keys than the space": (PAIR, lambda t: {"a": t, "b": np.float32([t, 1]), "extra": "x"}),
    "OrderedDict": (PAIR, lambda t: OrderedDict(a=np.int64(t), b=[t, 2])),
    "list for Tuple": (spaces.Tuple(PAIR.spaces.values()), lambda t: [t, np.float32([t, 1])]),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_observations_are_converted_as_gymnasium_does(backend: str, name: str) -> None:
    make_env = partial(OddEnv, *OBSERVATIONS[name])
    theirs = gymnasium.vector.SyncVectorEnv([make_env] * 3)
    ours = VectorEnv(make_env, 3, backend=backend, num_workers=2)
    assert_lockstep(ours, theirs, steps=12)
    ours.close()


NUMBERS: dict[str, tuple[Callable[[int], Any], Callable[[bool], Any]]] = {
    "int": (int, bool),
    "bool": (lambda t: t % 2 == 0, bool),
    "numpy float32": (lambda t: np.float32(t / 3), np.bool_),
    "numpy int64": (np.int64, np.bool_),
    "0-d array": (lambda t: np.array(t / 3), lambda flag: np.array(flag)),
    "not finite": (lambda t: (np.nan, np.inf, -np.inf)[t % 3], int),
    "tiny": (lambda t: 5e-324 * t, bool),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_rewards_and_flags_are_converted_as_gymnasium_does(backend: str, name: str) -> None:
    make_env = partial(OddEnv, BOX, grid, *NUMBERS[name])
    theirs = gymnasium.vector.SyncVectorEnv([make_env] * 3)
    ours = VectorEnv(make_env, 3, backend=backend, num_workers=2)
    assert_lockstep(ours, theirs, steps=12)
    ours.close()


def test_an_action_space_without_parts(backend: str) -> None:
    """Gymnasium cannot take such actions apart; the envs here watch a world that nobody acts in."""
    with Pool(Spectator, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        np.testing.assert_array_equal(pool.step({}).reward, [0, 0, 0])


class Spectator(OddEnv):
    """Its action is always {}."""

    def __init__(self) -> None:
        super().__init__(BOX, grid)
        self.action_space = spaces.Dict({})

    def step(self, action: Any) -> Any:
        assert action == {}
        obs, _, *rest = super().step(action)
        return obs, 0.0, *rest


# ---- envs that reuse what they gave out ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_an_env_that_reuses_its_info(backend: str, mode: AutoresetMode) -> None:
    """What counts is what was in it when the step returned, final_info included."""
    theirs = gymnasium.vector.SyncVectorEnv([NoObjects] * 3, autoreset_mode=mode)
    ours = VectorEnv(NoObjects, 3, autoreset_mode=mode, backend=backend, num_workers=2)
    assert_lockstep(ours, theirs, steps=12)
    ours.close()


class NoObjects(ReusedInfoEnv):
    """Without the list, which Gymnasium's SyncVectorEnv hands on as it is."""

    def _refilled(self, value: int) -> dict[str, Any]:
        info = super()._refilled(value)
        return {key: info[key] for key in ("numbers", "inner", "value")}


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_infos_of_a_batch_do_not_change_after_the_fact(backend: str, autoreset: str) -> None:
    """The same in every backend: where infos are not sent anywhere, they could be the env's own objects."""
    expected = {
        "next_step": [1, 2, 3, -1, 1, 2, 3],
        "same_step": [1, 2, -1, 1, 2, -1, 1],
    }[autoreset]
    with Pool(ReusedInfoEnv, 3, backend=backend, num_workers=2, autoreset=autoreset) as pool:
        pool.reset(seed=0)
        infos = [pool.step(zeros(3)).info for _ in expected]
        for info, value in zip(infos, expected, strict=True):
            final = info[0].pop("final_info", None)
            info[0].pop("final_obs", None)
            whole = {"numbers": np.full(2, value, np.float64), "list": [value], "inner": {"value": value}}
            assert_same(info[0], {**whole, "value": value}, "info")
            if final is not None:
                assert (final["value"], final["list"], final["inner"]) == (3, [3], {"value": 3})


class Herd(gymnasium.Env[Any, Any]):
    """An observation that is an object, always the same one, changed in place."""

    def __init__(self) -> None:
        self.observation_space = spaces.Tuple((Flock(), spaces.Box(0, 99, (1,), np.int64)))
        self.action_space = spaces.Discrete(2)
        self.members: list[int] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.members.clear()
        return (self.members, np.array([0])), {}

    def step(self, action: Any) -> Any:
        self.members.append(len(self.members))
        return (self.members, np.array([len(self.members)])), 1.0, len(self.members) == 4, False, {}


class Flock(EvenSpace):
    """Lists of any length."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, list)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return []


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize("copy", [False, True])
def test_objects_in_observations_do_not_change_after_the_fact(backend: str, autoreset: str, copy: bool) -> None:
    with Pool(Herd, 3, backend=backend, num_workers=2, autoreset=autoreset, copy=copy) as pool:
        previous = pool.reset(seed=0)
        for _ in range(9):
            length = int(previous.obs[1][0, 0])
            batch = pool.step(zeros(3))
            assert previous.obs[0] == (list(range(length)),) * 3
            for last in batch.final_obs.values():
                assert last[0] == [0, 1, 2, 3]
            previous = batch


@pytest.mark.parametrize("batch_size", [3, 1])
def test_an_env_that_reuses_its_observation(backend: str, batch_size: int) -> None:
    with Pool(ReusedBufferEnv, 3, backend=backend, num_workers=2, batch_size=batch_size, order="fifo") as pool:
        pool.async_reset()
        for turn in range(5 * 3 // batch_size):
            batch = pool.recv()
            step = turn * batch_size // 3
            np.testing.assert_array_equal(batch.obs, [[step // 4, step % 4]] * batch_size)
            pool.send(np.zeros((batch_size, 2), np.float32), batch.env_id)


# ---- envs that raise -------------------------------------------------------------------------------------------


class InfoThenFail(InfoEnv):
    """Raises in the step with action 1."""

    def step(self, action: Any) -> Any:
        if int(action) == 1:
            raise LookupError("lost")
        *result, _ = super().step(action)
        return (*result[:2], False, False, {"steps": self.steps})


def test_the_others_keep_their_infos_when_one_raises(backend: str) -> None:
    with Pool(InfoThenFail, 4, backend=backend, num_workers=2, batch_size=2, order="fifo") as pool:
        pool.reset(seed=0)
        pool.send([0, 1, 0, 1])
        with pytest.raises(LookupError, match="lost") as caught:
            pool.recv()
        assert caught.value.env_id == 1
        assert pool.recv().info == {0: {"steps": 1}, 2: {"steps": 1}}  # 2 was the next in turn
        pool.send([0], [0])
        with pytest.raises(LookupError, match="lost") as caught:
            pool.recv()
        assert caught.value.env_id == 3
        assert pool.pending.tolist() == [0]
        pool.reset([1, 3], seed=0)
        pool.send(zeros(3), [1, 3, 2])
        assert pool.recv().info == {0: {"steps": 2}, 1: {"steps": 1}}
        assert pool.recv().info == {2: {"steps": 2}, 3: {"steps": 1}}


@pytest.mark.parametrize("where", ["reset", "step"])
def test_the_error_says_where_it_was(backend: str, where: str) -> None:
    with Pool([CountEnv, partial(FailEnv, where)], backend=backend, num_workers=2) as pool:
        if where == "step":
            pool.reset(seed=0)
        with pytest.raises(shoal.EnvError) as caught:
            pool.reset(seed=0) if where == "reset" else pool.step([0, 3])
        error = caught.value
        assert isinstance(error, ValueError)
        assert (error.env_id, error.during, str(error.original)) == (1, where, "bad joint")
        assert error.worker == pool.plan.num_workers - 1
        assert "Traceback" in error.remote_traceback
        assert "in reset" in error.remote_traceback or "in step" in error.remote_traceback
        assert pool.call("add", 1, env_ids=[0])[0] >= 2  # the pool goes on


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_an_automatic_reset_that_raises(backend: str, autoreset: str) -> None:
    with Pool([CountEnv, OnlyOnce], backend=backend, num_workers=2, autoreset=autoreset) as pool:
        pool.reset(seed=0)
        for _ in range(4 if autoreset == "same_step" else 5):
            pool.step(zeros(2))
        with pytest.raises(ArithmeticError, match="once only") as caught:
            pool.step(zeros(2))
        assert (caught.value.env_id, caught.value.during) == (1, "reset")
        np.testing.assert_array_equal(pool.reset([0], seed=4).obs, [[4, 0, 0]])


class OnlyOnce(CountEnv):
    """Can be reset once."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.episode >= 0:
            raise ArithmeticError("once only")
        return super().reset(seed=seed, options=options)


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_constructor_that_raises(backend: str) -> None:
    env_fns = [CountEnv, CountEnv, partial(FailEnv, "constructor", KeyError("no map"))]
    with pytest.raises(shoal.EnvError, match="no map") as caught:
        Pool(env_fns, backend=backend, num_workers=2)
    assert isinstance(caught.value, KeyError)
    assert caught.value.env_id == 2


# ---- many ------------------------------------------------------------------------------------------------------


def test_hundreds_of_envs(backend: str) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 301)
    ours = VectorEnv("CartPole-v1", 301, backend=backend, num_workers=2)
    assert_lockstep(ours, theirs, steps=20)
    ours.close()
