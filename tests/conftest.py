"""Shared fixtures. This directory is on sys.path in a run: tests say `from envs import CountEnv`."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

BACKENDS = ("serial", "threads", "processes", "hybrid")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every local backend in turn."""
    return str(request.param)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that GateEnv waits for; opened at the end in any case, so that no worker stays behind it."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def child_pids() -> set[int]:
    """Direct children of this process, by the kernel's word."""
    task = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for thread in task.iterdir() for pid in (thread / "children").read_text().split()}


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fails the test if it leaves threads or multiprocessing children running."""
    threads = set(threading.enumerate())
    yield
    assert not multiprocessing.active_children()
    assert set(threading.enumerate()) <= threads
