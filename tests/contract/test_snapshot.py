"""Snapshot and restore: a resumed run is the same run, bit by bit, whoever resumes it."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv, InfoEnv, SpaceEnv
from shoal import Pool, Snapshot

BACKENDS = ("serial", "threads", "processes", "hybrid")
MODES = ("next_step", "same_step", "disabled")


def plain(value: Any) -> Any:
    """Something that compares by value, types included."""
    if isinstance(value, np.ndarray | np.generic):
        return (type(value).__name__, str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "t"}  # a time, of RecordEpisodeStatistics
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def run(pool: Pool, turns: int, rng: np.random.Generator) -> list[Any]:
    """Step with actions from the generator, resetting what must be; everything that came back."""
    seen = []
    for _ in range(turns):
        actions = [pool.single_action_space.sample() for _ in range(pool.num_envs)]
        actions = rng.integers(0, 2, pool.num_envs) if isinstance(actions[0], np.integer) else actions
        if isinstance(pool.single_action_space, spaces.Box):
            actions = rng.uniform(-1, 1, (pool.num_envs, *pool.single_action_space.shape)).astype(np.float32)
        batch = pool.step(actions)
        seen.append(plain(batch._asdict()))
        if pool.autoreset == "disabled" and batch.done.any():
            seen.append(plain(pool.reset(np.flatnonzero(batch.done))._asdict()))
    return seen


def resumed(env: Any, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], turns: int = 40) -> None:
    """Run on after a snapshot, and again from its file in another pool: the same."""
    file = tmp_path / "snapshot"
    with Pool(env, 5, **before) as pool:
        pool.reset(seed=3)
        run(pool, 17, np.random.default_rng(0))
        pool.snapshot(file)
        expected = run(pool, turns, np.random.default_rng(1))
    with Pool(env, 5, **after) as pool:
        pool.restore(file)
        assert run(pool, turns, np.random.default_rng(1)) == expected
        pool.restore(file)  # and once more, into envs that are somewhere else
        assert run(pool, turns, np.random.default_rng(1)) == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_resumed_run_is_the_same(backend: Any, mode: Any, tmp_path: Path) -> None:
    options = {"backend": backend, "num_workers": 2, "autoreset": mode}
    resumed("CartPole-v1", tmp_path, options, options)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"backend": "serial"}, {"backend": "processes", "num_workers": 3}),
        ({"backend": "processes", "num_workers": 2, "frames": 4}, {"backend": "threads", "num_workers": 5}),
        ({"backend": "hybrid", "num_workers": 2, "copy": True}, {"backend": "serial"}),
    ],
)
def test_on_another_backend(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    resumed("CartPole-v1", tmp_path, before, after)


NESTED = spaces.Dict(
    a=spaces.Box(-1, 1, (2, 3), np.float64),
    b=spaces.Discrete(5),
    c=spaces.Text(6),
    d=spaces.Sequence(spaces.Discrete(3)),
)


@pytest.mark.parametrize(
    "env",
    [
        "Pendulum-v1",
        "FrozenLake-v1",
        "Blackjack-v1",
        "Taxi-v4",
        InfoEnv,
        functools.partial(SpaceEnv, NESTED),
        lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1", max_episode_steps=15)),
    ],
    ids=["Pendulum", "FrozenLake", "Blackjack", "Taxi", "infos", "nested", "wrapped"],
)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_all_kinds_of_envs(env: Any, backend: Any, tmp_path: Path) -> None:
    options = {"backend": backend, "num_workers": 2}
    if env == "Pendulum-v1":
        resumed(env, tmp_path, options, options, turns=250)
    else:
        resumed(env, tmp_path, options, options)


def test_the_last_observations_come_back() -> None:
    with Pool(CountEnv, 3, backend="serial") as pool:
        pool.reset(seed=0)
        pool.step([0, 1, 2])
        snapshot = pool.snapshot()
        last = pool.step([0, 0, 0])
        assert last.obs[:, 2].tolist() == [2] * 3
        batch = pool.restore(snapshot)
        assert batch.obs.tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
        assert batch.reward.tolist() == [1.0, 101.0, 201.0]
        assert pool.step([0, 0, 0]).episode_return.tolist() == [3.0, 103.0, 203.0]


def test_before_the_first_reset_and_with_the_pools_own_seed(tmp_path: Path) -> None:
    with Pool(CountEnv, 3, backend="serial", seed=7) as pool:
        pool.reset([1])
        pool.snapshot(tmp_path / "file")
    with Pool(CountEnv, 3, backend="serial") as pool:
        pool.restore(tmp_path / "file")
        with pytest.raises(shoal.ResetNeeded, match="env 0"):
            pool.step([0, 0, 0])
        pool.send([0], [1])
        pool.drop_pending()
        assert pool.reset([0, 2]).obs[:, 0].tolist() == [7, 9]


# ---- what is under way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_that_were_not_received_wait_again(backend: Any, order: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": backend, "num_workers": 2, "batch_size": 2, "order": order}
    file = tmp_path / "file"
    with Pool(InfoEnv, 5, **options) as pool:
        pool.async_reset(seed=0)
        for _ in range(7):
            pool.send(np.zeros(2, np.int64), pool.recv().env_id)
        snapshot = pool.snapshot(file)
        assert len(pool.pending) == 5
        expected = received(pool)
        for source in (snapshot, file):
            pool.restore(source)
            assert len(pool.pending) == 5
            found = received(pool)
            assert all(expected[key] == found[key] for key in expected.keys() & found.keys())
            if order == "fifo":
                assert found.keys() == expected.keys()


def received(pool: Pool) -> dict[int, Any]:
    """Observation and info of the next two batches, by env."""
    found = {}
    for _ in range(2):
        batch = pool.recv()
        for row, env_id in enumerate(batch.env_id.tolist()):
            found[env_id] = (plain(batch.obs[row]), plain(batch.info.get(env_id)))
    return found


def test_a_restore_drops_what_is_under_way() -> None:
    with Pool(CountEnv, 3, backend="processes", num_workers=2) as pool:
        pool.reset(seed=0)
        snapshot = pool.snapshot()
        pool.step([0, 0, 0])
        pool.send([0, 0, 0])
        assert pool.restore(snapshot).obs[:, 2].tolist() == [0, 0, 0]
        assert len(pool.pending) == 0
        assert pool.step([0, 0, 0]).obs[:, 2].tolist() == [1, 1, 1]


def test_restarts_are_remembered(tmp_path: Path) -> None:
    def kill(pool: Pool) -> None:
        pid = pool.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    options: dict[str, Any] = {"backend": "processes", "num_workers": 2, "on_error": "restart"}
    with Pool(CountEnv, 4, **options) as pool:
        pool.reset(seed=0)
        kill(pool)
        pool.step([0] * 4)
        pool.step([0] * 4)
        pool.snapshot(tmp_path / "file")
        kill(pool)
        expected = [plain(pool.step([0] * 4)._asdict()) for _ in range(3)]
    with Pool(CountEnv, 4, **options) as pool:
        pool.restore(tmp_path / "file")
        kill(pool)
        found = [plain(pool.step([0] * 4)._asdict()) for _ in range(3)]
    for one in (*expected, *found):
        for info in one["info"].values():
            info["shoal_restart"].pop("message")  # which names the process
    assert found == expected
    assert found[0]["info"][3]["shoal_restart"]["count"] == 2


# ---- what cannot be ---------------------------------------------------------------------------------------------


class LockedEnv(CountEnv):
    """Holds something that cannot be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Pocket:
    """An object of a class that only pickle knows."""

    def __init__(self) -> None:
        self.coins = 3


class PickledEnv(CountEnv):
    """Can be pickled, and not be saved as data."""

    def __init__(self) -> None:
        super().__init__()
        self.pocket = Pocket()

    def step(self, action: Any) -> Any:
        self.pocket.coins += 1
        observation, *rest = super().step(action)
        return observation + np.array([0, 0, 100 * self.pocket.coins]), *rest


@pytest.mark.parametrize("backend", BACKENDS)
def test_envs_that_cannot_are_named(backend: Any) -> None:
    with Pool([CountEnv, LockedEnv, CountEnv, LockedEnv], backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.CannotSnapshot, match=r"2 of 4 envs.*env 1: its attribute 'lock', a lock") as caught:
            pool.snapshot()
        assert caught.value.env_ids == [1, 3]
        assert pool.step([0] * 4).obs[:, 2].tolist() == [1] * 4


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_pickle_is_loaded_only_if_trusted(backend: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with Pool(PickledEnv, 2, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        pool.step([0, 0])
        snapshot = pool.snapshot(file)
        assert snapshot.pickled == [0, 1]
        expected = pool.step([0, 0]).obs.tolist()
        with pytest.raises(shoal.CannotSnapshot, match=r"envs \[0, 1\] are pickles.*trusted=True"):
            pool.restore(file)
        pool.restore(file, trusted=True)
        assert pool.step([0, 0]).obs.tolist() == expected
        pool.restore(snapshot)
        assert pool.step([0, 0]).obs.tolist() == expected


@pytest.mark.parametrize(
    ("env", "options", "words"),
    [
        (CountEnv, {"num_envs": 3}, "num_envs is 2.*3"),
        ("CartPole-v1", {"num_envs": 2}, "observation space"),
        (CountEnv, {"num_envs": 2, "autoreset": "same_step"}, "autoreset is next_step"),
    ],
)
def test_a_snapshot_of_something_else(env: Any, options: dict[str, Any], words: str) -> None:
    with Pool(CountEnv, 2, backend="serial") as pool:
        pool.reset(seed=0)
        snapshot = pool.snapshot()
    with Pool(env, backend="serial", **options) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.CannotSnapshot, match=words):
            pool.restore(snapshot)
        pool.step(np.zeros(pool.num_envs, np.int64))


def test_other_envs_than_before() -> None:
    """The states do not fit: some may have been set already, so nothing goes on."""
    with Pool(CountEnv, 2, backend="serial") as pool:
        pool.reset(seed=0)
        snapshot = pool.snapshot()
    pool = Pool(PickledEnv, 2, backend="serial")
    with pytest.raises(shoal.EnvError, match="env 0 raised in loading its state"):
        pool.restore(snapshot)
    assert pool.closed


@pytest.mark.parametrize("content", [b"", b"not a snapshot", b"PK\x03\x04" + bytes(100)])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(shoal.CannotSnapshot, match="cannot be read"):
        Snapshot.load(tmp_path / "file")
    with Pool(CountEnv, 2, backend="serial") as pool, pytest.raises(FileNotFoundError):
        pool.restore(tmp_path / "nowhere")


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_an_env_that_has_raised(backend: Any) -> None:
    class Raises(CountEnv):
        def step(self, action: Any) -> Any:
            raise ValueError("bad joint")

    with Pool([CountEnv, Raises], backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        pool.send([0, 0])
        with pytest.raises(shoal.CannotSnapshot, match=r"envs \[1\] have raised"):
            pool.snapshot()
        with pytest.raises(ValueError, match="bad joint"):
            pool.recv()
        pool.drop_pending()
        assert pool.snapshot().about["num_envs"] == 2
