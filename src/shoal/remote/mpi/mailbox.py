"""Messages between MPI ranks, sent and received without blocking, because MPI waits by spinning.

Both sides of backend="mpi" look for messages, and leave their core to others between two looks; see PollBackoff.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.remote.bell import Home, MachineBells, PollBackoff, PollTimes, home_of_this_process
from shoal.support import processes
from shoal.support.cores import usable_cores

# Tags on the caller's own communicator: a rank says that it serves; rank 0 invites it to a communicator of Shoal's.
HELLO, INVITATION = 4711, 4712
# Tags on Shoal's communicator: orders to a rank; orders that it must hear even while it steps envs; every greater tag
# belongs to one host and carries its messages.
ORDERS, URGENT, FIRST_HOST = 0, 1, 2
LARGEST_TAG = 32767  # every MPI has at least this one
TIMES = PollTimes(soon=0.6, spin=300e-6, longest=2e-3, woken=2e-3)


class Mailbox:
    """Sends and receives bytes without blocking.

    Messages of one rank are received in the order in which they were sent, only those with the given tag if there is
    one. Any thread may call `post`, which rings the rank, and one thread calls the other methods. Two threads may use
    two mailboxes of one communicator of mpi4py.
    """

    def __init__(self, comm: Any, tag: int | None = None, bells: MachineBells | None = None):
        self._comm, self._bells, self._mpi = comm, bells, _mpi()
        self._tag = self._mpi.ANY_TAG if tag is None else tag
        self._status = self._mpi.Status()
        self._all_ring = bells is not None and all(bells.reaches(rank) for rank in bells.homes)
        self._lock = threading.Lock()
        # MPI's requests, with the bytes that must be kept until they are done.
        self._sending: list[tuple[Any, Any]] = []
        self._receiving: list[tuple[int, int, Any, Any]] = []

    @property
    def busy(self) -> bool:
        """Whether part of a message is still to come or to go, which happens only in `take` and `let_go`.

        A message to a rank that rings does not count. Open MPI calls all but the smallest messages sent only when they
        are received, and a rank that needs the rest of one rings.
        """
        return bool(self._receiving or (self._sending and not self._all_ring))

    def post(self, rank: int, tag: int, data: Any) -> None:
        request = self._comm.Isend([data, self._mpi.BYTE], rank, tag)
        if self._bells is not None:
            self._bells.ring(rank)
        with self._lock:
            self._sending.append((request, data))

    def take(self, most: int | None = None) -> list[tuple[int, int, Any]]:
        """Receive messages: (rank, tag, bytes) each. Looks for `most` new ones at most, because looking takes time."""
        for _ in itertools.count() if most is None else range(most):
            message = self._probe() or self._probe()  # Open MPI looks for a message before it takes in new ones
            if message is None:
                break
            data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            request = message.Irecv([data, self._mpi.BYTE])
            self._receiving.append((self._status.Get_source(), self._status.Get_tag(), request, data))
        return self._received() if self._receiving else []

    def _probe(self) -> Any:
        return self._comm.Improbe(tag=self._tag, status=self._status)

    def _received(self) -> list[tuple[int, int, Any]]:
        """The messages that are complete, unless an earlier one of the same rank is not."""
        complete, receiving, late = [], [], set()
        for one in self._receiving:
            rank, tag, request, data = one
            if rank not in late and request.Test():
                complete.append((rank, tag, data))
                continue
            if rank not in late and self._bells is not None:
                self._bells.ring(rank)  # it may have to send the rest
            late.add(rank)
            receiving.append(one)
        self._receiving = receiving
        return complete

    def let_go(self) -> None:
        """Forget the messages that were sent."""
        if self._sending:
            with self._lock:
                self._sending = [one for one in self._sending if not one[0].Test()]

    def flush(self, seconds: float) -> None:
        """Wait until all messages were sent, for so long at most."""
        backoff, until = PollBackoff(TIMES), time.monotonic() + seconds
        while self._sending and time.monotonic() < until:
            self.let_go()
            backoff.wait()


@dataclass(frozen=True)
class Peer:
    """A serving rank, as it introduces itself."""

    rank: int  # among all that mpiexec has started, which is what mpiexec calls it
    home: Home
    pid: int
    started: int | None  # when, for others that see its pid
    cores: int  # that it may use

    @classmethod
    def me(cls) -> Peer:
        rank, pid = int(_mpi().COMM_WORLD.Get_rank()), os.getpid()
        return cls(rank, home_of_this_process(), pid, processes.started(pid), usable_cores())

    @property
    def where(self) -> str:
        """The place in words, as they follow "on node"."""
        return f"{self.home[0]}, rank {self.rank}"

    def gone_for(self, other: Peer) -> bool:
        """Whether the other one can see that this one is gone."""
        visible = self.home[1] and self.home == other.home
        return bool(visible) and processes.started(self.pid) != self.started


def new_tag(count: int) -> int:
    """The tag of the count-th host of a job."""
    return FIRST_HOST + count % (LARGEST_TAG - FIRST_HOST)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
