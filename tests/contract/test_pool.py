"""The pool: send and recv in batches, what a batch tells, how long it stays valid, and calls of the envs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest

import shoal
from conftest import BACKENDS
from contract.lockstep import assert_same
from contract.plain_loop import Row, plain_loop
from envs import SPACES, CountEnv, FailEnv, GateEnv, InfoEnv, SpaceEnv, fingerprint
from repeats import product
from shoal import Pool
from shoal.worker.single import SingleStepper

AUTORESETS = ("next_step", "same_step", "disabled")
PARALLEL = ("threads", "processes", "hybrid")  # where the caller can wait while an env is at work
FIELDS = (
    "obs",
    "reward",
    "terminated",
    "truncated",
    "env_id",
    "mask",
    "began",
    "episode_return",
    "episode_length",
)
FRAME_FIELDS = ("obs", "reward", "terminated", "truncated", "began", "episode_return", "episode_length")


def zeros(n: int) -> Any:
    return np.zeros(n, np.int64)


# ---- every lane has its own life, whoever runs it --------------------------------------------------------


def action_of(lane: int, t: int) -> int:
    return (3 * lane + 5 * t) % 2


def rows_of(batch: shoal.Batch) -> Iterable[tuple[int, Row]]:
    for i, lane in enumerate(batch.env_id.tolist()):
        yield lane, Row(
            batch.obs[i].copy(), float(batch.reward[i]), bool(batch.terminated[i]), bool(batch.truncated[i]),
            batch.info.get(lane, {}), bool(batch.began[i]), float(batch.episode_return[i]),
            int(batch.episode_length[i]),
        )  # fmt: skip


def drive(pool: Pool, steps: int, seed: Any) -> list[list[Row]]:
    """Answer every batch at once until each lane has made `steps` steps; returns each lane's history."""
    lives: list[list[Row]] = [[] for _ in range(pool.num_envs)]
    pool.async_reset(seed=seed)
    for _ in range(50 * steps * pool.num_envs):
        batch = pool.recv()
        assert len(batch.env_id) == len(batch.reward) == len(batch.obs) == pool.batch_size
        assert batch.mask.all()
        for lane, row in rows_of(batch):
            lives[lane].append(row)
        if min(map(len, lives)) > steps:
            return lives
        over = batch.done if pool.autoreset == "disabled" else np.zeros(len(batch.env_id), np.bool_)
        if over.any():
            pool.async_reset(batch.env_id[over])
        if not over.all():
            ids = batch.env_id[~over]
            pool.send(np.array([action_of(lane, len(lives[lane]) - 1) for lane in ids.tolist()]), ids)
    raise AssertionError("some lane was never received")


LIVES: dict[str, Callable[[], Any]] = {
    "CartPole": partial(gymnasium.make, "CartPole-v1", max_episode_steps=12),
    "infos": partial(InfoEnv, "everything"),
    "counting": partial(CountEnv, length=4, truncates=True),
}


# Size of a batch, workers, env.
PARTS = [(1, 3, "counting"), (3, 3, "infos"), (4, 2, "CartPole"), (7, 7, "CartPole")]


@product("backend order part autoreset", BACKENDS, ["ready", "fifo"], PARTS, AUTORESETS)
def test_every_lane_lives_as_in_a_plain_loop(
    backend: str, order: str, part: tuple[int, int, str], autoreset: str
) -> None:
    batch_size, workers, env = part
    make_env = LIVES[env]
    with Pool(
        make_env,
        7,
        backend=backend,
        num_workers=workers,
        batch_size=batch_size,
        order=order,
        autoreset=autoreset,
    ) as pool:
        lives = drive(pool, steps=30, seed=40)
    for lane, life in enumerate(lives):
        expected = plain_loop(make_env, 40 + lane, partial(action_of, lane), len(life) - 1, autoreset)
        assert_same(life, expected, f"env {lane}")


def test_nested_observations_in_partial_batches(backend: str) -> None:
    make_env = partial(SpaceEnv, SPACES["nested"], SPACES["tuple"])
    loops = [plain_loop(make_env, lane, lambda t: (np.int64(1), np.zeros(2)), 6, "next_step") for lane in range(5)]
    with Pool(make_env, 5, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.async_reset(seed=0)
        seen = [0] * 5
        for _ in range(12):
            batch = pool.recv()
            for i, lane in enumerate(batch.env_id.tolist()):
                obs = loops[lane][seen[lane]].obs if seen[lane] < 7 else None
                if obs is not None:
                    assert_same(batch.obs["image"][i], obs["image"], "image")
                    assert batch.obs["word"][i] == obs["word"]
                    assert_same(batch.obs["pair"][0]["z"][i], obs["pair"][0]["z"], "z")
                    assert_same(batch.obs["pair"][0]["y"][i], obs["pair"][0]["y"], "y")
                    assert_same(batch.obs["pair"][1][i], obs["pair"][1], "second of the pair")
                seen[lane] += 1
            pool.send((np.ones(2, np.int64), np.zeros((2, 2))), batch.env_id)


# ---- send and recv ---------------------------------------------------------------------------------------


def test_several_batches_in_flight(backend: str) -> None:
    with Pool(CountEnv, 6, backend=backend, num_workers=2, batch_size=2) as pool:
        pool.async_reset(seed=0)
        first = [pool.recv().env_id for _ in range(3)]
        assert sorted(np.concatenate(first).tolist()) == list(range(6))
        for ids in ([5, 0], [3, 1], [2, 4]):
            pool.send(np.array(ids) % 4, ids)
        assert len(pool.pending) == 6
        for _ in range(3):
            batch = pool.recv()
            np.testing.assert_array_equal(batch.reward, 1 + 100.0 * (batch.env_id % 4))
            np.testing.assert_array_equal(batch.obs[:, 0], batch.env_id)
        assert len(pool.pending) == 0


def test_actions_go_to_the_envs_named_beside_them(backend: str) -> None:
    with Pool(CountEnv, 5, backend=backend, num_workers=2, batch_size=3) as pool:
        pool.reset(seed=0)
        pool.send([3, 0, 1], [4, 2, 0])
        batch = pool.recv()
        assert dict(zip(batch.env_id.tolist(), batch.reward.tolist(), strict=True)) == {
            4: 301.0,
            2: 1.0,
            0: 101.0,
        }


@pytest.mark.parametrize("backend", PARALLEL)
def test_ready_order_takes_whoever_is_done(backend: str, gate: Path) -> None:
    with Pool(partial(GateEnv, gate), 4, backend=backend, num_workers=4, batch_size=2, order="ready") as pool:
        pool.reset(seed=0)
        pool.send([0, 3, 0, 0], [0, 1, 2, 3])  # env 1 waits at the gate
        assert 1 not in pool.recv().env_id
        gate.touch()
        assert 1 in pool.recv().env_id


@pytest.mark.parametrize("backend", PARALLEL)
def test_fifo_order_waits_for_the_first_sent(backend: str, gate: Path) -> None:
    with Pool(partial(GateEnv, gate), 4, backend=backend, num_workers=4, batch_size=2, order="fifo") as pool:
        pool.reset(seed=0)
        pool.send([3, 0], [3, 1])  # env 3 waits at the gate
        pool.send([0, 0], [0, 2])
        with pytest.raises(shoal.StepTimeout) as caught:
            pool.recv(timeout=0.2)
        assert caught.value.env_ids == [3]
        gate.touch()
        assert sorted(pool.recv().env_id.tolist()) == [1, 3]
        assert sorted(pool.recv().env_id.tolist()) == [0, 2]


def test_fifo_is_a_strict_rotation(backend: str) -> None:
    with Pool(CountEnv, 6, backend=backend, num_workers=3, batch_size=2, order="fifo") as pool:
        pool.async_reset(seed=0)
        for turn in range(9):
            batch = pool.recv()
            assert batch.env_id.tolist() == [2 * (turn % 3), 2 * (turn % 3) + 1]
            pool.send(zeros(2), batch.env_id)


@pytest.mark.parametrize("backend", PARALLEL)
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_recv_may_be_tried_again_after_a_timeout(backend: str, gate: Path, timeout: float) -> None:
    with Pool(partial(GateEnv, gate), 3, backend=backend, num_workers=3) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 3])
        with pytest.raises(shoal.StepTimeout) as caught:
            pool.recv(timeout=timeout)
        assert 2 in caught.value.env_ids
        assert isinstance(caught.value, TimeoutError)
        gate.touch()
        np.testing.assert_array_equal(pool.recv().reward, [1, 1, 301])
        np.testing.assert_array_equal(pool.step(zeros(3)).reward, [2, 2, 2])


@pytest.mark.parametrize("backend", PARALLEL)
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_step_that_timed_out_is_received_later(backend: str, gate: Path, timeout: float) -> None:
    opener = threading.Timer(3.0, gate.touch)  # so that a deadline that is not kept fails and does not hang
    with Pool(partial(GateEnv, gate), 3, backend=backend, num_workers=3) as pool:
        pool.reset(seed=0)
        opener.start()
        with pytest.raises(shoal.StepTimeout):
            pool.step([0, 0, 3], timeout=timeout)
        gate.touch()
        np.testing.assert_array_equal(pool.recv().reward, [1, 1, 301])
    opener.cancel()


@pytest.mark.parametrize("backend", PARALLEL)
def test_reset_that_timed_out_is_received_later(backend: str, gate: Path) -> None:
    env_fns = [CountEnv, CountEnv, partial(GateEnv, gate, at_reset=True)]
    with Pool(env_fns, backend=backend, num_workers=3) as pool:
        with pytest.raises(shoal.StepTimeout):
            pool.reset(seed=5, timeout=0.05)
        gate.touch()
        np.testing.assert_array_equal(pool.recv().obs[:, 0], [5, 6, 7])


@pytest.mark.parametrize("backend", PARALLEL)
def test_reset_drops_the_step_that_is_pending(backend: str, gate: Path) -> None:
    with Pool(partial(GateEnv, gate), 3, backend=backend, num_workers=3) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 3])
        gate.touch()
        batch = pool.reset(seed=10)
        np.testing.assert_array_equal(batch.obs, [[10, 0, 0], [11, 0, 0], [12, 0, 0]])
        np.testing.assert_array_equal(pool.step(zeros(3)).reward, [1, 1, 1])


def test_call_order_is_checked_before_anything_moves(backend: str) -> None:
    with Pool(CountEnv, 4, backend=backend, num_workers=2, batch_size=2) as pool:
        with pytest.raises(shoal.ResetNeeded, match="env 0"):
            pool.send(zeros(4))
        with pytest.raises(shoal.NothingPending):
            pool.recv()
        pool.reset(seed=0)
        pool.send([0, 0], [0, 1])
        for attempt in (
            lambda: pool.send([1], [1]),
            lambda: pool.send(zeros(4)),
            lambda: pool.step(zeros(4)),
        ):
            with pytest.raises(shoal.CallPending):
                attempt()
        with pytest.raises(shoal.CallPending):
            pool.call("add", 1)
        assert pool.call("add", 1, env_ids=[2, 3]) == [2, 2]  # these two are idle
        assert pool.recv().env_id.tolist() == [0, 1]
        pool.send([0], [3])
        with pytest.raises(shoal.NothingPending):  # one env cannot fill a batch of two
            pool.recv()
        pool.send([0], [2])
        np.testing.assert_array_equal(pool.recv().obs, [[2, 0, 1], [3, 0, 1]])


def test_an_env_that_raises_does_not_take_the_others_along(backend: str) -> None:
    with Pool(partial(FailEnv, "step"), 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        pool.send([0, 3, 1])
        with pytest.raises(shoal.EnvError, match="bad joint") as caught:
            pool.recv()
        assert isinstance(caught.value, ValueError)
        assert (caught.value.env_id, caught.value.args) == (1, ("bad joint",))
        with pytest.raises(shoal.ResetNeeded):
            pool.send([0], [1])
        pool.async_reset([1], seed=7)
        batch = pool.recv()
        np.testing.assert_array_equal(batch.obs, [[0, 0, 1], [8, 0, 0], [2, 0, 1]])
        np.testing.assert_array_equal(batch.reward, [1, 0, 101])
        np.testing.assert_array_equal(batch.began, [False, True, False])


# ---- what a batch tells ----------------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", AUTORESETS)
def test_fields_have_their_documented_types(backend: str, autoreset: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2, autoreset=autoreset) as pool:
        for batch in (pool.reset(seed=0), pool.step(zeros(3))):
            assert batch.obs.dtype == np.int64
            assert batch.reward.dtype == batch.episode_return.dtype == np.float64
            assert batch.env_id.dtype == batch.episode_length.dtype == np.int64
            for name in ("terminated", "truncated", "mask", "began", "done"):
                assert getattr(batch, name).dtype == np.bool_, name
            assert batch.info == {}
            assert batch.final_obs == {}


@pytest.mark.parametrize("copy", [False, True])
def test_began_and_episode_figures_at_the_end_of_an_episode(backend: str, copy: bool) -> None:
    tables = {  # began, done, episode_length, episode_return after each of four steps of an episode of two
        "next_step": ([0, 0, 1, 0], [0, 1, 0, 0], [1, 2, 0, 1], [1, 3, 0, 1]),
        "same_step": ([0, 1, 0, 1], [0, 1, 0, 1], [1, 2, 1, 2], [1, 3, 1, 3]),
    }
    for autoreset, (began, done, length, total) in tables.items():
        make_env = partial(CountEnv, length=2)
        with Pool(make_env, 3, backend=backend, num_workers=2, autoreset=autoreset, copy=copy) as pool:
            assert pool.reset(seed=0).began.all()
            for t in range(4):
                batch = pool.step(zeros(3))
                expected = [[row[t]] * 3 for row in (began, done, length, total)]
                found = [batch.began, batch.done, batch.episode_length, batch.episode_return]
                np.testing.assert_array_equal(found, expected, f"{autoreset}, step {t}")


def test_infos_come_by_env_id(backend: str) -> None:
    env_fns = [partial(InfoEnv, kind) for kind in ("empty", "int", "empty", "str")]
    with Pool(env_fns, backend=backend, num_workers=2) as pool:
        assert sorted(pool.reset(seed=3).info) == [0, 1, 2, 3]  # every reset says {"fresh": True}
        seen = {lane for _ in range(10) for lane in pool.step(zeros(4)).info}
        assert {1, 3} <= seen  # and 0 and 2 only when they are reset


# ---- how long arrays stay valid --------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [2, 3])
def test_views_stay_valid_for_exactly_frames_minus_one_sends(backend: str, frames: int) -> None:
    with Pool(partial(CountEnv, length=100), 4, backend=backend, num_workers=2, frames=frames) as pool:
        kept = pool.reset(seed=0)
        for _ in range(7):
            before = {name: getattr(kept, name).copy() for name in FIELDS}
            for _ in range(frames - 1):
                latest = pool.step(zeros(4))
                assert not np.shares_memory(latest.obs, kept.obs)
                for name in FIELDS:
                    np.testing.assert_array_equal(getattr(kept, name), before[name], name)
            latest = pool.step(zeros(4))
            for name in FRAME_FIELDS:
                assert np.shares_memory(getattr(latest, name), getattr(kept, name)), name
            assert (kept.obs != before["obs"]).any()  # the frame came round: now it holds the latest step
            kept = latest


@pytest.mark.parametrize("frames", [2, 3])
def test_views_of_partial_batches_stay_valid_as_long(backend: str, frames: int) -> None:
    with Pool(
        partial(CountEnv, length=100),
        4,
        backend=backend,
        num_workers=2,
        batch_size=2,
        order="fifo",
        frames=frames,
    ) as pool:
        pool.async_reset(seed=0)
        kept = [pool.recv(), pool.recv()]
        values = [batch.obs.copy() for batch in kept]
        for _ in range(frames - 1):
            for batch in kept:
                pool.send(zeros(2), batch.env_id)
            for _ in kept:
                pool.recv()
            for batch, value in zip(kept, values, strict=True):
                np.testing.assert_array_equal(batch.obs, value)
        pool.send(zeros(2), kept[0].env_id)
        assert np.shares_memory(pool.recv().obs, kept[0].obs)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


@pytest.mark.parametrize("space", ["box", "dict", "nested", "graph"])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_copies_are_the_users_own(backend: str, space: str, batch_size: int) -> None:
    """Neither do they change later, nor does what the user writes into them come back."""
    options: dict[str, Any] = {
        "backend": backend,
        "num_workers": 2,
        "batch_size": batch_size,
        "order": "fifo",
    }
    make_env = partial(SpaceEnv, SPACES[space])
    with Pool(make_env, 4, copy=True, **options) as ours, Pool(make_env, 4, **options) as clean:
        batches = []
        ours.async_reset(seed=0)
        clean.async_reset(seed=0)
        for _ in range(12):
            batch, expected = ours.recv(), clean.recv()
            assert_same(batch._asdict(), expected._asdict(), "batch")
            ids = batch.env_id.copy()
            for name in FIELDS[1:]:
                getattr(batch, name)[:] = 0
            for leaf in leaves(batch.obs):
                if isinstance(leaf, np.ndarray):
                    leaf[:] = 1
            batches.append(batch)
            ours.send(zeros(batch_size), ids)
            clean.send(zeros(batch_size), ids)
        for batch in batches:
            assert all((getattr(batch, name) == 0).all() for name in FIELDS[1:])
            assert all((leaf == 1).all() for leaf in leaves(batch.obs) if isinstance(leaf, np.ndarray) and leaf.size)


def test_env_ids_and_mask_cannot_be_turned_against_the_pool(backend: str) -> None:
    """A user may shuffle or overwrite what a batch gave out, views or not: later batches are right."""
    with Pool(CountEnv, 4, backend=backend, num_workers=2) as pool:
        for batch in (pool.reset(seed=0), pool.step(zeros(4))):
            for array in (batch.env_id, batch.mask):
                if array.flags.writeable:
                    array[:] = 0
        batch = pool.step(zeros(4))
        np.testing.assert_array_equal(batch.env_id, [0, 1, 2, 3])
        np.testing.assert_array_equal(batch.mask, [True] * 4)
        np.testing.assert_array_equal(batch.obs, [[lane, 0, 2] for lane in range(4)])


def test_gathered_batches_are_their_own_arrays(backend: str) -> None:
    """Lanes that are not one run, or were sent to a different number of times, are copied together."""
    with Pool(partial(CountEnv, length=100), 6, backend=backend, num_workers=2, batch_size=3) as pool:
        pool.reset(seed=0)
        pool.send(zeros(3), [0, 2, 5])
        gathered = pool.recv()
        np.testing.assert_array_equal(gathered.env_id, [0, 2, 5])
        expected = np.array([[0, 0, 1], [2, 0, 1], [5, 0, 1]])
        np.testing.assert_array_equal(gathered.obs, expected)
        pool.send(zeros(3), [0, 1, 2])  # a run, but 1 is one send behind
        uneven = pool.recv()
        np.testing.assert_array_equal(uneven.obs, [[0, 0, 2], [1, 0, 1], [2, 0, 2]])
        np.testing.assert_array_equal(uneven.episode_length, [2, 1, 2])
        for _ in range(6):
            pool.send(zeros(3), [0, 1, 2])
            pool.recv()
            pool.send(zeros(3), [3, 4, 5])
            pool.recv()
        np.testing.assert_array_equal(gathered.obs, expected)
        np.testing.assert_array_equal(uneven.obs, [[0, 0, 2], [1, 0, 1], [2, 0, 2]])


@pytest.mark.parametrize("first", [0, 1])
def test_full_batches_after_a_reset_of_some_envs(backend: str, first: int) -> None:
    """The lanes are out of step in the slab then: batches are right all the same, views keep their word."""
    with Pool(partial(CountEnv, length=100), 4, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        kept = pool.step(zeros(4))
        values = kept.obs.copy()
        ids = [first, first + 2]
        np.testing.assert_array_equal(pool.reset(ids, seed=20).obs, [[20 + lane, 0, 0] for lane in ids])
        np.testing.assert_array_equal(kept.obs, values)
        batch = pool.step([1, 2, 3, 0])
        length = [1 if lane in ids else 2 for lane in range(4)]
        np.testing.assert_array_equal(batch.episode_length, length)
        np.testing.assert_array_equal(batch.obs[:, 0], [20 * (lane in ids) + lane for lane in range(4)])
        np.testing.assert_array_equal(batch.obs[:, 2], length)
        np.testing.assert_array_equal(batch.reward, np.array([100, 200, 300, 0]) + length)


# ---- calls -----------------------------------------------------------------------------------------------


def test_call_and_attributes_of_all_envs(backend: str) -> None:
    with Pool(partial(CountEnv, render_mode="rgb_array"), 5, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        pool.step(zeros(5))
        assert pool.call("add", 2) == [4] * 5
        assert pool.call("add", 2, b=5) == [8] * 5
        assert pool.call("length") == [5] * 5  # a plain attribute is returned as it is
        assert pool.get_attr("seed_given") == [0, 1, 2, 3, 4]
        pool.set_attr("value", "one for all")
        assert pool.get_attr("value") == ["one for all"] * 5
        pool.set_attr("value", [10, 11, 12, 13, 14])
        assert pool.get_attr("value") == [10, 11, 12, 13, 14]
        pool.set_attr("value", ([1], [2], [3], [4], [5]))
        assert pool.get_attr("value") == [[1], [2], [3], [4], [5]]
        frames = pool.render()
        assert_same(frames, [np.ones((2, 3, 3), np.uint8)] * 5, "frames")


def test_call_and_attributes_of_some_envs_in_their_order(backend: str) -> None:
    with Pool(partial(CountEnv, render_mode="rgb_array"), 5, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("seed_given", [4, 0, 3]) == [4, 0, 3]
        pool.set_attr("value", ["four", "zero"], env_ids=[4, 0])
        assert pool.get_attr("value") == ["zero", "untouched", "untouched", "untouched", "four"]
        pool.set_attr("steps", 9, env_ids=[2])
        assert pool.call("add", 0, 0, env_ids=[3, 2]) == [0, 9]
        assert [frame.max() for frame in pool.render([1, 2])] == [0, 9]


def test_attributes_are_found_through_wrappers(backend: str) -> None:
    def make_env() -> Any:
        return gymnasium.wrappers.TimeLimit(CountEnv(), 3)

    with Pool(make_env, 2, backend=backend, num_workers=2) as pool:
        assert pool.get_attr("value") == ["untouched"] * 2
        pool.set_attr("value", "touched")
        assert pool.get_attr("value") == ["touched"] * 2
        pool.set_attr("_max_episode_steps", 1)
        pool.reset(seed=0)
        assert pool.step(zeros(2)).truncated.all()


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda pool: pool.get_attr("no_such_thing"), AttributeError),
        (lambda pool: pool.call("complain"), KeyError),
        (lambda pool: pool.call("add"), TypeError),
        (lambda pool: pool.call("step", 0), ValueError),
        (lambda pool: pool.call("reset"), ValueError),
        (lambda pool: pool.set_attr("value", [1, 2]), ValueError),
        (lambda pool: pool.call("add", 1, env_ids=[3]), ValueError),
    ],
    ids=["no attribute", "raises", "wrong arguments", "step", "reset", "too few values", "no such env"],
)
def test_a_call_that_fails_leaves_the_pool_usable(backend: str, attempt: Any, error: type[Exception]) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(error) as caught:
            attempt(pool)
        assert isinstance(caught.value, shoal.ShoalError)
        np.testing.assert_array_equal(pool.step(zeros(3)).reward, [1, 1, 1])
        assert pool.get_attr("value") == ["untouched"] * 3


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_call_that_timed_out_is_not_taken_for_the_next(backend: str, gate: Path) -> None:
    with Pool(partial(GateEnv, gate), 2, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.StepTimeout):
            pool.call("wait", timeout=0.05)
        gate.touch()
        assert pool.call("add", 1, 1) == [2, 2]
        np.testing.assert_array_equal(pool.step(zeros(2)).reward, [1, 1])


@pytest.fixture
def hesitant_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that pause after they have looked for messages and before they look for requests."""
    original = SingleStepper.__init__

    def init(self: SingleStepper, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        run = self.run

        def pause_and_run() -> int:
            time.sleep(0.01)
            return int(run())

        self.run = pause_and_run

    monkeypatch.setattr(SingleStepper, "__init__", init)


@pytest.mark.usefixtures("hesitant_workers")
@pytest.mark.parametrize(("backend", "options"), [("threads", {}), ("processes", {"start_method": "fork"})])
def test_a_request_never_overtakes_its_message(backend: str, options: dict[str, Any]) -> None:
    """Seeds and actions that are objects travel beside the request: a worker just awake from a call needs both."""
    make_env = partial(SpaceEnv, SPACES["box"], SPACES["custom"])
    with Pool(make_env, 2, backend=backend, num_workers=2, **options) as pool:
        for turn in range(5):
            pool.get_attr("spec")
            pool.reset(seed=10 * turn)
            assert pool.get_attr("np_random_seed") == [10 * turn, 10 * turn + 1]
            np.testing.assert_array_equal(pool.step([2, 4]).reward, [fingerprint(2), fingerprint(4)])


# ---- what it says about itself ---------------------------------------------------------------------------


def test_stats_count_steps_and_episodes(backend: str) -> None:
    with Pool(partial(CountEnv, length=2), 5, backend=backend, num_workers=2, autoreset="same_step") as pool:
        pool.reset(seed=0)
        assert (pool.stats().steps, pool.stats().episodes) == (5, 5)
        for _ in range(4):
            pool.step(zeros(5))
        stats = pool.stats()
        assert (stats.steps, stats.episodes) == (25, 15)
        assert len(stats.busy) == len(pool.workers)
        assert all(0 <= share <= 1 for share in stats.busy)
        assert stats.steps_per_second == pytest.approx(stats.steps / stats.seconds)


def test_workers_own_contiguous_blocks(backend: str) -> None:
    with Pool(CountEnv, 7, backend=backend, num_workers=3) as pool:
        workers = pool.workers
        assert [i for worker in workers for i in worker.env_ids] == list(range(7))
        assert [worker.index for worker in workers] == list(range(len(workers)))
        assert [len(worker.env_ids) for worker in workers] == ([7] if backend == "serial" else [3, 2, 2])
        assert {worker.state for worker in workers} == {"running"}
        pids = pool.call("pid")
        for worker in workers:
            expected = os.getpid() if worker.pid is None else worker.pid
            assert {pids[i] for i in worker.env_ids} == {expected}
        isolated = {"serial": 0, "threads": 0, "processes": 3, "hybrid": 2}[backend]
        assert len({worker.pid for worker in workers} - {None}) == isolated
    assert {worker.state for worker in pool.workers} == {"closed"}


def test_plan_says_what_was_asked_for(backend: str) -> None:
    with Pool(CountEnv, 4, backend=backend, num_workers=2) as pool:
        assert (pool.plan.backend, pool.plan.num_workers) == (backend, 1 if backend == "serial" else 2)
        assert pool.plan.reason in str(pool.plan)
        assert pool.plan.backend in repr(pool)


@pytest.mark.parametrize("isolate", [False, True])
def test_auto_chooses_a_backend_and_says_why(isolate: bool) -> None:
    with Pool(CountEnv, 4, isolate=isolate) as pool:
        assert pool.plan.backend in (("processes",) if isolate else ("serial", "threads", "processes", "hybrid"))
        assert 1 <= pool.plan.num_workers <= 4
        assert len(pool.plan.reason) > 10
        assert (os.getpid() in pool.call("pid")) <= (not isolate)
        pool.reset(seed=3)
        np.testing.assert_array_equal(pool.step(zeros(4)).obs[:, 0], [3, 4, 5, 6])


def test_no_more_workers_than_envs(backend: str) -> None:
    with Pool(CountEnv, 2, backend=backend, num_workers=5) as pool:
        assert len(pool.workers) == (1 if backend == "serial" else 2)
        np.testing.assert_array_equal(pool.reset(seed=0).obs[:, 0], [0, 1])


def test_spaces_are_batched_as_gymnasium_does(backend: str) -> None:
    theirs = gymnasium.vector.SyncVectorEnv([CountEnv] * 3)
    with Pool(CountEnv, 3, backend=backend, num_workers=2) as pool:
        names = ("single_observation_space", "observation_space", "single_action_space", "action_space")
        assert [getattr(pool, name) for name in names] == [getattr(theirs, name) for name in names]


# ---- what may be given as an env -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "num_envs", "options", "length"),
    [
        (CountEnv, 2, {}, [5, 5]),
        (CountEnv, 2, {"env_kwargs": {"length": 3}}, [3, 3]),
        (lambda: CountEnv(length=6), 2, {}, [6, 6]),
        ([partial(CountEnv, 2), partial(CountEnv, 4)], None, {}, [2, 4]),
        ((partial(CountEnv, 2), CountEnv), 2, {}, [2, 5]),
        (CountEnv, None, {}, [5]),
    ],
    ids=["class", "class with arguments", "function", "list", "tuple and count", "one by default"],
)
def test_ways_to_name_an_env(backend: str, env: Any, num_envs: Any, options: Any, length: list[int]) -> None:
    with Pool(env, num_envs, backend=backend, num_workers=2, **options) as pool:
        assert pool.get_attr("length") == length


@pytest.mark.parametrize("env", ["CartPole-v1", gymnasium.spec("CartPole-v1")], ids=["id", "spec"])
def test_registered_envs(backend: str, env: Any) -> None:
    with Pool(env, 2, backend=backend, num_workers=2, env_kwargs={"sutton_barto_reward": True}) as pool:
        assert [spec.id for spec in pool.get_attr("spec")] == ["CartPole-v1"] * 2
        pool.reset(seed=0)
        np.testing.assert_array_equal(pool.step(zeros(2)).reward, [0, 0])


# ---- the end ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left_behind")
def test_close_twice_and_use_after(backend: str) -> None:
    pool = Pool(CountEnv, 3, backend=backend, num_workers=2)
    pool.reset(seed=0)
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    assert "closed" in repr(pool)
    for use in (
        lambda: pool.reset(),
        lambda: pool.async_reset(),
        lambda: pool.send(zeros(3)),
        lambda: pool.recv(),
        lambda: pool.step(zeros(3)),
        lambda: pool.call("add", 1),
        lambda: pool.set_attr("value", 1),
        lambda: pool.get_attr("value"),
        lambda: pool.render(),
        lambda: pool.stats(),
    ):
        with pytest.raises(shoal.PoolClosed):
            use()


@pytest.mark.usefixtures("nothing_left_behind")
def test_with_closes_whatever_happens(backend: str) -> None:
    def use() -> None:
        with pool:
            raise ZeroDivisionError

    pool = Pool(CountEnv, 3, backend=backend, num_workers=2)
    pids = [worker.pid for worker in pool.workers if worker.pid is not None]
    with pytest.raises(ZeroDivisionError):
        use()
    assert pool.closed
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.usefixtures("nothing_left_behind")
def test_close_with_steps_in_flight(backend: str) -> None:
    pool = Pool(CountEnv, 4, backend=backend, num_workers=2, batch_size=2)
    pool.async_reset(seed=0)
    pool.recv()
    pool.close()
    assert pool.closed


def test_arrays_outlive_the_pool(backend: str) -> None:
    pool = Pool(CountEnv, 3, backend=backend, num_workers=2)
    batch = pool.reset(seed=4)
    pool.close()
    del pool
    np.testing.assert_array_equal(batch.obs, [[4, 0, 0], [5, 0, 0], [6, 0, 0]])


def test_two_pools_side_by_side(backend: str) -> None:
    with (
        Pool(CountEnv, 3, backend=backend, num_workers=2) as one,
        Pool(CountEnv, 2, backend=backend) as other,
    ):
        one.reset(seed=0)
        other.reset(seed=50)
        one.send(zeros(3))
        other.send(zeros(2))
        np.testing.assert_array_equal(other.recv().obs[:, 0], [50, 51])
        np.testing.assert_array_equal(one.recv().obs[:, 0], [0, 1, 2])


# ---- corners that a review found -----------------------------------------------------------------------------


def test_wait_reset_of_an_idle_env_is_refused(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=None if backend == "serial" else 2) as pool:
        pool.reset(seed=0)
        pool.async_reset([0])
        with pytest.raises(shoal.NothingPending, match=r"envs \[1\]"):
            pool.wait_reset([1], timeout=5)
        assert pool.wait_reset([0], timeout=20).ids.tolist() == [0]


def test_seeds_of_the_pool_are_for_envs_that_are_given_none(backend: str) -> None:
    with Pool(CountEnv, 3, backend=backend, num_workers=None if backend == "serial" else 2, seed=40) as pool:
        assert pool.reset(seed=[None, 7, None]).obs[:, 0].tolist() == [40, 7, 42]
    envs = shoal.make(CountEnv, 3, backend=backend, seed=40)
    assert envs.reset()[0][:, 0].tolist() == [40, 41, 42]
    envs.close()


def test_a_call_may_be_waited_for_again(gate: Path) -> None:
    with Pool(partial(GateEnv, gate), 4, backend="processes", num_workers=2) as pool:
        call = pool.start_call("wait", (), {}, [0, 3])
        with pytest.raises(shoal.StepTimeout):
            pool.finish_call(call, timeout=0.1)
        gate.touch()
        assert pool.finish_call(call, timeout=20) == ["open", "open"]


def test_float_actions_at_their_bound_are_inside_it() -> None:
    class Env(CountEnv):
        action_space: Any = gymnasium.spaces.Box(-0.7, 0.7, (2,), np.float32)

        def __init__(self) -> None:
            super().__init__()
            self.action_space = Env.action_space

        def step(self, action: Any) -> Any:
            return super().step(0)

    with Pool(Env, 2, backend="serial") as pool:
        pool.reset()
        pool.step(np.full((2, 2), 0.7))
        with pytest.raises(shoal.BadAction):
            pool.step(np.full((2, 2), 0.71))
