"""`shoal.dialects.puffer`: the calls of PufferLib's guide, with the import changed."""

from __future__ import annotations

import functools
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv
from shoal.dialects import puffer
from shoal.dialects.puffer import Multiprocessing, Serial
from shoal.support.cores import usable_cores

pytestmark = pytest.mark.timeout(60)
Multi = functools.partial(Multiprocessing, num_workers=2)


@pytest.mark.parametrize("vectorize", [Serial, Multi], ids=["Serial", "Multiprocessing"])
def test_a_loop_of_recv_and_send(vectorize: Any) -> None:
    with vectorize(CountEnv, env_kwargs={"length": 3}, num_envs=4) as envs:
        assert (envs.num_agents, envs.agents_per_batch, envs.num_envs) == (4, 4, 4)
        assert envs.single_action_space == CountEnv().action_space
        assert envs.action_space.shape == (4,)
        envs.async_reset(seed=7)
        for turn in range(1, 9):
            obs, rewards, terminals, truncations, *_, infos, env_ids, masks = envs.recv()
            assert env_ids.tolist() == [0, 1, 2, 3]
            assert masks.all()
            assert infos == []
            assert obs[:, 0].tolist() == [7, 8, 9, 10]
            assert terminals.tolist() == [turn % 4 == 0] * 4
            assert not truncations.any()
            assert rewards.tolist() == [float((turn - 1) % 4)] * 4
            envs.send(np.zeros(4, int))


def test_truncations_are_not_lost_and_seeds_differ() -> None:
    with Serial(functools.partial(CountEnv, length=2, truncates=True), num_envs=3, seed=5) as envs:
        observations, infos = envs.reset()
        assert observations[:, 0].tolist() == [5, 6, 7]
        assert infos == []
        envs.step(np.zeros(3, int))
        _, _, terminals, truncations, _ = envs.step(np.zeros(3, int))
        assert truncations.all()
        assert not terminals.any()


def test_surplus_envs_give_batches_of_those_that_are_ready() -> None:
    with Multiprocessing(CountEnv, num_envs=7, num_workers=3, batch_size=3, overwork=True, sync_traj=False) as envs:
        assert (envs.num_agents, envs.agents_per_batch, envs.num_workers) == (7, 3, 3)
        envs.async_reset(seed=0)
        seen: set[int] = set()
        while seen != set(range(7)):  # a worker that gets no core for a while is ready after many batches of others
            obs, *_, env_ids, _ = envs.recv()
            assert obs.shape == (3, 3)
            seen |= set(env_ids.tolist())
            envs.send(np.ones(3, int))


def test_batches_come_strictly_in_turn() -> None:
    with Multi(CountEnv, num_envs=4, batch_size=2) as envs:
        envs.async_reset(seed=0)
        for _ in range(4):
            for half in ([0, 1], [2, 3]):
                assert envs.recv()[-2].tolist() == half
                envs.send(np.zeros(2, int))


def test_zero_copy_gives_views_and_copies_stay() -> None:
    with Multi(CountEnv, num_envs=2) as views, Multi(CountEnv, num_envs=2, zero_copy=False) as copies:
        kept = {}
        for name, envs in (("views", views), ("copies", copies)):
            first = envs.reset(seed=0)[0]
            for _ in range(3):
                envs.step(np.zeros(2, int))
            kept[name] = first
        assert kept["copies"].tolist() == [[0, 0, 0], [1, 0, 0]]
        assert kept["views"].tolist() != kept["copies"].tolist()


# ---- make ------------------------------------------------------------------------------------------------------


class Scaled(CountEnv):
    def __init__(self, scale: int, length: int = 5):
        super().__init__(length)
        self.scale = scale


def test_what_can_be_vectorized() -> None:
    with puffer.make("CartPole-v1", num_envs=4) as envs:
        assert envs.single_observation_space.shape == (4,)
        assert envs.pool.plan.reason != "as asked for"
    with puffer.make(Scaled, env_args=[3], env_kwargs={"length": 2}, num_envs=2, backend=Serial) as envs:
        assert envs.pool.get_attr("scale") == [3, 3]
        assert envs.pool.get_attr("length") == [2, 2]
    with puffer.make(
        [Scaled, Scaled], env_args=[[1], [2]], env_kwargs=[{"length": 3}, {"length": 4}], backend="multiprocessing"
    ) as envs:
        assert envs.pool.get_attr("scale") == [1, 2]
        assert envs.pool.get_attr("length") == [3, 4]
    with puffer.make(CountEnv, num_workers=2, envs_per_worker=3) as envs:
        assert (envs.num_envs, envs.num_workers) == (6, 2)
        assert envs.pool.plan.backend == "processes"
    with puffer.make(CountEnv, num_envs=5, envs_per_worker=3) as envs:
        assert envs.num_workers == 2


def test_auto_is_a_number_of_workers_and_a_batch_size() -> None:
    with puffer.make(CountEnv, backend=Multiprocessing, num_envs=5, num_workers="auto", batch_size="auto") as envs:
        assert envs.num_workers == min(5, usable_cores())
        assert envs.agents_per_batch == 2
    with puffer.make(CountEnv, backend=Multiprocessing, num_envs=1, batch_size="auto") as envs:
        assert envs.agents_per_batch == 1


def test_what_makes_no_sense_is_refused() -> None:
    for arguments, options, words in (
        ((None,), {}, "found None"),
        ((CountEnv,), {"num_envs": 2, "backend": "threads of fate"}, "Serial, Multiprocessing or Ray"),
        ((CountEnv,), {"num_envs": 2, "backend": 7}, "Serial, Multiprocessing or Ray"),
        (([CountEnv, CountEnv],), {"num_envs": 3}, "leave num_envs out"),
        ((CountEnv, None, [{}, {}, {}]), {"num_envs": 2}, "env_kwargs: expected 2"),
        ((CountEnv, 5), {"num_envs": 2}, "env_args: expected one for all"),
        (("CartPole-v1", [1]), {"num_envs": 2}, "env_args are for a function"),
        ((CountEnv,), {"num_envs": 4, "num_workers": 3, "envs_per_worker": 2}, "leave one of the three out"),
        ((CountEnv,), {"envs_per_worker": 2}, "num_envs or num_workers"),
        ((CountEnv,), {"num_envs": 2, "speed": "high"}, "unknown option 'speed'"),
        ((CountEnv,), {"num_envs": 2, "num_workers": "many"}, "num_workers: expected a whole number"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            puffer.make(*arguments, **options)
    with pytest.warns(UserWarning, match="overwork=True"):
        Multiprocessing(CountEnv, num_envs=200, num_workers=50, start_timeout=60).close()


def test_send_is_for_what_was_received() -> None:
    with Serial(CountEnv, num_envs=2) as envs:
        envs.async_reset(seed=0)
        with pytest.raises(shoal.NothingPending, match="call recv first"):
            envs.send(np.zeros(2, int))
        envs.recv()
        envs.send(np.zeros(2, int))
        with pytest.raises(shoal.NothingPending):
            envs.send(np.zeros(2, int))


def test_the_driver_env_is_one_to_look_at() -> None:
    envs = Multi(CountEnv, num_envs=2)
    driver = envs.driver_env
    assert driver is envs.driver_env
    assert driver.observation_space == envs.single_observation_space
    envs.close()
    envs.close()


# ---- the examples of the guide -----------------------------------------------------------------------------------


def test_serial_and_multiprocessing_match() -> None:
    serial_env = Serial(lambda: gymnasium.make("CartPole-v1"), num_envs=4)
    vec_env = Multiprocessing(lambda: gymnasium.make("CartPole-v1"), num_envs=4, num_workers=2)
    serial_env.seed(42)
    vec_env.seed(42)
    serial_obs = serial_env.reset()
    vec_obs = vec_env.reset()
    assert np.allclose(serial_obs, vec_obs), "Vectorization mismatch!"
    assert not np.allclose(serial_obs, vec_env.reset(seed=43))
    serial_env.close()
    vec_env.close()


def test_profiling_and_configuration() -> None:
    def profile_vectorization(vec_env: Any, num_steps: int = 50) -> float:
        start = time.time()
        vec_env.reset()
        for _ in range(num_steps):
            actions = vec_env.action_space.sample()
            vec_env.step(actions)
        elapsed = time.time() - start
        return float((num_steps * vec_env.num_envs) / elapsed)

    vec_env = puffer.make("CartPole-v1", num_envs=16, num_workers=2, envs_per_worker=8)
    assert profile_vectorization(vec_env) > 0
    assert vec_env.num_envs // vec_env.num_workers == 8
    vec_env.close()


def test_envs_that_pufferlib_would_not_take_can_be_drivers() -> None:
    """Policies of PufferLib's read spaces, agents and `emulated` of the driver, whatever kind of env it is."""
    for backend in (Serial, Multi):
        with backend(CountEnv, num_envs=2) as envs:
            driver = envs.driver_env
            assert isinstance(driver, CountEnv)
            assert driver.single_observation_space == envs.single_observation_space
            assert driver.single_action_space == envs.single_action_space
            assert (driver.num_agents, driver.emulated, envs.emulated) == (1, False, False)


def test_batches_of_some_envs_have_their_own_spaces() -> None:
    with Multi(CountEnv, num_envs=4, batch_size=2) as envs:
        assert (envs.num_envs, envs.num_environments, envs.num_agents) == (2, 4, 4)
        assert envs.action_space.shape == (2,)
        assert envs.observation_space.shape == (2, 3)
