"""The check for what a test leaves behind: it counts what this process has made, and nothing of other programs."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

from faults.kit import Traces, eventually

# Keeps a lock and a piece of shared memory, both with names, until its standard input ends.
OTHER = """
import multiprocessing, sys
from multiprocessing import shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=64)
print(lock._semlock.name.strip("/"), memory.name, flush=True)
sys.stdin.read()
memory.unlink()
"""


def test_names_of_another_program_are_its_own() -> None:
    before = Traces.of_this_process()
    # The shell leaves at once: what it has started is no descendant of this process any more.
    shell = ["sh", "-c", 'exec 3<&0; "$0" -c "$1" <&3 &', sys.executable, OTHER]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        lock, memory = starter.stdout.readline().split()
        starter.wait()
        paths = [Path(f"/dev/shm/sem.{lock}"), Path(f"/dev/shm/{memory}")]
        assert all(path.exists() for path in paths)
        after = Traces.of_this_process()
        assert {path.name for path in paths} <= after.shared - before.shared
        assert not [one for one in after.beyond(before) if "shm" in one]
        starter.stdin.close()
        eventually(lambda: not any(path.exists() for path in paths))


def test_names_of_this_process_are_counted() -> None:
    before = Traces.of_this_process()
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert f"/dev/shm/{memory.name}" in Traces.of_this_process().beyond(before)
        memory.close()  # and nobody holds it now
        assert f"/dev/shm/{memory.name}" in Traces.of_this_process().beyond(before)
    finally:
        memory.unlink()
