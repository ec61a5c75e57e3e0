"""The other side of backend="mpi": a rank that runs envs for rank 0."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

from shoal.errors import StartError
from shoal.ranks import MpiRanks, current, told_by_launcher
from shoal.remote.bell import BellMemory, MachineBells, PollBackoff
from shoal.remote.host import BlockHost
from shoal.remote.mpi.mailbox import HELLO, INVITATION, TIMES, URGENT, Mailbox, Peer
from shoal.remote.mpi.transport import MEET_TIMEOUT, driver_of, join
from shoal.remote.wire import unpack_words
from shoal.support.checks import positive_number
from shoal.support.deadline import NEVER, Deadline

URGENT_EVERY = 0.02  # seconds between two looks for urgent orders
HUNG_TIMEOUT = 5.0  # seconds until an env of a host that was killed must return
TERM_DELAY = 0.4  # seconds between SIGTERM and the end; mpiexec grants one second
SILENCE = 30.0  # seconds without an invitation until a rank says so


def serve(comm: Any = None, leave: bool = True, meet_timeout: float = MEET_TIMEOUT) -> bool:
    """Under mpiexec: make every rank but 0 run envs for the pools with backend="mpi" that rank 0 makes.

    Call it at the beginning of a script that mpiexec starts, on all ranks. It returns at once on rank 0, and where
    there is no mpiexec. On the other ranks it returns only when rank 0 is done, so they do not run what follows.

    Args:
        comm: a communicator of mpi4py with rank 0 as the driver; by default that of all ranks.
        leave: end the process then, by SystemExit; otherwise return True.
        meet_timeout: seconds that rank 0 waits for the others to start MPI, before it says so and ends the job.

    Returns:
        False on rank 0, and with `leave=False` True on the others.
    """
    positive_number("meet_timeout", meet_timeout)
    try:
        known = join(comm, meet_timeout)
    except StartError:
        if isinstance(current(), MpiRanks):
            raise
        return False  # there are no ranks; a pool that needs them says what is missing
    if known.Get_rank() == 0:
        driver_of(comm)  # it lets the others leave at the end of this process, however that ends
        return False
    _serve(known)
    if leave:
        sys.exit(0)
    return True


def _serve(comm: Any) -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash of an env ends the job, and must say where it happened
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_later)
    me = Peer.me()
    mail = Mailbox(comm, INVITATION)
    mail.post(0, HELLO, pickle.dumps(me))
    invitation = _await_invitation(mail, me.rank)
    if invitation is not None:
        memory, path = invitation
        sys.path += [folder for folder in path if folder not in sys.path]
        rank = comm.Get_rank()
        bells = MachineBells(memory, rank, {0: memory.home, rank: me.home})
        MpiServer(comm.Dup(), me.where, bells).run()


def _leave_later(number: int, frame: Any) -> None:
    """End a little later when mpiexec ends all ranks because one has ended: rank 0 must see first which one it was."""
    time.sleep(TERM_DELAY)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _await_invitation(mail: Mailbox, rank: int) -> tuple[BellMemory, list[str]] | None:
    """Wait for the invitation of rank 0; None if it needs no ranks."""
    backoff, silent_since = PollBackoff(TIMES), time.monotonic()
    while True:
        for _, _, data in mail.take():
            return pickle.loads(data)  # type: ignore[no-any-return]
        if time.monotonic() - silent_since > SILENCE:
            silent_since = float("inf")
            sys.stderr.write(f'shoal: rank {rank} serves, and rank 0 has made no pool with backend="mpi" so far\n')
        backoff.wait()


class MpiServer:
    """Runs the hosts that rank 0 has given to this rank, one for each block of envs.

    One thread takes messages and steps envs in turns. A second thread takes urgent orders meanwhile: rank 0 wants to
    know what an env is doing, or has killed its host.
    """

    def __init__(self, comm: Any, where: str, bells: MachineBells):
        self._comm, self._where, self._bells = comm, where, bells
        self._mail = Mailbox(comm, bells=bells)
        self._hosts: dict[int, BlockHost] = {}  # by tag, until rank 0 kills them, as it does with each in the end
        self._killed: dict[int, float] = {}  # the time of the order, by tag; it may come before the order to start
        self._over = False

    def run(self) -> None:
        """Serve until rank 0 ends it."""
        threading.Thread(target=self._take_urgent, name="shoal-urgent", daemon=True).start()
        backoff = PollBackoff(TIMES, self._bells, [0])
        try:
            while not self._over:
                messages = self._mail.take(backoff.rings())
                for _, tag, data in messages:
                    host = self._hosts.get(tag)
                    if host is not None and not host.over:
                        host.admit(data)
                    elif tag <= URGENT:  # otherwise it is for a host that has ended
                        self._obey(data, self._mail)
                self._end_killed()
                if messages:
                    backoff.came()
                stepped, waited = self._step(backoff)
                if stepped:
                    backoff.restart()
                self._mail.let_go()
                if not waited and (backoff.woken or not (messages or stepped)):
                    backoff.wait(hurry=self._mail.busy)
        finally:
            self._over = True
            for host in self._hosts.values():
                host.end()
        self._mail.flush(1.0)

    def _step(self, backoff: PollBackoff) -> tuple[bool, bool]:
        """Let all hosts go on. Returns whether one has answered, and whether this thread has waited for it."""
        busy = [(tag, host) for tag, host in self._hosts.items() if not host.idle]
        stepped = waited = False
        for tag, host in busy:
            # If the host has workers of its own, wait for them, but not longer than until the next look for messages.
            waits = not host.takes_turns
            deadline = Deadline.after(backoff.sleep if len(busy) == 1 else 0.0) if waits else NEVER
            for answer in host.poll(deadline):
                self._mail.post(0, tag, answer)
                stepped = True
            waited |= waits and len(busy) == 1
        return stepped, waited

    def _end_killed(self) -> None:
        for tag in [tag for tag in list(self._killed) if tag in self._hosts]:
            host = self._hosts.pop(tag)
            del self._killed[tag]
            host.end()

    # ---- orders of rank 0 --------------------------------------------------------------------------------------

    def _obey(self, data: Any, mail: Mailbox) -> None:
        """Carry out an order; `mail` belongs to the calling thread."""
        order, *tags = unpack_words(data)
        if order == "end":
            self._over = True
            return
        (tag,) = tags
        if order == "kill":
            self._killed[tag] = time.monotonic()
        elif order == "start":
            if self._killed.pop(tag, None) is None:  # tags are used again
                self._hosts[tag] = BlockHost(self._where)
        elif order == "peek" and (host := self._hosts.get(tag)) is not None:
            mail.post(0, tag, host.peek())

    def _take_urgent(self) -> None:
        """In the second thread."""
        mail = Mailbox(self._comm, URGENT, self._bells)
        while not self._over:
            time.sleep(URGENT_EVERY)
            mail.let_go()
            for _, _, data in mail.take():
                self._obey(data, mail)
            self._look_for_hung()

    def _look_for_hung(self) -> None:
        """End the job if an env of a killed host does not return."""
        now = time.monotonic()
        late = [self._hosts.get(tag) for tag, since in list(self._killed.items()) if now - since > HUNG_TIMEOUT]
        hung = [host for host in late if host is not None and not host.over]
        if hung:
            at, _, _, stack = unpack_words(hung[0].peek())[1:]
            env = f"env {abs(at) - 1}" if at else "an env"
            sys.stderr.write(
                f"shoal: rank 0 has given up {env}, which does not return; it cannot be ended but with its rank (on "
                f"node {self._where}), and so the job is. It is here:\n{stack}\n"
            )
            sys.stderr.flush()
            self._comm.Abort(1)


def check_serving() -> None:
    """For a process that does nothing but serve: raise StartError unless mpiexec has started it.

    As rank 0 it cannot serve either, and the whole job ends.
    """
    words = (
        "this is rank 0, which drives, or no mpiexec has started it: put the script first, as in "
        "mpiexec -n 1 python train.py : -n 2 shoal serve"
    )
    told = told_by_launcher()
    if told is None or told == (0, 1):
        raise StartError(words)
    if told[0] == 0:
        # MPI must be running: Open MPI's mpiexec may hang or crash if a rank ends while others start.
        comm = join(None)
        sys.stderr.write(f"shoal serve: {words}\n")
        sys.stderr.flush()
        comm.Abort(2)
