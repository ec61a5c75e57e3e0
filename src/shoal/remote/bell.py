"""Wakes processes of the same machine, which would otherwise have to look for messages again and again."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import time
from dataclasses import dataclass

__all__ = ["BellTower", "MachineBell", "home_of_this_process"]

ROOM = 128  # bytes for a semaphore, with cache lines of its own
Home = tuple[str, str]  # a machine, and its table of processes


def home_of_this_process() -> Home:
    """What tells whether two processes see each other: the machine, and its table of processes."""
    try:
        return platform.node(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node(), ""


@dataclass(frozen=True)
class BellTower:
    """Where the semaphores of processes of one machine are: memory without a name, opened by way of its owner.

    `owner` and `descriptor` are None where the system has none of this.
    """

    home: Home
    owner: int | None = None
    descriptor: int | None = None
    inode: int = 0  # which the file has, by whatever number it is known

    @classmethod
    def build(cls, home: Home, ranks: int) -> BellTower:
        """In the process that is rank 0, before the others hear of it."""
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.memfd_create("shoal-bells", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, ROOM * ranks)
            made = cls(home, os.getpid(), descriptor, os.fstat(descriptor).st_ino)
            memory, first = _address(made)
            places = [ctypes.c_void_p(first + ROOM * rank) for rank in range(ranks)]
            if all(_libc().sem_init(place, 1, 0) == 0 for place in places):
                memory.close()
                return made
        return cls(home)

    def close(self) -> None:
        """Let nobody else in. For its owner, once."""
        if self.descriptor is not None:
            os.close(self.descriptor)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class MachineBell:
    """A semaphore for each rank. Whoever has sent a message rings; whoever waits for one sleeps on its own.

    Ranks elsewhere are not reached: sleeps then last as long as they last.

    Args:
        tower: rank 0's.
        rank: of this process.
        homes: of all ranks.
    """

    def __init__(self, tower: BellTower, rank: int, homes: dict[int, Home]):
        self._first, self._rank, self.homes = 0, rank, homes
        self._near = {other for other, home in homes.items() if home == tower.home == homes[rank]}
        self._libc, self._limit = _libc(), _Timespec()
        with contextlib.suppress(OSError, AttributeError):
            if tower.owner is not None and rank in self._near:
                self._memory, self._first = _address(tower)
        if not self._first:
            self._near = set()
        self._semaphores = {near: ctypes.c_void_p(self._first + ROOM * near) for near in self._near}
        self._until = ctypes.byref(self._limit)

    def reaches(self, rank: int) -> bool:
        """Whether that rank and this one wake each other."""
        return rank in self._near

    def ring(self, rank: int) -> None:
        """Wake a rank, or keep it from falling asleep."""
        if rank in self._near:
            self._libc.sem_post(self._semaphores[rank])

    def sleep(self, seconds: float) -> bool:
        """Until somebody rings, or has rung since the last time: whether so. For one thread.

        Each ring ends one sleep. So whoever takes a message after each misses none.
        """
        if not self._near:
            time.sleep(seconds)
            return False
        # By the clock that sem_timedwait knows.
        self._limit.seconds, self._limit.nanoseconds = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
        return bool(self._libc.sem_timedwait(self._semaphores[self._rank], self._until) == 0)

    def rings(self) -> int:
        """How many there were that have ended no sleep; they will not."""
        count = 0
        while self._near and self._libc.sem_trywait(self._semaphores[self._rank]) == 0:
            count += 1
        return count


def _address(tower: BellTower) -> tuple[mmap.mmap, int]:
    """The memory, and where it begins."""
    descriptor = os.open(f"/proc/{tower.owner}/fd/{tower.descriptor}", os.O_RDWR)
    try:
        found = os.fstat(descriptor)
        if found.st_ino != tower.inode:
            raise OSError("its owner has closed it, and this is another file")
        memory = mmap.mmap(descriptor, found.st_size)
    finally:
        os.close(descriptor)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
