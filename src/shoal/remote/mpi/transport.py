"""Blocks of envs in the ranks of an MPI job: rank 0 drives, the others serve.

    import shoal

    shoal.serve()                                       # the other ranks stay here until rank 0 is done, and leave
    pool = shoal.Pool("CartPole-v1", 64, backend="mpi")

A batch of one rank is one message there and one back, sent without waiting; several may be under way. Everything that
comes to rank 0 is taken by one thread of it, whatever the number of pools.
"""

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
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.backends.base import split
from shoal.envs.batched import BATCHED
from shoal.errors import StartError, WorkerDied
from shoal.remote.bell import BellTower, MachineBell
from shoal.remote.dispatcher import Deliver, HostLost
from shoal.remote.mpi.mailbox import HELLO, ORDERS, URGENT, WELCOME, Mailbox, MpiPollBackoff, Peer, Welcome, new_tag
from shoal.remote.mpi.start import MEET_TIMEOUT, join
from shoal.remote.wire import pack_words
from shoal.support.checks import check_choice, check_names, positive_number, whole_number

__all__ = ["Driver", "MpiLink", "MpiOptions", "MpiTransport", "driver_of"]

LOCAL_BACKENDS = ("serial", "threads", "processes", *BATCHED)
WATCH_EVERY = 0.1  # seconds between two looks at whether the ranks of this machine are still there
LEAVE_PATIENCE = 2.0  # seconds until the last words to the ranks must be on their way
START_EXAMPLE = "mpiexec -n 3 python script.py (rank 0 drives, the two others serve)"
GONE = (
    "has ended without a word: it was killed, or an env ended its process, or native code of an env crashed; mpiexec "
    "says by which exit code or signal, and ends the job, as MPI cannot replace a rank"
)


@dataclass(frozen=True)
class MpiOptions:
    """`backend_options` of backend="mpi".

    Attributes:
        local_backend: how a rank runs its envs: "serial" (the default), "threads", "processes", "compiled", "cuda" or
            "jax".
        local_workers: by how many workers; by default as many as its cores, shared with other ranks of its machine.
        comm: a communicator of mpi4py's, whose rank 0 drives; by default that of all ranks. `shoal.serve` must be
            given the same.
        meet_timeout: seconds until all ranks must serve.
    """

    local_backend: str = "serial"
    local_workers: int | None = None
    comm: Any = None
    meet_timeout: float = MEET_TIMEOUT

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> MpiOptions:
        """Raises ValueError for those that make no sense."""
        check_names("backend_options", given, [one.name for one in fields(cls)])
        options = cls(**given)
        check_choice("backend_options: local_backend", options.local_backend, LOCAL_BACKENDS)
        if options.local_workers is not None:
            whole_number("backend_options: local_workers", options.local_workers, 1, 2**20)
        positive_number("backend_options: meet_timeout", options.meet_timeout)
        return options


class MpiTransport:
    """Serving ranks, one for each block of a pool; those that serve the fewest blocks already."""

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        given = MpiOptions.checked(options)
        if num_workers is not None:
            whole_number("num_workers", num_workers, 1, 2**20)
        self._driver = driver_of(given.comm, given.meet_timeout)
        self._driver.check(num_envs, num_workers)
        self._driver.meet(given.meet_timeout)
        self.num_workers = min(num_envs, num_workers or len(self._driver.peers))
        self.local_backend = given.local_backend
        self.local_workers = given.local_workers or self._driver.cores_each()
        # Worker processes can be ended by their rank; the rank itself, and with it the job, by nobody.
        self.ends_hung_envs = given.local_backend == "processes"
        self._ranks = self._driver.least_busy(self.num_workers)
        self._blocks = split(num_envs, self.num_workers)

    def start(self, index: int, deliver: Deliver) -> MpiLink:
        """See Transport. A rank that has lost its envs gets a new host."""
        return self._driver.open(self._ranks[index], index, self._blocks[index], deliver)

    def close(self) -> None:
        """See Transport. The ranks go on, and wait for the next pool."""


class MpiLink:
    """One host in a rank."""

    def __init__(self, driver: Driver, rank: int, tag: int, index: int, block: tuple[int, int], deliver: Deliver):
        self.rank, self.tag, self.index, self.block = rank, tag, index, block
        self._driver, self.deliver = driver, deliver
        self.posted = self.answered = 0  # each of them has one thread that moves it
        self.lost = False

    def post(self, data: bytes) -> None:
        """See Link."""
        self.posted += 1
        self._driver.post(self.rank, self.tag, data)

    def peek(self) -> None:
        """See Link."""
        self.posted += 1
        self._driver.post(self.rank, URGENT, pack_words("peek", self.tag))

    def take(self, data: Any) -> None:
        """An answer has come."""
        self.answered += 1
        self.deliver(data)

    def lose(self, why: str) -> None:
        """None will come any more."""
        self.answered = self.posted
        if not self.lost:
            self.lost = True
            self.deliver(HostLost(why, for_good=True))

    def kill(self) -> None:
        """See Link."""
        self._driver.drop(self)


class Driver:
    """What rank 0 has of the others: a thread that takes their messages, and a look at whether they are still there.

    One for each communicator, from the first pool or `shoal.serve` until the process leaves.
    """

    def __init__(self, comm: Any):
        self._given = comm
        self._me = Peer.me()
        self.peers: dict[int, Peer] = {}
        self._found: dict[int, Peer] = {}  # who serves so far: they say so once, whoever else is late
        self._links: dict[tuple[int, int], MpiLink] = {}
        self._hosts = itertools.count()
        self._lock = threading.RLock()  # a signal's handler may come while its thread has it
        self._work = threading.Event()
        self._over = False
        self._mail: Mailbox | None = None
        self._old_handler: Any = None
        atexit.register(self.close)

    # ---- meeting -----------------------------------------------------------------------------------------------

    def check(self, num_envs: int, num_workers: int | None) -> None:
        """Raise StartError unless this is rank 0, and the ranks fit the envs."""
        rank, size = self._given.Get_rank(), self._given.Get_size()
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
        mail, pace, until = Mailbox(self._given, HELLO), MpiPollBackoff(), time.monotonic() + seconds
        found = self._found
        everybody = set(range(1, self._given.Get_size()))
        while missing := sorted(everybody - set(found)):
            found.update((rank, pickle.loads(data)) for rank, _, data in mail.take())
            if time.monotonic() > until:
                raise StartError(
                    f'backend="mpi": rank {", ".join(map(str, missing))} of {len(everybody) + 1} did not begin to '
                    f"serve within {seconds:g} s: all but rank 0 must call shoal.serve(), at the beginning of the "
                    "script, or be started as `shoal serve`"
                )
            pace.wait()
        tower = BellTower.build(self._me.home, len(everybody) + 1)
        self._bell = MachineBell(tower, 0, {0: self._me.home, **{rank: peer.home for rank, peer in found.items()}})
        self._welcome(Welcome(tower, sys.path))
        self._mail = Mailbox(self._given.Dup(), bell=self._bell)
        self.peers = dict(sorted(found.items()))
        self._say_how_it_ends()
        threading.Thread(target=self._main, name="shoal-mpi", daemon=True).start()

    def _welcome(self, welcome: Welcome | None) -> None:
        """Bid all ranks come, or go: None."""
        mail = Mailbox(self._given)
        for rank in range(1, self._given.Get_size()):
            mail.post(rank, WELCOME, pickle.dumps(welcome))
        mail.flush(LEAVE_PATIENCE)

    def cores_each(self) -> int:
        """How many cores a serving rank has for itself, at least."""
        ranks = Counter(peer.home for peer in self.peers.values())
        return max(1, min(peer.cores // ranks[peer.home] for peer in self.peers.values()))

    def least_busy(self, count: int) -> list[int]:
        """So many ranks, in their order."""
        with self._lock:
            load = Counter(rank for rank, _ in self._links)
        return sorted(sorted(self.peers, key=lambda rank: (load[rank], rank))[:count])

    # ---- hosts -------------------------------------------------------------------------------------------------

    def open(self, rank: int, index: int, block: tuple[int, int], deliver: Deliver) -> MpiLink:
        """Begin to talk to a new host in a rank. Raises StartError if the rank is gone."""
        if self.peers[rank].gone_for(self._me):
            raise StartError(f"rank {self.peers[rank].rank} {GONE}")
        link = MpiLink(self, rank, new_tag(next(self._hosts)), index, block, deliver)
        with self._lock:
            self._links[rank, link.tag] = link
        self.post(rank, ORDERS, pack_words("start", link.tag))
        return link

    def drop(self, link: MpiLink) -> None:
        """Talk to a host no more, and have its rank end it."""
        with self._lock:
            if self._links.pop((link.rank, link.tag), None) is None:
                return
        self.post(link.rank, URGENT, pack_words("kill", link.tag))

    def post(self, rank: int, tag: int, data: bytes) -> None:
        """Send a message."""
        if self._mail is not None and not self._over:
            self._mail.post(rank, tag, data)
            self._work.set()

    # ---- the thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        assert self._mail is not None
        pace, next_watch = MpiPollBackoff(self._bell, list(self.peers)), 0.0
        while not self._over:
            messages = self._mail.take(pace.heard())
            for rank, tag, data in messages:
                link = self._links.get((rank, tag))
                if link is not None:
                    link.take(data)
            now = time.monotonic()
            if now > next_watch:
                next_watch = now + WATCH_EVERY
                self._watch()
            if messages:
                pace.came()
            self._mail.let_go()
            if messages and not pace.woken:
                continue  # more may follow
            if self._mail.busy:
                pace.wait(hurry=True)
            elif any(link.posted > link.answered for link in list(self._links.values())):
                pace.wait()
            elif pace.woken:
                pace.rest(WATCH_EVERY)
            elif self._work.wait(WATCH_EVERY):
                self._work.clear()
                pace.restart()

    def _watch(self) -> None:
        for link in self._lost_links():
            link.lose(GONE)

    def _lost_links(self) -> list[MpiLink]:
        with self._lock:
            links = list(self._links.values())
        gone = {rank for rank in {link.rank for link in links} if self.peers[rank].gone_for(self._me)}
        return [link for link in links if link.rank in gone]

    # ---- the end -----------------------------------------------------------------------------------------------

    def _say_how_it_ends(self) -> None:
        """Where mpiexec ends a job because a rank is gone, tell whose envs that had. It asks by SIGTERM first."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: Any) -> None:
        lost = sorted(self._lost_links(), key=lambda link: not link.lost)  # who was missed before comes first
        with self._lock:
            links = list(self._links.values())
        for link in links:  # nobody shall wait for what they may still say
            link.lose(GONE if link in lost else "was ended with the job")
        if lost:
            raise self._death(lost[0])
        if links:
            ranks = "; ".join(f"rank {self.peers[one.rank].rank}: {_envs(one.block)}" for one in links)
            os.write(2, f"shoal: MPI ends this job, and mpiexec says why. Envs were in {ranks}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _death(self, link: MpiLink) -> WorkerDied:
        peer = self.peers[link.rank]
        message = f"worker {link.index} (on node {peer.where}, pid {peer.pid}, {_envs(link.block)}) {GONE}"
        return WorkerDied(message, link.index, peer.pid, None, range(*link.block), node=peer.where)

    def close(self) -> None:
        """Let the ranks go. Called when the process leaves, after all pools were closed."""
        if self._over:
            return
        if self._mail is None:
            if self._given.Get_rank() == 0:
                self._welcome(None)
        else:
            for rank in self.peers:
                self.post(rank, ORDERS, pack_words("end"))
            self._mail.flush(LEAVE_PATIENCE)
        self._over = True
        self._work.set()
        if self._old_handler is not None:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(signal.SIGTERM, self._old_handler)


def _envs(block: tuple[int, int]) -> str:
    start, stop = block
    return f"env {start}" if stop - start == 1 else f"envs {start} to {stop - 1}"


_drivers: dict[Any, Driver] = {}


def driver_of(comm: Any, patience: float = MEET_TIMEOUT) -> Driver:
    """The one of a communicator, None for that of all ranks. Raises StartError where there is no MPI."""
    comm = join(comm, patience)
    key = comm.handle
    if key not in _drivers:
        _drivers[key] = Driver(comm)
    return _drivers[key]
