"""Envs on a GPU answer as the table of autoreset says: see `shoal.envs.autoreset`, the model of `cuda/source.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from autoreset_cells import CELLS, Cell, Kernel, KernelTeam, check
from compiled.cuda.kit import needs_cuda
from shoal.compiled.cuda import CudaEnvs

pytestmark = [needs_cuda, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("mode", "script"), CELLS)
@pytest.mark.parametrize("env", [Kernel, KernelTeam])
def test_envs_on_a_gpu_answer_as_the_table_says(env: Any, mode: str, script: str) -> None:
    envs = CudaEnvs(env, 2, autoreset=mode, track_episodes=True)

    def reset() -> list[Cell]:
        return [Cell(float(obs[0]), *[None] * 7) for obs in np.asarray(envs.reset())]

    def step(action: int) -> list[Cell]:
        columns: list[Any] = [np.asarray(column) for column in envs.step(np.full(envs.num_lanes, action))]
        columns += [np.asarray(envs.episode_return), np.asarray(envs.episode_length)]
        finals = None if envs.final_obs is None else np.asarray(envs.final_obs)
        found = []
        for lane, (obs, reward, terminated, truncated, total, length) in enumerate(zip(*columns, strict=True)):
            final = float(finals[lane][0]) if finals is not None and (terminated or truncated) else None
            found.append(Cell(float(obs[0]), reward, terminated, truncated, None, final, total, length))
        return found

    check(mode, script, reset, step)
    envs.close()


@pytest.mark.parametrize(("mode", "script"), CELLS)
def test_a_pool_of_envs_on_a_gpu_answers_as_the_table_says(mode: Any, script: str) -> None:
    def cells(batch: Any) -> list[Cell]:
        finals = batch.final_obs
        rows = zip(
            batch.obs[:, 0], batch.reward, batch.terminated, batch.truncated, batch.began,
            [float(finals[i][0]) if i in finals else None for i in range(2)], batch.episode_return,
            batch.episode_length, strict=True,
        )  # fmt: skip
        return [Cell(*row) for row in rows]

    with shoal.Pool(Kernel, 2, backend="cuda", autoreset=mode) as pool:
        check(mode, script, lambda: cells(pool.reset()), lambda action: cells(pool.step(np.full(2, action))))
