"""`shoal top`: what the running pools of this user are doing, again and again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from shoal.observe import rates, running_pools
from shoal.observe.rates import PoolRates
from shoal.observe.running_pools import Gone, Look, RunningPool, Unreadable
from shoal.observe.screen import HISTORY, Screen
from shoal.support import processes

__all__ = ["Watch", "top"]

NOTHING = 1  # exit code
SEARCHING = 0.02  # the share of the time in which a look for new pools may be under way
NOBODY = "no pool of this user is running"


@dataclass
class _Seen:
    last: Look
    rates: PoolRates
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))


class Watch:
    """Looks at pools and remembers the last look, so that it can tell what has happened since.

    Args:
        pid: of the process whose pools, or of the worker whose pool, alone is of interest.

    Raises:
        UsageError: there is no such process, or it is another user's.
    """

    def __init__(self, pid: int | None = None):
        self._pid = pid
        if pid is not None:
            running_pools.check_process(pid)
        self._known: list[RunningPool] = []
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._next_search = 0.0
        self.unreadable: list[Unreadable] = []

    def look(self) -> list[PoolRates]:
        """What each pool has done since the last look; since its start where this is the first."""
        self._search()
        there = []
        for pool in self._known:
            with contextlib.suppress(Gone):
                now = running_pools.look(pool)
                self._note(pool, now)
                there.append(pool)
        self._known = there
        self._seen = {pool.key: self._seen[pool.key] for pool in there}
        return [seen.rates for seen in self._seen.values()]

    def history(self) -> list[tuple[PoolRates, list[float]]]:
        """The last rates of each pool, and its steps/s in all looks but the first."""
        return [(seen.rates, list(seen.history)) for seen in self._seen.values()]

    def _note(self, pool: RunningPool, now: Look) -> None:
        seen = self._seen.get(pool.key)
        if seen is None:
            self._seen[pool.key] = _Seen(now, rates.between(pool, rates.at_its_start(pool, now), now))
            return
        seen.rates = rates.between(pool, seen.last, now)
        seen.last = now
        seen.history.append(seen.rates.steps_per_second)

    def _search(self) -> None:
        """Look for pools, seldom enough: where there are many processes it takes a while."""
        began = time.monotonic()
        if began < self._next_search:
            return
        self._known, self.unreadable = running_pools.find() if self._pid is None else _pools_of(self._pid)
        now = time.monotonic()
        self._next_search = now + (now - began) / SEARCHING


def _pools_of(pid: int) -> tuple[list[RunningPool], list[Unreadable]]:
    """Those that a process has made, or the one that it is a worker of."""
    try:
        found, unreadable = running_pools.find_in(pid)
    except OSError:
        return [], []
    if found or unreadable:
        return found, unreadable
    others = []
    for pool in running_pools.find()[0]:
        with contextlib.suppress(Gone):
            if pid in running_pools.look(pool).roster[:, 0]:
                others.append(pool)
    return others, []


# ---- the command ---------------------------------------------------------------------------------------------


def top(pid: int | None, interval: float, once: bool, as_json: bool, console: Console) -> int:
    """Show the pools until the user has seen enough; the exit code.

    Args:
        pid: one process, or None for all of this user.
        once: show one interval and return.
        as_json: one line for each pool and interval, instead of tables.
    """
    watch = Watch(pid)
    first = watch.look()
    if not first and (once or pid is not None):
        print(_nobody(watch, pid), file=sys.stderr)
        return NOTHING
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            time.sleep(interval)
            return _tell(watch, pid, as_json, console)
        if as_json or not console.is_terminal:
            return _stream(watch, pid, interval, as_json, console)
        return _live(watch, pid, interval, console)
    return 0


def _tell(watch: Watch, pid: int | None, as_json: bool, console: Console) -> int:
    """One look in print."""
    found = watch.look()
    if not found:
        print(_nobody(watch, pid), file=sys.stderr)
        return NOTHING
    if as_json:
        for one in found:
            print(json.dumps({"time": time.time(), **asdict(one)}), flush=True)
    else:
        console.print(Group(Screen(console).draw(watch.history()), *_refusals(watch)), soft_wrap=True)
    return 0


def _stream(watch: Watch, pid: int | None, interval: float, as_json: bool, console: Console) -> int:
    """One look after another in print, until there is nobody to look at or to listen."""
    try:
        code = 0
        while code == 0 or pid is None:
            time.sleep(interval)
            code = _tell(watch, pid, as_json, console)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its exit
    return 0


def _live(watch: Watch, pid: int | None, interval: float, console: Console) -> int:
    """Redraw the screen until a key says that it is enough, or the one process has no pool any more."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(watch, console), refresh=True)
            if pressed(interval) in ("q", "Q"):
                return 0
            if not watch.look() and pid is not None:
                break
    console.print(f"the pool of process {pid} has ended")
    return 0


def _picture(watch: Watch, console: Console) -> RenderableType:
    shown = watch.history()
    body = Screen(console).draw(shown, console.height - 1) if shown else Text(f"{NOBODY}; waiting for one")
    return Group(body, *_refusals(watch), Text("q leaves", style="dim"))


def _refusals(watch: Watch) -> list[Text]:
    return [Text(f"process {one.pid} has a pool that cannot be shown: {one.reason}") for one in watch.unreadable]


def _nobody(watch: Watch, pid: int | None) -> str:
    refusals = "; ".join(str(text) for text in _refusals(watch))
    if refusals:
        return refusals
    if not processes.PROC.is_dir():
        return "pools are found by /proc, which this system does not have"
    return NOBODY if pid is None else f"process {pid} has no running pool"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key: "" where none was pressed."""
    if not sys.stdin.isatty():

        def nothing(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield nothing
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        return os.read(terminal, 1).decode(errors="replace") if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
