"""Limits of time: step_timeout, and what is said to those who wait without one."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv, GateEnv
from faults.kit import RELEASE, DeedEnv, alive, assert_usable, eventually, open_pool
from shoal.engine import timeouts

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)
LIMITED = ("threads", "processes")
LIMIT = 1.5  # seconds for a step; a busy machine may keep a healthy env waiting for one of them


# ---- step_timeout --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", LIMITED)
@pytest.mark.parametrize("act", ["step", "send and recv", "reset"])
def test_the_env_that_takes_too_long_is_named(backend: str, act: str) -> None:
    """Only that one: its neighbour of the same worker, which has not had its turn, is not to blame."""
    pool = open_pool(DeedEnv, 6, backend, step_timeout=LIMIT)
    pool.reset(seed=0)
    pool.set_attr("deeds", [{"step": "hang", "reset": "hang"}], [4])
    acts = {
        "step": lambda: pool.step(np.zeros(6, np.int64)),
        "send and recv": lambda: (pool.send(np.zeros(6, np.int64)), pool.recv()),
        "reset": lambda: pool.reset(),
    }
    with pytest.raises(shoal.StepTimeout, match=rf"\[4\] take longer than step_timeout={LIMIT:g}") as caught:
        acts[act]()
    assert caught.value.env_ids == [4]
    with pytest.raises(shoal.StepTimeout) as caught:  # still: and again after the same time, not at once
        pool.recv()
    assert caught.value.env_ids == [4]
    RELEASE.set()
    pool.close(timeout=0.3)


class NapEnv(CountEnv):
    """Takes a moment for every step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.3 * LIMIT)
        return super().step(action)


@pytest.mark.parametrize("backend", LIMITED)
def test_the_limit_is_for_one_env_and_not_for_its_worker(backend: str) -> None:
    with open_pool(NapEnv, 6, backend, num_workers=1, step_timeout=LIMIT, on_error="restart") as pool:
        pool.reset(seed=0)
        batch = pool.step(np.zeros(6, np.int64))
        assert batch.obs[:, 2].tolist() == [1] * 6
        assert batch.info == {}


def test_a_thinking_learner_is_no_slow_env() -> None:
    """The time that the caller takes between two steps is not the envs'."""
    with open_pool(CountEnv, 4, step_timeout=LIMIT, on_error="restart") as pool:
        pool.reset(seed=0)
        time.sleep(1.1 * LIMIT)
        assert pool.step(ZEROS).info == {}
        pool.send(ZEROS)
        time.sleep(1.1 * LIMIT)
        assert pool.recv().info == {}


@pytest.mark.parametrize("backend", LIMITED)
def test_a_late_answer_after_a_step_timeout_is_taken_or_dropped(backend: str, gate: Path) -> None:
    with open_pool(functools.partial(GateEnv, gate), 4, backend, step_timeout=LIMIT) as pool:
        for take in (True, False):
            pool.reset(seed=0)
            pool.send([0, 0, 0, 3])
            with pytest.raises(shoal.StepTimeout, match=r"\[3\]"):
                pool.recv()
            gate.touch()
            if take:
                assert pool.recv().obs.tolist() == [[i, 0, 1] for i in range(4)]
            gate.unlink()
        gate.touch()
        assert_usable(pool)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_stopped_worker_is_replaced(start_method: str) -> None:
    """It does not even begin to answer; nothing that it could say would tell."""
    with open_pool(DeedEnv, 4, step_timeout=LIMIT, on_error="restart", start_method=start_method) as pool:
        pool.reset(seed=0)
        pid = pool.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        batch = pool.step(ZEROS)
        assert {lane: info["shoal_restart"]["cause"] for lane, info in batch.info.items()} == {
            2: "timed out",
            3: "timed out",
        }
        assert "did not begin to answer" in batch.info[2]["shoal_restart"]["message"]
        eventually(lambda: not alive(pid))
        assert pool.step(ZEROS).began.tolist() == [False, False, True, True]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_hangs_and_the_others_go_on(batch_size: int) -> None:
    with open_pool(DeedEnv, 6, num_workers=3, step_timeout=LIMIT, on_error="restart", batch_size=batch_size) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{"step": "hang"}], [5])
        pool.send(np.zeros(6, np.int64))
        told = {}
        until = time.monotonic() + 30
        while {4, 5} - set(told) and time.monotonic() < until:
            batch = pool.recv(timeout=20)
            told |= {lane: info["shoal_restart"]["cause"] for lane, info in batch.info.items()}
            pool.send(np.zeros(batch_size, np.int64), batch.env_id)
        assert told == {4: "timed out", 5: "timed out"}


def test_a_call_is_not_a_step(gate: Path) -> None:
    """A call has a timeout of its own; a long one does not make its worker a slow one."""
    with open_pool(functools.partial(GateEnv, gate), 4, step_timeout=LIMIT, on_error="restart", batch_size=1) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.StepTimeout, match="worker 1"):
            pool.call("wait", env_ids=[3], timeout=0.6 * LIMIT)
        pool.send([0], [2])
        with pytest.raises(shoal.StepTimeout):
            pool.recv(timeout=0.6 * LIMIT)
        gate.touch()
        assert pool.recv(timeout=20).info == {}


# ---- a word to whoever waits ---------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PATIENCE_NS", 300_000_000)


def wait_for_gate(pool: shoal.Pool) -> None:
    pool.step([0, 0, 0, 3])


WAITS = {
    "step": wait_for_gate,
    "send and recv": lambda pool: (pool.send([0, 0, 0, 3]), pool.recv()),
    "call": lambda pool: pool.call("wait", env_ids=[3]),
}


class SelfOpeningEnv(GateEnv):
    """Waits for the gate at action 3, or in `wait`, and opens it itself after a while."""

    def __init__(self, gate: Path):
        super().__init__(gate)
        self.own_gate = gate

    def take_a_rest(self) -> None:
        time.sleep(1.2)
        self.own_gate.touch()

    def step(self, action: Any) -> Any:
        if action == 3:
            self.take_a_rest()
        return super().step(action)

    def wait(self) -> None:
        self.take_a_rest()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_long_wait_says_once_what_it_waits_for(backend: str, wait: str, gate: Path) -> None:
    with open_pool(functools.partial(SelfOpeningEnv, gate), 4, backend) as pool:
        pool.reset(seed=0)
        with pytest.warns(shoal.SlowEnvWarning) as caught:
            WAITS[wait](pool)
        assert len(caught) == 1
        text = str(caught[0].message)
        assert "3" in text.partition("after")[0]
        assert "worker 1" in text
        assert "running env 3" in text
        assert "take_a_rest" in text, text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gate.unlink(missing_ok=True)
            WAITS[wait](pool)
        assert_usable(pool)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("limit", ["timeout", "step_timeout"])
def test_a_wait_with_a_limit_says_nothing(limit: str, gate: Path) -> None:
    options = {"step_timeout": 20.0} if limit == "step_timeout" else {}
    with open_pool(functools.partial(SelfOpeningEnv, gate), 4, **options) as pool:
        pool.reset(seed=0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pool.step([0, 0, 0, 3], timeout=None if options else 20.0)


@pytest.mark.usefixtures("impatient")
def test_a_long_start_of_a_new_worker_is_told(gate: Path) -> None:
    with open_pool(
        [CountEnv, CountEnv, CountEnv, functools.partial(SlowAgain, gate)], None, on_error="restart"
    ) as pool:
        pool.reset(seed=0)
        pid = pool.workers[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.warns(shoal.SlowEnvWarning, match="worker 1 is being started again"):
            pool.step(ZEROS)


class SlowAgain(CountEnv):
    """Takes its time when it is built for the second time."""

    def __init__(self, flag: Path):
        super().__init__()
        if flag.exists():
            time.sleep(1.0)
        flag.touch()


class NativeSleepEnv(CountEnv):
    """Sleeps in native code, which does not go on with its sleep after a signal, as Python's own does."""

    def step(self, action: Any) -> Any:
        left = ctypes.CDLL(None).sleep(2)
        observation, *rest, _ = super().step(action)
        return (observation, *rest, {"left": left})


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_asking_for_a_stack_does_not_cut_a_native_sleep_short(start_method: str) -> None:
    with open_pool(NativeSleepEnv, 2, start_method=start_method) as pool:
        pool.reset(seed=0)
        with pytest.warns(shoal.SlowEnvWarning, match=r"in step"):
            batch = pool.step(np.zeros(2, np.int64))
        assert [info["left"] for info in batch.info.values()] == [0, 0]
