"""What a user sees while a policy is trained: a table that changes in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

LINE_EVERY = 5.0  # seconds between two plain lines
FRAME_EVERY = 0.2


class Screen:
    """Shows the rows of a training. `with Screen(...) as screen: screen.show(row)`.

    Args:
        title: the env, and how it is run.
        target: the mean return that is aimed at.
    """

    def __init__(self, title: str, target: float | None = None, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._title, self._target = title, target
        self._live: Live | None = None
        self._last = 0.0

    def __enter__(self) -> Screen:
        self._console.print(self._title, highlight=False, markup=False)
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def show(self, row: Mapping[str, float], left: float | None, last: bool = False) -> None:
        """Show a row, unless the last one was shown a moment ago. `left`: seconds until the end, if that is known."""
        now = time.monotonic()
        if not last and now - self._last < (FRAME_EVERY if self._live is not None else LINE_EVERY):
            return
        self._last = now
        if self._live is None:
            self._console.print(line(row, left), highlight=False, markup=False, soft_wrap=True)
        else:
            self._live.update(self._table(row, left), refresh=True)

    def say(self, text: str) -> None:
        """Print a sentence above the table."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _table(self, row: Mapping[str, float], left: float | None) -> Table:
        grid = Table(show_header=False, box=None, padding=(0, 2))
        target = "" if self._target is None else f" of {self._target:g}"
        grid.add_row("steps", f"{int(row['steps']):,}", "steps/s", f"{row['steps_per_s']:,.0f}")
        grid.add_row("return", f"{row['return']:.1f}{target}", "length", f"{row['length']:.0f}")
        grid.add_row("time", duration(row["seconds"]), "left", duration(left))
        grid.add_row("stepping", f"{row['stepping']:.0%}", "learning", f"{row['learning']:.0%}")
        grid.add_row("policy loss", f"{row['policy_loss']:.4f}", "value loss", f"{row['value_loss']:.4g}")
        grid.add_row("entropy", f"{row['entropy']:.3f}", "kl", f"{row['kl']:.4f}")
        return grid


def line(row: Mapping[str, float], left: float | None) -> str:
    """Return a row as one line of text."""
    return (
        f"{duration(row['seconds'])}  {int(row['steps']):,} steps  {row['steps_per_s']:,.0f} steps/s  return "
        f"{row['return']:.1f}  length {row['length']:.0f}  stepping {row['stepping']:.0%}  learning "
        f"{row['learning']:.0%}  entropy {row['entropy']:.3f}  value loss {row['value_loss']:.4g}  "
        f"left {duration(left)}"
    )


def duration(seconds: float | None) -> str:
    """Return a number of seconds in words."""
    if seconds is None or seconds != seconds:
        return "?"
    minutes, rest = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02.0f} s" if minutes else f"{rest:.1f} s"
