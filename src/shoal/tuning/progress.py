"""A bar for a search that ends with its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["bar"]


@contextmanager
def bar(seconds: float, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr and yield a function that takes what is being done now."""
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not shown) as progress:
        task = progress.add_task("starting", total=seconds)
        began = time.monotonic()
        yield lambda text: progress.update(task, description=text, completed=time.monotonic() - began)
