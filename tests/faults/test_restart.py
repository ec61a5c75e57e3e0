"""on_error="restart": an env that is lost is replaced, its lane says so once, and nobody else notices."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv
from faults.kit import ISOLATED, DeedEnv, alive, eventually, open_pool
from shoal import Pool
from shoal.engine import restarts
from shoal.support import processes
from shoal.support.deadline import Deadline

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)
BACKENDS = ("serial", "threads", "processes", "hybrid")
MODES = ("next_step", "same_step", "disabled")

# deed, cause, words of the message
RAISED = ("raise", "raised", "env 3 raised in step: ValueError: bad joint")
DIED = [
    ("kill", "died", "worker 1 .* SIGKILL.*running env 3"),
    ("segfault", "died", "SIGSEGV"),
    ("exit well", "died", "exit code 0"),
    ("hang", "timed out", "env 3 took longer than step_timeout=1.5"),
]
LOSSES = [*((backend, *RAISED) for backend in BACKENDS), *((backend, *row) for backend in ISOLATED for row in DIED)]
LOSSES = [loss for loss in LOSSES if loss[:2] != ("hybrid", "hang")]  # the caller's own envs cannot be timed out


def derived(seed: int, count: int) -> int:
    """What the documentation says about the seed of a new env."""
    return int(np.random.SeedSequence([seed, count]).generate_state(1)[0])


def restarting(backend: str, env: Any = DeedEnv, num_envs: int | None = 4, **options: Any) -> Pool:
    """A pool that restarts. Its envs were reset with seeds 0, 1, ..."""
    pool = open_pool(env, num_envs, backend, on_error="restart", **options)
    pool.reset(seed=0)
    return pool


def limits(deed: str) -> dict[str, Any]:
    """What a hanging env needs. On a busy machine a healthy env may wait for a while."""
    return {"step_timeout": 1.5} if deed == "hang" else {}


def kill_worker(pool: Pool, index: int = 1) -> None:
    pid = pool.workers[index].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))


def reports(batch: Any) -> dict[int, tuple[str, int]]:
    """Cause and count of each report, by env."""
    found = {env_id: info.get("shoal_restart") for env_id, info in batch.info.items()}
    return {env_id: (one["cause"], one["count"]) for env_id, one in found.items() if one}


def step_on(pool: Pool, seen: list[Any]) -> None:
    """Step, and keep the reports, until something is raised."""
    for _ in range(20):
        seen.append(reports(pool.step(ZEROS)))


# ---- a step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("backend", "deed", "cause", "words"), LOSSES)
def test_an_env_is_lost_in_a_step(backend: str, mode: str, deed: str, cause: str, words: str) -> None:
    with restarting(backend, autoreset=mode, **limits(deed)) as pool:
        pool.step(ZEROS)
        pool.set_attr("deeds", [{"step": deed}], [3])
        batch = pool.step(ZEROS)
        assert reports(batch) == {3: (cause, 1)}
        assert re.search(words, batch.info[3]["shoal_restart"]["message"])
        assert batch.truncated.tolist() == [False, False, False, True]
        assert not batch.terminated.any()
        assert batch.reward.tolist() == [2.0, 2.0, 2.0, 0.0]
        assert batch.obs[:3].tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]
        new = [derived(3, 1), 0, 0]
        if mode == "same_step":
            assert batch.final_obs[3].tolist() == [3, 0, 1]
            assert batch.obs[3].tolist() == new
            assert batch.began.tolist() == [False, False, False, True]
        else:
            assert batch.obs[3].tolist() == [3, 0, 1]
            assert batch.episode_length[3] == 1
            if mode == "disabled":
                with pytest.raises(shoal.ResetNeeded, match="env 3"):
                    pool.step(ZEROS)
                batch = pool.reset([3])
            else:
                batch = pool.step(ZEROS)
            assert batch.obs[-1].tolist() == new
            assert bool(batch.began[-1])
            assert 3 not in reports(batch)
        batch = pool.step(ZEROS)
        assert 3 not in reports(batch)
        assert batch.obs[[0, 1, 3], 2].tolist() == ([4, 4, 1] if mode == "next_step" else [3, 3, 1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ISOLATED)
def test_a_worker_dies_between_steps(backend: str, mode: str) -> None:
    """All its envs are lost, and say so at their next step; those of the other worker never notice."""
    with restarting(backend, autoreset=mode) as pool:
        pool.step(ZEROS)
        kill_worker(pool)
        batch = pool.step(ZEROS)
        assert reports(batch) == {2: ("died", 1), 3: ("died", 1)}
        assert batch.truncated.tolist() == [False, False, True, True]
        assert batch.obs[:2].tolist() == [[0, 0, 2], [1, 0, 2]]
        if mode == "disabled":
            pool.reset([2, 3])
        elif mode == "next_step":
            pool.step(ZEROS)
        batch = pool.step(ZEROS)
        assert reports(batch) == {}
        assert batch.obs[2:].tolist() == [[derived(2, 1), 0, 1], [derived(3, 1), 0, 1]]


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_report_that_is_dropped_does_not_hide_a_later_loss(backend: str) -> None:
    """An env raises; before anybody has seen the report of it, its worker dies: the last loss is what is told."""
    with restarting(backend, batch_size=1, order="fifo") as pool:
        pool.set_attr("deeds", [{"step": "take a while"}, {"step": "raise"}], [2, 3])
        pool.send([0], [3])
        pool.drop_pending([3])
        pool.send([0, 0], [2, 3])  # the answer of env 3 would report it
        with pytest.raises(shoal.StepTimeout):
            pool.recv(timeout=0)  # env 2 is the first to be received
        requested, answered = (pool._slab.array(name) for name in ("requested", "answered"))
        eventually(lambda: bool((requested == answered).all()))
        kill_worker(pool)
        eventually(lambda: bool(pool._workers.dead()))
        pool.drop_pending([3])
        assert reports(pool.recv()) == {}
        pool.send([0], [3])
        assert reports(pool.recv()) == {3: ("died", 2)}


@pytest.mark.parametrize("backend", ISOLATED)
def test_an_observation_that_was_dropped_is_never_repeated(backend: str) -> None:
    """Nobody has seen an env's first observation, and a reset of another env does not change that."""
    with open_pool(DeedEnv, backend=backend, on_error="restart", autoreset="disabled", batch_size=1) as pool:
        kill_worker(pool)
        pool.async_reset([2], seed=5)
        pool.drop_pending([2])
        pool.reset([0], seed=0)  # brings all lanes into one frame
        pool.send([0], [2])
        batch = pool.recv()
        assert reports(batch) == {2: ("died", 1)}
        assert batch.began.tolist() == [True]
        assert batch.truncated.tolist() == [False]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_with_every_start_method(start_method: str) -> None:
    with restarting("processes", start_method=start_method) as pool:
        for count in (1, 2, 3):
            kill_worker(pool)
            assert reports(pool.step(ZEROS)) == {2: ("died", count), 3: ("died", count)}
            assert pool.step(ZEROS).obs[2:].tolist() == [[derived(2, count), 0, 0], [derived(3, count), 0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_again_and_again_give_the_same_trajectories(backend: str) -> None:
    """With the same faults at the same steps, two runs are the same, whatever the backend."""

    def run() -> list[Any]:
        seen = []
        with restarting(backend, max_restarts=100, restart_window=0.01) as pool:
            for turn in range(20):
                if turn % 3 == 0:
                    pool.set_attr("deeds", [{"step": "raise"}], [turn % 4])
                batch = pool.step(np.arange(4) % 3)
                seen.append([batch.obs.tolist(), batch.reward.tolist(), batch.truncated.tolist(), reports(batch)])
        return seen

    first = run()
    assert run() == first
    assert sum(len(row[3]) for row in first) == 7


# ---- a reset -------------------------------------------------------------------------------------------------


class FragileEnv(DeedEnv):
    """Fails in its first reset of a process, or of a file's life."""

    def __init__(self, flag: Path, deed: str):
        super().__init__()
        self.flag, self.deed = flag, deed

    def reset(self, **kwargs: Any) -> Any:
        if not self.flag.exists():
            self.flag.touch()
            self.deeds = {"reset": self.deed}
        return super().reset(**kwargs)


@pytest.mark.parametrize(
    ("backend", "deed", "cause"), [(b, "raise", "raised") for b in BACKENDS] + [(b, "kill", "died") for b in ISOLATED]
)
def test_an_env_is_lost_in_a_reset(backend: str, deed: str, cause: str, tmp_path: Path) -> None:
    """It is reset once more, with another seed; nothing was cut short, so nothing is truncated."""
    fns = [DeedEnv] * 3 + [functools.partial(FragileEnv, tmp_path / "flag", deed)]
    with open_pool(fns, None, backend, on_error="restart") as pool:
        batch = pool.reset(seed=0)
        assert reports(batch)[3] == (cause, 1)
        assert not batch.truncated.any()
        assert batch.began.all()
        assert batch.obs[3].tolist() == [derived(3, 1), 0, 0]
        assert batch.obs[:2].tolist() == [[0, 0, 0], [1, 0, 0]]
        batch = pool.step(ZEROS)
        assert batch.obs[3].tolist() == [derived(3, 1), 0, 1]


@pytest.mark.parametrize("backend", ISOLATED)
def test_an_explicit_reset_after_a_loss_takes_the_callers_seed(backend: str) -> None:
    with restarting(backend) as pool:
        kill_worker(pool)
        batch = pool.reset(seed=100)
        assert batch.obs[:, 0].tolist() == [100, 101, 102, 103]
        assert reports(batch) == {2: ("died", 1), 3: ("died", 1)}
        assert not batch.truncated.any()
        assert reports(pool.step(ZEROS)) == {}


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_loss_at_the_end_of_an_episode_begins_the_next(backend: str) -> None:
    """The end was delivered: the next answer is the first of a new episode, and not truncated once more."""
    with restarting(backend) as pool:
        for _ in range(5):
            batch = pool.step(ZEROS)
        assert batch.terminated.all()
        kill_worker(pool)
        batch = pool.step(ZEROS)
        assert not batch.truncated.any()
        assert batch.began.all()
        assert reports(batch) == {2: ("died", 1), 3: ("died", 1)}
        assert batch.obs[2:].tolist() == [[derived(2, 1), 0, 0], [derived(3, 1), 0, 0]]


@pytest.mark.parametrize("backend", ISOLATED)
def test_without_a_seed_there_is_none(backend: str) -> None:
    with open_pool(DeedEnv, 4, backend, on_error="restart") as pool:
        pool.reset()
        kill_worker(pool)
        pool.step(ZEROS)
        pool.step(ZEROS)
        assert pool.get_attr("seed_given")[2:] == [-1, -1]


# ---- partial batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize("backend", ISOLATED)
def test_partial_batches_under_fire(backend: str, order: str) -> None:
    """Each lane's stream is whole: one step after the other, cut only where it says so."""
    num_envs, workers = 7, 3
    last: dict[int, list[int]] = {}
    counts = [0] * num_envs
    seeds = {env_id: {env_id} for env_id in range(num_envs)}  # what each may have been reset with
    with open_pool(DeedEnv, num_envs, backend, num_workers=workers, batch_size=2, order=order,
                   on_error="restart", max_restarts=1000, restart_window=0.01) as pool:  # fmt: skip
        pool.async_reset(seed=0)
        turn = kills = 0
        while min(counts[5:]) < 3:
            turn += 1
            batch = pool.recv(timeout=20)
            for row, env_id in enumerate(batch.env_id.tolist()):
                seed, episode, step = batch.obs[row].tolist()
                report = batch.info.get(env_id, {}).get("shoal_restart")
                if report:  # one for all losses since the last answer
                    assert report["count"] > counts[env_id]
                    counts[env_id] = report["count"]
                    # A reset whose worker died before it could begin is carried out with the seed that was asked for.
                    own = set() if env_id in last else {env_id}
                    seeds[env_id] = own | {derived(env_id, counts[env_id])}
                if batch.began[row]:
                    assert step == 0
                    assert seed in seeds[env_id]
                    seeds[env_id] = {seed}
                elif batch.truncated[row]:
                    assert report
                    assert [seed, episode, step] == last[env_id]
                else:
                    assert [seed, episode, step - 1] == last[env_id]
                last[env_id] = [seed, episode, step]
            pool.send(np.zeros(2, np.int64), batch.env_id)
            if turn % 20 == 10 and min(counts[5:]) >= kills:  # both have told of the last time
                kills += 1
                pid = pool.workers[2].pid
                assert pid is not None
                with contextlib.suppress(ProcessLookupError):  # it was lost once more, and the pool has not heard of it
                    os.kill(pid, signal.SIGKILL)
    assert counts[:5] == [0] * 5


def test_others_go_on_while_a_worker_is_away(gate: Path) -> None:
    """Starting a simulator may take minutes; whoever needs only the others need not wait for that."""
    slow = functools.partial(SlowStart, gate)
    with open_pool([CountEnv, CountEnv, slow, slow], None, batch_size=1, on_error="restart") as pool:
        gate.unlink(missing_ok=True)
        pool.reset(seed=0)
        kill_worker(pool)
        pool.send([0, 0, 0, 0])
        seen: set[int] = set()
        turns = 0
        while turns < 20:
            turns += pool.workers[1].state == "restarting"  # as soon as the pool has heard of it
            batch = pool.recv(timeout=10)
            seen |= set(batch.env_id.tolist())
            pool.send([0], batch.env_id)
        assert seen == {0, 1}
        assert pool.workers[1].state == "restarting"
        gate.touch()
        while seen != {0, 1, 2, 3}:
            batch = pool.recv(timeout=10)
            seen |= set(batch.env_id.tolist())
            if batch.env_id[0] < 2:
                pool.send([0], batch.env_id)
            else:
                assert reports(batch) == {int(batch.env_id[0]): ("died", 1)}


class SlowStart(CountEnv):
    """Its first start is quick, the second one waits for the gate."""

    def __init__(self, gate: Path):
        super().__init__()
        first = gate.with_name(f"first-{os.getpid()}-{id(self)}")
        starts = len(list(gate.parent.glob("first-*")))
        first.touch()
        while starts >= 2 and not gate.exists():
            time.sleep(0.01)


@pytest.mark.parametrize("backend", ISOLATED)
def test_close_while_a_worker_is_away(backend: str, gate: Path) -> None:
    slow = functools.partial(SlowStart, gate)
    pool = open_pool([CountEnv, CountEnv, slow, slow], None, backend, on_error="restart", batch_size=1)
    pool.reset(seed=0)
    kill_worker(pool)
    pool.send([0, 0, 0, 0])
    while pool.workers[1].state != "restarting":
        pool.send([0], pool.recv(timeout=10).env_id)
    pool.close()
    assert pool.closed


def test_a_wait_for_a_worker_that_is_away_has_a_deadline(gate: Path) -> None:
    slow = functools.partial(SlowStart, gate)
    with open_pool([CountEnv, CountEnv, slow, slow], None, on_error="restart") as pool:
        pool.reset(seed=0)
        kill_worker(pool)
        with pytest.raises(shoal.StepTimeout) as caught:
            pool.step(ZEROS, timeout=0.3)
        assert caught.value.env_ids == [2, 3]
        with pytest.raises((shoal.StepTimeout, shoal.CallPending)):
            pool.call("pid", timeout=0.3)
        gate.touch()
        assert reports(pool.recv(timeout=20)) == {2: ("died", 1), 3: ("died", 1)}
        assert pool.reset(seed=9).obs[:, 0].tolist() == [9, 10, 11, 12]


class InterruptedLanes:
    """The core's Lanes, whose post is interrupted once, before or after it has posted."""

    def __init__(self, lanes: Any, after: bool):
        self._lanes, self._after, self._armed = lanes, after, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)

    def __enter__(self) -> None:
        self._lanes.__enter__()

    def __exit__(self, *args: Any) -> None:
        self._lanes.__exit__(*args)

    def post(self, ids: Any, op: int) -> int:
        armed, self._armed = self._armed, False
        if armed and not self._after:
            raise KeyboardInterrupt
        code: int = self._lanes.post(ids, op)
        if armed:
            raise KeyboardInterrupt
        return code


@pytest.mark.parametrize("then", ["recv", "reset"])
@pytest.mark.parametrize("after", [False, True], ids=["before it is posted", "after it was posted"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ctrl_c_while_an_order_is_posted(backend: str, after: bool, then: str) -> None:
    """The lane is neither lost, so that nobody would ever get its answer, nor counted twice."""
    with restarting(backend) as pool:
        pool.step(ZEROS)
        # Env 2 keeps their worker busy with its reset, so that the next order comes in the middle of a pass.
        pool.set_attr("deeds", [{"reset": "take a while"}, {"step": "raise"}], [2, 3])
        recovery = pool._scheduler._recovery
        recovery._table.core = InterruptedLanes(recovery._table.core, after)
        with pytest.raises(KeyboardInterrupt):
            pool.step(ZEROS)
        assert pool.pending.tolist() == [0, 1, 2, 3]
        # The worker has read what it was told before the interrupt: it must not take it for what comes now.
        board = pool._scheduler.commands
        assert board.command(np.array([3]), "call", lambda _: ("answer", (), {}), Deadline.after(10)) == [42]
        batch = pool.recv(timeout=10) if then == "recv" else pool.reset(timeout=10)
        assert reports(batch) == {3: ("raised", 1)}
        assert batch.truncated[3] == (then == "recv")
        assert len(pool.pending) == 0
        assert reports(pool.step(ZEROS)) == {}


# ---- calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize("act", ["answer", "render"])
def test_a_worker_dies_in_a_call(backend: str, act: str) -> None:
    """The call fails, the pool goes on, and the lost envs say so at their next step."""
    with restarting(backend) as pool:
        pool.set_attr("deeds", [{"call": "kill", "render": "kill"}], [3])
        with pytest.raises(shoal.WorkerDied, match="worker 1"):
            pool.call(act)
        assert not pool.closed
        assert pool.call("answer") == [42] * 4
        assert reports(pool.step(ZEROS)) == {2: ("died", 1), 3: ("died", 1)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_raises_in_a_call_stays(backend: str) -> None:
    with restarting(backend) as pool:
        pool.set_attr("deeds", [{"call": "raise"}], [3])
        with pytest.raises(ValueError, match="env 3"):
            pool.call("answer")
        assert reports(pool.step(ZEROS)) == {}


# ---- budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_always_raises_is_given_up(backend: str) -> None:
    fns = [DeedEnv] * 3 + [functools.partial(DeedEnv, {"step": "raise"})]
    with restarting(backend, fns, None, max_restarts=3) as pool:
        seen: list[Any] = []
        with pytest.raises(ValueError, match=r"restarted 3 times in 600 s.*max_restarts") as caught:
            step_on(pool, seen)
        assert isinstance(caught.value, shoal.EnvError)
        assert [row[3] for row in seen if row] == [("raised", n) for n in (1, 2, 3)]
        assert not pool.closed
        assert pool.reset().obs.shape == (4, 3)


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_worker_that_always_dies_is_given_up(backend: str) -> None:
    fns = [DeedEnv] * 3 + [functools.partial(DeedEnv, {"step": "kill"})]
    pool = restarting(backend, fns, None, max_restarts=3)
    with pytest.raises(shoal.WorkerDied, match=r"restarted 3 times.*max_restarts"):
        step_on(pool, [])
    assert pool.closed
    pool.close()


class DiesAtRestart(CountEnv):
    """Starts well once, and never again."""

    def __init__(self, flag: Path, deed: str):
        super().__init__()
        if flag.exists():
            DeedEnv({"constructor": deed})
        flag.touch()


@pytest.mark.parametrize("backend", ISOLATED)
@pytest.mark.parametrize(("deed", "error"), [("kill", shoal.WorkerDied), ("raise", ValueError)])
def test_a_worker_that_cannot_be_started_again(backend: str, deed: str, error: Any, tmp_path: Path) -> None:
    fns = [CountEnv] * 3 + [functools.partial(DiesAtRestart, tmp_path / "flag", deed)]
    pool = restarting(backend, fns, None, max_restarts=2)
    kill_worker(pool)
    with pytest.raises(error, match="worker 1"):
        pool.step(ZEROS)
    assert pool.closed
    pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_env_that_cannot_be_built_again(backend: str, tmp_path: Path) -> None:
    """A raised error is told as it is when the new env fails as well."""
    fns = [DeedEnv] * 3 + [functools.partial(RaisesAtRestart, tmp_path / "flag")]
    with restarting(backend, fns, None, max_restarts=2) as pool:
        with pytest.raises(KeyError, match="no such fish"):
            pool.step(ZEROS)
        assert not pool.closed


class RaisesAtRestart(DeedEnv):
    def __init__(self, flag: Path):
        super().__init__({"step": "raise"} if not flag.exists() else {"constructor": "raise KeyError"})
        flag.touch()


# ---- what is stepped -----------------------------------------------------------------------------------------


class NestedEnv(DeedEnv):
    """Everything that an observation can be: arrays, a scalar, text, a sequence, which has no array."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(
            count=self.observation_space,
            image=spaces.Box(0, 255, (3, 2), np.uint8),
            number=spaces.Discrete(100),
            word=spaces.Text(8),
            list=spaces.Sequence(spaces.Discrete(50)),
            flat=spaces.Box(-1, 1, (), np.float64),
        )

    def _observation(self) -> Any:
        step = self.steps
        return {
            "count": super()._observation(), "image": np.full((3, 2), step, np.uint8), "number": step,
            "word": "abcdefgh"[: step + 1], "list": tuple(range(step)), "flat": np.array(step / 10),
        }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deed", ["raise", "kill"])
def test_nested_observations_are_repeated_whole(mode: str, deed: str) -> None:
    with restarting("processes", NestedEnv, autoreset=mode) as pool:
        pool.step(ZEROS)
        pool.step(ZEROS)
        pool.set_attr("deeds", [{"step": deed}], [3])
        batch = pool.step(ZEROS)
        last = batch.final_obs[3] if mode == "same_step" else None
        pick = (lambda key: last[key]) if last is not None else (lambda key: batch.obs[key][3])
        assert pick("count").tolist() == [3, 0, 2]
        assert np.asarray(pick("image")).tolist() == [[2, 2]] * 3
        assert int(pick("number")) == 2
        assert pick("word") == "abc"
        assert tuple(pick("list")) == (0, 1)
        assert float(pick("flat")) == 0.2


class ObjectActionEnv(DeedEnv):
    """Actions without an array."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Sequence(spaces.Discrete(5))  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        return super().step(len(action))


def test_actions_without_arrays() -> None:
    with restarting("processes", ObjectActionEnv) as pool:
        pool.step([(1,)] * 4)
        kill_worker(pool)
        assert reports(pool.step([(1, 2)] * 4)) == {2: ("died", 1), 3: ("died", 1)}
        pool.step([()] * 4)
        assert pool.step([(1, 2, 3)] * 4).reward.tolist() == [304.0, 304.0, 301.0, 301.0]


@pytest.mark.parametrize(("size", "workers", "victim"), [(1, 1, 0), (7, 3, 1), (3, 3, 2)])
def test_odd_sizes(size: int, workers: int, victim: int) -> None:
    zeros = np.zeros(size, np.int64)
    with restarting("processes", num_envs=size, num_workers=workers) as pool:
        for count in (1, 2):
            lost = pool.workers[victim].env_ids
            kill_worker(pool, victim)
            assert reports(pool.step(zeros)) == dict.fromkeys(lost, ("died", count))
            pool.step(zeros)


def test_the_gymnasium_face() -> None:
    envs = shoal.make(DeedEnv, num_envs=4, backend="processes", num_workers=2, on_error="restart")
    envs.reset(seed=0)
    kept, *_ = envs.step(ZEROS)
    before = kept.tolist()
    kill_worker(envs.pool)
    obs, _, terminated, truncated, infos = envs.step(ZEROS)
    assert obs.tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 1], [3, 0, 1]]
    assert truncated.tolist() == [False, False, True, True]
    assert not terminated.any()
    assert infos["shoal_restart"]["count"].tolist() == [0, 0, 1, 1]
    assert infos["_shoal_restart"].tolist() == [False, False, True, True]
    assert kept.tolist() == before
    envs.close()


class BigObsEnv(DeedEnv):
    """Frames large enough to be lent rather than copied."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (256, 256), np.uint8)

    def _observation(self) -> Any:
        return np.full((256, 256), self.steps, np.uint8)


def test_lent_frames_stay_as_they_were() -> None:
    envs = shoal.make(BigObsEnv, num_envs=4, backend="processes", num_workers=2, on_error="restart")
    envs.reset(seed=0)
    kept = [envs.step(ZEROS)[0] for _ in range(2)]
    kill_worker(envs.pool)
    kept.append(envs.step(ZEROS)[0])
    kept.append(envs.step(ZEROS)[0])
    assert [obs[:, 0, 0].tolist() for obs in kept] == [[1] * 4, [2] * 4, [3, 3, 2, 2], [4, 4, 0, 0]]
    assert all((obs == obs[:, :1, :1]).all() for obs in kept)
    envs.close()


class OtherSpace(CountEnv):
    """Comes back with another observation space."""

    def __init__(self, flag: Path):
        super().__init__()
        if flag.exists():
            self.observation_space = spaces.Box(0, 1, (2,), np.float32)
        flag.touch()


def test_an_env_that_comes_back_with_other_spaces(tmp_path: Path) -> None:
    fns = [CountEnv] * 3 + [functools.partial(OtherSpace, tmp_path / "flag")]
    pool = restarting("processes", fns, None, max_restarts=1)
    kill_worker(pool)
    with pytest.raises(shoal.SpaceMismatch, match="worker 1"):
        pool.step(ZEROS)
    assert pool.closed


# ---- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_error": "ignore"}, "on_error.*'restart'.*'ignore'"),
        ({"max_restarts": 0}, "max_restarts"),
        ({"restart_window": -1}, "restart_window"),
        ({"step_timeout": 0}, "step_timeout"),
        ({"step_timeout": "soon"}, "step_timeout"),
        ({"step_timeout": 1.0, "backend": "serial"}, "cannot be timed out"),
        ({"step_timeout": 1.0, "backend": "hybrid"}, "cannot be timed out"),
        ({"recycle_after": 1.5}, "recycle_after"),
        ({"recycle_after": 10, "backend": "threads"}, "worker processes"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pool(CountEnv, 2, **{"backend": "processes", **options})


def test_auto_keeps_envs_out_of_a_process_that_wants_to_survive_them() -> None:
    with Pool(CountEnv, 2, on_error="restart") as pool:
        assert pool.plan.backend == "processes"


# ---- families ------------------------------------------------------------------------------------------------


class ParentEnv(DeedEnv):
    """Starts processes of its own: a plain child, one in a session of its own, one without our environment, an
    orphan."""

    def __init__(self) -> None:
        super().__init__()

        nap = [sys.executable, "-c", "import time; time.sleep(100)"]
        orphan = f"import subprocess, sys; print(subprocess.Popen({nap!r}, start_new_session=True, stdout=-3).pid)"
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.children = [
            subprocess.Popen(nap, **quiet).pid,
            subprocess.Popen(nap, start_new_session=True, **quiet).pid,
            subprocess.Popen(nap, env={}, **quiet).pid,
            int(subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE).stdout),
        ]


@pytest.mark.parametrize("end", ["close", "kill", "hang", "restart", "forget"])
def test_children_of_envs_are_ended(end: str) -> None:
    options = {"on_error": "restart"} if end == "restart" else {}
    pool = open_pool(ParentEnv, 2, num_workers=1, **options)
    pool.reset(seed=0)
    families = [pid for own in pool.get_attr("children") for pid in own]
    assert all(alive(pid) for pid in families)
    if end == "close":
        pool.close()
    elif end == "hang":
        pool.set_attr("deeds", {"close": "hang"})
        pool.close(timeout=0.3)
    elif end == "forget":
        del pool
        gc.collect()
    else:
        kill_worker(pool, 0)
        if end == "restart":
            assert reports(pool.step([0, 0])) == {0: ("died", 1), 1: ("died", 1)}
        else:
            with pytest.raises(shoal.WorkerDied):
                pool.step([0, 0])
    eventually(lambda: not any(alive(pid) for pid in families), lambda: [pid for pid in families if alive(pid)])
    if end == "restart":
        pool.close()


def test_nobody_elses_children_are_ended() -> None:

    with subprocess.Popen(["sleep", "100"]) as bystander:
        pool = open_pool(ParentEnv, 2, num_workers=1)
        kill_worker(pool, 0)
        pool.close()
        assert bystander.poll() is None
        bystander.kill()


# ---- memory --------------------------------------------------------------------------------------------------


class LeakyEnv(CountEnv):
    """Keeps a few megabytes of every step, outside of itself, as a native library would."""

    kept: list[bytearray] = []

    def step(self, action: Any) -> Any:
        if action == 1:
            self.kept.append(bytearray(os.urandom(1 << 20) * 4))
        return super().step(action)

    def memory(self) -> int:
        return processes.resident(os.getpid()) or 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ISOLATED)
def test_a_worker_that_grows_is_recycled_at_the_end_of_an_episode(
    backend: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Env 3 leaks. Env 2, of another length, is moved with its state and never notices."""
    monkeypatch.setattr(restarts, "LOOK_EVERY", 0.0)
    fns = [LeakyEnv, LeakyEnv, functools.partial(LeakyEnv, 100), LeakyEnv]
    with open_pool(fns, None, backend, recycle_after=30 << 20, autoreset=mode) as pool:
        pool.reset(seed=0)
        pids, seen = set(), []
        for turn in range(1, 41):
            batch = pool.step([0, 0, 0, 1])
            if mode == "disabled" and batch.done.any():
                seen.append(reports(pool.reset(np.flatnonzero(batch.done))))
            pids.add(pool.workers[1].pid)
            assert batch.obs[2].tolist() == [2, 0, turn]
            assert 2 not in reports(batch)
            assert not batch.truncated.any()
            seen.append(reports(batch))
        told = [row[3] for row in seen if 3 in row]
        assert len(pids) >= 3
        # Under same_step the next episode had begun, so that env 3 was moved as well.
        assert len(told) == (0 if mode == "same_step" else len(pids) - 1)
        assert told == [("recycled", n) for n in range(1, len(told) + 1)]
        assert max(pool.call("memory", env_ids=[2, 3])) < 400 << 20
        assert set(pool.get_attr("seed_given", [2])) == {2}


class UnsavableEnv(LeakyEnv):
    """Has something that cannot be saved."""

    def __init__(self, length: int = 5):
        super().__init__(length)
        self.lock = threading.Lock()


def test_an_env_that_cannot_be_moved_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LOOK_EVERY", 0.0)
    fns = [UnsavableEnv, functools.partial(UnsavableEnv, 100)]
    with open_pool(fns, None, num_workers=1, recycle_after=16 << 20) as pool:
        pool.reset(seed=0)
        told = {}
        for _ in range(12):
            batch = pool.step([1, 0])
            told |= reports(batch)
            if 1 in reports(batch):
                assert batch.truncated[1]
                break
        assert told[1] == ("recycled", 1)


def test_recycling_with_partial_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LOOK_EVERY", 0.0)
    with open_pool(LeakyEnv, 5, num_workers=2, batch_size=2, recycle_after=16 << 20) as pool:
        pool.async_reset(seed=0)
        told = set()
        for _ in range(60):
            batch = pool.recv(timeout=20)
            told |= set(reports(batch))
            pool.send(np.ones(2, np.int64), batch.env_id)
        assert told


# ---- really ---------------------------------------------------------------------------------------------------


def test_cartpole_trains_through_deaths() -> None:
    """A long run with a real env: all steps arrive, and the returns are what the rewards say."""
    pool = open_pool("CartPole-v1", 6, num_workers=3, on_error="restart", max_restarts=100, restart_window=0.01)
    rng = np.random.default_rng(0)
    totals, restarts = np.zeros(6), 0
    with pool:
        pool.reset(seed=0)
        for turn in range(600):
            batch = pool.step(rng.integers(0, 2, 6))
            totals = np.where(batch.began, 0.0, totals + batch.reward)
            assert np.array_equal(batch.episode_return, totals)
            restarts += len(reports(batch))
            if turn % 100 == 50:
                kill_worker(pool, turn // 100 % 3)
    assert restarts == 12
