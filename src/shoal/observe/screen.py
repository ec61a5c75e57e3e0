"""Draws running pools for a terminal: a block for each, and a row for each worker while there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.observe.rates import PoolRates, WorkerRates

__all__ = ["Screen"]

BLOCK_LINES = 7  # of a pool's block, beside the rows of its workers
LONG = 1.0  # seconds in one env that are worth a word
MOST_NAMED = 4  # workers that a summary names
BINS = 20  # of a summary's histogram
HISTORY = 30  # looks that the line of steps/s goes back
BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


class Screen:
    """How pools look on this console."""

    def __init__(self, console: Console):
        self._console = console
        self._bars = PLAIN_BARS if console.options.ascii_only else BARS

    def draw(self, pools: Sequence[tuple[PoolRates, Sequence[float]]], height: int | None = None) -> RenderableType:
        """One block for each pool; with each, its steps/s so far.

        Args:
            height: lines that there are; None for as many as it takes.
        """
        room = math.inf if height is None else height // max(1, len(pools)) - BLOCK_LINES
        return Group(*(self._block(rates, history, room) for rates, history in pools))

    def _block(self, rates: PoolRates, history: Sequence[float], room: float) -> RenderableType:
        head = Text.assemble(
            (rates.env, "bold"), f", {_many(rates.envs, 'env')}, {rates.backend} with ",
            f"{_many(len(rates.workers), 'worker')}, process {rates.pid}, running for {_clock(rates.seconds)}",
        )  # fmt: skip
        lines = [head, self._speed(rates, history), self._queue(rates)]
        whole = len(rates.workers) <= room
        return Group(*lines, self._rows(rates.workers) if whole else self._summary(rates.workers), "")

    def _speed(self, rates: PoolRates, history: Sequence[float]) -> Text:
        line = Text.assemble((f"{rates.steps_per_second:,.0f}", "bold green"), " steps/s ")
        recent = list(history)[-HISTORY:]
        if len(recent) > 1:
            line.append(self._spark(value / max(*recent, 1e-9) for value in recent), style="green")
        line.append(f"  {_rate(rates.episodes_per_second)} episodes/s")
        if rates.mean_return is not None and rates.mean_length is not None:
            line.append(f" with a mean return of {rates.mean_return:,.4g} in {rates.mean_length:,.4g} steps")
        if rates.restarts:
            line.append(f", {_many(rates.restarts, 'restart')}", style="yellow")
        return line

    def _queue(self, rates: PoolRates) -> Text:
        working = rates.pending - rates.done
        text = f"queue: {rates.pending} sent, of which {working} at work and {rates.done} done and not yet received"
        return Text(text)

    def _rows(self, workers: Sequence[WorkerRates]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name, justify in _COLUMNS:
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for worker in workers:
            table.add_row(
                str(worker.index), _pid(worker), _span(*worker.envs), f"{worker.steps_per_second:,.0f}",
                f"{worker.busy:4.0%} {self._bar(worker.busy)}", _rate(worker.episodes_per_second), _where(worker),
            )  # fmt: skip
        return table

    def _summary(self, workers: Sequence[WorkerRates]) -> Group:
        """For more workers than there are lines."""
        shares = np.array([worker.busy for worker in workers])
        counts, _ = np.histogram(shares, BINS, (0.0, 1.0))
        low, middle, high = np.percentile(shares, (0, 50, 100))
        shape = (self._spark(counts / max(1, counts.max())), "cyan")
        busy = Text.assemble("busy: 0 % ", shape, f" 100 %, from {low:.0%} to {high:.0%}, median {middle:.0%}")
        slow = sorted((worker for worker in workers if _where(worker)), key=lambda worker: -worker.env_seconds)
        words = [f"worker {worker.index} {_where(worker)}" for worker in slow[:MOST_NAMED]]
        if len(slow) > MOST_NAMED:
            words.append(f"{len(slow) - MOST_NAMED} more")
        return Group(busy, Text("; ".join(words), style="yellow"))

    def _spark(self, shares: Iterable[float]) -> str:
        top = len(self._bars) - 1
        return "".join(self._bars[math.ceil(min(1.0, max(0.0, share)) * top)] for share in shares)

    def _bar(self, share: float) -> str:
        full = round(share * 10)
        return self._bars[-1] * full + self._bars[1] * (10 - full)


_COLUMNS = (
    ("worker", "right"), ("pid", "right"), ("envs", "left"), ("steps/s", "right"), ("busy", "left"),
    ("episodes/s", "right"), ("", "left"),
)  # fmt: skip


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _pid(worker: WorkerRates) -> str:
    return "" if worker.pid is None else str(worker.pid)


def _where(worker: WorkerRates) -> str:
    """What is worth a word about it; "" for nothing."""
    if worker.away:
        return "is being replaced"
    return f"in env {worker.env} for {worker.env_seconds:.1f} s" if worker.env_seconds > LONG else ""
