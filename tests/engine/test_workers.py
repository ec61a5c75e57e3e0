"""Workers that are late: the error says which envs are not built, and which worker has not even begun."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from envs import CountEnv
from faults.kit import eventually
from shoal.backends.base import BlockSpec
from shoal.backends.processes import ProcessWorker
from shoal.backends.threads import ThreadWorker
from shoal.engine.workers import _built
from shoal.envs.functions import pickle_env_fns
from shoal.errors import StepTimeout
from shoal.support.deadline import NEVER, Deadline

NOW = Deadline.after(0)


class SlowEnv(CountEnv):
    """Its constructor waits for a file."""

    def __init__(self, gate: Path):
        eventually(gate.exists, seconds=60)
        super().__init__()


class Builder(ThreadWorker):
    """Owns two envs, and builds them when it is told to: no thread is started."""

    def __init__(self, index: int, building: int | None = None, done: bool = False):
        super().__init__(BlockSpec(index, 2 * index, 2 * index + 2, [CountEnv] * 2))
        self._building = building
        if done:
            self._main_until_built()

    def _main_until_built(self) -> None:
        self._attachment.put(None)
        self._main()


def late(*workers: Builder) -> StepTimeout:
    with pytest.raises(StepTimeout) as caught:
        _built(workers, NOW)
    return caught.value


def test_a_worker_that_has_not_begun_is_not_blamed_for_the_env_that_hangs() -> None:
    error = late(Builder(0), Builder(1, building=3))
    assert str(error).startswith("not all envs were built within 0.0 s: worker 1 is still building env 3; ")
    assert "worker 0 (envs 0 to 1) has not begun" in str(error)
    assert error.env_ids == [0, 1, 3]


def test_workers_that_are_ready_are_not_named() -> None:
    error = late(Builder(0, building=1), Builder(1, done=True), Builder(2, building=4))
    assert error.env_ids == [1, 4, 5]
    assert "worker 1 " not in str(error)


def test_all_have_begun_and_none_is_late() -> None:
    summaries = _built([Builder(0, done=True), Builder(1, done=True)], NOW)
    assert sorted(summaries) == [0, 1]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_worker_says_which_env_it_builds(kind: str, gate: Path) -> None:
    fns: list[Any] = [CountEnv, functools.partial(SlowEnv, gate)]
    worker: ThreadWorker | ProcessWorker
    if kind == "threads":
        worker = ThreadWorker(BlockSpec(0, 5, 7, fns))
    else:
        worker = ProcessWorker(BlockSpec(0, 5, 7, pickle_env_fns(fns, 5)), None, "forkserver")
    assert worker.building is None
    worker.launch(NEVER)
    try:
        eventually(lambda: worker.building == 6, seconds=60)
        assert worker.describe_late_start() == "worker 0 is still building env 6"
        gate.touch()
        assert len(worker.built(Deadline.after(60)).which) == 2
    finally:
        worker.close(Deadline.after(10))
