"""Arrays that are the caller's own: large ones are lent frames of the slab, and nobody must ever notice."""

from __future__ import annotations

import gc
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.memory.answers import LEND_FRAMES, LEND_FROM

SHAPE = (64, 64)
COUNT = 4  # of envs: a frame is just large enough to be lent


class StampEnv(gymnasium.Env[Any, Any]):
    """Every number of its observation says which env, which episode and which step it is of."""

    observation_space: Any = spaces.Box(0, np.inf, SHAPE, np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 5):
        self.length, self.episode = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.stamp = 0.0 if seed is None else float(seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observation(), 0.0, False, self.steps >= self.length, {}

    def _observation(self) -> Any:
        return np.full(SHAPE, self.stamp * 1e6 + self.episode * 1e3 + self.steps)


class TwoStampsEnv(StampEnv):
    """The same with a nested observation."""

    observation_space = spaces.Dict(a=StampEnv.observation_space, b=spaces.Tuple((spaces.Box(0, np.inf, (3,)),)))

    def _observation(self) -> Any:
        whole = super()._observation()
        return {"a": whole, "b": (whole[0, :3].astype(np.float32),)}


def test_a_frame_of_these_envs_is_lent() -> None:
    assert COUNT * 8 * SHAPE[0] * SHAPE[1] >= LEND_FROM
    with shoal.Pool(StampEnv, COUNT, backend="serial", copy=True) as pool:
        assert pool.data.lends
    with shoal.Pool("CartPole-v1", COUNT, backend="serial", copy=True) as pool:
        assert not pool.data.lends


def leaves(observation: Any) -> list[Any]:
    if isinstance(observation, dict):
        return [leaf for part in observation.values() for leaf in leaves(part)]
    if isinstance(observation, tuple):
        return [leaf for part in observation for leaf in leaves(part)]
    return [observation]


@pytest.mark.parametrize("env", [StampEnv, TwoStampsEnv])
@pytest.mark.parametrize("hold", [0, 1, 2, 3, 20])
def test_what_is_held_never_changes(backend: str, env: Any, hold: int) -> None:
    envs = shoal.make(env, COUNT, backend=backend, num_workers=None if backend == "serial" else 2)
    reference = gymnasium.vector.SyncVectorEnv([env] * COUNT)
    held: list[tuple[Any, Any]] = []

    def check(ours: Any, theirs: Any) -> None:
        held.append((leaves(ours), [leaf.copy() for leaf in leaves(theirs)]))
        del held[: len(held) - max(hold, 1)]
        for mine, expected in held:
            assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(mine, expected, strict=True))

    check(envs.reset(seed=3)[0], reference.reset(seed=3)[0])
    for turn in range(25):
        actions = np.full(COUNT, turn % 2)
        check(envs.step(actions)[0], reference.step(actions)[0])
    envs.close()
    for mine, expected in held:  # nor after the end
        assert all((a == b).all() for a, b in zip(mine, expected, strict=True))
    reference.close()


def test_part_of_an_array_holds_all_of_it(backend: str) -> None:
    with shoal.Pool(StampEnv, COUNT, backend=backend, copy=True) as pool:
        parts = [pool.reset(seed=0).obs[1:3, ::7, 5]]
        parts += [pool.step(np.zeros(COUNT, int)).obs[1:3, ::7, 5] for _ in range(12)]
        stamps = [(part[0, 0] % 1e6, part[1, 0] % 1e6) for part in parts]
        assert stamps[:4] == [(1000.0 + i, 1000.0 + i) for i in range(4)]
        assert len({part[0, 0] for part in parts}) == 13
        assert all((part == part[:, :1]).all() for part in parts)


def test_frames_that_nobody_holds_are_used_again() -> None:
    with shoal.Pool(StampEnv, COUNT, backend="serial", copy=True) as pool:
        obs = pool.reset(seed=0).obs
        places = set()
        for _ in range(12):
            obs = pool.step(np.zeros(COUNT, int)).obs
            places.add(obs.ctypes.data)
        assert len(places) <= LEND_FRAMES, "no copy was made"
        kept = [pool.step(np.zeros(COUNT, int)).obs for _ in range(6)]
        assert len({one.ctypes.data for one in kept}) == 6, "those beyond the frames are copies"
        del kept, obs
        gc.collect()
        assert pool.step(np.zeros(COUNT, int)).obs.ctypes.data in places


def test_the_caller_may_write_into_its_own(backend: str) -> None:
    with shoal.Pool(StampEnv, COUNT, backend=backend, copy=True) as pool:
        before = pool.reset(seed=0).obs
        before[:] = -1.0
        after = pool.step(np.zeros(COUNT, int)).obs
        assert (before == -1.0).all()
        assert (after[:, 0, 0] % 1e3 == 1).all()
        assert after.flags.writeable


def test_resets_of_some_and_refused_steps(backend: str) -> None:
    with shoal.Pool(StampEnv, COUNT, backend=backend, copy=True, autoreset="disabled") as pool:
        held = [pool.reset(seed=0).obs]
        for turn in range(1, 5):
            with pytest.raises(shoal.BadAction):
                pool.step(np.full(COUNT, 7))
            held.append(pool.step(np.zeros(COUNT, int)).obs)
            assert (held[-1][:, 0, 0] % 1e3 == turn).all()
        some = pool.reset([1, 3], seed=[8, 9]).obs
        assert some[:, 5, 5].tolist() == [8e6 + 2e3, 9e6 + 2e3]
        held.append(pool.step(np.zeros(COUNT, int), timeout=20).obs)
        assert (held[-1][:, 0, 0] % 1e3).tolist() == [5, 1, 5, 1]
        assert [int(one[0, 0, 0] % 1e3) for one in held] == [0, 1, 2, 3, 4, 5]


def test_partial_batches(backend: str) -> None:
    with shoal.Pool(long_env, COUNT, backend=backend, copy=True, batch_size=2) as pool:
        pool.async_reset(seed=0)
        held = []
        for _ in range(40):
            batch = pool.recv()
            held.append((batch.obs, batch.obs.copy()))
            pool.send(np.zeros(2, int), batch.env_id)
        assert all((one == kept).all() for one, kept in held)


def long_env() -> Any:
    return StampEnv(40)
