"""Where the result of a command goes, and how that of a benchmark looks: as a table, as JSON and as a plot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from shoal.cli.bench import RateSummary, Result, Row
from shoal.cli.contenders import Role
from shoal.cli.work import first_line
from shoal.support.optional_dependencies import install
from shoal.support.usage import UsageError
from shoal.tuning.result import new_figure, table

SCHEMA = 1
STYLES = {Role.LIMIT: "bold", Role.LOOP: "", Role.SHOAL: "cyan", Role.PEER: ""}
COLOURS = {Role.LIMIT: "#444444", Role.LOOP: "#888888", Role.SHOAL: "#0072b2", Role.PEER: "#e69f00"}
HEAD = ("", "steps/s", "of the limit", "start", "workers")


class Output:
    """Where the result of a command goes: to the terminal, or as JSON to stdout, and to the files that the user named.

    A file that cannot be written is refused here, before the command does any work.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._json: str | None = options.json
        self._plot: Path | None = getattr(options, "plot", None)
        if self._plot:
            check_plot(self._plot)
        if self._json and self._json != "-":
            check_file(Path(self._json))

    def write(
        self,
        document: Callable[[], dict[str, Any]],
        show: Callable[[Console], None],
        plot: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Write the result in each form that was asked for, by the function for that form."""
        text = as_json(document()) if self._json else ""
        if self._json == "-":
            print(text, end="")
        else:
            show(Console())
        if self._json and self._json != "-":
            Path(self._json).write_text(text)
        if self._plot:
            plot(self._plot)
            print(f"plot saved to {self._plot}", file=sys.stderr)


def as_json(document: dict[str, Any]) -> str:
    """Write a document as JSON, with null for infinite numbers, which JSON does not have."""
    return json.dumps(_finite(document), indent=2) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be drawn or written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"a plot needs matplotlib: {install('plot')}")
    check_file(path, "the plot is a PNG")


def check_file(path: Path, what: str = "") -> None:
    """Refuse a file that cannot be written, or that is not named as `what` says: its last word is the suffix."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {str(folder)!r} to write {path.name!r} to")
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder, not a file")
    suffix = f".{what.split()[-1].lower()}" if what else path.suffix.lower()
    if path.suffix.lower() != suffix:
        raise UsageError(f"{what}, so name it {suffix} and not {path.name!r}")


def ordered(result: Result) -> list[Row]:
    """Return the rows as they are read: first the loops, then the others, the fastest first, last those that failed."""
    loops = {Role.LIMIT: 0, Role.LOOP: 1}

    def key(row: Row) -> tuple[bool, int, float]:
        return row.status != "ok", loops.get(row.contender.role, 2), -(row.rate.median if row.rate else 0.0)

    return sorted(result.rows, key=key)


def cells(result: Result, row: Row) -> tuple[str, ...]:
    """Return one row as text, in the order of HEAD."""
    workers = startup = ""
    if row.starts:
        start, startup = row.starts[-1], f"{row.startup:.2f} s"
        size = f" x {start.worker_pss / 2**20:.0f} MiB" if start.worker_pss else ""
        workers = f"{start.workers}{size}" if start.workers else ""
    return row.name, thousands(row.rate), fraction(result.of_limit(row)), startup, workers


def notes(result: Result) -> list[str]:
    """Return the remarks below a table: what failed and why, what was chosen and why. The JSON has whole messages."""
    found = [line] if (line := headline(result)) else []
    for row in ordered(result):
        status = "" if row.status == "ok" else f"{row.status}: "
        if status or row.note:
            found.append(f"{row.name}: {status}{first_line(row.note)}")
    return found


def headline(result: Result) -> str:
    """Compare the fastest of Shoal's backends with the fastest peer, in one line; "" if one of them is missing."""
    best, peer = result.best_shoal(), result.best_python_peer()
    over = best.over(peer) if best and peer else None
    if not best or not peer or not over:
        return ""
    of_limit = result.of_limit(best)
    part = f"{of_limit.median:.2f} of the limit, " if of_limit else ""
    return f"{best.name}: {part}{over.median:.1f} x {peer.name}, the fastest Python peer here"


def thousands(value: RateSummary | None) -> str:
    if value is None:
        return ""
    digits = 2 if value.median < 10_000 else 1 if value.median < 100_000 else 0
    return f"{value.median / 1000:.{digits}f} k"


def fraction(value: RateSummary | None) -> str:
    """Write a ratio with its spread: 0.91 (0.88..0.93)."""
    return "" if value is None else f"{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def title(result: Result) -> str:
    """Return the title of a table: what was run, and how."""
    many = "env" if result.work.num_envs == 1 else "envs"
    how = f"{result.settings.rounds} rounds of {result.settings.seconds:g} s"
    return f"{result.work.env}, {result.work.num_envs} {many} ({how}; median, quartiles)"


def show(results: Sequence[Result], console: Console) -> None:
    """Print a table for each result, with its notes below."""
    for result in results:
        grid = table(HEAD, title(result))
        for row in ordered(result):
            if row.rate:
                grid.add_row(*cells(result, row), style=STYLES[row.contender.role])
        below = (Padding(Text(note, style="dim"), (0, 0, 0, 2)) for note in notes(result))
        console.print(grid, *below, Text())


def as_dict(results: Sequence[Result], machine: dict[str, Any]) -> dict[str, Any]:
    return {"schema": SCHEMA, "machine": machine, "results": [result.as_dict() for result in results]}


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw each result as bars of steps/s with their spread, the limit as a line; save a PNG."""
    heights = [max(2, sum(1 for row in result.rows if row.rate)) for result in results]
    figure = new_figure(10, 0.34 * sum(heights) + 1.1 * len(heights))
    axes = figure.subplots(len(results), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, result in zip(axes, results, strict=True):
        _bars(axis, result)
    figure.savefig(path, dpi=120)


def _bars(axis: Any, result: Result) -> None:
    rows = [(row, row.rate) for row in reversed(ordered(result)) if row.rate]
    for place, (row, rate) in enumerate(rows):
        spread = [[rate.median - rate.low], [rate.high - rate.median]]
        colour = COLOURS[row.contender.role]
        axis.barh(place, rate.median, xerr=spread, color=colour, ecolor="#222222", capsize=2)
        ratio = result.of_limit(row)
        label = thousands(rate) + (f"  ({ratio.median:.2f})" if ratio else "")
        axis.text(rate.high, place, f"  {label}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row.name for row, _ in rows], fontsize=8)
    if result.limit and (limit := result.limit.rate):
        axis.axvline(limit.median, color=COLOURS[Role.LIMIT], linestyle="--", linewidth=1)
    axis.set_title(f"{result.work.env}, {result.work.num_envs} envs", fontsize=10, loc="left")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(axis="x", labelsize=8)
    axis.set_xlabel("steps/s (of the limit)", fontsize=8)
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
