"""Draws running pools for a terminal: a block for each pool, with a row for each worker while there is room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.observe.rates import PoolRates, WorkerRates
from shoal.observe.words import plural

BLOCK_LINES = 7  # lines of a pool's block, without the rows of its workers
LONG = 1.0  # seconds in one env that are worth a remark
MOST_NAMED = 4  # workers that a summary names
BINS = 20  # of a summary's histogram
HISTORY = 30  # looks that the line of steps/s goes back
BARS, PLAIN_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
COLUMNS = {
    "worker": "right", "pid": "right", "envs": "left", "steps/s": "right", "busy": "left", "episodes/s": "right",
    "": "left",
}  # fmt: skip


class Screen:
    """Draws pools for one console."""

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
        recent = list(history)[-HISTORY:]
        if len(recent) > 1:
            line.append(self._spark(value / max(*recent, 1e-9) for value in recent), style="green")
        line.append(f"  {_rate(rates.episodes_per_second)} episodes/s")
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
                _rate(worker.episodes_per_second),
                _remark(worker),
            )
        return table

    def _summary(self, workers: Sequence[WorkerRates]) -> Group:
        """Summarize more workers than there are lines."""
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


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _remark(worker: WorkerRates) -> str:
    """Say what is unusual about a worker; "" for nothing."""
    if worker.away:
        return "is being replaced"
    return f"in env {worker.env} for {worker.env_seconds:.1f} s" if worker.env_seconds > LONG else ""
