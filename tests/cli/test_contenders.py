"""A contender that crashes, hangs or is not there becomes a row; the others go on; nobody is left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from shoal.cli import bench
from shoal.cli.contenders import Contender, PlainLoop, Role, limits
from shoal.cli.peers import EnvPoolRunner, GymnasiumAsync, GymnasiumSync, others
from shoal.cli.work import Work
from shoal.support import processes

SETTINGS = bench.Settings(seconds=0.02, rounds=3, patience=1.0, start_patience=60.0)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.fixture
def odd() -> Any:
    from cli import odd_runners

    return odd_runners


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    before = {process.pid for process in processes.descendants(os.getpid())}
    yield
    left = {process.pid for process in processes.descendants(os.getpid())} - before
    assert not left


def work(num_envs: int = 2) -> Work:
    return Work("CartPole-v1", num_envs, gymnasium.spaces.Discrete(2))


def test_misfits_become_rows_and_others_go_on(odd: Any) -> None:
    field = [
        Contender("loop", PlainLoop, role=Role.LIMIT),
        Contender("crashes", odd.Crashes),
        Contender("raises", odd.Raises),
        Contender("raises later", odd.RaisesLater),
        Contender("declines", odd.Declines),
        Contender("absent", odd.Absent),
        Contender("steady", odd.Steady),
    ]
    heard: list[str] = []
    result = bench.measure(work(), field, SETTINGS, heard.append)
    status = {row.name: (row.status, row.note) for row in result.rows}
    assert status["steady"] == ("ok", "")
    assert status["loop"] == ("ok", "")
    assert status["crashes"] == ("failed", "its process died (SIGKILL): something is about to break")
    assert status["raises"] == ("failed", "RuntimeError: no luck today")
    assert status["raises later"] == ("failed", "RuntimeError: tired")
    assert status["declines"] == ("skipped", "not my kind of work")
    assert status["absent"] == ("skipped", "no_such_library_anywhere is not installed")
    assert result.row("steady").rates == [200.0] * 3
    assert all(result.row("loop").rates)
    assert result.row("raises later").rates == [200.0, None, None]
    assert len(heard) == bench.ticks(field, SETTINGS)


@needs_proc
def test_one_that_hangs_is_ended_with_its_children(odd: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    field = [
        Contender("hangs", odd.Hangs, {"pid_file": str(pid_file)}),
        Contender("steady", odd.Steady),
    ]
    result = bench.measure(work(), field, SETTINGS)
    assert result.row("hangs").status == "failed"
    assert "no answer within" in result.row("hangs").note
    assert result.row("steady").rates == [200.0] * 3
    assert _gone(int(pid_file.read_text()))


@needs_proc
def test_one_that_cannot_close_is_ended(odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.contender_process.CLOSE_PATIENCE", 0.5)
    result = bench.measure(work(), [Contender("stays", odd.HangsAtClose)], SETTINGS)
    assert result.row("stays").rates == [200.0] * 3


@needs_proc
def test_an_interrupt_leaves_nobody(odd: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    field = [
        Contender("hangs", odd.Hangs, {"pid_file": str(pid_file)}),
        Contender("steady", odd.Steady),
    ]

    def interrupt(text: str) -> None:
        if "round" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.measure(work(), field, SETTINGS, interrupt)
    assert _gone(int(pid_file.read_text()))


def test_one_that_spins_is_opened_and_closed_in_every_round(odd: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    field = [Contender("spins", odd.Spins, {"log": str(log)}), Contender("steady", odd.Steady)]
    result = bench.measure(work(), field, SETTINGS)
    assert log.read_text().split() == ["open", "close"] * SETTINGS.rounds
    assert len(result.row("spins").starts) == SETTINGS.rounds


def test_a_process_for_each_env_stops_somewhere(odd: Any) -> None:
    field = [Contender("many", odd.ManyProcesses)]
    row = bench.measure(work(1024), field, SETTINGS).row("many")
    assert (row.status, row.note) == ("skipped", "one process per env")
    assert bench.measure(work(64), field, SETTINGS).row("many").status == "ok"


def test_copies_run_together_and_add_up(odd: Any) -> None:
    result = bench.measure(work(), [Contender("three", odd.Steady, copies=3)], SETTINGS)
    assert result.row("three").rates == [600.0] * 3
    assert len(result.row("three").starts) == 3


def test_limit_of_one_core_is_the_plain_loop_itself() -> None:
    assert [one.role for one in limits(1)] == [Role.LIMIT]
    assert [(one.role, one.copies) for one in limits(4)] == [(Role.LOOP, 1), (Role.LIMIT, 4)]


def test_gymnasium_runs_and_its_workers_are_weighed() -> None:
    field = [Contender("sync", GymnasiumSync), Contender("async", GymnasiumAsync)]
    result = bench.measure(work(3), field, SETTINGS)
    assert [row.status for row in result.rows] == ["ok", "ok"]
    assert result.row("sync").starts[0].workers == 0
    if sys.platform == "linux":
        start = result.row("async").starts[0]
        assert start.workers == 3
        assert start.worker_pss


def test_plain_loop_counts_calls_and_crosses_episodes() -> None:
    loop = PlainLoop(work(8))
    loop.reset()
    seconds = 0.05
    while (tally := loop.run(seconds)).steps <= 500:  # a busy machine takes longer
        seconds *= 2
    loop.close()
    assert tally.steps > 500  # one episode of CartPole cannot be longer
    assert tally.seconds >= seconds


def test_actions_are_the_same_for_everybody() -> None:
    rows, lanes = work(4).actions(), work(4).lane_actions()
    assert [int(action) for row in rows for action in row] == [int(action) for action in lanes]


@pytest.mark.parametrize("contender", others(cores=2), ids=lambda one: str(one.name))
def test_peers_run_where_they_are_installed(contender: Contender) -> None:
    if reason := contender.unfit(work()):
        pytest.skip(reason)
    settings = bench.Settings(seconds=0.05, rounds=2)
    row = bench.measure(work(2), [contender], settings).rows[0]
    assert (row.status, row.note) == ("ok", "")
    assert all(row.rates)


def test_no_round_begins_after_the_limit() -> None:
    settings = bench.Settings(seconds=0.02, rounds=50, limit=0.0)
    (row,) = bench.measure(work(), [Contender("loop", PlainLoop)], settings).rows
    assert len(row.rates) == 1


def test_envpool_is_told_from_python() -> None:
    assert not EnvPoolRunner.python
    assert GymnasiumAsync.python


def _gone(pid: int) -> bool:
    """Wait a moment for a killed process to be cleared away."""
    for _ in range(100):
        if processes.identify(pid) is None:
            return True
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return False
