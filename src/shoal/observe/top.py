"""`shoal top`: shows what the running pools of this user are doing, again and again."""

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

NOTHING = 1  # exit code
SEARCHING = 0.02  # the share of the time that the search for new pools may take
NO_POOL = "no pool of this user is running"


@dataclass
class _Seen:
    last: Look
    rates: PoolRates
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))


class Watch:
    """Looks at pools and remembers the last look, so that it can tell what has happened since.

    Args:
        pid: a process with pools, or a worker of a pool; None for all pools of this user.

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
        """Return what each pool has done since the last look, or since its start if this is the first."""
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
        """Return the last rates of each pool, and its steps/s in all looks but the first."""
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
        """Search for pools, but rarely: with many processes a search takes long."""
        began = time.monotonic()
        if began < self._next_search:
            return
        self._known, self.unreadable = running_pools.find() if self._pid is None else _pools_of(self._pid)
        now = time.monotonic()
        self._next_search = now + (now - began) / SEARCHING


def _pools_of(pid: int) -> tuple[list[RunningPool], list[Unreadable]]:
    """Return the pools that a process has made, or the pool of which it is a worker."""
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
    """Show the pools until the user ends it, and return the exit code.

    Args:
        pid: one process; None for all of this user.
        once: show one interval and return.
        as_json: print one line for each pool and interval, instead of tables.
    """
    watch = Watch(pid)
    if not watch.look() and (once or pid is not None):
        return _tell_why(watch, pid)
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            time.sleep(interval)
            return _print_look(watch, pid, as_json, console)
        if as_json or not console.is_terminal:
            return _stream(watch, pid, interval, as_json, console)
        return _live(watch, pid, interval, console)
    return 0


def _print_look(watch: Watch, pid: int | None, as_json: bool, console: Console) -> int:
    """Look once and print what is found."""
    found = watch.look()
    if not found:
        return _tell_why(watch, pid)
    if as_json:
        for one in found:
            print(json.dumps({"time": time.time(), **asdict(one)}), flush=True)
    else:
        console.print(Group(Screen(console).draw(watch.history()), *_refusals(watch)), soft_wrap=True)
    return 0


def _stream(watch: Watch, pid: int | None, interval: float, as_json: bool, console: Console) -> int:
    """Print one look after another, until the one process has no pool any more or the reader closes the pipe."""
    try:
        code = 0
        while code == 0 or pid is None:
            time.sleep(interval)
            code = _print_look(watch, pid, as_json, console)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python complains at its exit
    return 0


def _live(watch: Watch, pid: int | None, interval: float, console: Console) -> int:
    """Redraw the screen until the user presses q, or the one process has no pool any more."""
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
    body = Screen(console).draw(shown, console.height - 1) if shown else Text(f"{NO_POOL}; waiting for one")
    return Group(body, *_refusals(watch), Text("q leaves", style="dim"))


def _refusals(watch: Watch) -> list[Text]:
    return [Text(f"process {one.pid} has a pool that cannot be shown: {one.reason}") for one in watch.unreadable]


def _tell_why(watch: Watch, pid: int | None) -> int:
    """Say on stderr why there is nothing to show, and return the exit code."""
    reason = "; ".join(str(text) for text in _refusals(watch))
    if not reason and not processes.PROC.is_dir():
        reason = "pools are found by /proc, which this system does not have"
    print(reason or (NO_POOL if pid is None else f"process {pid} has no running pool"), file=sys.stderr)
    return NOTHING


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds for a key; it returns "" if none was pressed."""
    if not sys.stdin.isatty():
        yield lambda seconds: _read_key([], seconds)
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield lambda seconds: _read_key([terminal], seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read_key(terminals: list[int], seconds: float) -> str:
    ready, _, _ = select.select(terminals, [], [], seconds)
    return os.read(ready[0], 1).decode(errors="replace") if ready else ""
