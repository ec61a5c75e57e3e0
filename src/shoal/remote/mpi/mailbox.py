"""Messages between MPI ranks that nobody waits for inside of MPI, since MPI waits by spinning.

Both sides of backend="mpi" look for messages, and between two looks give up their core: see MpiPollBackoff.
"""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.remote.bell import BellTower, MachineBell, home_of_this_process
from shoal.remote.poll_backoff import PollBackoff, pause
from shoal.support import processes
from shoal.support.cores import usable_cores

__all__ = ["HELLO", "ORDERS", "URGENT", "WELCOME", "Mailbox", "MpiPollBackoff", "Peer", "Welcome", "new_tag"]

# Tags of the messages on the caller's own communicator, by which the ranks meet.
HELLO, WELCOME = 4711, 4712
# Tags on the communicator that they make for themselves: what a rank is told, in order; what it shall hear even while
# it steps envs; every greater one is a host's, and carries its messages.
ORDERS, URGENT, FIRST_HOST = 0, 1, 2
LEAST_TAG = 32767  # which every MPI has

# See PollBackoff.
SOON = 0.6
SPIN = 300e-6  # seconds
LONGEST = 2e-3  # seconds


class MpiPollBackoff(PollBackoff):
    """How often to look for messages of other ranks.

    Args:
        bell: what wakes this rank; with it nothing need be looked for so often.
        awaited: the ranks whose messages are waited for.

    Attributes:
        woken: whether all of them ring, so that nothing need be looked for before.
    """

    def __init__(self, bell: MachineBell | None = None, awaited: Sequence[int] = ()) -> None:
        super().__init__(SOON, SPIN, LONGEST)
        self._bell, self.woken = bell, bell is not None and all(bell.reaches(rank) for rank in awaited)
        self._rung = False

    def heard(self) -> int | None:
        """How many rings there were by the end of the last wait: so many messages are there. None: nobody knows."""
        rings = 0 if self._bell is None else self._bell.rings()
        rung, self._rung = self._rung, False
        return 1 + rings if rung else None

    @property
    def sleep(self) -> float:
        """Seconds until the next look; 0 to look at once."""
        return LONGEST if self.woken else super().sleep

    def wait(self, hurry: bool = False) -> None:
        """Until the next look.

        Args:
            hurry: a message is on its way in or out. Large ones go in several pieces, and only while both sides look.
        """
        seconds = self._after(time.perf_counter() - self._since) if hurry else self.sleep
        if seconds > 0 and self._bell is not None:
            self._rung = self._bell.sleep(seconds) and self.woken and not hurry
        else:
            pause(seconds)

    def rest(self, seconds: float) -> None:
        """Until somebody rings; nothing is expected."""
        assert self._bell is not None
        self._rung = self._bell.sleep(seconds)


class Mailbox:
    """Sends and receives bytes without waiting.

    Messages from one rank are taken in the order in which they were sent. `post` may be called by any thread, `take` by
    one; two mailboxes of one communicator may be used by two threads.

    Args:
        comm: a communicator of mpi4py's.
        tag: take messages with this tag only; None for any.
        bell: to be rung for each message.
    """

    def __init__(self, comm: Any, tag: int | None = None, bell: MachineBell | None = None):
        self._comm, self._bell, self._mpi = comm, bell, _mpi()
        self._tag = self._mpi.ANY_TAG if tag is None else tag
        self._status = self._mpi.Status()
        self._all_ring = bell is not None and all(bell.reaches(rank) for rank in bell.homes)
        self._lock = threading.Lock()
        # Requests of MPI's, with the bytes that must stay until they are done.
        self._leaving: list[tuple[Any, Any]] = []
        self._coming: list[tuple[int, int, Any, Any]] = []

    @property
    def busy(self) -> bool:
        """Whether a message is on its way in or out, which it is only while somebody calls `take` and `let_go`.

        One that goes out to a rank that rings is none of it: Open MPI calls none but the smallest ones sent until they
        are received, and who needs us to receive one rings.
        """
        return bool(self._coming or (self._leaving and not self._all_ring))

    def post(self, rank: int, tag: int, data: Any) -> None:
        """Send a message."""
        request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
        if self._bell is not None:
            self._bell.ring(rank)
        with self._lock:
            self._leaving.append((request, data))

    def take(self, most: int | None = None) -> list[tuple[int, int, Any]]:
        """What has arrived: (rank, tag, bytes) each. Looks for so many messages at most, as each look costs."""
        for _ in itertools.count() if most is None else range(most):
            message = self._look()
            if message is None:
                break
            data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            request = message.Irecv([data, self._mpi.BYTE])
            self._coming.append((self._status.Get_source(), self._status.Get_tag(), request, data))
        return self._arrived() if self._coming else []

    def let_go(self) -> None:
        """Forget the messages that are sent. For `take`'s thread, when it has nothing better to do."""
        if self._leaving:
            with self._lock:
                self._leaving = [one for one in self._leaving if not one[0].Test()]

    def _look(self) -> Any:
        """The next message, if there is one. Open MPI's probe first looks and then takes in what has come."""
        message = self._comm.Improbe(tag=self._tag, status=self._status)
        return message or self._comm.Improbe(tag=self._tag, status=self._status)

    def _arrived(self) -> list[tuple[int, int, Any]]:
        """Those that are here as a whole, unless an earlier one of their rank is not."""
        arrived, coming, late = [], [], set()
        for one in self._coming:
            rank, tag, request, data = one
            if rank in late or not request.Test():
                if rank not in late and self._bell is not None:
                    self._bell.ring(rank)  # it may have to send the rest
                late.add(rank)
                coming.append(one)
            else:
                arrived.append((rank, tag, data))
        self._coming = coming
        return arrived

    def flush(self, seconds: float) -> None:
        """Have everything sent, or give up."""
        pace, until = MpiPollBackoff(), time.monotonic() + seconds
        while self._leaving and time.monotonic() < until:
            self.let_go()
            pace.wait()


@dataclass(frozen=True)
class Peer:
    """A serving rank, as it introduces itself.

    Attributes:
        rank: among all that mpiexec has started, which is what mpiexec calls it.
        home: what tells whether two processes see each other: the machine, and its table of processes.
        pid, started: its number there, and when it started; None where the others cannot see it.
        cores: that it may use.
    """

    rank: int
    node: str
    home: tuple[str, str]
    pid: int | None
    started: int | None
    cores: int

    @classmethod
    def me(cls) -> Peer:
        """This process."""
        home = home_of_this_process()
        pid = os.getpid() if home[1] else None
        started = None if pid is None else processes.started(pid)
        rank = int(_mpi().COMM_WORLD.Get_rank())
        return cls(rank, platform.node(), home, pid, started, usable_cores())

    @property
    def where(self) -> str:
        """In words, to go on after "on node"."""
        return f"{self.node}, rank {self.rank}"

    def gone_for(self, other: Peer) -> bool:
        """Whether the other one can see that this one is gone."""
        return self.pid is not None and self.home == other.home and processes.started(self.pid) != self.started


@dataclass(frozen=True)
class Welcome:
    """What rank 0 tells the others when it first makes a pool: how to wake each other, and where modules are."""

    tower: BellTower
    path: list[str]


def new_tag(count: int) -> int:
    """The tag of the count-th host of a job."""
    return FIRST_HOST + count % (LEAST_TAG - FIRST_HOST)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
