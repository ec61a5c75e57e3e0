"""The report of `shoal profile --html`: one page with the verdict, the shares, the time line and the slowest envs.

The page is `report.html` beside this module with the figures put in, and draws itself. It loads nothing else, so that
it can be kept, sent and opened anywhere.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.observe.stats import COLOURS, LABELS, PoolStats
from shoal.observe.timeline import Timeline
from shoal.observe.words import duration, plural

TICK = 100  # nanoseconds: the unit of times in the page
MOST_ENVS = 10  # of the slowest
PAGE = Path(__file__).with_name("report.html")


def page(env: str, plan: str, stats: PoolStats, timeline: Timeline, machine: Mapping[str, Any]) -> str:
    """Return the page as text.

    Args:
        env: the name of the env.
        plan: how it was run, and why, in words.
        stats: the figures of the run.
        timeline: some batches of it.
        machine: what `shoal doctor` says of this machine.
    """
    document = {
        "figures": _figures(stats),
        "shares": [
            {"label": LABELS[name], "share": share, "colour": COLOURS[name]}
            for name, share in vars(stats.shares).items()
        ],
        "workers": [
            [w.index, _ids(w.env_ids), f"{w.busy:.0%}", f"{w.passes:,}", *map(duration, (w.waking, w.median, w.p99))]
            for w in stats.workers
        ],
        "envs": _slowest(stats),
        "timeline": _times(stats, timeline),
    }
    texts = {
        "ENV": env, "VERDICT": stats.verdict.removeprefix("verdict: "), "PLAN": plan, "TEXT": str(stats),
        "MACHINE": "\n".join(f"{name}: {value}" for name, value in machine.items()),
    }  # fmt: skip
    found = PAGE.read_text(encoding="utf-8")
    for name, text in texts.items():
        found = found.replace(f"[[{name}]]", html.escape(text))
    # "</script>" in a text would end the script.
    return found.replace("[[DATA]]", json.dumps(document, separators=(",", ":")).replace("<", "\\u003c"))


def _figures(stats: PoolStats) -> list[tuple[str, str]]:
    found = [
        ("steps/s", f"{stats.steps_per_second:,.0f}"),
        ("envs", f"{stats.num_envs:,}"),
        ("backend", f"{stats.backend}, {plural(len(stats.blocks), 'worker')}"),
        ("batches of", f"{stats.batch_size:,}"),
        ("a step takes", f"{duration(stats.median)} (99%: {duration(stats.p99)})"),
    ]
    if stats.mean_return is not None:
        found.append(("mean return", f"{stats.mean_return:,.4g} of {plural(stats.ended_episodes, 'episode')}"))
    if stats.restarts:
        found.append(("restarts", f"{stats.restarts:,}"))
    return found


def _ids(env_ids: list[int]) -> str:
    return f"{env_ids[0]}..{env_ids[-1]}" if len(env_ids) > 1 else str(env_ids[0])


def _slowest(stats: PoolStats) -> list[list[Any]]:
    """The envs of the longest mean steps: id, that time in seconds, as words, the longest step, number of steps."""
    slowest = sorted(stats.envs, key=lambda env: -env.mean)[:MOST_ENVS]
    return [[env.env_id, env.mean, duration(env.mean), duration(env.longest), f"{env.steps:,}"] for env in slowest]


def _times(stats: PoolStats, timeline: Timeline) -> dict[str, Any]:
    """The bars of each worker as flat lists env, start, end; times in ticks since the beginning."""
    began = timeline.start

    def ticks(ns: int) -> int:
        return max(0, round((ns - began) / TICK))

    rows: list[list[int]] = [[] for _ in stats.blocks]
    for bar in timeline.bars:
        if bar.end > began:
            rows[bar.worker] += [bar.env, ticks(bar.start), ticks(bar.end)]
    return {
        "tick": TICK,
        "length": ticks(timeline.end),
        "batches": max(0, len(timeline.caller) - 1),
        "caller": [ticks(ns) for pair in timeline.caller for ns in pair],
        "workers": [{"envs": _ids(block), "bars": row} for block, row in zip(stats.blocks, rows, strict=True)],
    }
