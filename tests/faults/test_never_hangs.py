"""Nobody ever waits for somebody who is gone: every fault is reported in bounded time, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv, GateEnv
from faults.kit import (
    ISOLATED,
    RELEASE,
    BigEnv,
    DeedEnv,
    InfoEnv,
    SeveralArgs,
    Traces,
    Unpicklable,
    alive,
    assert_usable,
    eventually,
    in_thread,
    open_pool,
)
from shoal import Pool
from shoal.backends.processes import ProcessWorker
from shoal.support import processes

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)
NOT_SERIAL = ("threads", "processes", "hybrid")

ACTS: dict[str, Callable[[Pool], Any]] = {
    "step": lambda p: p.step(ZEROS),
    "step with a timeout": lambda p: p.step(ZEROS, timeout=20),
    "send and recv": lambda p: (p.send(ZEROS), p.recv()),
    "reset": lambda p: p.reset(),
    "reset of one": lambda p: p.reset([3]),
    "call": lambda p: p.call("answer"),
    "call of one": lambda p: p.call("answer", env_ids=[3]),
    "render": lambda p: p.render(),
    "set_attr": lambda p: p.set_attr("value", 1),
}


def told(backend: str, deeds: dict[str, str], env_id: int = 3, **options: Any) -> Pool:
    """A pool that was reset, and one env of which shall do something terrible."""
    pool = open_pool(DeedEnv, backend=backend, **options)
    pool.reset(seed=0)
    pool.set_attr("deeds", [deeds], [env_id])
    return pool


def assert_closed_for(pool: Pool, reason: str) -> None:
    """It was closed, and says why to whoever goes on."""
    assert pool.closed
    for act in ACTS.values():
        with pytest.raises(shoal.PoolClosed, match=reason):
            act(pool)
    pool.close()


# ---- deaths --------------------------------------------------------------------------------------------------

# deed, exit code, words
DEATHS = [
    ("kill", -signal.SIGKILL, "SIGKILL.*memory"),
    ("segfault", -signal.SIGSEGV, "SIGSEGV"),
    ("abort", -signal.SIGABRT, "SIGABRT"),
    ("exit", 7, "exit code 7"),
    ("exit well", 0, "exit code 0"),
]
PLACES = {"step": "step", "send and recv": "step", "reset": "reset", "call": "call", "render": "render"}


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize(
    ("act", "deed", "code", "words"),
    [*(("step", *row) for row in DEATHS), *((act, *DEATHS[0]) for act in PLACES if act != "step")],
)
def test_a_worker_dies_at_work(backend: str, act: str, deed: str, code: int, words: str) -> None:
    pool = told(backend, {PLACES[act]: deed})
    with pytest.raises(shoal.WorkerDied, match=f"worker 1 .*envs 2 to 3.*{words}") as caught:
        ACTS[act](pool)
    assert (caught.value.worker, caught.value.env_ids, caught.value.exitcode) == (1, [2, 3], code)
    assert_closed_for(pool, "worker 1")


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_crash_tells_all_that_is_known(start_method: str) -> None:
    """The env, the memory, and where in Python it happened."""
    pool = told("processes", {"step": "really segfault"}, start_method=start_method)
    worker = pool._workers[1]
    assert isinstance(worker, ProcessWorker)
    eventually(lambda: worker.memory is not None)
    with pytest.raises(shoal.WorkerDied) as caught:
        pool.step(ZEROS)
    error = caught.value
    assert (error.exitcode, error.env_id, error.env_ids) == (-signal.SIGSEGV, 3, [2, 3])
    assert error.memory is not None
    assert 4 << 20 < error.memory < 4 << 30
    for part in ("SIGSEGV", "native code", "running env 3", "MiB when last seen", "Segmentation fault", "string_at"):
        assert part in str(error)
    assert "worker_main" in error.dump
    assert "worker_main" not in str(error), "Shoal's own frames are of no use to anybody"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), vars(copy)) == (str(error), vars(error))


@pytest.mark.parametrize("counted", [True, False])
def test_a_kill_for_lack_of_memory_is_told_from_others(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the control group's counter, where there is one; the counter is faked here, the kill is not."""
    kills = [3]
    monkeypatch.setattr(processes, "oom_kills", lambda: kills[0])
    pool = told("processes", {"step": "kill"})
    kills[0] += counted
    words = "processes here because memory ran out.*recycle_after" if counted else "if nobody else has sent it"
    with pytest.raises(shoal.WorkerDied, match=f"SIGKILL.*{words}"):
        pool.step(ZEROS)
    pool.close()


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("act", ACTS)
def test_a_worker_is_killed_while_idle(backend: str, act: str) -> None:
    pool = open_pool(DeedEnv, backend=backend)
    pool.reset(seed=0)
    pid = pool.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))
    eventually(lambda: pool.workers[1].state == "dead")
    with pytest.raises(shoal.WorkerDied, match=f"pid {pid}.*SIGKILL"):
        ACTS[act](pool)
    assert_closed_for(pool, "SIGKILL")


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_worker_is_killed_while_another_hangs(backend: str) -> None:
    """The living must not keep us from hearing of the dead, nor from ending."""
    with open_pool(DeedEnv, 6, backend, num_workers=3) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{}, {}, {"step": "hang"}, {}, {"step": "kill"}, {}])
        with pytest.raises(shoal.WorkerDied, match="worker 2"):
            pool.step(np.zeros(6, np.int64))


@pytest.mark.parametrize("backend", ISOLATED)
def test_all_workers_are_killed_at_once(backend: str) -> None:
    pool = open_pool(DeedEnv, 6, backend, num_workers=3)
    pool.reset(seed=0)
    for worker in pool.workers:
        if worker.pid is not None:
            os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(shoal.WorkerDied, match="SIGKILL"):
        pool.step(np.zeros(6, np.int64))
    assert pool.closed
    pool.close()


@pytest.mark.parametrize("backend", ISOLATED)
def test_close_after_a_death_that_nobody_saw(backend: str) -> None:
    pool = open_pool(DeedEnv, backend=backend)
    pool.reset()
    pid = pool.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    pool.close()
    assert pool.closed


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize(("deed", "code", "words"), DEATHS, ids=[row[0] for row in DEATHS])
def test_a_worker_dies_in_a_constructor(backend: str, deed: str, code: int, words: str) -> None:
    fns = [DeedEnv, DeedEnv, DeedEnv, functools.partial(DeedEnv, {"constructor": deed})]
    with pytest.raises(shoal.WorkerDied, match=f"worker 1 .*{words}"):
        open_pool(fns, None, backend)


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("deed", ["kill", "exit well"])
def test_a_worker_dies_in_close(backend: str, deed: str) -> None:
    pool = told(backend, {"close": deed})
    pool.close()
    assert pool.closed


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_deaths_with_every_start_method(start_method: str) -> None:
    pool = told("processes", {"step": "kill"}, start_method=start_method)
    with pytest.raises(shoal.WorkerDied, match="SIGKILL"):
        pool.step(ZEROS)
    assert_closed_for(pool, "SIGKILL")
    with open_pool(CountEnv, start_method=start_method) as pool:
        assert_usable(pool)


def test_a_batch_is_never_half_new() -> None:
    """What was received before a death stays as it was."""
    pool = told("processes", {})
    kept = pool.step(ZEROS).obs
    before = kept.tolist()
    pool.set_attr("deeds", [{"step": "kill"}], [3])
    with pytest.raises(shoal.WorkerDied):
        pool.step(ZEROS)
    assert kept.tolist() == before
    pool.close()


# ---- exceptions ----------------------------------------------------------------------------------------------

RAISES: list[tuple[str, type[BaseException], str]] = [
    ("raise", ValueError, "bad joint"),
    ("raise KeyError", KeyError, "no such fish"),
    ("raise several", SeveralArgs, "hip gave way at 3.5"),
    ("raise unpicklable", Unpicklable, "with a lock inside"),
]


@pytest.mark.parametrize(
    ("act", "deed", "error", "words"),
    [
        *((act, *row) for row in RAISES for act in ("step", "reset", "call")),
        *((act, *RAISES[0]) for act in ("send and recv", "render")),
    ],
)
def test_an_env_raises(backend: str, act: str, deed: str, error: type[BaseException], words: str) -> None:
    with told(backend, {PLACES[act]: deed}) as pool:
        with pytest.raises(error, match=f"(?s)env 3 raised in .*{words}.*Traceback") as caught:
            ACTS[act](pool)
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.env_id == 3
        assert PLACES[act] in caught.value.during
        pool.set_attr("deeds", {}, [3])
        assert_usable(pool)


@pytest.mark.parametrize(("deed", "error", "words"), RAISES, ids=[row[0] for row in RAISES])
def test_an_env_raises_in_its_constructor(backend: str, deed: str, error: type[BaseException], words: str) -> None:
    fns = [DeedEnv, DeedEnv, DeedEnv, functools.partial(DeedEnv, {"constructor": deed})]
    with pytest.raises(error, match=f"(?s)env 3 raised in .*constructor.*{words}"):
        open_pool(fns, None, backend).close()


@pytest.mark.parametrize("deed", [row[0] for row in RAISES])
def test_an_env_raises_in_close(backend: str, deed: str) -> None:
    pool = told(backend, {"close": deed}, env_id=2)
    with pytest.raises(shoal.EnvError, match="env 2 raised in close"):
        pool.close()
    assert pool.closed
    pool.close()


def test_what_an_env_raises_in_close_is_never_lost() -> None:
    """Also when the thread is done before anybody asks it."""
    for _ in range(50):
        pool = told("threads", {"close": "raise"}, env_id=0)
        with pytest.raises(ValueError, match="env 0 raised in close"):
            pool.close()


@pytest.mark.parametrize("deed", ["exit politely", "interrupt"])
@pytest.mark.parametrize("act", ["step", "reset", "call"])
def test_an_env_that_wants_to_leave(backend: str, act: str, deed: str) -> None:
    """By sys.exit() or an interrupt of its own: an error, or the end of its worker; in no case does anybody wait."""
    inline = (SystemExit, KeyboardInterrupt) if backend == "serial" else ()
    with told(backend, {PLACES[act]: deed}) as pool:
        with pytest.raises((shoal.EnvError, shoal.WorkerDied, *inline)):
            ACTS[act](pool)
        if pool.closed:
            assert_closed_for(pool, "exit code")
        else:
            for env in pool.local_envs:
                env.deeds = {}
            pool.drop_pending()
            pool.set_attr("deeds", {}, [3])
            assert_usable(pool)


@pytest.mark.parametrize("deed", ["exit politely", "interrupt"])
@pytest.mark.parametrize("where", ["constructor", "close"])
def test_an_env_that_wants_to_leave_at_the_start_or_end(backend: str, where: str, deed: str) -> None:
    fns = [DeedEnv, DeedEnv, DeedEnv, functools.partial(DeedEnv, {where: deed})]
    inline = (SystemExit, KeyboardInterrupt) if backend == "serial" else ()
    try:
        pool = open_pool(fns, None, backend)
        assert where == "close"
        pool.close()
        assert pool.closed
    except (shoal.EnvError, shoal.WorkerDied, *inline):
        pass


def test_an_interrupt_in_the_callers_own_block_can_be_gone_on_from() -> None:
    with told("serial", {"step": "interrupt"}) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.step(ZEROS)
        pool.local_envs[3].deeds = {}
        assert_usable(pool)


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("what", ["lock", "generator", "loads badly", "several args"])
def test_what_cannot_be_sent_is_named(backend: str, what: str) -> None:
    """An info, a result or an attribute that does not pickle, or that pickles and does not load."""
    with open_pool(InfoEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("what", what, [3])
        with pytest.raises(shoal.EnvError, match="env 3 "):
            pool.get_attr("thing")
        with pytest.raises(shoal.EnvError, match=r"env 3 .*'thing'"):
            pool.step(ZEROS)
        pool.set_attr("what", "", [3])
        assert_usable(pool)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_one_process_can_hand_out_anything(backend: str) -> None:
    with open_pool(InfoEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("what", "lock", [3])
        assert hasattr(pool.get_attr("thing", [3])[0], "acquire")
        assert hasattr(pool.step(ZEROS).info[3]["thing"], "acquire")


# ---- hanging -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_a_step_that_hangs(backend: str) -> None:
    pool = told(backend, {"step": "hang"})
    pool.send(ZEROS)
    for _ in range(2):
        with pytest.raises(shoal.StepTimeout, match=r"0.2 s") as caught:
            pool.recv(timeout=0.2)
        assert caught.value.env_ids[-1] == 3
        assert set(caught.value.env_ids) <= {2, 3}
    assert pool.pending.tolist() == [0, 1, 2, 3]
    RELEASE.set()
    pool.close(timeout=0.3)
    assert pool.closed


@pytest.mark.parametrize("backend", NOT_SERIAL)
@pytest.mark.parametrize(
    ("where", "act"),
    [
        ("step", lambda p: p.step(ZEROS, timeout=0.2)),
        ("step", lambda p: p.step(ZEROS, timeout=0)),
        ("reset", lambda p: p.reset(timeout=0.2)),
        ("reset", lambda p: p.reset([3], timeout=0.2)),
        ("call", lambda p: p.call("answer", timeout=0.2)),
        ("step", lambda p: (p.send(ZEROS), p.reset(timeout=0.2))),
        ("step", lambda p: (p.send(ZEROS), p.drop_pending(timeout=0.2))),
    ],
    ids=["step", "step, at once", "reset", "reset of one", "call", "reset while stepping", "drop_pending"],
)
def test_every_wait_has_a_deadline(backend: str, where: str, act: Callable[[Pool], Any]) -> None:
    pool = told(backend, {where: "hang"})
    with pytest.raises(shoal.StepTimeout):
        act(pool)
    RELEASE.set()
    pool.close(timeout=0.3)


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_a_constructor_that_hangs(backend: str) -> None:
    fns = [DeedEnv, DeedEnv, DeedEnv, functools.partial(DeedEnv, {"constructor": "hang"})]
    with pytest.raises(shoal.StepTimeout, match=r"0.5 s"):
        open_pool(fns, None, backend, start_timeout=0.5)


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_a_close_that_hangs(backend: str) -> None:
    pool = told(backend, {"close": "hang"})
    pool.close(timeout=0.3)
    assert pool.closed


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_worker_that_is_stopped(backend: str) -> None:
    pool = open_pool(CountEnv, backend=backend)
    pool.reset()
    pid = pool.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(shoal.StepTimeout):
        pool.step(ZEROS, timeout=0.2)
    pool.close(timeout=0.3)
    eventually(lambda: not alive(pid))


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_a_late_answer_is_dropped(backend: str, gate: Path) -> None:
    with open_pool(functools.partial(GateEnv, gate), backend=backend) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 0, 3])
        with pytest.raises(shoal.StepTimeout) as caught:
            pool.recv(timeout=0.1)
        assert caught.value.env_ids == [3]
        gate.touch()
        assert_usable(pool)


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_a_late_result_of_a_call_is_dropped(backend: str, gate: Path) -> None:
    with open_pool(functools.partial(GateEnv, gate), backend=backend) as pool:
        with pytest.raises(shoal.StepTimeout):
            pool.call("wait", env_ids=[3], timeout=0.1)
        gate.touch()
        assert pool.call("add", 1) == [2] * 4
        assert_usable(pool)


class NeighbourEnv(GateEnv):
    """Has something to say at every reset; waits for the gate at action 3; hangs at a reset with options."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if options:
            time.sleep(100)
        return super().reset(seed=seed)[0], {"fresh": True}


def test_an_answer_whose_neighbour_hangs(gate: Path) -> None:
    """Three envs of one worker, asked one by one: the first has answered when the second hangs in the same pass."""
    pool = open_pool(functools.partial(NeighbourEnv, gate), 3, num_workers=1)
    pool.reset(seed=0)
    pool.send([3], [2])
    pool.async_reset([0])
    pool.async_reset([1], options={"hang": True})
    gate.touch()
    with contextlib.suppress(shoal.StepTimeout):  # just as good: it is bounded
        assert pool.wait_reset([0], timeout=20).infos == {0: {"fresh": True}}
    pool.close(timeout=0.3)


def test_messages_larger_than_a_pipe_cross_each_other() -> None:
    """The worker is writing an info that nobody reads yet while we write an action, options or an argument."""
    big = bytes(4 << 20)
    for cross in (
        lambda p: p.send([big], [1]),
        lambda p: p.async_reset([1], options={"big": big}),
        lambda p: p.call("swallow", big, env_ids=[1]),
        lambda p: p.set_attr("value", big, [1]),
    ):
        with open_pool(BigEnv, 2, num_workers=1, batch_size=1) as pool:
            pool.reset([0, 1])
            pool.send([b""], [0])
            time.sleep(0.1)
            with in_thread(lambda p=pool, c=cross: c(p)) as outcome:
                pass
            assert not isinstance(outcome[0], BaseException), outcome
            assert len(pool.recv(timeout=10).info) <= 1


@pytest.mark.parametrize("backend", NOT_SERIAL)
def test_close_by_another_thread_ends_the_wait(backend: str) -> None:
    """A watchdog closes the pool: whoever waits on it hears of that, and does not wait for ever."""
    pool = told(backend, {"step": "hang"})
    with in_thread(lambda: pool.step(ZEROS)) as outcome:
        time.sleep(0.3)
        pool.close(timeout=0.3)
    assert isinstance(outcome[0], shoal.ShoalError), outcome


# ---- nothing is left -----------------------------------------------------------------------------------------


def once(backend: str) -> None:
    with open_pool(CountEnv, backend=backend, batch_size=2) as pool:
        pool.reset()
        pool.send(ZEROS)
        pool.recv()


def unstarted(backend: str) -> None:
    with pytest.raises(ValueError):
        open_pool([CountEnv, functools.partial(DeedEnv, {"constructor": "raise"})], None, backend)


def mismatched(backend: str) -> None:
    with pytest.raises(shoal.SpaceMismatch):
        open_pool(["CartPole-v1", CountEnv], None, backend)


def forgotten(backend: str) -> None:
    pool = open_pool(CountEnv, backend=backend)
    pool.reset()
    pool.send(ZEROS)
    del pool
    gc.collect()


def murdered(backend: str) -> None:
    with pytest.raises((shoal.WorkerDied, ValueError)):
        told(backend, {"step": "kill" if backend in ISOLATED else "raise"}).step(ZEROS)


@pytest.mark.parametrize("life", [once, unstarted, mismatched, forgotten, murdered])
def test_five_lives_leave_nothing(backend: str, life: Callable[[str], None]) -> None:
    life(backend)
    gc.collect()
    before = Traces.of_this_process()
    for _ in range(5):
        life(backend)
    gc.collect()
    eventually(lambda: Traces.of_this_process().beyond(before) == [], lambda: Traces.of_this_process().beyond(before))


def test_a_start_without_descriptors_is_undone() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = Traces.of_this_process()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        with pytest.raises(shoal.StartError, match="fewer workers"):
            open_pool(CountEnv, 64, num_workers=64)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()
    eventually(lambda: Traces.of_this_process().beyond(before) == [])
    once("processes")


def test_more_than_the_memory_is_refused_in_one_sentence(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "available_memory", lambda: 1000)
    words = r"^4 envs in 2 frames need [\d,]+ bytes of shared memory, and 1,000 are available: use fewer envs, [^\n]*$"
    with pytest.raises(shoal.StartError, match=words):
        open_pool(CountEnv, 4, backend)
