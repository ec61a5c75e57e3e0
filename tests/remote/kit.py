"""What tests of far workers share: whole runs to compare, and envs that say where they live."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from contract.test_snapshot import plain
from envs import CountEnv
from shoal import Pool


def history(env: Any, num_envs: int | None, turns: int = 60, **options: Any) -> list[Any]:
    """Everything that a pool says in a run with fixed seeds and actions, resets of some envs included."""
    with Pool(env, num_envs, **options) as pool:
        space = pool.action_space
        space.seed(5)
        seen = [plain(pool.reset(seed=11)._asdict())]
        for turn in range(turns):
            batch = pool.step(space.sample())
            seen.append(plain(batch._asdict()))
            if pool.autoreset == "disabled" and batch.done.any():
                seen.append(plain(pool.reset(np.flatnonzero(batch.done))._asdict()))
            elif turn % 20 == 10 and pool.num_envs > 1 and pool.lanes_per_env == 1:
                seen.append(plain(pool.reset([pool.num_envs - 1, 0], seed=[turn, 3])._asdict()))
        return seen


class PlacedEnv(CountEnv):
    """A CountEnv that can end its process, and says which one that is."""

    def home(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        os._exit(7)
