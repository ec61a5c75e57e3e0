"""The matrix: every fault at every moment, by backend, start method and policy; the same rules for all.

Each cell is over in bounded time, names the env or its worker, and leaves the pool either closed or as good as new.
`make test` runs all faults and moments with the default start method and a diagonal of the others; `make faults` runs
the whole product, again and again.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import Any

import numpy as np
import pytest

import shoal
from faults.conftest import REPEATS
from faults.kit import ISOLATED, RELEASE, DeedEnv, assert_usable, open_pool
from shoal import Pool

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)
LIMIT = 3.0  # seconds, for what hangs; healthy envs keep it on a machine that has much else to do
PATIENCE = 30.0  # for what does not: to die takes longer on a busy machine

RAISING = ("raise", "raise several", "raise unpicklable")
DEADLY = ("kill", "segfault", "abort", "exit", "exit well")
FAULTS = (*RAISING, *DEADLY, "hang")
MOMENTS = ("constructor", "reset", "step", "call", "close")
METHODS = ("forkserver", "spawn", "fork")
POLICIES = ("raise", "restart")


def makes_sense(backend: str, fault: str, moment: str) -> bool:
    if backend not in ISOLATED and fault in DEADLY:
        return False  # it would end the tests
    if fault == "hang":
        return backend not in ("serial", "hybrid")  # nobody else could wait
    return True


def cells() -> list[Any]:
    found = []
    spread = itertools.count()
    for backend, fault, moment, policy in itertools.product(
        ("serial", "threads", "processes", "hybrid"), FAULTS, MOMENTS, POLICIES
    ):
        if not makes_sense(backend, fault, moment):
            continue
        methods = METHODS if backend in ISOLATED else ("forkserver",)
        if REPEATS == 1 and backend in ISOLATED:
            # One start method for each cell in turn would hide the default's faults: that one always, others sometimes.
            number = next(spread)
            methods = ("forkserver",) if number % 8 else ("forkserver", METHODS[1 + number // 8 % 2])
        found += [(backend, method, fault, moment, policy) for method in methods]
    return found


def start(backend: str, method: str, fault: str, moment: str, policy: str) -> Pool:
    fns: list[Any] = [DeedEnv] * 4
    if moment == "constructor":
        fns[3] = functools.partial(DeedEnv, {"constructor": fault})
    options: dict[str, Any] = {"on_error": policy, "start_method": method}
    if fault == "hang":
        options["start_timeout"] = 2.0 if moment == "constructor" else 30.0  # will be waited for to the end, or not
    if backend in ("threads", "processes"):
        options["step_timeout"] = limit(fault)
    pool = open_pool(fns, None, backend, **options)
    pool.reset(seed=0)
    pool.set_attr("deeds", [{moment: fault}], [3])
    return pool


def limit(fault: str) -> float:
    return LIMIT if fault == "hang" else PATIENCE


def act(pool: Pool, fault: str, moment: str) -> Any:
    if moment == "step":
        return pool.step(ZEROS)
    if moment == "reset":
        return pool.reset(seed=0)
    if moment == "call":
        return pool.call("answer", timeout=limit(fault))
    return pool.close(timeout=0.4)


@pytest.mark.parametrize(("backend", "method", "fault", "moment", "policy"), cells())
def test_matrix(backend: str, method: str, fault: str, moment: str, policy: str) -> None:
    parent = os.getpid()
    if moment == "constructor":
        with pytest.raises((shoal.EnvError, shoal.WorkerDied, shoal.StepTimeout)) as caught:
            start(backend, method, fault, moment, policy)
        assert_names_the_culprit(caught.value, expected_error(fault))
        return
    pool = start(backend, method, fault, moment, policy)
    try:
        batch = act(pool, fault, moment)
    except shoal.ShoalError as error:
        assert_names_the_culprit(error, expected_error(fault))
    else:
        assert moment == "close" or policy == "restart", "it was not told"
        if moment != "close":
            assert batch.info[3]["shoal_restart"]["cause"] == cause(fault)
    assert os.getpid() == parent
    assert_sound(pool, fault, moment, policy)


def expected_error(fault: str) -> type[Exception]:
    if fault in RAISING:
        return shoal.EnvError
    return shoal.WorkerDied if fault in DEADLY else shoal.StepTimeout


def cause(fault: str) -> str:
    return "raised" if fault in RAISING else "died" if fault in DEADLY else "timed out"


def assert_names_the_culprit(error: Exception, kind: type[Exception]) -> None:
    """By its env, or by its worker and the envs of that."""
    assert isinstance(error, kind)
    named = getattr(error, "env_id", None)
    assert named == 3 or 3 in getattr(error, "env_ids", [])
    assert "env" in str(error)
    assert "3" in str(error).partition("\n")[0]


def assert_sound(pool: Pool, fault: str, moment: str, policy: str) -> None:
    """Closed, with a reason, or usable."""
    RELEASE.set()  # a thread that hangs cannot be ended, only waited for
    died = fault in DEADLY or (fault == "hang" and pool.plan.backend == "processes")
    if moment == "close" or (died and policy == "raise" and fault in DEADLY):
        assert pool.closed
        with pytest.raises(shoal.PoolClosed):
            pool.step(ZEROS)
    elif fault == "hang" and pool.plan.backend == "processes" and (policy == "raise" or moment == "call"):
        pool.close(timeout=0.4)  # still hanging, and named; nothing else can be done with that env
        assert pool.closed
    else:
        pool.drop_pending(timeout=20)
        pool.set_attr("deeds", {}, [3])
        assert_usable(pool)
    pool.close()
