"""The progress bar of all commands and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Notify = Callable[[str], None]


@contextmanager
def progress(total: float, timed: bool = False, shown: bool = True) -> Iterator[Notify]:
    """Show a bar on stderr, and yield a function to call before each move with what is done next.

    `total` is the number of moves; with `timed`, the seconds until the end.
    """
    if not shown:  # a bar that is disabled prints an empty line, with older versions of rich
        yield lambda text: None
        return
    count = TextColumn("{task.completed:.0f}/{task.total:.0f}")
    ends = (TimeElapsedColumn(),) if timed else (count, TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *ends)
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("starting", total=total)
        began, moves = time.monotonic(), 0

        def notify(text: str) -> None:
            nonlocal moves
            bar.update(task, description=text, completed=time.monotonic() - began if timed else moves)
            moves += 1

        yield notify
