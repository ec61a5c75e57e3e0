"""The table of docs/migrate/index.md, as the side-by-side tests know it: each deviation names one of its rows."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/migrate/index.md"


@cache
def documented_rows() -> tuple[str, ...]:
    """The names of the rows, which the first column has in bold."""
    section = PAGE.read_text().partition("## What differs")[2]
    return tuple(re.findall(r"^\| \*\*(\w+)\*\*", section, re.MULTILINE))
