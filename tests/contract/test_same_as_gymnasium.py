"""Results are those of gymnasium.vector.SyncVectorEnv, bit for bit, whoever and however many run the envs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics

from conftest import BACKENDS
from contract.lockstep import MODES, assert_lockstep, assert_same
from envs import INFO_KINDS, SPACES, CountEnv, InfoEnv, ReusedBufferEnv, SpaceEnv
from repeats import product, repeat
from shoal.dialects.gymnasium import VectorEnv

# (envs, workers): also counts that do not divide, one env alone, and one env for each worker.
LAYOUTS = [(7, 3), (1, 1), (5, 5), (8, 2)]


class NoClock(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes the wall-clock time out of RecordEpisodeStatistics: it is never the same twice."""

    def step(self, action: Any) -> Any:
        result = super().step(action)
        result[4].get("episode", {}).pop("t", None)
        return result


def cartpole() -> gymnasium.Env[Any, Any]:
    return NoClock(RecordEpisodeStatistics(gymnasium.make("CartPole-v1")))


def short(env_id: str, **kwargs: Any) -> Callable[[], gymnasium.Env[Any, Any]]:
    """An env whose episodes are cut off early enough to see several."""
    return partial(gymnasium.make, env_id, max_episode_steps=8, **kwargs)


ENVS: dict[str, Callable[[], Any]] = {
    "CartPole with episode statistics": cartpole,
    "Pendulum": short("Pendulum-v1"),
    "MountainCarContinuous": short("MountainCarContinuous-v0"),
    "Acrobot": short("Acrobot-v1"),
    "FrozenLake": short("FrozenLake-v1", is_slippery=True),
    "Taxi": short("Taxi-v4"),
    "CliffWalking": short("CliffWalking-v1"),
    "Blackjack": partial(gymnasium.make, "Blackjack-v1", natural=True),
    "counting, terminating": partial(CountEnv, length=3),
    "counting, truncating": partial(CountEnv, length=3, truncates=True),
    "infos of every kind": partial(InfoEnv, "everything"),
}


@contextmanager
def both(
    env_fns: list[Callable[[], Any]], mode: AutoresetMode, backend: str, workers: int, **options: Any
) -> Iterator[tuple[VectorEnv, gymnasium.vector.SyncVectorEnv[Any, Any]]]:
    """Shoal's vector env and Gymnasium's of the same envs."""
    theirs = gymnasium.vector.SyncVectorEnv(
        env_fns, autoreset_mode=mode, observation_mode=options.get("observation_mode", "same")
    )
    ours = VectorEnv(env_fns, autoreset_mode=mode, backend=backend, num_workers=workers, **options)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def modes(test: Any) -> Any:
    return pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)(test)


@product("backend mode layout", BACKENDS, MODES, LAYOUTS)
def test_every_worker_count(backend: str, mode: AutoresetMode, layout: tuple[int, int]) -> None:
    num_envs, workers = layout
    with both([cartpole] * num_envs, mode, backend, workers) as (ours, theirs):
        assert_lockstep(ours, theirs, steps=60)


def every_backend(table: Any) -> Any:
    """Each row meets every backend, and every autoreset mode in some backend.

    In `make test` a row meets one of the backends that run envs here, and one of those that run them in processes.
    """
    rows = [
        pytest.param(
            name, backend, MODES[(i + j) % 3], id=f"{name}-{backend}-{MODES[(i + j) % 3].name}",
            marks=repeat("the row meets the two other backends", (i + j) % 2 == 1),
        )
        for i, name in enumerate(table)
        for j, backend in enumerate(BACKENDS)
    ]  # fmt: skip
    return pytest.mark.parametrize(("name", "backend", "mode"), rows)


@every_backend(ENVS)
def test_every_env(name: str, backend: str, mode: AutoresetMode) -> None:
    with both([ENVS[name]] * 5, mode, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs, steps=40)


@every_backend(SPACES)
def test_every_observation_space(name: str, backend: str, mode: AutoresetMode) -> None:
    with both([partial(SpaceEnv, SPACES[name])] * 5, mode, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs)


# Gymnasium cannot take actions of an empty Dict apart: test_odd_envs has that one.
@every_backend([name for name in SPACES if name != "empty dict"])
def test_every_action_space(name: str, backend: str, mode: AutoresetMode) -> None:
    """The reward is a fingerprint of the action: type, dtype and shape arrive as Gymnasium's would."""
    with both([partial(SpaceEnv, SPACES["box"], SPACES[name])] * 5, mode, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs)


@every_backend(INFO_KINDS)
def test_every_kind_of_info(name: str, backend: str, mode: AutoresetMode) -> None:
    with both([partial(InfoEnv, name)] * 5, mode, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs)


@modes
def test_seeds_of_each_env(backend: str, mode: AutoresetMode) -> None:
    with both([cartpole] * 3, mode, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs, seed=[5, 4, 99], steps=60)


@modes
def test_a_second_reset_goes_on_with_the_same_generators(backend: str, mode: AutoresetMode) -> None:
    with both([cartpole] * 3, mode, backend, 2) as (ours, theirs):
        for seed in (1, None, [None, 3, None], None):
            assert_lockstep(ours, theirs, seed=seed, steps=12, ends=False)


@modes
def test_reset_mask_at_any_time(backend: str, mode: AutoresetMode) -> None:
    """Also in the middle of an episode, and with the other envs' autoreset still to come."""
    with both([partial(CountEnv, length) for length in (2, 3, 4, 50, 50)], mode, backend, 2) as (
        ours,
        theirs,
    ):
        actions = np.array([0, 1, 2, 3, 0])
        masks = np.array(
            [[1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.bool_
        )
        assert_same(ours.reset(seed=0), theirs.reset(seed=0), "reset")
        for i, mask in enumerate(masks):
            assert_same(ours.step(actions), theirs.step(actions), f"step {i}")
            seeds = [10 * i + lane for lane in range(5)]
            options = [{"reset_mask": mask.copy(), "level": i} for _ in range(2)]
            our, their = (
                envs.reset(seed=seeds, options=option) for envs, option in zip((ours, theirs), options, strict=True)
            )
            assert_same(our, their, f"reset {i}")
            assert_same(ours.get_attr("options_given"), theirs.get_attr("options_given"), "options")
            assert_same(ours.step(actions), theirs.step(actions), f"step {i} after reset")
            if mode is not AutoresetMode.DISABLED:
                assert_same(ours.step(actions), theirs.step(actions), f"second step {i} after reset")
            else:
                assert_same(ours.reset(), theirs.reset(), f"full reset {i}")


@modes
def test_without_copies(backend: str, mode: AutoresetMode) -> None:
    """Views of the slab hold the same values while they are valid."""
    with both([cartpole] * 7, mode, backend, 3, copy=False) as (ours, theirs):
        assert_lockstep(ours, theirs, steps=60)


def different_bounds(high: float) -> SpaceEnv:
    return SpaceEnv(spaces.Box(-high, high, (2,), np.float32), SPACES["discrete"])


@modes
def test_envs_whose_bounds_differ(backend: str, mode: AutoresetMode) -> None:
    env_fns = [partial(different_bounds, high) for high in (1.0, 2.0, 3.0)]
    with both(env_fns, mode, backend, 2, observation_mode="different") as (ours, theirs):
        assert ours.observation_space == theirs.observation_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert_lockstep(ours, theirs)


def test_envs_of_different_kinds_under_one_space(backend: str) -> None:
    env_fns = [
        partial(gymnasium.make, "CartPole-v1"),
        partial(gymnasium.make, "CartPole-v1", sutton_barto_reward=True),
    ]
    with both(env_fns, AutoresetMode.NEXT_STEP, backend, 2) as (ours, theirs):
        assert_lockstep(ours, theirs, steps=60)


# ---- where Gymnasium cannot serve as the reference: a plain loop does ------------------------------------


def test_final_obs_of_an_env_that_reuses_its_buffer(backend: str) -> None:
    """Gymnasium hands out the buffer itself, which reset has overwritten by then."""
    with VectorEnv(
        ReusedBufferEnv, 3, autoreset_mode=AutoresetMode.SAME_STEP, backend=backend, num_workers=2
    ).pool as pool:
        pool.reset()
        for step in range(1, 8):
            batch = pool.step(np.full((3, 2), 0.5, np.float32))
            if step % 3 == 0:
                assert sorted(batch.final_obs) == [0, 1, 2]
                for last in batch.final_obs.values():
                    np.testing.assert_array_equal(last, [step // 3 - 1, 3])
            np.testing.assert_array_equal(batch.obs, [[step // 3, step % 3]] * 3)
            np.testing.assert_array_equal(batch.reward, [2.0] * 3)


def test_an_env_may_change_its_action_in_place(backend: str) -> None:
    """Gymnasium's SyncVectorEnv lets the env write into the caller's own array: nobody counts on that."""
    actions = np.full((3, 2), 0.5, np.float32)
    envs = VectorEnv(ReusedBufferEnv, 3, backend=backend, num_workers=2)
    envs.reset()
    envs.step(actions)
    np.testing.assert_array_equal(actions, np.full((3, 2), 0.5, np.float32))
    envs.close()


def test_async_vector_env_agrees_too(backend: str) -> None:
    """Gymnasium's two vector envs put their info together in different places; ours follows both."""
    env_fns = [partial(InfoEnv, "everything")] * 3
    theirs = gymnasium.vector.AsyncVectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = VectorEnv(env_fns, autoreset_mode=AutoresetMode.SAME_STEP, backend=backend, num_workers=2)
    try:
        assert_lockstep(ours, theirs)
    finally:
        ours.close()
        theirs.close()
