"""What wakes ranks of one machine, without MPI: all within one process."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shoal.remote.bell import BellMemory, MachineBells
from shoal.support.system import system

HERE, THERE = ("fish", "1"), ("chips", "1")
pytestmark = pytest.mark.timeout(30)
LONG = 60.0  # longer than the test may last: who is not woken fails


@pytest.fixture
def memory() -> BellMemory:
    if not system.proc.is_dir():
        pytest.skip("this system has no memory without a name, and its ranks look for messages")
    return BellMemory.create(HERE, 3)


def test_who_is_rung_for_wakes_up(memory: BellMemory) -> None:
    homes = {0: HERE, 1: HERE, 2: HERE}
    driver, server = MachineBells(memory, 0, homes), MachineBells(memory, 2, homes)
    assert [driver.reaches(rank) for rank in (1, 2)] == [True, True]
    driver.ring(2)  # before it sleeps
    driver.ring(1)
    server.sleep(LONG)
    threading.Timer(0.1, driver.ring, [2]).start()
    server.sleep(LONG)
    threading.Timer(0.1, server.ring, [0]).start()
    driver.sleep(LONG)
    server.sleep(0.01)  # nobody rings


def test_each_ring_ends_one_sleep(memory: BellMemory) -> None:
    homes = {0: HERE, 1: HERE, 2: HERE}
    driver, server = MachineBells(memory, 0, homes), MachineBells(memory, 1, homes)
    for _ in range(3):
        driver.ring(1)
    assert [server.sleep(LONG), server.sleep(LONG)] == [True, True]
    driver.ring(1)
    assert server.take_rings() == 2
    assert not server.sleep(0.01)


def test_ranks_of_other_machines_are_not_reached(memory: BellMemory) -> None:
    homes = {0: HERE, 1: HERE, 2: THERE}
    driver, server = MachineBells(memory, 0, homes), MachineBells(memory, 2, homes)
    assert [driver.reaches(rank) for rank in (1, 2)] == [True, False]
    assert not server.reaches(0)
    driver.ring(2)
    server.ring(0)
    server.sleep(0.01)


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(system), "proc", Path("/no/proc"))
    bell = MachineBells(BellMemory.create(HERE, 2), 1, {0: HERE, 1: HERE})
    assert not bell.reaches(0)
    bell.ring(0)
    assert bell.take_rings() == 0
    assert not bell.sleep(0.01)


def test_an_owner_that_cannot_be_seen(memory: BellMemory) -> None:
    bell = MachineBells(BellMemory(HERE, memory.owner, 10_000), 1, {0: HERE, 1: HERE})
    assert not bell.reaches(0)
    bell.sleep(0.01)


def test_a_memory_that_was_closed(memory: BellMemory) -> None:
    memory.close()
    other = os.memfd_create("another", os.MFD_CLOEXEC)
    os.ftruncate(other, 4096)
    assert other == memory.descriptor, "the number is used again"
    assert not MachineBells(memory, 1, {0: HERE, 1: HERE}).reaches(0)
    os.close(other)
