"""Rank 0's connections to the serving ranks, for all pools of a communicator."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shoal.errors import StartError, WorkerDied
from shoal.remote.bell import BellMemory, MachineBells
from shoal.remote.mpi.mailbox import HELLO, INVITATION, ORDERS, TIMES, URGENT, Invitation, Mailbox, Peer, new_tag
from shoal.remote.mpi.start import MEET_TIMEOUT, join
from shoal.remote.poll_backoff import PollBackoff
from shoal.remote.transport import Deliver, HostLost, host_died, in_words
from shoal.remote.wire import pack_words

WATCH_EVERY = 0.1  # seconds between two looks at whether the ranks of this machine are running
LEAVE_TIMEOUT = 2.0  # seconds until the last messages to the ranks must be sent
START_EXAMPLE = "mpiexec -n 3 python script.py (rank 0 drives, the two others serve)"
GONE = (
    "has ended without a word: it was killed, or an env ended its process, or native code of an env crashed; mpiexec "
    "says by which exit code or signal, and ends the job, as MPI cannot replace a rank"
)


@dataclass(eq=False)
class MpiLink:
    """The connection to one host in a rank.

    Attributes:
        posted, answered: the numbers of messages there and back. One thread changes each of them.
        lost: whether the host was reported as lost.
    """

    driver: Driver
    rank: int
    tag: int
    index: int
    env_ids: range
    deliver: Deliver
    posted = 0
    answered = 0
    lost = False

    def post(self, data: bytes) -> None:
        self.posted += 1
        self.driver.post(self.rank, self.tag, data)

    def peek(self) -> None:
        self.posted += 1
        self.driver.post(self.rank, URGENT, pack_words("peek", self.tag))

    def take(self, data: Any) -> None:
        """Deliver an answer."""
        self.answered += 1
        self.deliver(data)

    def lose(self, why: str) -> None:
        """Deliver that no answer will come any more."""
        self.answered = self.posted
        if not self.lost:
            self.lost = True
            self.deliver(HostLost(why, for_good=True))

    def kill(self) -> None:
        self.driver.drop(self)


class Driver:
    """Receives the messages of all serving ranks in one thread, and watches whether the ranks are still running.

    There is one for each communicator, from the first pool or `shoal.serve` until the process ends.
    """

    def __init__(self, comm: Any):
        self._comm = comm
        self._me = Peer.me()
        self.peers: dict[int, Peer] = {}
        self._found: dict[int, Peer] = {}  # ranks that serve, while others are late; each says so only once
        self._links: dict[tuple[int, int], MpiLink] = {}
        self._hosts = itertools.count()
        self._lock = threading.RLock()  # a signal handler may run while its own thread holds the lock
        self._over = False
        self._mail: Mailbox | None = None
        self._old_handler: Any = None
        atexit.register(self.close)

    # ---- meeting -----------------------------------------------------------------------------------------------

    def check(self, num_envs: int, num_workers: int | None) -> None:
        """Raise StartError unless this is rank 0, and the number of ranks fits the envs."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        if rank:
            raise StartError(
                f'backend="mpi": this is rank {rank} of {size}, and rank 0 drives alone: call shoal.serve() before the '
                "pool is made; the other ranks stay there until rank 0 is done"
            )
        if size == 1:
            raise StartError(
                f'backend="mpi" needs serving ranks beside this one, and there are none: start it by {START_EXAMPLE}'
            )
        if num_workers is None and size - 1 > num_envs:
            raise StartError(
                f'backend="mpi": there are {size - 1} serving ranks and {num_envs} envs: start {num_envs + 1} ranks at '
                f"most, or let some have nothing to do by num_workers={num_envs}"
            )
        if num_workers is not None and min(num_workers, num_envs) > size - 1:
            raise StartError(
                f'backend="mpi": num_workers={num_workers} asks for as many serving ranks, and there are {size - 1}: '
                f"start {num_workers + 1} ranks, one of which drives"
            )

    def meet(self, seconds: float) -> None:
        """Wait until all ranks serve, the first time. Raises StartError if some do not."""
        if self.peers:
            return
        mail, backoff, until = Mailbox(self._comm, HELLO), PollBackoff(TIMES), time.monotonic() + seconds
        found, expected = self._found, set(range(1, self._comm.Get_size()))
        while missing := sorted(expected - set(found)):
            found.update((rank, pickle.loads(data)) for rank, _, data in mail.take())
            if time.monotonic() > until:
                raise StartError(
                    f'backend="mpi": rank {", ".join(map(str, missing))} of {len(expected) + 1} did not begin to '
                    f"serve within {seconds:g} s: all but rank 0 must call shoal.serve(), at the beginning of the "
                    "script, or be started as `shoal serve`"
                )
            backoff.wait()
        memory = BellMemory.create(self._me.home, len(expected) + 1)
        self._bells = MachineBells(memory, 0, {0: self._me.home, **{rank: peer.home for rank, peer in found.items()}})
        self._invite(Invitation(memory, sys.path))
        self._mail = Mailbox(self._comm.Dup(), bells=self._bells)
        self.peers = dict(sorted(found.items()))
        self._backoff = PollBackoff(TIMES, self._bells, list(self.peers))
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, self._on_term)
        threading.Thread(target=self._main, name="shoal-mpi", daemon=True).start()

    def _invite(self, invitation: Invitation | None) -> None:
        """Tell all ranks to serve, or to leave: None."""
        mail = Mailbox(self._comm)
        for rank in range(1, self._comm.Get_size()):
            mail.post(rank, INVITATION, pickle.dumps(invitation))
        mail.flush(LEAVE_TIMEOUT)

    def cores_each(self) -> int:
        """The number of cores that each serving rank has for itself, at least."""
        ranks = Counter(peer.home for peer in self.peers.values())
        return max(1, min(peer.cores // ranks[peer.home] for peer in self.peers.values()))

    def least_busy(self, count: int) -> list[int]:
        """The `count` ranks that run the fewest hosts, in their order."""
        load = Counter(link.rank for link in self._all_links())
        return sorted(sorted(self.peers, key=lambda rank: (load[rank], rank))[:count])

    # ---- hosts -------------------------------------------------------------------------------------------------

    def open(self, rank: int, index: int, env_ids: range, deliver: Deliver) -> MpiLink:
        """Begin to start a host in a rank. Raises StartError if the rank has ended."""
        if self.peers[rank].gone_for(self._me):
            raise StartError(f"rank {self.peers[rank].rank} {GONE}")
        link = MpiLink(self, rank, new_tag(next(self._hosts)), index, env_ids, deliver)
        with self._lock:
            self._links[rank, link.tag] = link
        self.post(rank, ORDERS, pack_words("start", link.tag))
        return link

    def drop(self, link: MpiLink) -> None:
        """Ignore a host from now on, and let its rank end it."""
        with self._lock:
            if self._links.pop((link.rank, link.tag), None) is None:
                return
        self.post(link.rank, URGENT, pack_words("kill", link.tag))

    def post(self, rank: int, tag: int, data: bytes) -> None:
        """Send a message."""
        if self._mail is not None and not self._over:
            self._mail.post(rank, tag, data)
            if not self._backoff.woken:
                self._bells.ring(0)  # the thread must now look for the answer

    def _all_links(self) -> list[MpiLink]:
        with self._lock:
            return list(self._links.values())

    def _lost_links(self) -> list[MpiLink]:
        links = self._all_links()
        gone = {rank for rank in {link.rank for link in links} if self.peers[rank].gone_for(self._me)}
        return [link for link in links if link.rank in gone]

    # ---- the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        assert self._mail is not None
        backoff, next_watch = self._backoff, 0.0
        while not self._over:
            messages = self._mail.take(backoff.rings())
            for rank, tag, data in messages:
                link = self._links.get((rank, tag))
                if link is not None:
                    link.take(data)
            if time.monotonic() > next_watch:
                next_watch = time.monotonic() + WATCH_EVERY
                for link in self._lost_links():
                    link.lose(GONE)
            if messages:
                backoff.came()
            self._mail.let_go()
            if messages and not backoff.woken:
                continue  # more may follow
            if self._mail.busy or any(link.posted > link.answered for link in list(self._links.values())):
                backoff.wait(hurry=self._mail.busy)
            else:
                backoff.rest(WATCH_EVERY)

    # ---- the end -----------------------------------------------------------------------------------------------

    def _on_term(self, number: int, frame: Any) -> None:
        """Say which envs were lost when mpiexec ends the job because a rank has ended. It sends SIGTERM first."""
        lost = sorted(self._lost_links(), key=lambda link: not link.lost)  # those that were noticed before come first
        links = self._all_links()
        for link in links:  # so that no thread waits for their answers
            link.lose(GONE if link in lost else "was ended with the job")
        if lost:
            raise self._death(lost[0])
        if links:
            ranks = "; ".join(f"rank {self.peers[one.rank].rank}: {in_words(one.env_ids)}" for one in links)
            os.write(2, f"shoal: MPI ends this job, and mpiexec says why. Envs were in {ranks}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _death(self, link: MpiLink) -> WorkerDied:
        peer = self.peers[link.rank]
        return host_died(link.index, link.env_ids, peer.where, peer.pid, GONE)

    def close(self) -> None:
        """Let the ranks leave. Called at the end of the process, after all pools were closed."""
        if self._over:
            return
        if self._mail is None:
            if self._comm.Get_rank() == 0:
                self._invite(None)
        else:
            for rank in self.peers:
                self.post(rank, ORDERS, pack_words("end"))
            self._mail.flush(LEAVE_TIMEOUT)
        self._over = True
        if self._old_handler is not None:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, self._old_handler)


_drivers: dict[Any, Driver] = {}


def driver_of(comm: Any, timeout: float = MEET_TIMEOUT) -> Driver:
    """The driver of a communicator; None for that of all ranks. Raises StartError if there is no MPI."""
    comm = join(comm, timeout)
    if comm.handle not in _drivers:
        _drivers[comm.handle] = Driver(comm)
    return _drivers[comm.handle]
