"""`shoal top`: shows what the running pools of this user are doing, again and again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

if sys.platform == "win32":
    raise ImportError("pools of other processes are found by /proc, which Windows does not have")

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.observe import running_pools
from shoal.observe.running_pools import Gone, Look, PoolRates, RunningPool, Unreadable, WorkerRates
from shoal.observe.words import figure, plural
from shoal.support import processes

NOTHING = 1  # exit code
SEARCHING = 0.02  # the share of the time that the search for new pools may take
NO_POOL = "no pool of this user is running"
BLOCK_LINES = 7  # lines of a pool's block, without the rows of its workers
LONG = 1.0  # seconds in one env that are worth a remark
MOST_NAMED = 4  # workers that a summary names
BINS = 20  # of a summary's histogram
PAGE_WIDTH = 120  # letters, of a page
HISTORY = 30  # looks that the line of steps/s goes back
BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
COLUMNS = {
    "worker": "right", "pid": "right", "envs": "left", "steps/s": "right", "busy": "left", "episodes/s": "right",
    "": "left",
}  # fmt: skip


class _Seen(NamedTuple):
    last: Look
    rates: PoolRates
    history: list[float]


class Watch:
    """Looks at pools and remembers the last look, so that it can tell what has happened since.

    `pid` is a process with pools, or a worker of a pool; None for all pools of this user. Raises UsageError if there is
    no such process, or it is another user's.
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
        return [(seen.rates, seen.history) for seen in self._seen.values()]

    def _note(self, pool: RunningPool, now: Look) -> None:
        seen = self._seen.get(pool.key)
        before = seen.last if seen else running_pools.at_its_start(pool, now)
        rates = running_pools.between(pool, before, now)
        history = [*seen.history, rates.steps_per_second][-HISTORY:] if seen else []
        self._seen[pool.key] = _Seen(now, rates, history)

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


# ---- the picture ---------------------------------------------------------------------------------------------


class Screen:
    def __init__(self, console: Console):
        self._bars = PLAIN_BARS if console.options.ascii_only else BARS

    def draw(self, pools: Sequence[tuple[PoolRates, Sequence[float]]], height: int | None = None) -> RenderableType:
        """Draw one block for each pool, given with its steps/s so far, in `height` lines; None for any number."""
        room = math.inf if height is None else height // max(1, len(pools)) - BLOCK_LINES
        return Group(*(self._block(rates, history, room) for rates, history in pools))

    def _block(self, rates: PoolRates, history: Sequence[float], room: float) -> RenderableType:
        minutes, seconds = divmod(int(rates.seconds), 60)
        age = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        head = Text.assemble(
            (rates.env, "bold"), f", {plural(rates.envs, 'env')}, {rates.backend} with ",
            f"{plural(len(rates.workers), 'worker')}, process {rates.pid}, running for {age}",
        )  # fmt: skip
        stepping = rates.pending - rates.done
        queue = f"queue: {rates.pending} sent, of which {stepping} at work and {rates.done} done and not yet received"
        whole = len(rates.workers) <= room
        workers = self._rows(rates.workers) if whole else self._summary(rates.workers)
        return Group(head, self._speed(rates, history), Text(queue), workers, "")

    def _speed(self, rates: PoolRates, history: Sequence[float]) -> Text:
        line = Text.assemble((f"{rates.steps_per_second:,.0f}", "bold green"), " steps/s ")
        if len(history) > 1:
            line.append(self._spark(value / max(*history, 1e-9) for value in history), style="green")
        line.append(f"  {figure(rates.episodes_per_second)} episodes/s")
        if rates.mean_return is not None and rates.mean_length is not None:
            line.append(f" with a mean return of {rates.mean_return:,.4g} in {rates.mean_length:,.4g} steps")
        if rates.restarts:
            line.append(f", {plural(rates.restarts, 'restart')}", style="yellow")
        return line

    def _rows(self, workers: Sequence[WorkerRates]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, justify in COLUMNS.items():
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for worker in workers:
            first, last = worker.envs
            full = round(worker.busy * 10)
            table.add_row(
                str(worker.index),
                "" if worker.pid is None else str(worker.pid),
                str(first) if first == last else f"{first}-{last}",
                f"{worker.steps_per_second:,.0f}",
                f"{worker.busy:4.0%} {self._bars[-1] * full}{self._bars[1] * (10 - full)}",
                figure(worker.episodes_per_second),
                _remark(worker),
            )
        return table

    def _summary(self, workers: Sequence[WorkerRates]) -> Group:
        shares = np.array([worker.busy for worker in workers])
        counts, _ = np.histogram(shares, BINS, (0.0, 1.0))
        low, middle, high = np.percentile(shares, (0, 50, 100))
        shape = (self._spark(counts / max(1, counts.max())), "cyan")
        busy = Text.assemble("busy: 0 % ", shape, f" 100 %, from {low:.0%} to {high:.0%}, median {middle:.0%}")
        slow = sorted((worker for worker in workers if _remark(worker)), key=lambda worker: -worker.env_seconds)
        words = [f"worker {worker.index} {_remark(worker)}" for worker in slow[:MOST_NAMED]]
        if len(slow) > MOST_NAMED:
            words.append(f"{len(slow) - MOST_NAMED} more")
        return Group(busy, Text("; ".join(words), style="yellow"))

    def _spark(self, shares: Iterable[float]) -> str:
        top = len(self._bars) - 1
        return "".join(self._bars[math.ceil(min(1.0, max(0.0, share)) * top)] for share in shares)


def _remark(worker: WorkerRates) -> str:
    """Say what is unusual about a worker; "" for nothing."""
    if worker.away:
        return "is being replaced"
    return f"in env {worker.env} for {worker.env_seconds:.1f} s" if worker.env_seconds > LONG else ""


# ---- the command ---------------------------------------------------------------------------------------------


def top(pid: int | None, interval: float, once: bool, as_json: bool, console: Console) -> int:
    """Show the pools of a process, or of this user, until the user ends it or `once`; return the exit code."""
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
            shown = watch.history()
            body = Screen(console).draw(shown, console.height - 1) if shown else Text(f"{NO_POOL}; waiting for one")
            live.update(Group(body, *_refusals(watch), Text("q leaves", style="dim")), refresh=True)
            if pressed(interval) in ("q", "Q"):
                return 0
            if not watch.look() and pid is not None:
                break
    console.print(f"the pool of process {pid} has ended")
    return 0


def save(pid: int | None, interval: float, path: Path) -> int:
    """Save what one interval shows as a page of its own; return the exit code."""
    watch = Watch(pid)
    if not watch.look():
        return _tell_why(watch, pid)
    time.sleep(interval)
    watch.look()
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=PAGE_WIDTH, force_terminal=True, file=nowhere)
        console.print(Screen(console).draw(watch.history()))
        path.write_text(console.export_html(inline_styles=True), encoding="utf-8")
    print(f"saved to {path}", file=sys.stderr)
    return 0


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
