"""Puts the figures of docs/plots/bench.json into docs/explanation/benchmarks.md, between the marks there.

    python benchmarks/quick.py && python tools/fill_performance.py

A part that the JSON does not have says so in the page. A test compares the page with the JSON.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plots  # noqa: E402

__all__ = ["filled"]

PAGE, FIGURES = ROOT / "docs" / "explanation" / "benchmarks.md", ROOT / "docs" / "plots" / "bench.json"
MARKS = re.compile(r"(<!-- bench (\w+): [^\n]* -->\n)(.*?)(<!-- end of \2 -->)", re.DOTALL)


def machine(about: dict[str, Any]) -> str:
    """The line that says when and on what was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    where = f"{about['cores']} cores ({about['cpu']}), {about['system']}, Python {about['python']}, {versions}"
    return f"Measured on {about['date']}: {where}. Load of the machine before: {about['load']}."


def table(part: dict[str, Any] | None, usual: dict[str, Any]) -> str:
    """The plot and the tables of a part, its command, and its machine, where that is not the usual one."""
    if part is None:
        return "Not measured in the last run."
    unit, blocks = part["unit"], [f"![{part['title']}](../plots/{part['name']}.png)"]
    for group, rows in plots.groups(part).items():
        limited = any(row["of_limit"] for row in rows)
        head = [group or part["title"], unit, *(["of the limit"] if limited else [])]
        lines = [f"| {' | '.join(head)} |", "|---|" + "--:|" * (len(head) - 1)]
        for row in rows:
            low, middle, high = (plots.amount(row[name], unit) for name in ("low", "median", "high"))
            cells = [row["name"], f"{middle} ({low}..{high})"]
            cells += [f"{row['of_limit']:.2f}" if row["of_limit"] else ""] if limited else []
            lines.append(f"| {' | '.join(cells)} |")
        blocks.append("\n".join(lines))
    elsewhere = [machine(part["machine"])] if part["machine"] != usual else []
    return "\n\n".join([*blocks, f"`{part['command']}`", *elsewhere])


def filled(page: str, document: dict[str, Any]) -> str:
    """A page with everything between its marks made anew."""
    parts = {part["name"]: part for part in document["parts"]}

    def fill(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        about = document["machine"]
        text = machine(about) if name == "machine" else table(parts.get(name), about)
        return f"{begin}{text}\n{end}"

    return MARKS.sub(fill, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), json.loads(FIGURES.read_text())))
