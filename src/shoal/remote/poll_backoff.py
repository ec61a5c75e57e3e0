"""How often to look for messages where nobody wakes whoever waits for them."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import time

__all__ = ["PollBackoff", "pause"]

MEMORY = 8  # waits
SHARE = 0.1  # of the time for which something has been expected, to sleep until the next look
SHORTEST = 20e-6  # seconds of such a sleep
SELDOM = 2e-3  # seconds between two looks while nothing is expected
PR_SET_TIMERSLACK = 29


class PollBackoff:
    """How often to look. For one thread, which begins the first wait when it makes this.

    Seldom for as long as nothing has come in the last waits either; then all the time, as it is about to come, and
    waking up costs more than what is waited for, if envs are cheap; then ever more seldom. So who waits has the core
    for others, and a long wait takes a tenth longer than it must.

    Args:
        soon: of the shortest of the last waits; for so long nothing is expected.
        spin: seconds of looking all the time, for which the core is lent to whoever wants it.
        longest: seconds between two looks.
    """

    def __init__(self, soon: float, spin: float, longest: float) -> None:
        self._share, self._spin, self.longest = soon, spin, longest
        self._waits: collections.deque[float] = collections.deque([0.0], MEMORY)
        with contextlib.suppress(OSError, AttributeError):  # Linux lets threads sleep 50 us longer than they want
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        self.restart()

    def restart(self) -> None:
        """A wait begins."""
        self._since, self._soon, self._first = time.perf_counter(), self._share * min(self._waits), True

    def came(self) -> None:
        """Something has come. More may follow at once, which tells nothing of the next wait."""
        now = time.perf_counter()
        if self._first:
            self._waits.append(now - self._since)
        self._since, self._soon, self._first = now, 0.0, False

    @property
    def sleep(self) -> float:
        """Seconds until the next look; 0 to look again at once."""
        late = time.perf_counter() - self._since - self._soon
        return min(-late, SELDOM) if late < 0 else self._after(late)

    def _after(self, late: float) -> float:
        return 0.0 if late < self._spin else min(max(late * SHARE, SHORTEST), self.longest)

    def wait(self) -> None:
        """Until the next look."""
        pause(self.sleep)


def pause(seconds: float) -> None:
    """Sleep, or let others have the core for once."""
    if seconds > 0:
        time.sleep(seconds)
    else:
        os.sched_yield()
