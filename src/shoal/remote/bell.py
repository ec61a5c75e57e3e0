"""Semaphores in shared memory, by which processes of one machine wake each other when they have sent a message.

Processes are numbered (ranks), and each sleeps on its own semaphore. Without them a process has to look for messages
again and again; see `poll_backoff`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
import time
from dataclasses import dataclass

ROOM = 128  # bytes for each semaphore, so that no two share a cache line
Home = tuple[str, str]  # a machine, and its table of processes
_libc = ctypes.CDLL(None)


def home_of_this_process() -> Home:
    """The machine and the process table of this process. Two processes see each other if both are equal."""
    try:
        return platform.node(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node(), ""


@dataclass(frozen=True)
class BellMemory:
    """Says where the semaphores are: in an anonymous file that other processes open by way of its owner.

    `owner` (a process id) and `descriptor` are None on systems without such files.
    """

    home: Home
    owner: int | None = None
    descriptor: int | None = None
    inode: int = 0  # tells whether the descriptor still belongs to the same file

    @classmethod
    def create(cls, home: Home, ranks: int) -> BellMemory:
        """Make the semaphores. Rank 0 does so, before it tells the others."""
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.memfd_create("shoal-bells", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, ROOM * ranks)
            made = cls(home, os.getpid(), descriptor, os.fstat(descriptor).st_ino)
            memory, first = made.map()
            if all(_libc.sem_init(ctypes.c_void_p(first + ROOM * rank), 1, 0) == 0 for rank in range(ranks)):
                memory.close()
                return made
        return cls(home)

    def map(self) -> tuple[mmap.mmap, int]:
        """The memory, and its address. Raises OSError if the owner has closed it or cannot be seen."""
        descriptor = os.open(f"/proc/{self.owner}/fd/{self.descriptor}", os.O_RDWR)
        try:
            found = os.fstat(descriptor)
            if found.st_ino != self.inode:
                raise OSError("the owner has closed the file, and this is another one")
            memory = mmap.mmap(descriptor, found.st_size)
        finally:
            os.close(descriptor)
        return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def close(self) -> None:
        """Let no other process open it any more. The owner calls this once."""
        if self.descriptor is not None:
            os.close(self.descriptor)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class MachineBells:
    """Rings the semaphores of other ranks, and sleeps on the one of this rank.

    Ranks on other machines cannot be reached, and no rank can where the system has no such memory. Threads of this
    process can always wake this rank.

    Args:
        memory: made by rank 0.
        rank: the rank of this process.
        homes: the home of each rank.
    """

    def __init__(self, memory: BellMemory, rank: int, homes: dict[int, Home]):
        self._rank, self.homes = rank, homes
        self._semaphores: dict[int, ctypes.c_void_p] = {}
        near = [other for other, home in homes.items() if home == memory.home == homes[rank]]
        with contextlib.suppress(OSError, AttributeError):
            if memory.owner is not None and rank in near:
                self._memory, first = memory.map()
                self._semaphores = {other: ctypes.c_void_p(first + ROOM * other) for other in near}
        self._limit = _Timespec()
        self._until = ctypes.byref(self._limit)
        self._alone = threading.Semaphore(0)  # in place of the shared one

    def reaches(self, rank: int) -> bool:
        """Whether that rank and this one wake each other."""
        return rank in self._semaphores

    def ring(self, rank: int) -> None:
        """Wake a rank. If it does not sleep, its next sleep ends at once."""
        if rank in self._semaphores:
            _libc.sem_post(self._semaphores[rank])
        elif rank == self._rank:
            self._alone.release()

    def sleep(self, seconds: float) -> bool:
        """Sleep until this rank is rung, for so long at most; return whether it was rung. For one thread.

        Each ring ends one sleep. So a thread that takes a message after each sleep misses no message.
        """
        if not self._semaphores:
            return self._alone.acquire(timeout=seconds)
        # sem_timedwait takes a time of the system's clock.
        self._limit.seconds, self._limit.nanoseconds = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
        return bool(_libc.sem_timedwait(self._semaphores[self._rank], self._until) == 0)

    def take_rings(self) -> int:
        """The number of rings that have ended no sleep. They will not end one any more."""
        count, own = 0, self._semaphores.get(self._rank)
        while self._alone.acquire(blocking=False) if own is None else _libc.sem_trywait(own) == 0:
            count += 1
        return count
