"""Where the engine could lose count, or a pool that is still good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv, GateEnv
from shoal.backends import registry


def test_a_restore_that_came_too_early_can_be_tried_again(gate: Path) -> None:
    with shoal.Pool([CountEnv, lambda: GateEnv(gate)], backend="threads") as pool:
        begun = pool.reset(seed=0).obs.tolist()
        saved = pool.snapshot()
        pool.send(np.full(2, 3))
        with pytest.raises(shoal.StepTimeout):
            pool.restore(saved, timeout=0.05)
        assert not pool.closed
        gate.touch()
        assert pool.restore(saved).obs.tolist() == begun


class _Interrupted:
    """The core's Lanes, of which one method is interrupted just after its work is done."""

    def __init__(self, lanes: Any, method: str):
        self._lanes, self._method = lanes, method

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lanes, name)
        if name != self._method:
            return found

        def interrupted(*args: Any) -> Any:
            found(*args)
            self._method = ""
            raise KeyboardInterrupt

        return interrupted

    def __enter__(self) -> None:
        self._lanes.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lanes.__exit__(*error)


@pytest.mark.parametrize(("method", "dtype"), [("send", "i8"), ("post", ">i8")], ids=["at once", "step by step"])
@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_an_interrupt_after_a_post_loses_no_lane(backend: str, method: str, dtype: str) -> None:
    with shoal.Pool(CountEnv, 3, backend=backend) as pool:
        pool.reset(seed=0)
        scheduler = pool._scheduler
        scheduler._core = _Interrupted(scheduler._core, method)
        with pytest.raises(KeyboardInterrupt):
            pool.send(np.zeros(3, dtype))
        assert pool.pending.tolist() == [0, 1, 2]
        assert pool.recv(timeout=10).obs[:, 2].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("method", "timeout"), [("recv", None), ("collect", 60)], ids=["at once", "step by step"])
@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_an_interrupt_after_a_wait_leaves_nothing_to_wait_for(backend: str, method: str, timeout: float | None) -> None:
    with shoal.Pool(CountEnv, 3, backend=backend) as pool:
        pool.reset(seed=0)
        waits: Any = pool._scheduler if method == "recv" else pool._scheduler._collector
        waits._core = _Interrupted(waits._core, method)
        pool.send(np.zeros(3, np.int64))
        with pytest.raises(KeyboardInterrupt):
            pool.recv(timeout)
        assert pool.pending.tolist() == []
        with pytest.raises(shoal.NothingPending):
            pool.recv(timeout=10)
        assert pool.step(np.zeros(3, np.int64)).obs[:, 2].tolist() == [2, 2, 2]


def test_handlers_of_the_exit_can_still_use_a_local_pool() -> None:
    script = """
import atexit, shoal
pools = []
atexit.register(lambda: print(len(pools[0].snapshot().envs), flush=True))
pools.append(shoal.Pool("CartPole-v1", 2, backend="processes"))
pools[0].reset(seed=0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_what_backends_can_do_is_known_without_their_packages() -> None:
    script = """
import sys
for name in ("jax", "numba", "ray", "mpi4py"):
    sys.modules[name] = None
import shoal
from shoal.backends import registry
print([name for name in registry.names() if registry.find(name).batched], shoal.Plan("jax", 1).backend)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['jax', 'batched', 'compiled', 'cuda'] jax\n", "")


@pytest.mark.parametrize("name", [None, "nonsense", ["serial"], "serial"])
def test_what_is_no_batched_backend(name: Any) -> None:
    assert not registry.is_batched(name)
