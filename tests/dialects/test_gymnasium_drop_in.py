"""The two drop-ins make as many envs as Gymnasium's classes do, and touch none of them before the user does."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv, FailEnv
from shoal.dialects import gymnasium as face
from shoal.support.cores import usable_cores


class Diary(CountEnv):
    """Writes down what happens to it, and in which process."""

    def __init__(self, path: Path, number: int):
        super().__init__()
        self.path, self.number = path, number
        self.write("made")

    def write(self, what: str) -> None:
        """Add a line."""
        with self.path.open("a") as file:
            file.write(f"{what} {self.number} {'here' if os.getpid() == int(self.path.stem) else 'there'}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.write("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self.write("step")
        return super().step(action)

    def close(self) -> None:
        self.write("close")


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_what_happens_to_envs_is_what_happens_in_gymnasium(tmp_path: Path, name: str, count: int) -> None:
    diaries = []
    for place in (gymnasium.vector, face):
        path = tmp_path / place.__name__ / str(os.getpid())
        path.parent.mkdir()
        envs = getattr(place, name)([partial(Diary, path, i) for i in range(count)])
        made = sorted(path.read_text().splitlines())
        envs.reset(seed=0)
        envs.step(np.zeros(count, np.int64))
        envs.close()
        diaries.append((made, sorted(path.read_text().splitlines())))
    assert diaries[0] == diaries[1]
    assert not [line for line in diaries[1][0] if line.startswith(("reset", "step"))]


def test_async_is_processes_with_as_many_workers_as_cores() -> None:
    for count in (1, 3):
        envs = face.AsyncVectorEnv([CountEnv] * count)
        assert envs.pool.plan.backend == "processes"
        assert len(envs.pool.workers) == min(count, usable_cores())
        envs.close()
    envs = face.AsyncVectorEnv([CountEnv] * 7, num_workers=3)
    assert len(envs.pool.workers) == 3
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "threads", "processes", "hybrid", "auto"])
def test_a_backend_that_is_asked_for_is_the_one_that_runs(backend: str) -> None:
    envs = face.AsyncVectorEnv([CountEnv] * 2, backend=backend)
    assert envs.pool.plan.backend == (backend if backend != "auto" else "processes")
    envs.close()


def test_an_error_has_the_envs_text_and_shoals_report_as_its_cause() -> None:
    for cls in (face.SyncVectorEnv, face.AsyncVectorEnv):
        envs = cls([CountEnv, partial(FailEnv, "step")])
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"^bad joint$") as caught:
            envs.step([0, 3])
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.env_id == 1
        assert caught.value.args == ("bad joint",)
        assert "env 1 raised in step" in str(caught.value.__cause__)
        assert "Traceback" in str(caught.value.__cause__)
        envs.reset(seed=0)
        envs.close()


def test_the_pool_itself_stays_strict() -> None:
    envs = shoal.make(CountEnv, 2, backend="serial")
    with pytest.raises(gymnasium.error.ResetNeeded):
        envs.step([0, 0])
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="expected 0 to 3"):
        envs.step([0, 99])
    envs.close()


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_pools_that_leave_checks_to_the_envs(backend: str) -> None:
    with shoal.Pool(CountEnv, 2, backend=backend, check_reset="none", check_actions="none") as pool:
        assert pool.step([0, 99]).reward.tolist() == [1.0, 9901.0]
        assert pool.step(np.array([-3, 0], np.int8)).reward.tolist() == [-298.0, 2.0]
