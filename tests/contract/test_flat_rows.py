"""Pools whose nested observations lie in rows: the same observations, and flat without a copy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shoal
from envs import SPACES, CountEnv, SpaceEnv
from shoal import Pool
from shoal.emulation import Emulation

pytestmark = pytest.mark.timeout(60)

MIXED = spaces.Dict(
    image=spaces.Box(0, 255, (5, 3), np.uint8),
    pair=spaces.Tuple((spaces.Discrete(7), spaces.Box(-1, 1, (), np.float64))),
    flags=spaces.MultiBinary(3),
    half=spaces.Box(-1, 1, (2,), np.float16),
)
KINDS = {"mixed": MIXED, **{name: SPACES[name] for name in ("dict", "tuple", "deep", "box", "box 0-d", "discrete")}}


def open_pools(space: Any, backend: str = "serial", **options: Any) -> tuple[Pool, Pool]:
    workers = {} if backend == "serial" else {"num_workers": 2}
    make = functools.partial(SpaceEnv, space)
    return tuple(  # type: ignore[return-value]
        Pool(make, 5, backend=backend, flat_rows=flat, **{**workers, **options})  # type: ignore[arg-type]
        for flat in (True, False)
    )


def memory_of(pool: Pool) -> Any:
    return pool._slab.array("obs_rows")


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("name", KINDS)
def test_observations_are_the_same_and_flat_already(name: str, autoreset: Any) -> None:
    emulation = Emulation(KINDS[name])
    flat, plain = open_pools(KINDS[name], autoreset=autoreset)
    with flat, plain:
        pairs = [(flat.reset(seed=2), plain.reset(seed=2))]
        for _ in range(12):
            over = np.flatnonzero(pairs[-1][1].done)
            if autoreset == "disabled" and len(over):
                pairs.append((flat.reset(over), plain.reset(over)))
                break
            actions = plain.action_space.sample()
            pairs.append((flat.step(actions), plain.step(actions)))
            found, expected = pairs[-1]
            np.testing.assert_equal(found.obs, expected.obs)
            np.testing.assert_equal(found.final_obs, expected.final_obs)
            rows = emulation.flatten(found.obs)
            assert np.shares_memory(rows, memory_of(flat))
            np.testing.assert_array_equal(rows, emulation.flatten(found.obs, np.zeros_like(rows)))
            np.testing.assert_equal(emulation.unflatten(rows), expected.obs)


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
def test_on_every_backend(backend: str) -> None:
    emulation = Emulation(MIXED)
    flat, plain = open_pools(MIXED, backend)
    with flat, plain:
        flat.reset(seed=2)
        plain.reset(seed=2)
        for _ in range(10):
            actions = plain.action_space.sample()
            found, expected = flat.step(actions), plain.step(actions)
            np.testing.assert_equal(found.obs, expected.obs)
            assert np.shares_memory(emulation.flatten(found.obs), memory_of(flat))


def test_torch_takes_the_rows_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    emulation = Emulation(MIXED)
    with Pool(functools.partial(SpaceEnv, MIXED), 4, backend="serial", flat_rows=True) as pool:
        batch = pool.reset(seed=0)
        rows = torch.from_numpy(emulation.flatten(batch.obs))
        nested = emulation.unflatten(rows)
        np.testing.assert_array_equal(nested["pair"][0].numpy(), batch.obs["pair"][0])
        nested["image"][2] = 9
        assert (batch.obs["image"][2] == 9).all()


def test_parts_of_a_batch_are_flat_too() -> None:
    emulation = Emulation(MIXED)
    make = functools.partial(SpaceEnv, MIXED)
    with Pool(make, 6, backend="threads", num_workers=3, batch_size=2, order="contiguous", flat_rows=True) as pool:
        pool.async_reset(seed=0)
        for _ in range(12):
            batch = pool.recv()
            rows = emulation.flatten(batch.obs)
            assert rows.shape == (2, emulation.size)
            assert np.shares_memory(rows, memory_of(pool))
            pool.send(np.zeros(2, np.int64), batch.env_id)


def test_what_lies_elsewhere_is_copied() -> None:
    emulation = Emulation(MIXED)
    with Pool(functools.partial(SpaceEnv, MIXED), 4, backend="serial", flat_rows=True, copy=True) as pool:
        batch = pool.reset(seed=0)
        rows = emulation.flatten(batch.obs)
        assert not np.shares_memory(rows, batch.obs["image"])
        np.testing.assert_equal(emulation.unflatten(rows), batch.obs)
    one = {**batch.obs, "image": batch.obs["image"][::-1].copy()}  # another row's
    np.testing.assert_equal(emulation.unflatten(emulation.flatten(one)), one)


def test_snapshots_of_either_fit_only_their_own_kind(tmp_path: Path) -> None:
    flat, plain = open_pools(MIXED)
    with flat, plain:
        flat.reset(seed=1)
        flat.step(flat.action_space.sample())
        flat.snapshot(tmp_path / "flat")
        actions = flat.action_space.sample()
        expected = flat.step(actions).obs
        flat.restore(tmp_path / "flat")
        np.testing.assert_equal(flat.step(actions).obs, expected)
        plain.restore(tmp_path / "flat")  # how rows lie is no part of the state
        np.testing.assert_equal(plain.step(actions).obs, expected)


def test_rows_of_vector_envs() -> None:
    make = functools.partial(SpaceEnv, MIXED)
    fn = functools.partial(SyncVectorEnv, [make] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)
    with Pool(fn, 2, backend="serial", flat_rows=True) as grouped, Pool(make, 6, backend="serial") as plain:
        np.testing.assert_equal(grouped.reset(seed=0).obs, plain.reset(seed=0).obs)
        for _ in range(8):
            actions = plain.action_space.sample()
            found = grouped.step(actions).obs
            np.testing.assert_equal(found, plain.step(actions).obs)
            assert np.shares_memory(Emulation(MIXED).flatten(found), memory_of(grouped))


def test_objects_have_no_rows() -> None:
    with pytest.raises(shoal.BadEnv, match="a flat row holds numbers, and the observation space is a text"):
        Pool(functools.partial(SpaceEnv, SPACES["text"]), 2, backend="serial", flat_rows=True)
    with Pool(CountEnv, 2, backend="serial", flat_rows=True) as pool:
        assert pool.reset(seed=3).obs[:, 0].tolist() == [3, 4]
