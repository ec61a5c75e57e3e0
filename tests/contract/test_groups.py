"""Envs with several lanes: vector envs, EnvPools and envs of PufferLib's kind are envs like any other."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shoal
from envs import SPACES, CountEnv, GateEnv, InfoEnv, SpaceEnv
from faults.kit import eventually
from shoal import Pool
from shoal.dialects import puffer
from shoal.group import Answers

pytestmark = pytest.mark.timeout(60)

BACKENDS = ("serial", "threads", "processes", "hybrid")
MODES = [
    (AutoresetMode.NEXT_STEP, "next_step"),
    (AutoresetMode.SAME_STEP, "same_step"),
    (AutoresetMode.DISABLED, "same_step"),
]


def vector(env_fn: Callable[[], Any], lanes: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return SyncVectorEnv([env_fn] * lanes, autoreset_mode=mode)


def vectors(env_fn: Callable[[], Any], lanes: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> Any:
    return functools.partial(vector, env_fn, lanes, mode)


def open_pool(env: Any, num_envs: int | None = 3, backend: str = "serial", **options: Any) -> Pool:
    workers = {} if backend == "serial" else {"num_workers": 2}
    return Pool(env, num_envs, backend=backend, **{**workers, **options})  # type: ignore[arg-type]


def assert_same(found: Any, expected: Any, infos: bool = True) -> None:
    for name in found._fields:
        if name == "obs":
            np.testing.assert_equal(found.obs, expected.obs)
        elif name != "info":
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    if infos:
        np.testing.assert_equal(found.info, expected.info)


# ---- vector envs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "autoreset"), MODES)
def test_a_vector_env_in_each_worker_is_the_same_as_its_envs(mode: Any, autoreset: Any, backend: str) -> None:
    """Bit for bit: the same lanes, seeds, episodes and infos as a pool of the single envs; 3 of them for 2 workers."""
    make = functools.partial(gymnasium.make, "CartPole-v1")
    with (
        open_pool(vectors(make, 4, mode), 3, backend, autoreset=autoreset) as grouped,
        Pool("CartPole-v1", 12, backend="serial", autoreset=autoreset) as plain,
    ):
        assert (grouped.num_envs, grouped.lanes_per_env, grouped.autoreset) == (12, 4, autoreset)
        assert grouped.observation_space.shape == (12, 4)
        assert_same(grouped.reset(seed=5), plain.reset(seed=5))
        rng = np.random.default_rng(0)
        for _ in range(120):
            actions = rng.integers(0, 2, 12)
            assert_same(grouped.step(actions), plain.step(actions))


@pytest.mark.parametrize(("mode", "autoreset"), MODES)
@pytest.mark.parametrize("name", ["box 0-d", "box float64", "image", "dict", "tuple", "deep", "multi discrete 2-d"])
def test_spaces_of_vector_envs(name: str, mode: Any, autoreset: Any) -> None:
    make = functools.partial(SpaceEnv, SPACES[name])
    with (
        open_pool(vectors(make, 2, mode), 2, autoreset=autoreset) as grouped,
        Pool(make, 4, backend="serial", autoreset=autoreset) as plain,
    ):
        assert_same(grouped.reset(seed=1), plain.reset(seed=1), infos=False)
        for _ in range(15):
            actions = plain.action_space.sample()
            assert_same(grouped.step(actions), plain.step(actions), infos=False)


def test_infos_of_a_vector_env() -> None:
    with open_pool(vectors(InfoEnv, 3), 2, "processes") as grouped, Pool(InfoEnv, 6, backend="serial") as plain:
        found, expected = grouped.reset(seed=0), plain.reset(seed=0)
        assert found.info.keys() == expected.info.keys()
        for _ in range(8):
            found, expected = grouped.step(np.zeros(6, int)), plain.step(np.zeros(6, int))
            assert {i: sorted(info) for i, info in found.info.items()} == {
                i: sorted(info) for i, info in expected.info.items()
            }


class SlowToReset(CountEnv):
    """Takes a moment for a reset, so that who does not wait for it is seen."""

    def reset(self, **given: Any) -> Any:
        time.sleep(0.05)
        return super().reset(**given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_disabled_autoreset_lets_lanes_be_reset_alone(backend: str) -> None:
    with open_pool(vectors(SlowToReset, 3, AutoresetMode.DISABLED), 2, backend, autoreset="disabled") as pool:
        pool.reset(seed=0)
        for _ in range(5):
            batch = pool.step(np.zeros(6, int))
        assert batch.done.all()
        with pytest.raises(shoal.ResetNeeded):
            pool.step(np.zeros(6, int))
        first = pool.reset([1, 4], seed=[70, 80])
        assert first.obs[:, 0].tolist() == [70, 80]
        assert first.began.all()
        pool.reset([0, 2, 3, 5])
        batch = pool.step(np.zeros(6, int))
        assert batch.obs[:, 2].tolist() == [1] * 6
        assert batch.episode_length.tolist() == [1] * 6


@pytest.mark.parametrize(
    ("mode", "asked", "words"),
    [
        (AutoresetMode.NEXT_STEP, "same_step", 'they need autoreset="next_step", found "same_step"'),
        (AutoresetMode.SAME_STEP, "disabled", 'they need autoreset="same_step"'),
        (AutoresetMode.DISABLED, "next_step", 'autoreset="same_step" or autoreset="disabled"'),
    ],
)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_mode_that_the_envs_cannot_do(mode: Any, asked: Any, words: str, backend: str) -> None:
    with pytest.raises(shoal.BadEnv, match=words):
        open_pool(vectors(CountEnv, 2, mode), 2, backend, autoreset=asked)


def test_without_a_mode_the_envs_choose() -> None:
    for mode, autoreset in MODES:
        with open_pool(vectors(CountEnv, 2, mode), 1) as pool:
            assert pool.autoreset == autoreset
        with shoal.make(vectors(CountEnv, 2, mode), 1, backend="serial") as envs:
            assert envs.metadata["autoreset_mode"] == envs.autoreset_mode
            assert envs.autoreset_mode.name.lower() == autoreset
    with pytest.raises(shoal.BadEnv, match="not in the same way"):
        Pool([vectors(CountEnv, 2, MODES[0][0]), vectors(CountEnv, 2, MODES[1][0])], backend="serial")


def test_single_envs_and_groups_do_not_mix() -> None:
    fns = [CountEnv, vectors(CountEnv, 2)]
    for backend in ("serial", "threads"):
        with pytest.raises(shoal.BadEnv, match="several lanes"):
            open_pool(fns, None, backend)


def test_groups_of_different_sizes() -> None:
    fns = [vectors(CountEnv, lanes) for lanes in (1, 3, 2)]
    with open_pool(fns, None, "processes") as pool:
        assert (pool.num_envs, pool.lanes_per_env) == (6, 0)
        assert pool.reset(seed=10).obs[:, 0].tolist() == list(range(10, 16))
        assert pool.step(np.arange(6) % 4).reward.tolist() == [1, 101, 201, 301, 1, 101]
        pool.send([1, 1, 1], [1, 2, 3])
        pool.send([2], [0])
    with pytest.raises(ValueError, match="different numbers of lanes"):
        open_pool(fns, None, batch_size=3)


# ---- asking for some ---------------------------------------------------------------------------------------------


def test_lanes_of_one_env_are_asked_together() -> None:
    with open_pool(vectors(CountEnv, 2), 3) as pool:
        pool.reset(seed=0)
        for ids in ([0], [1, 0], [0, 2, 1, 3], [0, 1, 2]):
            with pytest.raises(shoal.BadCall, match=r"lanes \d to \d are those of one env"):
                pool.send(np.zeros(len(ids), int), ids)
            with pytest.raises(shoal.BadCall, match="reset"):
                pool.reset(ids)
        assert not len(pool.pending)
        pool.send([1, 1, 2, 2], [4, 5, 0, 1])
        assert pool.pending.tolist() == [0, 1, 4, 5]
        assert pool.reset([2, 3], seed=[7, 8]).obs[:, 0].tolist() == [7, 8]
    with pytest.raises(ValueError, match="a multiple of 2"):
        open_pool(vectors(CountEnv, 2), 3, batch_size=3)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_lanes_of_one_env_are_dropped_and_waited_for_together(backend: str) -> None:
    with open_pool(vectors(CountEnv, 3), 2, backend) as pool:
        pool.reset(seed=0)
        pool.send(np.zeros(6, int))
        with pytest.raises(shoal.BadCall, match="lanes 0 to 2"):
            pool.drop_pending([0, 3, 4, 5])
        assert pool.pending.tolist() == list(range(6))
        pool.drop_pending([3, 4, 5])
        pool.drop_pending()
        pool.async_reset()
        with pytest.raises(shoal.BadCall, match="lanes 0 to 2"):
            pool.wait_reset([1])
        assert pool.wait_reset().ids.tolist() == list(range(6))


def test_a_step_under_way_is_not_dropped_for_some_lanes() -> None:
    with open_pool(vectors(CountEnv, 3, AutoresetMode.DISABLED), 2, autoreset="disabled") as pool:
        pool.reset(seed=0)
        pool.send(np.zeros(6, int))
        with pytest.raises(shoal.BadCall, match="lanes 0 to 2"):
            pool.reset([1])
        assert pool.recv().obs[:, 2].tolist() == [1] * 6
        pool.async_reset([0, 1])
        pool.reset([1])  # resets are the lanes' own
        assert pool.pending.tolist() == [0]


def test_lanes_that_are_lost_together_are_reset_together() -> None:
    make = vectors(CountEnv, 3, AutoresetMode.DISABLED)
    with open_pool(make, 2, "processes", autoreset="disabled", on_error="restart") as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.BadCall, match="lanes 3 to 5"):
            pool.reset([4])
        assert pool.reset([3, 4, 5], seed=10).obs[:, 0].tolist() == [13, 14, 15]


@pytest.mark.parametrize("backend", ["threads", "processes"])
@pytest.mark.parametrize("order", ["ready", "fifo"])
def test_partial_batches_never_cut_an_env_in_two(backend: str, order: Any) -> None:
    with open_pool(vectors(CountEnv, 3), 4, backend, batch_size=6, order=order, num_workers=4) as pool:
        pool.async_reset(seed=0)
        steps = np.zeros(12, int)
        turns = 0
        while turns < 200 or (turns < 20_000 and not (steps > 20).all()):  # a busy machine may keep a worker waiting
            turns += 1
            batch = pool.recv()
            lanes = batch.env_id.reshape(2, 3)
            assert (lanes == lanes[:, :1] + np.arange(3)).all()
            assert (lanes[:, 0] % 3 == 0).all()
            assert (batch.obs[:, 2] == steps[batch.env_id] % 6).all()
            steps[batch.env_id] += 1
            pool.send(np.zeros(6, int), batch.env_id)
        assert (steps > 20).all()


def test_a_batch_of_those_that_are_ready(gate: Path) -> None:
    make = functools.partial(GateEnv, gate, length=99)
    with open_pool(vectors(make, 2), 3, "threads", num_workers=3, batch_size=4) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 3, 0, 0, 0])
        assert pool.recv().env_id.tolist() == [0, 1, 4, 5]
        with pytest.raises(shoal.NothingPending):
            pool.recv()
        with pytest.raises(shoal.StepTimeout):
            pool.recv(timeout=0.01, min_batch=2)
        gate.touch()
        assert pool.recv(min_batch=2).env_id.tolist() == [2, 3]


# ---- neighbours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_contiguous_batches_are_views(backend: str) -> None:
    with open_pool(CountEnv, 6, backend, batch_size=2, order="contiguous", num_workers=3) as pool:
        pool.async_reset(seed=0)
        steps = np.zeros(6, int)
        memory = np.frombuffer(pool._slab.memory, np.uint8)
        while steps.min() < 10:  # also where the caller's own envs are done before any other has woken up
            batch = pool.recv()
            assert batch.env_id[0] % 2 == 0
            assert batch.env_id[1] == batch.env_id[0] + 1
            for array in (batch.obs, batch.reward, batch.terminated):
                assert np.shares_memory(array, memory)
            assert batch.obs[:, 0].tolist() == batch.env_id.tolist()
            assert (batch.obs[:, 2] == steps[batch.env_id] % 6).all()
            steps[batch.env_id] += 1
            pool.send(np.zeros(2, int), batch.env_id)
        del memory, batch, array


def test_contiguous_batches_come_as_they_are_complete(gate: Path) -> None:
    make = functools.partial(GateEnv, gate, length=99)
    with open_pool(make, 6, "threads", num_workers=6, batch_size=2, order="contiguous") as pool:
        pool.reset(seed=0)
        pool.send([0, 3, 0, 0, 3, 0])
        assert pool.recv().env_id.tolist() == [2, 3]
        with pytest.raises(shoal.StepTimeout):
            pool.recv(timeout=0.05)
        gate.touch()
        assert sorted(pool.recv().env_id.tolist() + pool.recv().env_id.tolist()) == [0, 1, 4, 5]
    with pytest.raises(ValueError, match="does not divide"):
        open_pool(CountEnv, 6, batch_size=4, order="contiguous")


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_parts_of_several_contiguous_batches_are_not_waited_for_in_vain(backend: str) -> None:
    with open_pool(CountEnv, 6, backend, batch_size=2, order="contiguous") as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 0], [0, 2, 5])
        with pytest.raises(shoal.NothingPending, match="neighbours"):
            pool.recv()
        assert pool.recv(min_batch=1).env_id.tolist() == [0]
        pool.send([0], [3])
        assert pool.recv().env_id.tolist() == [2, 3]
        assert pool.recv(min_batch=1).env_id.tolist() == [5]


# ---- envs of PufferLib's kind, and our own -------------------------------------------------------------------------


class RowsEnv:
    """As PufferLib's native envs are written: rows for agents, arrays of its own or of whoever made it."""

    single_observation_space = spaces.Box(0, 255, (3,), np.uint8)
    single_action_space = spaces.Discrete(4)

    def __init__(self, num_agents: int = 2, length: int = 4, buf: Any = None, seed: int = 0):
        self.num_agents, self.length = num_agents, length
        own = {
            "observations": np.zeros((num_agents, 3), np.uint8), "rewards": np.zeros(num_agents, np.float32),
            "terminals": np.zeros(num_agents, bool), "truncations": np.zeros(num_agents, bool),
            "masks": np.ones(num_agents, bool), "actions": np.zeros(num_agents, np.int32),
        }  # fmt: skip
        for name, array in (buf or own).items():
            setattr(self, name, array)
        self.count = np.zeros(num_agents, int)
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        self.count = np.arange(self.num_agents)
        self.observations[:] = 0
        self.observations[:, 0] = (seed or 0) % 256
        self._look()
        return self.observations, []

    def step(self, actions: Any) -> Any:
        self.actions[:] = actions
        self.count += 1
        self.rewards[:] = self.count + 10 * self.actions
        self.terminals[:] = self.count >= self.length
        infos = [{"score": int(i)} for i in np.flatnonzero(self.terminals)]
        self.count[self.terminals] = 0
        self._look()  # only what has changed, as such envs do
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def _look(self) -> None:
        self.observations[:, 1] = self.count
        self.observations[:, 2] = self.actions

    def close(self) -> None:
        self.closed = True


def expected_rows(actions: Any, seed: int, lanes: int = 6) -> Any:
    """What RowsEnv does, by lane."""
    count, results = np.tile(np.arange(2), lanes // 2), []
    for action in actions:
        count = count + 1
        reward, over = count + 10 * action, count >= 4
        count = np.where(over, 0, count)
        obs = np.stack([np.repeat(seed + np.arange(0, lanes, 2), 2), count, action], axis=1)
        results.append((obs, reward, over))
    return results


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_rows_of_an_env(backend: str, frames: int) -> None:
    rng = np.random.default_rng(1)
    actions = [rng.integers(0, 4, 6) for _ in range(12)]
    with open_pool(RowsEnv, 3, backend, frames=frames) as pool:
        assert pool.autoreset == "same_step"
        pool.reset(seed=100)
        for action, (obs, reward, over) in zip(actions, expected_rows(actions, 100), strict=True):
            batch = pool.step(action)
            np.testing.assert_array_equal(batch.obs, obs)
            np.testing.assert_array_equal(batch.reward, reward)
            np.testing.assert_array_equal(batch.terminated, over)
            np.testing.assert_array_equal(batch.began, over)
            for group in range(3):  # such infos are about no lane in particular: the first one has them
                own = np.flatnonzero(over[2 * group : 2 * group + 2]).tolist()
                found = batch.info.get(2 * group, {}).get("infos", [])
                assert found == [{"score": i} for i in own] or len(own) == 2
    if backend == "serial":
        assert not pool.local_envs


def test_one_frame_is_the_envs_own_memory() -> None:
    """Nothing is copied: the env writes into what recv returns."""
    with open_pool(RowsEnv, 3, frames=1) as pool:
        batch = pool.reset(seed=0)
        for env in pool.local_envs:
            assert np.shares_memory(env.observations, batch.obs)
        pool.local_envs[1].observations[:] = 77
        assert batch.obs[2:4].tolist() == [[77] * 3] * 2
    with open_pool(lambda: RowsEnv(), 3, frames=1) as pool:  # takes no buffers
        batch = pool.reset(seed=0)
        assert not np.shares_memory(pool.local_envs[0].observations, batch.obs)
        assert pool.step(np.ones(6, int)).obs[:, 2].tolist() == [1] * 6


class Ramp:
    """Our own protocol: writes into what it is given."""

    single_observation_space = spaces.Dict(a=spaces.Box(-9, 9, (2,), np.float64), b=spaces.Discrete(100))
    single_action_space = spaces.Box(-1, 1, (), np.float32)
    lane_names = ("left", "right", "top")
    num_lanes, together, can_be_absent = 3, True, True
    places: list[int] = []

    @property
    def env(self) -> Any:
        return self

    def use(self, autoreset: str) -> None:
        self.mode = autoreset

    def reset(self, rows: Any, seeds: Any, options: Any, out: Answers) -> Any:
        self.steps = 0
        out.began[:] = True
        self._write(out.obs)
        return None

    def step(self, rows: Any, actions: Any, out: Answers) -> Any:
        self.steps += 1
        self._write(out.obs)
        self.places = [array.__array_interface__["data"][0] for array in out.obs]
        out.reward[:] = actions
        out.present[2] = self.steps % 2 == 0
        return [{}, {"steps": self.steps}, {}]

    def _write(self, obs: Any) -> None:
        obs[0][:, 0], obs[0][:, 1], obs[1][:] = self.steps, [1, 2, 3], [4, 5, 6]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_speaks_the_engines_own_words(backend: str) -> None:
    with open_pool(Ramp, 2, backend) as pool:
        assert pool.lane_names == ["left", "right", "top"]
        assert pool.reset(seed=0).mask.tolist() == [True] * 6
        for step in (1, 2):
            batch = pool.step(np.linspace(-1, 1, 6, dtype=np.float32))
            assert batch.obs["a"].tolist() == [[step, lane] for lane in (1, 2, 3)] * 2
            assert batch.obs["b"].tolist() == [4, 5, 6] * 2
            assert batch.mask.tolist() == [True, True, step == 2] * 2
            np.testing.assert_array_equal(batch.reward, np.linspace(-1, 1, 6, dtype=np.float32))
            assert batch.info == {1: {"steps": step}, 4: {"steps": step}}
        assert batch.episode_length.tolist() == [2, 2, 1] * 2
        if backend == "serial":
            rows = [batch.obs["a"][3:], batch.obs["b"][3:]]
            assert pool.local_envs[1].places == [row.__array_interface__["data"][0] for row in rows]


# ---- the rest of the pool ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_reach_an_env_once(backend: str) -> None:
    with open_pool(RowsEnv, 3, backend) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("num_agents") == [2] * 6
        pool.set_attr("length", [5, 5, 6, 6, 7, 7])
        assert pool.get_attr("length") == [5, 5, 6, 6, 7, 7]
        assert pool.apply(lambda env, by: env.length * by, 2, env_ids=[4]) == [14]
        with pytest.raises(AttributeError, match="nothing"):
            pool.call("nothing")


def test_attributes_of_an_env_may_have_any_name() -> None:
    def farm() -> Any:
        env = vector(CountEnv, 2)
        env.fields, env.hay = 3, 7
        return env

    with open_pool([farm], None) as pool:
        assert pool.get_attr("fields") == [3, 3]
        pool.set_attr("hay", 8)
        assert pool.get_attr("hay") == [8, 8]


class Fragile(RowsEnv):
    """Raises, or takes its process along, at action 3 or 2 of its first lane."""

    def step(self, actions: Any) -> Any:
        if actions[0] == 3:
            raise ValueError("too much")
        if actions[0] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(actions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_raises_takes_its_lanes_along(backend: str) -> None:
    with open_pool(Fragile, 3, backend) as pool:
        pool.reset(seed=0)
        with pytest.raises(ValueError, match="too much") as caught:
            pool.step([0, 0, 3, 0, 0, 0])
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.env_id == 2
        with pytest.raises(shoal.ResetNeeded, match="2"):
            pool.step(np.zeros(6, int))
        pool.reset([2, 3], seed=[50, 51])
        batch = pool.step(np.ones(6, int))
        assert batch.obs[:, 0].tolist() == [0, 0, 50, 50, 4, 4]


@pytest.mark.parametrize(("backend", "action"), [("serial", 3), ("threads", 3), ("processes", 3), ("processes", 2)])
def test_lost_groups_are_replaced_as_a_whole(backend: str, action: int) -> None:
    with open_pool(Fragile, 3, backend, on_error="restart", max_restarts=2, num_workers=3) as pool:
        pool.reset(seed=0)
        before = pool.step(np.ones(6, int))
        seen = before.obs.copy()
        batch = pool.step([0, 0, action, 0, 0, 0])
        assert batch.truncated.tolist() == [False, False, True, True, False, False]
        assert batch.began.tolist()[2:4] == [True, True]  # same_step: the next episode has begun
        for lane in (2, 3):
            assert batch.info[lane]["shoal_restart"]["count"] == 1
            assert batch.info[lane]["shoal_restart"]["culprit"] == 2
            np.testing.assert_array_equal(batch.info[lane]["final_obs"], seen[lane])
        assert pool.stats().restarts == 1  # of one env, however many lanes it has
        assert batch.episode_length.tolist() == [2, 2, 1, 1, 2, 2]
        batch = pool.step(np.ones(6, int))
        assert batch.episode_length.tolist()[2:4] == [1, 1]
        assert 2 not in batch.info
        pool.step([0, 0, action, 0, 0, 0])
        with pytest.raises((ValueError, shoal.WorkerDied)):  # one env's restart counts once, not once a lane
            pool.step([0, 0, action, 0, 0, 0])


def test_an_interrupt_between_answers_and_their_notes_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(RowsEnv, 3) as pool:
        pool.reset(seed=0)
        for _ in range(2):
            pool.step(np.zeros(6, int))
        stepper = pool._workers.inline.stepper  # type: ignore[union-attr]

        def interrupt() -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(stepper, "flush", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.step(np.zeros(6, int))
        batch = pool.recv(timeout=10)
        assert batch.info == {lane: {"infos": [{"score": 1}]} for lane in (0, 2, 4)}


class Deadly:
    """Takes the process along that pickles it: an answer is there then, and its note never comes."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class DiesOverItsInfo(RowsEnv):
    def step(self, actions: Any) -> Any:
        infos = [{"deadly": Deadly()}, *({} for _ in actions[1:])] if actions[0] == 2 else []
        return (*super().step(actions)[:-1], infos)


def test_a_group_whose_answer_was_told_by_half_is_lost_as_a_whole() -> None:
    """Also in partial batches, of which none has a part of a group."""
    with open_pool(DiesOverItsInfo, 3, "processes", on_error="restart", num_workers=3, batch_envs=1) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 2, 0, 0, 0])
        found = {}
        for _ in range(3):
            batch = pool.recv(timeout=30)
            assert batch.env_id.tolist() in ([0, 1], [2, 3], [4, 5])
            found[int(batch.env_id[0])] = batch.truncated.tolist(), sorted(batch.info)
        assert found == {0: ([False] * 2, []), 2: ([True] * 2, [2, 3]), 4: ([False] * 2, [])}
        pool.send(np.zeros(6, int))
        assert sum(len(pool.recv(timeout=30).env_id) for _ in range(3)) == 6


def test_a_lost_vector_env_under_next_step() -> None:
    with open_pool(vectors(CountEnv, 2), 2, "processes", on_error="restart") as pool:
        pool.reset(seed=0)
        pool.step(np.ones(4, int))
        pids = [worker.pid for worker in pool.workers]
        os.kill(pids[1], signal.SIGKILL)  # type: ignore[arg-type]
        batch = pool.step(np.ones(4, int))
        while not batch.truncated.any():
            batch = pool.step(np.ones(4, int))
        assert batch.truncated.tolist() == [False, False, True, True]
        assert set(batch.info) == {2, 3}
        batch = pool.step(np.ones(4, int))
        assert batch.began.tolist()[2:] == [True, True]
        assert len({*batch.obs[2:, 0].tolist(), 2, 3}) == 4  # new seeds, each its own
        assert pool.step(np.ones(4, int)).episode_length.tolist()[2:] == [1, 1]
        eventually(lambda: pids[1] not in [worker.pid for worker in pool.workers])


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize("kind", ["vector", "rows"])
def test_snapshots_go_on_where_they_were(kind: str, backend: str, tmp_path: Path) -> None:
    env: Any = vectors(CountEnv, 2) if kind == "vector" else RowsEnv
    actions = [np.full(6, i % 3) for i in range(9)]
    with open_pool(env, 3, backend) as pool:
        pool.reset(seed=4)
        for action in actions[:3]:
            pool.step(action)
        snapshot = pool.snapshot(tmp_path / "pool.shoal")
        assert len(snapshot.envs) == 6
        first = [pool.step(action).obs.tolist() for action in actions]
        pool.restore(snapshot)
        assert [pool.step(action).obs.tolist() for action in actions] == first
    with open_pool(env, 3, "serial") as pool:
        pool.restore(tmp_path / "pool.shoal", trusted=True)
        assert [pool.step(action).obs.tolist() for action in actions] == first


def test_a_nan_is_found_in_its_lane() -> None:
    class Nans(Ramp):
        def step(self, rows: Any, actions: Any, out: Answers) -> Any:
            result = super().step(rows, actions, out)
            out.obs[0][1, 0] = np.nan
            return result

    with open_pool(Nans, 2, check_nan=True) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.BadObservation, match=r"env 1: observation\['a'\] is nan"):
            pool.step(np.zeros(6, np.float32))


class WrongRows(RowsEnv):
    def step(self, actions: Any) -> Any:
        return (self.observations[:1], *super().step(actions)[1:])


class WrongInfos(Ramp):
    def step(self, rows: Any, actions: Any, out: Answers) -> Any:
        super().step(rows, actions, out)
        return [{}]


@pytest.mark.parametrize(
    ("env", "actions", "words"),
    [
        (WrongRows, np.zeros(6, int), r"shape \(2, 3\), one row for each lane, found uint8 of shape \(1, 3\)"),
        (WrongInfos, np.zeros(9, np.float32), "infos must be None or 3 dicts"),
    ],
)
def test_what_envs_get_wrong(env: Any, actions: Any, words: str) -> None:
    with open_pool(env, 3, "processes") as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.EnvError, match=words):
            pool.step(actions)


# ---- pools in pools ----------------------------------------------------------------------------------------------


def test_a_pool_of_pools() -> None:
    """Workers outside, a vector env of Shoal inside."""
    inner = functools.partial(shoal.make, CountEnv, 3, backend="serial")
    with open_pool(inner, 2, "processes") as pool, Pool(CountEnv, 6, backend="serial") as plain:
        assert_same(pool.reset(seed=9), plain.reset(seed=9))
        for _ in range(14):
            assert_same(pool.step(np.arange(6) % 4), plain.step(np.arange(6) % 4))


def test_serial_inside_of_multiprocessing() -> None:
    """As PufferLib's guide has it for very many envs."""

    def create_serial_vec_env() -> Any:
        return puffer.Serial(env_creator=CountEnv, num_envs=4)

    outer = puffer.Multiprocessing(env_creator=create_serial_vec_env, num_envs=2, num_workers=2)
    try:
        obs, _ = outer.reset(seed=3)
        assert obs.shape == (8, 3)
        assert len({*obs[:, 0].tolist()}) == 8
        obs, rewards, *_ = outer.step(np.ones(8, int))
        assert obs[:, 2].tolist() == [1] * 8
        assert rewards.tolist() == [101] * 8
    finally:
        outer.close()


@pytest.mark.parametrize("zero_copy", [True, False])
def test_agents_of_pufferlibs_envs(zero_copy: bool) -> None:
    with puffer.make(
        RowsEnv,
        num_envs=4,
        num_workers=2,
        batch_size=2,
        zero_copy=zero_copy,
        sync_traj=False,
        backend=puffer.Multiprocessing,
    ) as envs:
        assert (envs.num_envs, envs.num_agents, envs.agents_per_batch) == (4, 8, 4)
        assert isinstance(envs.driver_env, RowsEnv)
        assert envs.single_observation_space == RowsEnv.single_observation_space
        envs.async_reset(seed=0)
        steps, infos = np.zeros(8, int), []
        for _ in range(40):
            obs, rewards, terminals, truncations, *_, some, agents, masks = envs.recv()
            assert obs.shape == (4, 3)
            pairs = agents.reshape(2, 2)
            assert (pairs[:, 0] % 2 == 0).all()
            assert (pairs[:, 1] == pairs[:, 0] + 1).all()
            assert not zero_copy or agents[0] % 4 == 0  # always the same neighbours
            assert masks.all()
            assert not truncations.any()
            steps[agents] += 1
            infos += some
            envs.send(np.zeros(4, int))
        assert (steps > 2).all()
        assert {"score": 1} in infos
        assert rewards.dtype == np.float32
        assert terminals.dtype == np.bool_


def test_batches_in_envs() -> None:
    with open_pool(RowsEnv, 4, batch_envs=3) as pool:
        assert pool.batch_size == 6
    with open_pool(CountEnv, 4, batch_envs=3) as pool:
        assert pool.batch_size == 3
    with pytest.raises(ValueError, match="give one of them"):
        open_pool(CountEnv, 4, batch_envs=3, batch_size=3)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="batch_envs"):
            open_pool(RowsEnv, 4, batch_envs=wrong)


def test_an_envpool_inside() -> None:
    envpool = pytest.importorskip("envpool", reason="EnvPool is only in the environment for benchmarks")
    make = functools.partial(envpool.make, "CartPole-v1", env_type="gymnasium", num_envs=4, seed=1)
    with open_pool(make, 2, "processes") as pool:
        assert (pool.num_envs, pool.autoreset) == (8, "next_step")
        pool.reset()
        for _ in range(60):
            batch = pool.step(np.zeros(8, int))
            assert (batch.reward[~batch.began] == 1).all()
        assert (batch.episode_length <= 12).all()
