"""When a wait must look around: for envs that take longer than they may, and to warn of a wait that takes long.

`Timeouts` is for the waits of a pool that runs, `Patience` for those of its start.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal import native
from shoal.backends.base import Worker
from shoal.engine.lane_table import LaneTable
from shoal.errors import EnvError, SlowEnvWarning, StepTimeout
from shoal.support.checks import Ids
from shoal.support.deadline import NEVER, Deadline
from shoal.support.frames import caller_level

PATIENCE_NS = 10_000_000_000  # until a wait without any limit says what it is waiting for
Found = TypeVar("Found")


class Timeouts:
    """Looks at the progress of the workers, which each say in the slab what they are doing and since when."""

    def __init__(self, table: LaneTable, step_timeout: float | None):
        self._workers, self._owner = table.workers, table.owner
        self._stats = table.slab.array("stats")
        self.seconds = step_timeout
        self._timeout_ns = None if step_timeout is None else int(step_timeout * 1e9)
        self._seen: dict[int, tuple[Any, int]] = {}  # for each worker: what it was doing, and since when
        self._warned = False
        self._next_round_ns = 0
        # How long a wait that has just begun may last until the first look; -1 for ever.
        self.patience_ns = PATIENCE_NS if self._timeout_ns is None else self._timeout_ns

    def is_time(self, now_ns: int) -> bool:
        """Whether to look for overdue envs now. Where other envs are always ready, no wait is long enough to look."""
        if self._timeout_ns is None or now_ns < self._next_round_ns:
            return False
        self._next_round_ns = now_ns + self._timeout_ns // 4
        return True

    def next_look(self, deadline: Deadline, began_ns: int, late: Ids | None) -> int:
        """When to look next in a wait, on the monotonic clock; -1 for never. `late` are the lanes that have not
        answered, None when the wait has only begun."""
        if self._timeout_ns is None:
            return began_ns + PATIENCE_NS if deadline.at_ns < 0 and not self._warned else deadline.at_ns
        now = time.monotonic_ns()
        looks = [now + self._timeout_ns]  # also where no worker has begun yet
        if late is not None:
            self._observe(late)
            looks += [since + self._timeout_ns for _, since in self._seen.values()]
        if deadline.at_ns >= 0:
            looks.append(deadline.at_ns)
        return min(looks)

    def next_word(self, deadline: Deadline, began_ns: int) -> int:
        """The same for a wait that has no step_timeout: for the reply to a call."""
        silent = self._warned or self._timeout_ns is not None or deadline.at_ns >= 0
        return deadline.at_ns if silent else began_ns + PATIENCE_NS

    def _observe(self, late: Ids) -> None:
        now = time.monotonic_ns()
        seen: dict[int, tuple[Any, int]] = {}
        for index in np.unique(self._owner[late]).tolist():
            if self._workers.is_away(index):
                continue
            at, since = int(self._stats[index, native.STAT_AT]), int(self._stats[index, native.STAT_SINCE_NS])
            if at < 0:
                continue  # busy with a call, which has a limit of its own
            doing = (at, since, int(self._stats[index, native.STAT_STEPS]))
            before = self._seen.get(index)
            # One that has not even begun (stopped, or waiting for a core) counts from when we first saw it so.
            seen[index] = before if before is not None and before[0] == doing else (doing, since if at else now)
        self._seen = seen

    def overdue(self, late: Ids) -> list[tuple[Worker, int | None]]:
        """Workers that take too long, and the env that each is busy with; their clocks start again."""
        if self._timeout_ns is None:
            return []
        self._observe(late)
        now, found = time.monotonic_ns(), []
        for index, (doing, since) in self._seen.items():
            if now - since >= self._timeout_ns:
                found.append((self._workers[index], doing[0] - 1 if doing[0] else None))
                self._seen[index] = (doing, now)
        return found

    def speak(self, began_ns: int, late: Sequence[int]) -> None:
        """Warn, once, of a wait that takes long: for whom, and what their workers are doing."""
        limited = self._timeout_ns is not None and not self._workers.replacements  # no limit for a start
        if self._warned or limited or time.monotonic_ns() - began_ns < PATIENCE_NS:
            return
        self._warned = True
        if self._timeout_ns is None:
            self.patience_ns = -1
        indices = dict.fromkeys(int(self._owner[lane]) for lane in late)
        stories = "".join(self._story(index) for index in list(indices)[:4])
        warnings.warn(
            f"still waiting for envs {list(late[:8])} after {PATIENCE_NS // 10**9} s, without a limit: give "
            f"step_timeout, or a timeout{stories}",
            SlowEnvWarning,
            stacklevel=caller_level(),
        )

    def _story(self, index: int) -> str:
        worker = self._workers[index]
        if self._workers.is_away(index):
            return f"\nworker {index} is being started again"
        stack = worker.stack()  # one that is elsewhere says what it is doing only when it is asked
        at = int(self._stats[index, native.STAT_AT])
        doing = f"running env {abs(at) - 1}" if at else "running no env"
        return f"\nworker {index} (pid {worker.pid}) is {doing}" + (f":\n{stack}" if stack else "")


class Patience:
    """The waits of one start. If there is no limit for it, the first wait that takes long warns, once for all of them.

    Args:
        deadline: until when all of them must be over.
    """

    def __init__(self, deadline: Deadline):
        self.deadline = deadline
        self._first_look = Deadline(None, time.monotonic_ns() + PATIENCE_NS) if deadline is NEVER else deadline

    def wait(self, wait: Callable[[Deadline], Found], worker: Worker, story: Callable[[], str]) -> Found:
        """What `wait` returns. `story` says what the worker is doing, if that takes long."""
        try:
            return wait(self._first_look)
        except StepTimeout as error:
            if isinstance(error, EnvError) or self._first_look is self.deadline:
                raise  # the env's own, or the limit
        self._first_look = self.deadline
        stack = worker.stack()
        pid = "" if worker.pid is None else f" (pid {worker.pid})"
        warnings.warn(
            f"the start still waits after {PATIENCE_NS // 10**9} s, without a limit: give start_timeout\n"
            f"{story()}{pid}" + (f":\n{stack}" if stack else ""),
            SlowEnvWarning,
            stacklevel=caller_level(),
        )
        return wait(self.deadline)
