"""Draws the parts of docs/plots/bench.json: bars with their quartiles, one picture for each part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.tuning.result import new_figure

COLOURS = {"limit": "#444444", "loop": "#888888", "shoal": "#0072b2", "peer": "#e69f00"}
DOTS = 80  # per inch: the pictures are kept in the repository


def amount(value: float, unit: str) -> str:
    """Write a figure as its unit wants it: 231 k, 14.2, 0.37."""
    if unit == "steps/s":
        if value >= 1e6:
            return f"{value / 1e6:.1f} M"
        return f"{value:.0f}" if value < 1000 else f"{value / 1000:.{1 if value < 100_000 else 0}f} k"
    return f"{value:.1f}" if unit == "us" else f"{value:.2f}"


def groups(part: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a part by their group, in the order in which they stand."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in part["rows"]:
        found.setdefault(row["group"], []).append(row)
    return found


def draw(part: dict[str, Any], path: Path) -> None:
    """Draw one part."""
    found = groups(part)
    heights = [max(2, len(rows)) for rows in found.values()]
    figure = new_figure(8, 0.3 * sum(heights) + 0.75 * len(heights) + 0.3)
    axes = figure.subplots(len(found), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (group, rows) in zip(axes, found.items(), strict=True):
        _bars(axis, rows, part["unit"])
        axis.set_title(group or part["title"], fontsize=9, loc="left")
    axes[-1].set_xlabel(part["unit"], fontsize=8)
    figure.savefig(path, dpi=DOTS)


def _bars(axis: Any, rows: list[dict[str, Any]], unit: str) -> None:
    for place, row in enumerate(reversed(rows)):
        low, middle, high = row["low"], row["median"], row["high"]
        spread = [[middle - low], [high - middle]]
        axis.barh(place, middle, xerr=spread, color=COLOURS[row["role"]], ecolor="#222222", capsize=2)
        share = f"  ({row['of_limit']:.2f})" if row.get("of_limit") else ""
        axis.text(high, place, f"  {amount(middle, unit)}{share}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=8)
    if unit.startswith("times"):
        axis.axvline(1.0, color=COLOURS["limit"], linestyle="--", linewidth=1)
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(x=0.18)
    axis.set_xlim(left=min(0.0, *(row["low"] for row in rows)))
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
