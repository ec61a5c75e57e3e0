"""What on_error="restart" keeps: which envs were lost and why, their new seeds, and how often is too often."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Loss", "Restarts"]

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds before the second restart in a row, and before any


@dataclass(frozen=True)
class Loss:
    """Why an env is gone: `kind` is "raised", "died", "timed out" or "recycled", `text` the story in one line.

    `rebuild`: its worker lives, and still has the old env.
    """

    kind: str
    text: str
    rebuild: bool


class Restarts:
    """The losses of one pool.

    Args:
        lanes: how many there are.
        limit: how many restarts one env, or one worker, may cause within `window` seconds.
        clock: for tests.
    """

    def __init__(self, lanes: int, limit: int, window: float, clock: Any = time.monotonic):
        self.limit, self.window = limit, window
        self.due: dict[int, Loss] = {}  # lanes that have a new env, or shall have one, and have not reported it
        self.counts = [0] * lanes
        self.seeds: list[int | None] = [None] * lanes  # the last that the caller has given
        self._clock = clock
        self._caused: dict[Any, deque[float]] = {}

    def blame(self, culprit: Any) -> float | None:
        """Note a restart that somebody has caused: the seconds to wait before it, None when the budget is spent."""
        now = self._clock()
        past = self._caused.setdefault(culprit, deque())
        while past and past[0] < now - self.window:
            past.popleft()
        if len(past) >= self.limit:
            return None
        past.append(now)
        return 0.0 if len(past) == 1 else float(min(LONGEST_DELAY, FIRST_DELAY * 2 ** (len(past) - 2)))

    def spent(self) -> str:
        """For the message when the budget is."""
        return f"; it was restarted {self.limit} times in {self.window:g} s, and is not again (max_restarts)"

    def lose(self, lane: int, loss: Loss) -> None:
        """An env is gone; the lane's next request goes to its successor."""
        self.counts[lane] += 1
        self.due[lane] = loss

    def seed(self, lane: int) -> int | None:
        """For the first reset of a lane's new env: from the lane's own seed and the count; None if it had none."""
        original = self.seeds[lane]
        if original is None:
            return None
        return int(np.random.SeedSequence([abs(original), self.counts[lane]]).generate_state(1)[0])

    def report(self, lane: int) -> dict[str, Any]:
        """For the info of the lane's next answer."""
        loss = self.due[lane]
        return {"cause": loss.kind, "count": self.counts[lane], "message": loss.text}
