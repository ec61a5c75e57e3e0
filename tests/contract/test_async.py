"""Batches of some envs: what is taken when, how long an env can wait for its turn, and halves that take turns."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv, GateEnv
from faults.kit import eventually
from shoal import Pool, StepTimeout

pytestmark = pytest.mark.timeout(60)
AWAY = ["threads", "processes"]  # who steps while the caller does something else


def recv_by_and_by(pool: Pool, min_batch: int) -> Any:
    """What recv gives once enough envs have answered; on a busy machine that takes a while."""
    found: list[Any] = []

    def received() -> bool:
        with contextlib.suppress(StepTimeout):
            found.append(pool.recv(timeout=0.01, min_batch=min_batch))
        return bool(found)

    eventually(received, seconds=30)
    return found[0]


# ---- fewer after a deadline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize("backend", AWAY)
def test_after_the_timeout_fewer_will_do(backend: Any, order: Any, gate: Path) -> None:
    with Pool(
        functools.partial(GateEnv, str(gate)), 4, backend=backend, num_workers=4, batch_size=4, order=order
    ) as pool:
        pool.reset(seed=0)
        pool.send([0, 1, 3, 2])  # env 2 waits at the gate
        with pytest.raises(StepTimeout):
            pool.recv(timeout=0.2)
        if order == "fifo":
            batch = recv_by_and_by(pool, min_batch=2)
            assert batch.env_id.tolist() == [0, 1]  # what comes after env 2 waits for it
            with pytest.raises(StepTimeout):
                pool.recv(timeout=0.01, min_batch=1)
        else:
            with pytest.raises(StepTimeout):
                pool.recv(timeout=0.01, min_batch=4)
            batch = recv_by_and_by(pool, min_batch=3)
            assert batch.env_id.tolist() == [0, 1, 3]
            assert batch.reward.tolist() == [1.0, 101.0, 201.0]
        gate.touch()
        rest = pool.recv(timeout=10, min_batch=1)
        assert rest.env_id.tolist() == ([2, 3] if order == "fifo" else [2])
        assert not len(pool.pending)


def test_fewer_will_do_where_fewer_were_sent_to(backend: Any) -> None:
    with Pool(CountEnv, 5, backend=backend, num_workers=1 if backend == "serial" else 2, batch_size=3) as pool:
        pool.reset(seed=0)
        pool.send([1, 2], [4, 0])
        with pytest.raises(shoal.NothingPending):
            pool.recv()
        assert pool.recv(min_batch=2).env_id.tolist() == [0, 4]
        with pytest.raises(shoal.NothingPending):
            pool.recv(min_batch=1)
        pool.send(np.zeros(5, int))
        assert len(pool.recv(min_batch=1).env_id) == 3  # a whole batch, if there is time
        for wrong in (0, 4, 1.5, "two"):
            with pytest.raises(ValueError, match="min_batch"):
                pool.recv(min_batch=wrong)  # type: ignore[arg-type]


# ---- fairness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize(("envs", "batch"), [(7, 2), (8, 1), (5, 4)])
def test_no_env_starves(envs: int, batch: int, order: Any) -> None:
    """An env that is done is received before all that are done later: within envs / batch receives."""
    bound = -(-envs // batch)
    with Pool(CountEnv, envs, backend="processes", num_workers=2, batch_size=batch, order=order) as pool:
        pool.async_reset(seed=0)
        answered, requested = (pool._slab.array(name) for name in ("answered", "requested"))
        done_since: dict[int, int] = {}
        for turn in range(1, 400):
            for env_id in np.flatnonzero((answered == requested) & (requested > 0)).tolist():
                if env_id in pool.pending:
                    done_since.setdefault(env_id, turn)
            taken = pool.recv().env_id
            for env_id in taken.tolist():
                assert turn - done_since.pop(env_id, turn) < bound
            pool.send(np.zeros(batch, int), taken)


# ---- halves that take turns --------------------------------------------------------------------------------------


def test_two_halves_in_flight_give_the_same_as_one_whole() -> None:
    """Double buffering: the policy works on one half while the other half steps."""
    with (
        Pool(CountEnv, 6, backend="processes", num_workers=2, batch_size=3, order="fifo", copy=True) as halves,
        Pool(CountEnv, 6, backend="serial", copy=True) as whole,
    ):
        halves.async_reset(seed=0)
        expected = whole.reset(seed=0).obs
        for turn in range(12):
            actions = (np.arange(6) + turn) % 3
            for half in ([0, 1, 2], [3, 4, 5]):
                batch = halves.recv()
                assert batch.env_id.tolist() == half
                assert (batch.obs == expected[half]).all()
                halves.send(actions[half], half)
                assert len(halves.pending) == 6  # both are under way
            expected = whole.step(actions).obs
