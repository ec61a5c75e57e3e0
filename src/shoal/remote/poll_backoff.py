"""Decides how long a thread waits before it looks for messages again, where no call blocks until one arrives."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from shoal.remote.bell import MachineBells

MEMORY = 8  # the number of waits that are remembered
SHARE = 0.1  # a message that is late is looked for again after this share of the time for which it is late
SHORTEST = 20e-6  # seconds; the shortest such sleep
SELDOM = 2e-3  # seconds between two looks before a message is expected
PR_SET_TIMERSLACK = 29


class PollTimes(NamedTuple):
    """How often to look for messages.

    Attributes:
        soon: a message is expected after this share of the shortest remembered wait.
        spin: seconds for which the thread then looks all the time, yielding its core to threads that need it.
        longest: seconds between two looks at most.
        woken: seconds between two looks if every sender rings.
    """

    soon: float
    spin: float
    longest: float
    woken: float


class PollBackoff:
    """Waits between looks for messages. For one thread.

    At first no message is expected, since the last waits took longer, and the thread looks seldom. When the message is
    about to come the thread looks all the time, because with cheap envs a wake-up takes longer than the step. After
    that it looks less and less often. So a waiting thread leaves its core to others, and a long wait takes a tenth
    longer than it must. A ring (`bells`) ends any sleep.

    Args:
        times: how often to look.
        bells: of this process, if it has any.
        senders: the ranks that send the messages.

    Attributes:
        bells: as above. They may be set later.
        woken: whether all senders ring, so there is no need to look before. May be changed.
    """

    def __init__(self, times: PollTimes, bells: MachineBells | None = None, senders: Sequence[int] = ()) -> None:
        self.times, self.bells = times, bells
        self.woken = bells is not None and all(bells.reaches(rank) for rank in senders)
        self._rung = False
        self._waits: collections.deque[float] = collections.deque([0.0], MEMORY)
        with contextlib.suppress(OSError, AttributeError):  # Linux adds 50 us to sleeps of a thread unless told not to
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self.restart()

    def restart(self) -> None:
        """Begin a wait."""
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
        """Wait until the next look.

        Args:
            hurry: part of a message has come or gone. The rest follows only while both sides look.
        """
        seconds = self._when_late(time.perf_counter() - self._since) if hurry else self.sleep
        if seconds <= 0:
            os.sched_yield()
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
