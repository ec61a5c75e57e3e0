"""Envs that fork and forget to end the child: the child ends where it comes back, and the parent's rows are its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv
from faults.kit import open_pool
from shoal.memory.slab import Slab
from shoal.support.copies_of_process import EXIT_CODE

pytestmark = pytest.mark.timeout(60)

TESTS = Path(__file__).parents[1]
CASES = [("serial", "forkserver", 3), ("threads", "forkserver", 2), ("processes", "forkserver", 3),
         ("processes", "spawn", 1), ("hybrid", "forkserver", 1)]  # fmt: skip
TURNS = [f"step {env} {how}" for env in (0, 3) for how in ("returns", "SystemExit", "KeyboardInterrupt")]


@pytest.mark.parametrize(("backend", "method", "parts"), CASES)
def test_a_forked_child_that_comes_back_is_ended(backend: str, method: str, parts: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, "-m", "faults.fork_script", backend, method, str(parts)]
    done = subprocess.run(
        command, cwd=TESTS, env={**os.environ, "FORK_LOG": str(log)}, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    single, *others = json.loads(done.stdout)
    for turn, name in enumerate(TURNS, 1):
        assert single[name] == [turn] * 4, "rows of the parent, as if it had not forked"
    assert single["steps"] == 4 * len(TURNS), "the child has stepped no other env"
    assert single["reset"] == single["call"] == [0] * 4
    # The close of env 2 comes after they were asked for.
    assert single["codes"] == [[EXIT_CODE] * 3, [EXIT_CODE] * 2, [], [EXIT_CODE] * 3]
    assert single["closes"] == 4, "the child has closed no other env"
    assert others == [[[[], [EXIT_CODE], [], []], [1] * 4], [1] * 4][: parts - 1], "constructors, and vector envs"
    for env in ("env 0", "env 3", "env 1", "the close of env 2"):
        assert f"shoal: {env} has forked, and its child" in done.stderr


def write_all(pool: shoal.Pool, array: Any) -> None:
    """In a fork of the caller: reads what is there, and writes what must not be seen."""
    assert array.tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 0, 1]]
    pool._slab.array("reward")[:] = 77
    array[:] = 77
    with pytest.raises(shoal.WrongProcess):
        pool.step(np.zeros(4, np.int64))
    with shoal.Pool(CountEnv, 2, backend="serial") as own:  # its own pools are no copies
        own.reset(seed=0)
        os._exit(0 if own.step(np.zeros(2, np.int64)).obs[:, 2].tolist() == [1, 1] else 9)


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_fork_of_the_caller_keeps_what_it_writes_to_itself(backend: str) -> None:
    with open_pool(CountEnv, backend=backend, copy=False) as pool:
        pool.reset(seed=0)
        batch = pool.step(np.zeros(4, np.int64))
        child = get_context("fork").Process(target=write_all, args=(pool, batch.obs))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert batch.obs.tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 0, 1]]
        assert batch.reward.tolist() == [1.0] * 4
        assert pool.step(np.zeros(4, np.int64)).obs[:, 2].tolist() == [2] * 4


FORKS = threading.Lock()


class HelperEnv(CountEnv):
    """Forks a helper in each step that ends by itself, as it should."""

    def step(self, action: Any) -> Any:
        # In turns: filelock, which torch imports, refuses forks of two threads at once.
        with FORKS:
            pid = os.fork()
            if not pid:
                os._exit(3)
        self.value = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # type: ignore[assignment]
        return super().step(action)


@pytest.mark.parametrize("backend", ["serial", "threads", "processes"])
def test_a_helper_that_ends_by_itself_is_left_alone(backend: str) -> None:
    with open_pool(HelperEnv, backend=backend) as pool:
        pool.reset(seed=0)
        for turn in (1, 2):
            assert pool.step(np.zeros(4, np.int64)).obs[:, 2].tolist() == [turn] * 4
        assert pool.get_attr("value") == [3] * 4


def test_a_slab_without_a_descriptor_is_not_shared_with_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(label: str, size: int) -> int:
        raise OSError("no descriptor")

    with open_pool(CountEnv, backend="serial") as pool:
        layout = pool._slab.layout
    monkeypatch.setattr("shoal.memory.slab.system.shared_memory", refuse)
    slab = Slab.create(layout, shared=False)
    pid = os.fork()
    if not pid:
        slab.array("reward")[:] = 77
        os._exit(0)
    os.waitpid(pid, 0)
    assert not slab.array("reward").any()
