"""How processes of one machine wake each other when they have sent a message, and how long they wait for one.

Processes are numbered (ranks), and each sleeps on its own semaphore in shared memory (`MachineBells`). Where no sender
can ring, a process has to look for messages again and again, because no call blocks until one arrives (`PollBackoff`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.errors import StartError
from shoal.support.system import system

ROOM = 128  # bytes for each semaphore, so that no two share a cache line
MEMORY = 8  # the number of waits that are remembered
SHARE = 0.1  # a message that is late is looked for again after this share of the time for which it is late
SHORTEST = 20e-6  # seconds; the shortest such sleep
SELDOM = 2e-3  # seconds between two looks before a message is expected
Home = tuple[str, str]  # a machine, and its table of processes
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))  # not on every system
_libc: Any = None if sys.platform == "win32" else ctypes.CDLL(None)


def home_of_this_process() -> Home:
    """The machine and the process table of this process. Two processes see each other if both are equal."""
    try:
        return platform.node(), os.readlink(system.proc / "self/ns/pid")
    except OSError:
        return platform.node(), ""


@dataclass(frozen=True)
class BellMemory:
    """Says where the semaphores are: in an anonymous file that other processes open by way of its owner."""

    home: Home
    owner: int | None = None  # a process id; this and the next are None on systems without such files
    descriptor: int | None = None
    inode: int = 0  # tells whether the descriptor still belongs to the same file

    @classmethod
    def create(cls, home: Home, ranks: int) -> BellMemory:
        """Make the semaphores. Rank 0 does so, before it tells the others."""
        with contextlib.suppress(OSError, StartError):
            if not system.proc.is_dir():
                return cls(home)
            descriptor = system.anonymous_file("shoal-bells")
            os.ftruncate(descriptor, ROOM * ranks)
            made = cls(home, os.getpid(), descriptor, os.fstat(descriptor).st_ino)
            memory, first = made.map()
            if all(_libc.sem_init(ctypes.c_void_p(first + ROOM * rank), 1, 0) == 0 for rank in range(ranks)):
                memory.close()
                return made
        return cls(home)

    def map(self) -> tuple[mmap.mmap, int]:
        """The memory, and its address. Raises OSError if the owner has closed it or cannot be seen."""
        descriptor = os.open(system.proc / str(self.owner) / "fd" / str(self.descriptor), os.O_RDWR)
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
    process can always wake this rank. Rank 0 has made the memory; `homes` are those of all ranks.
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


class PollTimes(NamedTuple):
    """How often to look for messages."""

    soon: float  # a message is expected after this share of the shortest remembered wait
    spin: float  # seconds for which the thread then looks all the time, yielding its core to threads that need it
    longest: float  # seconds between two looks at most
    woken: float  # seconds between two looks if every sender rings


class PollBackoff:
    """Waits between looks for messages. For one thread.

    At first no message is expected, since the last waits took longer, and the thread looks seldom. When the message is
    about to come the thread looks all the time, because with cheap envs a wake-up takes longer than the step. After
    that it looks less and less often. So a waiting thread leaves its core to others, and a long wait takes a tenth
    longer than it must. A ring of the process's bells, which may be set later, ends any sleep. If all senders ring
    (`woken`, which may be changed), there is no need to look before.
    """

    def __init__(self, times: PollTimes, bells: MachineBells | None = None, senders: Sequence[int] = ()) -> None:
        self.times, self.bells = times, bells
        self.woken = bells is not None and all(bells.reaches(rank) for rank in senders)
        self._rung = False
        self._waits: collections.deque[float] = collections.deque([0.0], MEMORY)
        system.sleep_sharply()
        self.restart()

    def restart(self) -> None:
        self._since, self._expected, self._first = time.perf_counter(), self.times.soon * min(self._waits), True

    def came(self) -> None:
        """Note that a message has come. Another one may follow at once; that wait is not remembered."""
        now = time.perf_counter()
        if self._first:
            self._waits.append(now - self._since)
        self._since, self._expected, self._first = now, 0.0, False

    @property
    def sleep(self) -> float:
        """Seconds until the next look; 0 to look at once."""
        if self.woken:
            return self.times.woken
        late = time.perf_counter() - self._since - self._expected
        return min(-late, SELDOM) if late < 0 else self._when_late(late)

    def _when_late(self, late: float) -> float:
        return 0.0 if late < self.times.spin else min(max(late * SHARE, SHORTEST), self.times.longest)

    def wait(self, hurry: bool = False) -> None:
        """Wait until the next look; `hurry` if part of a message has come or gone, as the rest needs both to look."""
        seconds = self._when_late(time.perf_counter() - self._since) if hurry else self.sleep
        if seconds <= 0:
            _yield()
        elif self.bells is None:
            time.sleep(seconds)
        else:
            self._rung = self.bells.sleep(seconds) and self.woken and not hurry

    def rest(self, seconds: float) -> None:
        """Wait until this process is rung. No message is expected before."""
        assert self.bells is not None
        self._rung = self.bells.sleep(seconds)
        if not self.woken:
            self._rung = False
            self.restart()

    def rings(self) -> int | None:
        """The number of rings until the end of the last wait: so many messages are there. None if not known."""
        rings = 0 if self.bells is None else self.bells.take_rings()
        rung, self._rung = self._rung, False
        return 1 + rings if rung else None
