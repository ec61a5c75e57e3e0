"""Threads that use one pool at the same time: the second is refused, or gets the right answer; nobody ever waits.

Each test lasts SHOAL_THREAD_SECONDS, two by default. `make faults` runs them for half a minute each.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium.error
import numpy as np
import pytest

import shoal
from envs import CountEnv
from faults.kit import assert_usable, open_pool
from shoal import Pool, native

SECONDS = float(os.environ.get("SHOAL_THREAD_SECONDS", "2"))
pytestmark = pytest.mark.timeout(60 + 2 * SECONDS)

# What a thread may be told: another one is inside, or has left the pool in another state than this one expects.
REFUSALS = (
    shoal.ConcurrentUse, shoal.CallPending, shoal.NothingPending, shoal.ResetNeeded,
    gymnasium.error.AlreadyPendingCallError, gymnasium.error.NoAsyncCallError,
)  # fmt: skip
CLOSED = (shoal.PoolClosed, gymnasium.error.ClosedEnvironmentError, *REFUSALS)
Act = Callable[[Any, random.Random], Any]


# ---- what they do --------------------------------------------------------------------------------------------


def chosen(rng: random.Random) -> Any:
    return np.array([rng.randrange(4) for _ in range(4)])


def check_own(actions: Any, obs: Any, reward: Any) -> None:
    """Each row is the answer to this very action, or the first one of an episode."""
    for row, action in enumerate(actions.tolist()):
        assert reward[row] == (obs[row][2] + 100.0 * action if obs[row][2] else 0.0), (actions, obs, reward)


def check_any(obs: Any, reward: Any) -> None:
    """Each row is whole: the answer to some action."""
    assert ((reward - obs[:, 2]) % 100 == 0).all(), (obs, reward)


def step(pool: Pool, rng: random.Random) -> None:
    actions = chosen(rng)
    batch = pool.step(actions)
    check_own(actions, batch.obs, batch.reward)


def exchange(pool: Pool, rng: random.Random) -> None:
    assert len(pool.exchange(chosen(rng)).ids) == 4


def recv(pool: Pool, rng: random.Random) -> None:
    batch = pool.recv(min_batch=rng.choice([None, 1]))
    check_any(batch.obs, batch.reward)


def reset(pool: Pool, rng: random.Random) -> None:
    seed = rng.randrange(100)
    assert pool.reset(seed=seed).obs.tolist() == [[seed + i, 0, 0] for i in range(4)]


def roll(pool: Pool, rng: random.Random) -> None:
    actions = chosen(rng)
    found = pool.rollout(lambda obs: actions, 3)
    assert found.actions.tolist() == [actions.tolist()] * 3
    for t in range(3):
        check_own(actions, found.obs[t + 1], found.reward[t])


def call(pool: Pool, rng: random.Random) -> None:
    value = rng.random()
    assert pool.apply(return_it, value) == [value] * 4


def return_it(env: Any, value: float) -> float:
    return value


def set_attr(pool: Pool, rng: random.Random) -> None:
    with pool.turn:
        values = [rng.random() for _ in range(4)]
        pool.set_attr("value", values)
        assert pool.get_attr("value") == values


POOL: dict[str, Act] = {
    "step": step,
    "exchange": exchange,
    "send": lambda pool, rng: pool.send(chosen(rng)),
    "send to some": lambda pool, rng: pool.send([1], [rng.randrange(4)]),
    "recv": recv,
    "wait": lambda pool, rng: pool.wait(min_batch=1),
    "reset": reset,
    "reset of one": lambda pool, rng: pool.reset([rng.randrange(4)]),
    "async_reset": lambda pool, rng: pool.async_reset(),
    "wait_reset": lambda pool, rng: pool.wait_reset(),
    "drop_pending": lambda pool, rng: pool.drop_pending(),
    "call": call,
    "set_attr": set_attr,
    "render": lambda pool, rng: pool.render(),
    "rollout": roll,
    "last_answer": lambda pool, rng: pool.last_answer(),
    "snapshot": lambda pool, rng: pool.restore(pool.snapshot()),
    "look": lambda pool, rng: (pool.stats(), pool.workers, pool.pending, repr(pool), pool.closed),
}


def vector_step(envs: Any, rng: random.Random) -> None:
    actions = chosen(rng)
    obs, reward, *_ = envs.step(actions)
    check_own(actions, obs, reward)


def vector_reset(envs: Any, rng: random.Random) -> None:
    seed = rng.randrange(100)
    assert envs.reset(seed=seed)[0].tolist() == [[seed + i, 0, 0] for i in range(4)]


def step_wait(envs: Any, rng: random.Random) -> None:
    obs, reward, *_ = envs.step_wait()
    check_any(obs, reward)


VECTOR_ENV: dict[str, Act] = {
    "step": vector_step,
    "reset": vector_reset,
    "reset_async": lambda envs, rng: envs.reset_async(),
    "reset_wait": lambda envs, rng: envs.reset_wait(),
    "step_async": lambda envs, rng: envs.step_async(chosen(rng)),
    "step_wait": step_wait,
    "call": lambda envs, rng: envs.call("length"),
    "call_wait": lambda envs, rng: envs.call_wait(),
    "set_attr": lambda envs, rng: envs.set_attr("value", 1),
}


# ---- at the same time ----------------------------------------------------------------------------------------


class Crowd:
    """Three threads, each with the methods in an order of its own, until `stop` or a failure."""

    def __init__(self, used: Any, acts: dict[str, Act], allowed: tuple[type[BaseException], ...] = REFUSALS):
        self._used, self._acts, self._allowed = used, acts, allowed
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.done: Counter[str] = Counter()
        self.doing = [""] * 3
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(3)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.stop.is_set():
            self.doing[number] = name = rng.choice(list(self._acts))
            try:
                self._acts[name](self._used, rng)
                self.done[name] += 1
            except self._allowed:
                continue
            except BaseException as error:
                self.failures.append(error)
                self.stop.set()

    def leave(self, seconds: float, least: int = 0) -> None:
        """Let them go on for so long, and until so many calls were answered; then see that none waits, or got a wrong
        answer."""
        self.stop.wait(seconds)
        while self.done.total() < least and not self.stop.wait(0.1):
            pass  # on a busy machine it takes longer; pytest's timeout is for what hangs
        self.stop.set()
        until = time.monotonic() + 25
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        waiting = [what for what, thread in zip(self.doing, self._threads, strict=True) if thread.is_alive()]
        if self.failures:
            raise self.failures[0]
        assert not waiting, f"still waits in {waiting}"


def test_any_method_from_three_threads(backend: str) -> None:
    with open_pool(CountEnv, 4, backend, copy=True) as pool:
        pool.reset(seed=0)
        crowd = Crowd(pool, POOL)
        crowd.leave(SECONDS, least=4)
        pool.drop_pending()
        assert_usable(pool)


def test_any_method_of_a_vector_env_from_three_threads(backend: str) -> None:
    with shoal.make(CountEnv, 4, backend=backend, num_workers=2) as envs:
        envs.reset(seed=0)
        crowd = Crowd(envs, VECTOR_ENV)
        crowd.leave(SECONDS / 2, least=4)
        envs.pool.drop_pending()
        assert_usable(envs.pool)


@pytest.mark.parametrize("face", ["pool", "vector env"])
def test_a_close_while_three_threads_are_at_it(backend: str, face: str) -> None:
    pool: Any = open_pool(CountEnv, 4, backend, copy=True) if face == "pool" else None
    envs = pool or shoal.make(CountEnv, 4, backend=backend, num_workers=2)
    envs.reset(seed=0)
    crowd = Crowd(envs, POOL if pool else VECTOR_ENV, CLOSED)
    time.sleep(0.2)
    envs.close()
    crowd.leave(0.1)


def test_dropping_what_another_thread_waits_for(backend: str) -> None:
    with open_pool(CountEnv, 4, backend, copy=True) as pool:
        pool.reset(seed=0)
        crowd = Crowd(pool, {"step": step, "drop_pending": POOL["drop_pending"]})
        crowd.leave(SECONDS / 4)
        assert_usable(pool)


# ---- whose turn it is ----------------------------------------------------------------------------------------


def test_a_turn_is_one_threads_as_often_as_it_likes() -> None:
    turn = native.Turn(lambda: shoal.ConcurrentUse("not yours"))
    seen: list[str] = []

    def try_it() -> None:
        try:
            with turn:
                seen.append("in")
        except shoal.ConcurrentUse as error:
            seen.append(str(error))

    def other() -> None:
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()

    with turn:
        with turn:
            other()
        other()
        with pytest.raises(ZeroDivisionError), turn:
            raise ZeroDivisionError
        other()
    other()
    assert seen == ["not yours"] * 3 + ["in"]


def test_a_turn_over_several_calls(backend: str) -> None:
    """What comes between them, comes from nobody else."""
    with open_pool(CountEnv, 4, backend) as pool, pool.turn:
        pool.reset(seed=0)
        thread = threading.Thread(target=lambda: pool.closed or refused.append(tell(pool)))
        refused: list[str] = []
        thread.start()
        thread.join()
        pool.send([0, 1, 2, 3])
        assert pool.recv().reward.tolist() == [1.0, 101.0, 201.0, 301.0]
    assert refused == ["ConcurrentUse"]


def tell(pool: Pool) -> str:
    try:
        pool.reset()
    except shoal.ShoalError as error:
        return type(error).__name__
    return "in"
