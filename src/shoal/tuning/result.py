"""What a search has found: the plan, the table of all trials, and a map of their rates."""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.planning.plan import Plan
from shoal.tuning.candidates import SIMPLEST, Candidate, EnvCost, Limits

STATES = ("ran", "failed", "too large", "not tried", "waiting")
COLOURS = {0.98: "#1a9850", 0.9: "#66bd63", 0.75: "#a6d96a", 0.5: "#fee08b", 0.25: "#fdae61", 0.0: "#d73027"}
SIGNS = {"failed": "x", "too large": "!", "not tried": "."}


@dataclass(eq=False)
class Trial:
    """One candidate and its runs.

    Attributes:
        expected: steps per second that were expected of it.
        rates: steps per second of each run.
        start: seconds that its envs took to be built and reset.
        state: "ran", "failed", "too large" (for max_memory), "not tried", or "waiting" (the search was interrupted).
        note: the reason why it failed or was not tried.
    """

    candidate: Candidate
    expected: float
    rates: list[float] = field(default_factory=list)
    start: float | None = None
    state: str = "waiting"
    note: str = ""

    @property
    def rate(self) -> float:
        """The median rate of its runs, 0 without runs."""
        return quartiles(self.rates)[1]

    @property
    def batch_seconds(self) -> float:
        """The time of a batch: measured, or else expected."""
        return self.candidate.batch_size / (self.rate or self.expected)

    @property
    def place(self) -> tuple[int, float]:
        """A key that sorts by state, and then the fastest first."""
        return STATES.index(self.state), -(self.rate or self.expected)

    def ran(self, rate: float) -> None:
        self.rates.append(rate)
        self.state, self.note = "ran", ""

    def out(self, state: str, note: str) -> None:
        """Note why there is no run, or no further one."""
        self.state, self.note = state, note

    def as_dict(self) -> dict[str, Any]:
        low, median, high = quartiles(self.rates)
        rates = {"median": median, "low": low, "high": high} if self.rates else None
        names = ("expected", "rates", "start", "state", "note")
        return {**asdict(self.candidate), "steps_per_s": rates, **{name: getattr(self, name) for name in names}}


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile; zeros without values."""
    if len(values) < 2:
        return [*values, 0.0][:1] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


@dataclass(frozen=True)
class TuneResult:
    """What `shoal.tune` returns.

    Attributes:
        plan: the best plan, for `shoal.make(env, plan=...)` or `shoal.Pool(env, plan=...)`.
        cost: what the env costs in time and memory.
        table: all candidates, the fastest first, then those that failed or were not tried, with the reason.
        limits: the limits of the search.
        seconds: the time that the search took.
    """

    plan: Plan
    cost: EnvCost
    table: list[Trial]
    limits: Limits
    seconds: float

    def map(self) -> HeatMap:
        """Return the rates of all trials in percent of the best, to be printed (in colours by rich)."""
        return HeatMap(self.table)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Save the map as a picture, in the format that the file name says. Needs matplotlib."""
        self.map().plot(Path(path))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        cost = {"spread": self.cost.spread, **asdict(self.cost)}
        measured = cost.pop("measured")
        cost |= {"mean": self.cost.measured.mean, "waiting": self.cost.measured.waiting, "cpu": measured["cpu"]}
        trials = [trial.as_dict() for trial in self.table]
        found = {"plan": asdict(self.plan), "cost": cost, "limits": asdict(self.limits), "seconds": self.seconds}
        return {**found, "trials": trials}


def table(heads: Sequence[str], title: str | None = None, **settings: Any) -> Table:
    """Return an empty table; the first column is aligned to the left, the others to the right."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, **settings)
    for at, head in enumerate(heads):
        grid.add_column(head, justify="right" if at else "left", overflow="fold")
    return grid


def new_figure(width: float, height: float) -> Any:
    """Return a matplotlib figure. It needs no display, and does not touch the user's own pyplot figures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


class HeatMap:
    """Trials as a grid. Columns are numbers of envs, or batch sizes if there is one number of envs; rows are the rest.

    A cell shows the best of its trials.
    """

    def __init__(self, trials: Sequence[Trial]):
        several = len({trial.candidate.num_envs for trial in trials}) > 1
        self.head = "envs" if several else "envs in a batch"

        def place(trial: Trial) -> tuple[tuple[Any, ...], int]:
            one = trial.candidate
            part = f"batches of 1/{one.num_envs / one.batch_size:.3g}" if one.partial and several else ""
            return (one.backend, one.num_workers, part), one.num_envs if several else one.batch_size

        shown = [trial for trial in trials if trial.state not in ("waiting", "not tried")]
        self.best = max((trial.rate for trial in shown), default=0.0)
        self.columns = sorted({place(trial)[1] for trial in shown})
        rows = {place(trial)[0] for trial in shown}
        self.rows = sorted(rows, key=lambda key: (SIMPLEST.index(key[0]), key[1], key[2]))
        # The first of each place, which is the best.
        self.cells = {place(trial): trial for trial in sorted(trials, key=lambda trial: trial.place, reverse=True)}

    def words(self, row: tuple[Any, ...]) -> str:
        backend, workers, part = row
        return (backend if backend == "serial" else f"{backend} x{workers}") + (f", {part}" if part else "")

    @property
    def title(self) -> str:
        """The heading, which says what the numbers mean."""
        return f"steps/s in % of the best, {self.best:,.0f}"

    def value(self, row: tuple[Any, ...], column: int) -> float | str:
        """Return the fraction of the best rate, or a sign for a trial without a rate."""
        trial = self.cells.get((row, column))
        if trial is None:
            return ""
        return trial.rate / self.best if trial.state == "ran" else SIGNS.get(trial.state, "")

    def __rich__(self) -> Table:
        caption = {"caption": "x failed   ! too large   . not tried", "caption_justify": "left"}
        grid = table([self.head, *map(str, self.columns)], self.title, padding=(0, 0, 0, 1), **caption)
        for row in self.rows:
            grid.add_row(self.words(row), *(_cell(self.value(row, column)) for column in self.columns))
        return grid

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=100, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def plot(self, path: Path) -> None:
        values = [[self.value(row, column) for column in self.columns] for row in self.rows]
        numbers = [[one if isinstance(one, float) else float("nan") for one in line] for line in values]
        figure = new_figure(2.5 + 0.8 * len(self.columns), 1.2 + 0.34 * len(self.rows))
        axis = figure.subplots()
        axis.imshow(numbers, cmap="RdYlGn", vmin=0.0, vmax=1.0, aspect="auto")
        for y, line in enumerate(values):
            for x, one in enumerate(line):
                text = f"{one:.0%}" if isinstance(one, float) else one
                axis.text(x, y, text, ha="center", va="center", fontsize=8)
        axis.set_xticks(range(len(self.columns)), [str(column) for column in self.columns], fontsize=8)
        axis.set_yticks(range(len(self.rows)), [self.words(row) for row in self.rows], fontsize=8)
        axis.set_xlabel(self.head, fontsize=8)
        axis.set_title(self.title, fontsize=10, loc="left")
        figure.savefig(path, dpi=120)


def _cell(value: float | str) -> Text:
    if isinstance(value, str):
        return Text(value, style="dim")
    colour = next(colour for least, colour in COLOURS.items() if value >= least)
    return Text(f"{100 * value:4.0f}", style=f"black on {colour}")
