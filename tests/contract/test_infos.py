"""Infos of every kind, on every backend and in every autoreset mode, against Gymnasium's SyncVectorEnv."""

from __future__ import annotations

import collections
import copy
import json
import os
import pickle
import signal
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shoal
from conftest import BACKENDS
from repeats import product

LENGTH = 5  # steps of an episode of the first env; each further one takes a step more
LOCAL = [name for name in BACKENDS if name in ("serial", "threads", "processes", "hybrid")]


class Ordered(dict):  # type: ignore[type-arg]
    """A dict of a class of its own."""


def numbers(t: int) -> dict[str, Any]:
    return {"x": 0.5 * t, "n": t, "flag": t % 2 == 0, "speed": np.float64(t) / 3, "big": 2**62 + t}


def numpys(t: int) -> dict[str, Any]:
    kinds = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    return {kind: np.dtype(kind).type(t) for kind in kinds} | {"bool": np.bool_(t % 2)}


def arrays(t: int) -> dict[str, Any]:
    plain = {"row": np.full(3, t), "image": np.full((2, 2), t, np.uint8), "strided": np.arange(6.0)[::2] * t}
    return plain | {"none": np.zeros((0, 2)), "zero": np.array(t / 2), "mask": np.arange(4) < t}


def nested(t: int) -> dict[str, Any]:
    return {"a": {"b": {"c": t, "d": np.ones(2)}, "e": 1.5}, "empty": {}, "f": {"g": True}}


def coming_and_going(t: int) -> dict[str, Any]:
    return {key: t for i, key in enumerate("abcdefgh") if (t * 7 + i * i) % 3}


def other_types(t: int) -> dict[str, Any]:
    return {"v": [1, 2.5, True, np.float32(3), np.int8(4), 40][t % 6], "w": t, "s": ["text", None][t % 2]}


def other_orders(t: int) -> dict[str, Any]:
    return {"a": t, "b": t / 2} if t % 2 else {"b": t / 2, "a": t}


def objects(t: int) -> dict[str, Any]:
    return {"x": t / 2, "name": f"step {t}", "list": [t, {"a": t}], "none": None, "y": {"z": "deep", "n": t}}


def odd(t: int) -> dict[str, Any]:
    return {"ordered": Ordered(a=t), "counter": collections.Counter({"k": t}), "huge": 2.0**70, "ä\n": 1, "": t}


def many(t: int) -> dict[str, Any]:
    return {f"key {i}": i + t for i in range(300)}


def large(t: int) -> dict[str, Any]:
    return {"frame": np.full((40, 40), t, np.uint8), "x": float(t), "state": np.full(32, t / 2)}


def underscores(t: int) -> dict[str, Any]:
    return {"a": t, "_a": 1 if t % 2 else 2.5}


def some(t: int) -> dict[str, Any]:
    return {"rare": t} if t == 2 else {}


KINDS = {
    f.__name__: f
    for f in (numbers, numpys, arrays, nested, coming_and_going, other_types, other_orders, objects, odd, many, large,
              underscores, some)
}  # fmt: skip


class Telling(gymnasium.Env[Any, Any]):
    """Returns infos of one kind; its episodes end after `length` steps."""

    observation_space = gymnasium.spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, kind: str, length: int):
        self.kind, self.length, self.t = kind, length, 0

    def _obs(self) -> Any:
        return np.array([self.t, self.length], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {"began": self.length, **KINDS[self.kind](0)}

    def step(self, action: Any) -> Any:
        self.t += 1
        info, end = KINDS[self.kind](self.t + self.length), self.t >= self.length
        if end:
            info["episode"] = {"l": self.t, "r": 1.5}
        return self._obs(), 1.0, end, False, info


def makers(kind: str, count: int, first: int = LENGTH) -> list[Any]:
    return [lambda length=first + i: Telling(kind, length) for i in range(count)]


def assert_same(found: Any, expected: Any, where: str = "info") -> None:
    """The same keys in the same order, with values of the same type, shape and bits."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        if expected.dtype == object:
            for one, other in zip(found.ravel(), expected.ravel(), strict=True):
                assert_same(one, other, where)
        else:
            assert found.tobytes() == expected.tobytes(), where
    else:
        assert found == expected, where


def workers_for(backend: str) -> dict[str, Any]:
    return {} if backend == "serial" else {"num_workers": 3}


@product("backend kind mode", LOCAL, KINDS, AutoresetMode)
def test_as_gymnasium_stacks_them(backend: str, kind: str, mode: AutoresetMode) -> None:
    count = 7
    theirs = SyncVectorEnv(makers(kind, count), autoreset_mode=mode)
    options = {"backend": backend, "autoreset": mode.name.lower(), **workers_for(backend)}
    with shoal.make(makers(kind, count), **options) as ours:
        assert_same(ours.reset(seed=0)[1], theirs.reset(seed=0)[1])
        for _ in range(2 * LENGTH):
            actions = np.zeros(count, np.int64)
            *_, term, trunc, expected = theirs.step(actions)
            *_, found = ours.step(actions)
            assert_same(found, expected)
            if mode is AutoresetMode.DISABLED and (term | trunc).any():
                again = {"reset_mask": term | trunc}
                assert_same(ours.reset(options=dict(again))[1], theirs.reset(options=dict(again))[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", LOCAL)
def test_by_env_as_a_plain_loop_gets_them(backend: str, kind: str) -> None:
    envs = [make() for make in makers(kind, 5)]
    with shoal.Pool(makers(kind, 5), backend=backend, autoreset="disabled", **workers_for(backend)) as pool:
        expected = dict(enumerate(env.reset(seed=i)[1] for i, env in enumerate(envs)))
        assert_same(dict(pool.reset(seed=0).info), expected)
        kept = []
        for _ in range(LENGTH - 1):
            expected = {i: info for i, env in enumerate(envs) if (info := env.step(0)[4])}
            kept.append((pool.step(np.zeros(5, np.int64)).info, expected))
        for info, then in kept:  # they stay as they were, though the slab has gone on
            assert_same(dict(info), then)


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("order", ["ready", "fifo", "contiguous"])
def test_in_parts_of_a_batch(backend: str, order: str) -> None:
    options = {"backend": backend, "order": order, **workers_for(backend)}
    with shoal.Pool(makers("objects", 6, 100), batch_size=2, autoreset="disabled", **options) as pool:
        pool.async_reset(seed=0)
        steps = dict.fromkeys(range(6), -1)
        for _ in range(9):
            batch = pool.recv()
            for env_id in batch.env_id.tolist():
                steps[env_id] += 1
                t, length = steps[env_id], 100 + env_id
                expected = objects(t + length) if t else {"began": length, **objects(0)}
                assert_same(batch.info[env_id], expected)
            assert set(batch.info) == set(batch.env_id.tolist())
            pool.send(np.zeros(2, np.int64), batch.env_id)


def test_one_env_alone() -> None:
    theirs = SyncVectorEnv(makers("nested", 1))
    with shoal.make(makers("nested", 1), backend="serial") as ours:
        assert_same(ours.reset(seed=0)[1], theirs.reset(seed=0)[1])
        for _ in range(8):
            assert_same(ours.step(np.zeros(1, np.int64))[4], theirs.step(np.zeros(1, np.int64))[4])


@pytest.fixture
def infos() -> Any:
    with shoal.Pool(makers("objects", 3), backend="serial") as pool:
        pool.reset(seed=0)
        yield lambda: pool.step(np.zeros(3, np.int64)).info


def test_they_are_a_dict_to_all_that_looks(infos: Any) -> None:
    assert isinstance(infos(), dict)
    assert infos()
    assert len(infos()) == 3
    assert 1 in infos()
    assert 7 not in infos()
    assert list(infos()) == list(infos().keys()) == [0, 1, 2]
    looks: list[Any] = [dict, copy.copy, copy.deepcopy, lambda it: it.copy(), lambda it: {} | it, lambda it: it | {}]
    for look in [*looks, lambda it: pickle.loads(pickle.dumps(it)), lambda it: dict(zip(it, it.values(), strict=True))]:
        found = infos()
        looked = look(found)
        assert looked == found
        assert looked == dict(found.items())
        assert set(looked) == {0, 1, 2}
    assert json.loads(json.dumps(infos())).keys() == {"0", "1", "2"}
    assert repr(infos()).startswith("{0: {'x': ")


def test_they_can_be_changed_as_a_dict(infos: Any) -> None:
    found = infos()
    found[5] = {"mine": 1}
    found.setdefault(0, {})["more"] = 2
    assert found.pop(1)["name"].startswith("step")
    del found[2]
    found.update({9: {}})
    assert list(found) == [0, 5, 9]
    assert found[0]["more"] == 2


class Reusing(Telling):
    """Returns the same dict and the same array at each step, changed."""

    def __init__(self) -> None:
        super().__init__("numbers", 100)
        self.info: dict[str, Any] = {"row": np.zeros(2), "inner": {"t": 0}}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.info["row"] += 1
        self.info["inner"]["t"] = self.t
        return self._obs(), 1.0, False, False, self.info


@pytest.mark.parametrize("backend", LOCAL)
def test_an_env_may_use_its_info_again(backend: str) -> None:
    with shoal.Pool(Reusing, 2, backend=backend) as pool:
        pool.reset()
        kept = [pool.step(np.zeros(2, np.int64)).info for _ in range(4)]
        assert [info[1]["row"].tolist() for info in kept] == [[t, t] for t in range(1, 5)]
        assert [info[0]["inner"]["t"] for info in kept] == [1, 2, 3, 4]
        kept[0][0]["row"][:] = -1
        assert pool.step(np.zeros(2, np.int64)).info[0]["row"].tolist() == [5, 5]


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize(("wanted", "kept"), [("drop", set()), (["x", "list"], {"x", "list"}), ([], set())])
def test_some_infos_or_none(backend: str, mode: str, wanted: Any, kept: set[str]) -> None:
    with shoal.Pool(makers("objects", 3), backend=backend, infos=wanted, autoreset=mode) as pool:
        pool.reset(seed=0)
        ends = 0
        for _ in range(2 * LENGTH):
            batch = pool.step(np.zeros(3, np.int64))
            for info in batch.info.values():
                own = set(info) - {"final_obs", "final_info"}
                assert own <= kept
                ends += "final_obs" in info
                assert set(info.get("final_info", ())) <= kept
            if kept and not batch.done.any():
                assert all(set(batch.info[i]) == kept for i in range(3))
        assert (ends > 0) == (mode == "same_step")


@pytest.mark.parametrize("wanted", ["some", 3, [1], None])
def test_nonsense_for_infos(wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"infos: expected"):
        shoal.Pool(makers("numbers", 1), backend="serial", infos=wanted)


def test_an_info_that_is_no_dict_is_the_envs_fault() -> None:
    class Wrong(Telling):
        def step(self, action: Any) -> Any:
            return self._obs(), 0.0, False, False, [1]

    with shoal.Pool(lambda: Wrong("numbers", 9), 2, backend="serial") as pool:
        pool.reset()
        with pytest.raises(shoal.errors.EnvError, match="info must be a dict, got list"):
            pool.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("kind", ["numbers", "objects", "many"])
def test_infos_that_wait_in_a_snapshot(backend: str, kind: str) -> None:
    options = {"backend": backend, "autoreset": "same_step", **workers_for(backend)}
    with shoal.Pool(makers(kind, 4), **options) as pool:
        pool.reset(seed=0)
        for _ in range(LENGTH):
            pool.send(np.zeros(4, np.int64))
            saved = pool.snapshot()
            expected = dict(pool.recv().info)
            pool.restore(saved)
            assert_same(dict(pool.recv().info), expected)
    with shoal.Pool(makers(kind, 4), backend="serial", autoreset="same_step") as other:
        other.restore(saved)
        assert_same(dict(other.recv().info), expected)


def test_infos_go_on_after_a_restart() -> None:
    options = {"backend": "processes", "num_workers": 2, "on_error": "restart"}
    with shoal.Pool(makers("objects", 4, 100), **options) as pool:
        pool.reset(seed=0)
        before = pool.step(np.zeros(4, np.int64)).info
        os.kill(pool.workers[1].pid or 0, signal.SIGKILL)
        reports = {}
        while not reports:
            batch = pool.step(np.zeros(4, np.int64))
            reports = {i: info for i, info in batch.info.items() if "shoal_restart" in info}
        assert set(reports) == {2, 3}
        for _ in range(3):
            batch = pool.step(np.zeros(4, np.int64))
        assert {i: list(info) for i, info in batch.info.items()} == {i: list(info) for i, info in before.items()}
        for lane in (2, 3):  # a step that began the new episode, then two of it
            assert_same(batch.info[lane], objects(2 + 100 + lane))
