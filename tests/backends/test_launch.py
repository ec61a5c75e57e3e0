"""The caller's side of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from shoal.backends import launch
from shoal.support.deadline import NEVER


def test_the_end_of_a_launcher_that_leaves_slowly_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed closes its channel some time before its parent can take note of its end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: Any) -> int:
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))  # it has no end of the channel
        return started[-1].pid

    monkeypatch.setattr(launch, "start_interpreter", start)
    link = launch._LauncherLink()
    with pytest.raises(BrokenPipeError):
        link.request("start", [], NEVER)
    assert len(started) == 2  # the second one in place of the first
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    link.tidy()
    for process in started:
        with pytest.raises(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
        process.wait()


@pytest.mark.parametrize("reads", [False, True], ids=["closed", "read"])
def test_a_report_that_another_thread_takes_meanwhile(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """One thread asks whether a worker lives while another one notes its end, or closes its pool."""
    report, end = os.pipe()
    os.write(end, launch.REPORT.pack(7))
    process = launch.WorkerProcess(os.getpid(), report)
    meanwhile: Any = (lambda: process.join(0)) if reads else process.close
    look, looks = launch._readable, 0

    def while_another_thread_is_at_it(fd: int, deadline: Any) -> bool:
        nonlocal looks
        looks += 1
        ready = look(fd, deadline)
        if looks == 1:  # between this look and what follows it
            meanwhile()
        return ready

    monkeypatch.setattr(launch, "_readable", while_another_thread_is_at_it)
    assert process.alive is not reads  # the pid is this process's own
    assert process.exitcode == (7 if reads else None)
    process.close()
    os.close(end)


@pytest.mark.parametrize("forked", [True, False])
def test_a_process_that_another_thread_closes_can_be_asked_meanwhile(
    forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        report, told = os.pipe()
        worker = launch.WorkerProcess(process.pid, -1 if forked else report)
        wait = launch._readable

        def close_while_it_waits(fd: int, deadline: Any) -> bool:
            monkeypatch.setattr(launch, "_readable", wait)
            worker.close()
            return True

        monkeypatch.setattr(launch, "_readable", close_while_it_waits)
        assert worker.alive
        worker.signal(signal.SIGTERM)  # there is nothing to tell it from a later one by
        process.kill()
        process.wait()
        assert not worker.alive
        os.close(told)
        if forked:
            os.close(report)
