"""The other side of backend="mpi": a rank that steps envs for rank 0."""

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
from shoal.remote.bell import MachineBell
from shoal.remote.host import BlockHost
from shoal.remote.mpi.mailbox import HELLO, URGENT, WELCOME, Mailbox, MpiPollBackoff, Peer, Welcome
from shoal.remote.mpi.start import MEET_TIMEOUT, join
from shoal.remote.mpi.transport import driver_of
from shoal.remote.wire import unpack_words
from shoal.support.checks import positive_number
from shoal.support.deadline import NEVER, Deadline

__all__ = ["check_serving", "serve"]

ATTEND_EVERY = 0.02  # seconds between two looks for what a rank shall hear while it steps envs
HUNG_PATIENCE = 5.0  # seconds until an env that shall be given up must return
GRACE = 0.4  # seconds between being told to leave and leaving; mpiexec gives one second
SILENCE = 30.0  # seconds until a rank that nobody talks to says so


def serve(comm: Any = None, leave: bool = True, meet_timeout: float = MEET_TIMEOUT) -> bool:
    """Under mpiexec: make every rank but 0 step envs for the pools with backend="mpi" that rank 0 makes.

    Call it at the beginning of a script that mpiexec starts, on all ranks. On rank 0, and where no mpiexec is in play,
    it returns at once. On the others it returns only when rank 0 is done, and so nothing that follows is run there.

    Args:
        comm: a communicator of mpi4py's, whose rank 0 drives; by default that of all ranks.
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
        return False  # nobody has started ranks; a pool says what is missing, if there is one that needs it
    if known.Get_rank() == 0:
        driver_of(comm)  # which lets the others go in the end, whatever becomes of this one
        return False
    _serve(known)
    if leave:
        sys.exit(0)
    return True


def _serve(comm: Any) -> None:
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a crash of an env ends the job: it shall say where
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_later)
    me = Peer.me()
    mail = Mailbox(comm, WELCOME)
    mail.post(0, HELLO, pickle.dumps(me))
    welcome = _await_welcome(mail, me.rank)
    if welcome is not None:
        sys.path += [folder for folder in welcome.path if folder not in sys.path]
        rank = comm.Get_rank()
        bell = MachineBell(welcome.tower, rank, {0: welcome.tower.home, rank: me.home})
        Server(comm.Dup(), me.where, bell).run()


def _leave_later(number: int, frame: Any) -> None:
    """mpiexec ends all ranks because one is gone: let rank 0 see which one that was, before more are."""
    time.sleep(GRACE)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _await_welcome(mail: Mailbox, rank: int) -> Welcome | None:
    """What rank 0 says; None if it wants nothing."""
    pace, silent_since = MpiPollBackoff(), time.monotonic()
    while True:
        for _, _, data in mail.take():
            welcome: Welcome | None = pickle.loads(data)
            return welcome
        if time.monotonic() - silent_since > SILENCE:
            silent_since = float("inf")
            sys.stderr.write(f'shoal: rank {rank} serves, and rank 0 has made no pool with backend="mpi" so far\n')
        pace.wait()


class Server:
    """Hosts, one for each block of envs that rank 0 has given to this rank.

    One thread takes messages and steps envs in turns. Another one hears what is urgent meanwhile: that rank 0 wants to
    know what an env is doing, or has given it up.
    """

    def __init__(self, comm: Any, where: str, bell: MachineBell):
        self._comm, self._where, self._bell = comm, where, bell
        self._mail = Mailbox(comm, bell=self._bell)
        self._hosts: dict[int, BlockHost] = {}  # by tag, until rank 0 gives them up, as it does each in the end
        self._given_up: dict[int, float] = {}  # since when, by tag; those too of whose start we have still to hear
        self._over = False

    def run(self) -> None:
        """Until rank 0 says so."""
        threading.Thread(target=self._attend, name="shoal-attend", daemon=True).start()
        pace = MpiPollBackoff(self._bell, [0])
        try:
            while not self._over:
                messages = self._mail.take(pace.heard())
                for _, tag, data in messages:
                    self._take(tag, data)
                if self._given_up:
                    self._end_given_up()
                if messages:
                    pace.came()
                stepped, waited = self._step(pace)
                if stepped:
                    pace.restart()
                self._mail.let_go()
                if not waited and (pace.woken or not (messages or stepped)):
                    pace.wait(hurry=self._mail.busy)
        finally:
            self._over = True
            for host in self._hosts.values():
                host.end()
        self._mail.flush(1.0)

    def _take(self, tag: int, data: Any) -> None:
        host = self._hosts.get(tag)
        if host is not None and not host.over:
            host.admit(data)
        elif tag > URGENT:
            return  # for a host that is no more
        else:
            name, *words = unpack_words(data)
            getattr(self, f"_on_{name}")(*words)

    def _step(self, pace: MpiPollBackoff) -> tuple[bool, bool]:
        """Have all hosts go on: whether something was answered, and whether somebody has waited for it."""
        busy = [(tag, host) for tag, host in self._hosts.items() if not host.idle]
        stepped = waited = False
        for tag, host in busy:
            # Those who have workers of their own are waited for no longer than until the next look for messages.
            waits = not host.takes_turns
            deadline = Deadline.after(pace.sleep if len(busy) == 1 else 0.0) if waits else NEVER
            for answer in host.poll(deadline):
                self._mail.post(0, tag, answer)
                stepped = True
            waited |= waits and len(busy) == 1
        return stepped, waited

    # ---- what rank 0 says --------------------------------------------------------------------------------------

    def _on_start(self, tag: int) -> None:
        if self._given_up.pop(tag, None) is None:  # tags are used again
            self._hosts[tag] = BlockHost(self._where)

    def _on_end(self) -> None:
        self._over = True

    def _on_kill(self, tag: int) -> None:
        self._given_up[tag] = time.monotonic()

    def _on_peek(self, tag: int, mail: Mailbox | None = None) -> None:
        host = self._hosts.get(tag)
        if host is not None:
            (mail or self._mail).post(0, tag, host.peek())

    def _end_given_up(self) -> None:
        for tag in list(self._given_up):
            host = self._hosts.pop(tag, None)
            if host is None:
                continue
            del self._given_up[tag]
            if not host.over:
                host.end()

    # ---- the other thread --------------------------------------------------------------------------------------

    def _attend(self) -> None:
        mail = Mailbox(self._comm, URGENT, self._bell)
        while not self._over:
            time.sleep(ATTEND_EVERY)
            mail.let_go()
            for _, _, data in mail.take():
                name, tag = unpack_words(data)
                if name == "peek":
                    self._on_peek(tag, mail)
                else:
                    self._on_kill(tag)
            self._look_for_hung()

    def _look_for_hung(self) -> None:
        now = time.monotonic()
        late = [self._hosts.get(tag) for tag, since in list(self._given_up.items()) if now - since > HUNG_PATIENCE]
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
        # Not without MPI: Open MPI's mpiexec may hang or crash if a rank ends while others are just coming in.
        comm = join(None)
        sys.stderr.write(f"shoal serve: {words}\n")
        sys.stderr.flush()
        comm.Abort(2)
