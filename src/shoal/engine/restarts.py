"""Why envs are replaced: which were lost, how often is too often, and which workers have grown too much."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from shoal.engine.workers import Workers

LOOK_EVERY = 0.02  # seconds between two looks at a worker's memory; each worker has its turn
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # seconds before the second restart in a row, and before any


@dataclass(frozen=True)
class Loss:
    """Why an env is gone."""

    kind: str  # "raised", "died", "timed out" or "recycled"
    text: str  # the story in one line
    rebuild: bool  # its worker lives, and still has the old env
    culprit: int = -1  # the env that is to blame, which may be another one of the same worker; -1 where none is


class Restarts:
    """What on_error="restart" keeps: the losses of one pool, and the envs' new seeds. One env, or one worker, may cause
    `limit` restarts within `window` seconds."""

    def __init__(self, lanes: int, limit: int, window: float):
        self.limit, self.window = limit, window
        self.due: dict[int, Loss] = {}  # lanes that have a new env, or shall have one, and have not reported it
        self.counts = [0] * lanes
        self.seeds: list[int | None] = [None] * lanes  # the last that the caller has given
        self._caused: dict[Any, deque[float]] = {}
        self._in_vain: dict[Any, int] = {}  # restarts in a row without a step in between

    def blame(self, culprit: Any, progress: bool = False) -> float | None:
        """Note a restart, and what has caused it: the seconds to wait before it, None when the budget is spent. If the
        culprit has made progress since its last restart, there is no reason to wait."""
        now = time.monotonic()
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

    def facts(self) -> dict[str, Any]:
        """What a snapshot keeps of this, as plain data."""
        due = [(lane, *astuple(loss)) for lane, loss in self.due.items()]
        return {"seeds": list(self.seeds), "counts": list(self.counts), "due": due}

    def resume(self, facts: dict[str, Any]) -> None:
        """The counterpart of `facts`."""
        self.seeds, self.counts = list(facts["seeds"]), list(facts["counts"])
        self.due = {lane: Loss(*loss) for lane, *loss in facts["due"]}


class Recycling:
    """What recycle_after keeps: looks at the memory of one worker after another, which may grow by `most` bytes.

    `leaving` are the workers that are to be replaced as soon as they have nothing to do.
    """

    def __init__(self, most: int | None, workers: Workers):
        self.leaving: set[int] = set()
        self._most, self._workers = most, workers
        self._next_look = 0.0
        self._looked_at = -1
        self._heavy: set[int] = set()  # workers that have grown too much

    def look(self, is_away: Callable[[int], bool]) -> bool:
        """Look at the next worker, if it is time to; whether there is any that has grown too much."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY
            self._looked_at = (self._looked_at + 1) % len(self._workers)
            worker = self._workers[self._looked_at]
            if worker.recyclable and not is_away(worker.index):
                worker.look_at_memory()
                if worker.growth > (self._most or 0):
                    self._heavy.add(worker.index)
        return bool(self._heavy)

    def may_leave(self, indices: set[int]) -> bool:
        """An episode of these workers has ended: let those of them that have grown too much leave. Whether there are
        any."""
        due = self._heavy & indices
        self._heavy -= due
        self.leaving |= due
        return bool(due)

    def forget(self, index: int) -> None:
        """The worker is being replaced."""
        self._heavy.discard(index)
        self.leaving.discard(index)
