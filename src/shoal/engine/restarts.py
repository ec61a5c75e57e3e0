"""What on_error="restart" keeps: which envs were lost and why, their new seeds, and how often is too often."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds before the second restart in a row, and before any


@dataclass(frozen=True)
class Loss:
    """Why an env is gone.

    Attributes:
        kind: "raised", "died", "timed out" or "recycled".
        text: the story in one line.
        rebuild: its worker lives, and still has the old env.
        culprit: the env that is to blame, which may be another one of the same worker; -1 where none is.
    """

    kind: str
    text: str
    rebuild: bool
    culprit: int = -1


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
        self._in_vain: dict[Any, int] = {}  # restarts in a row without a step in between

    def blame(self, culprit: Any, progress: bool = False) -> float | None:
        """Note a restart, and what has caused it: the seconds to wait before it, None when the budget is spent.

        Args:
            progress: whether the culprit has worked since its last restart; then there is no reason to wait.
        """
        now = self._clock()
        past = self._caused.setdefault(culprit, deque())
        while past and past[0] < now - self.window:
            past.popleft()
        if len(past) >= self.limit:
            return None
        past.append(now)
        vain = self._in_vain[culprit] = 0 if progress or len(past) == 1 else self._in_vain.get(culprit, 0) + 1
        return 0.0 if vain == 0 else float(min(LONGEST_DELAY, FIRST_DELAY * 2 ** (vain - 1)))

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
        return {"cause": loss.kind, "count": self.counts[lane], "culprit": loss.culprit, "message": loss.text}
