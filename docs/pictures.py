"""Draws the pictures of the site: from the imports in the code, from measured figures, and from running pools.

python docs/pictures.py            draws packages, step, async and speed, which are the same each time
python docs/pictures.py --check    says whether docs/pictures has the pictures that the code and the figures give
python docs/pictures.py --live     draws top and profile, too, from pools that run meanwhile (profile needs Chromium)
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))

from drawing import BLUE, GREY, INK, ORANGE, PALE, Drawing  # noqa: E402

PACKAGE = ROOT / "src" / "shoal"
FOLDER = ROOT / "docs" / "pictures"
FIGURES = ROOT / "docs" / "plots" / "bench.json"
# Small modules that nearly everything imports would hide the picture.
LEFT_OUT = {"__init__", "errors", "batch", "support", "emulation", "group", "py"}


# ---- packages: what imports what ---------------------------------------------------------------------------------


def part_of(module: str) -> str:
    """The package of a module, or the module itself where it lies at the top: shoal.envs.group -> envs."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """The parts of Shoal that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "shoal":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("shoal."):
            found.add(part_of(str(node.module)))
    return found


def edges() -> dict[str, set[str]]:
    """What each part imports directly."""
    parts = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()} - LEFT_OUT
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in parts:
            found.setdefault(part, set()).update((imports(path) & parts) - {part})
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""

    def below(part: str) -> set[str]:
        return graph[part] | {deeper for one in graph[part] for deeper in below(one)}

    return {part: {one for one in ones if not any(one in below(other) for other in ones - {one})}
            for part, ones in graph.items()}  # fmt: skip


def rows_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The parts in rows: each above all that it imports, and near to what it has arrows to."""

    def height(part: str) -> int:
        return 1 + max((height(one) for one in graph[part]), default=-1)

    heights = {part: height(part) for part in graph}
    rows = [sorted(part for part in graph if heights[part] == level) for level in range(max(heights.values()) + 1)]
    place = {
        part: index / max(1, len(row) - 1) if len(row) > 1 else 0.5 for row in rows for index, part in enumerate(row)
    }
    for _ in range(8):  # each part moves to the mean place of its neighbours
        for row in rows:
            row.sort(key=lambda part: (_mean([place[one] for one in _neighbours(graph, part)], place[part]), part))
            place |= {part: (index + 0.5) / len(row) for index, part in enumerate(row)}
    return rows


def _neighbours(graph: dict[str, set[str]], part: str) -> list[str]:
    return sorted(graph[part] | {other for other, ones in graph.items() if part in ones})


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def packages() -> str:
    """Every package, and arrows to those that it imports; those that follow from others are left out."""
    graph = reduced(edges())
    rows = rows_of(graph)
    width, height, step = 104.0, 26.0, 48.0
    total = max(len(row) for row in rows) * (width + 24) + 224
    drawing = Drawing(total, step * len(rows) + 12, "The packages of Shoal, and what each imports")
    at = {}
    for level, row in enumerate(rows):
        gap = (total - len(row) * width) / (len(row) + 1)
        for index, part in enumerate(row):
            at[part] = (gap + index * (width + gap), 10 + (len(rows) - 1 - level) * step)
    for part, ones in sorted(graph.items()):
        for one in sorted(ones):
            (x, y), (to_x, to_y) = at[part], at[one]
            if to_y - y < 1.5 * step:
                drawing.curve(x + width / 2, y + height, to_x + width / 2, to_y - 1)
                continue
            side = width if x + to_x + width > total else 0.0  # long arrows go around the boxes between
            bend = (18 + (to_y - y) / 6) * (1 if side else -1)
            drawing.bow(x + side, y + height / 2, to_x + side, to_y + height / 2, bend)
    for part, (x, y) in sorted(at.items()):
        drawing.box(x, y, width, height, PALE, BLUE)
        drawing.text(x + width / 2, y + 17, part, anchor="middle")
    return drawing.svg()


# ---- step: the way of one step -----------------------------------------------------------------------------------

WHO = ("trainer", "Pool.step", "Scheduler", "the core's Lanes", "Stepper of a worker")
WAY = (  # from, to, what; a column to itself is work there
    (0, 1, "actions"), (1, 2, "exchange"), (2, 3, "step: check, copy, post, wait"), (3, 4, "requested + 1, doorbell"),
    (4, 4, "env.step, autoreset"), (4, 3, "rows of the frame, answered = requested, doorbell"),
    (4, 2, "notes: objects, errors, odd infos (only where there are any)"), (3, 2, "frame and status"), (2, 1, "Ready"),
    (1, 0, "Batch: views of the frame"),
)  # fmt: skip


def step() -> str:
    """A step as it passes from part to part, and back."""
    column, line = 190.0, 36.0
    drawing = Drawing(column * len(WHO), 70 + line * len(WAY), "The way of one step")
    for index, who in enumerate(WHO):
        x = column * (index + 0.5)
        drawing.line(x, 46, x, 56 + line * len(WAY), dashed=True)
        drawing.box(x - 78, 14, 156, 30, PALE, BLUE)
        drawing.text(x, 33, who, anchor="middle", bold=True)
    for index, (start, end, what) in enumerate(WAY):
        x, to_x, y = column * (start + 0.5), column * (end + 0.5), 78 + line * index
        if start == end:
            drawing.box(x - 70, y - 16, 140, 24, "#dcebf7")
            drawing.text(x, y, what, anchor="middle", size=12)
            continue
        drawing.line(x, y, to_x, y, edge=INK, arrow=True, dashed=end < start)
        drawing.text((x + to_x) / 2, y - 6, what, anchor="middle", size=11)
    return drawing.svg()


# ---- async: full batches and partial ones ------------------------------------------------------------------------

TIMES = (
    (3, 2, 7, 2, 3, 2, 4, 3, 2, 4),
    (2, 3, 2, 6, 2, 3, 3, 2, 5, 2),
    (4, 2, 2, 3, 8, 2, 2, 4, 2, 3),
    (2, 6, 3, 2, 2, 4, 2, 7, 2, 3),
)
UNTIL, POLICY = 32.0, 0.7  # length of the picture, and of the policy's work on a batch


def schedule(least: int) -> tuple[list[list[tuple[float, float]]], list[float]]:
    """When each env steps, and when the policy gets a batch of the first `least` envs that are ready."""
    bars: list[list[tuple[float, float]]] = [[(0.0, float(times[0]))] for times in TIMES]
    batches, now = [], 0.0
    while now < UNTIL:
        ready = sorted(range(len(bars)), key=lambda env: bars[env][-1][1])[:least]
        now = max(now, max(bars[env][-1][1] for env in ready))
        batches.append(now)
        now += POLICY
        for env in ready:
            length = TIMES[env][len(bars[env]) % len(TIMES[env])]
            bars[env].append((now, now + length))
    return bars, batches


def asynchronous() -> str:
    """The same four envs in full batches and in batches of two."""
    left, scale, row = 92.0, 22.0, 24.0
    drawing = Drawing(left + scale * UNTIL + 16, 322, "Full batches wait for the slowest env, partial batches do not")
    for top, least, title in ((34.0, len(TIMES), "batch_size=4: a batch waits for the slowest env"),
                              (190.0, 2, "batch_size=2: the first two that are ready")):  # fmt: skip
        bars, batches = schedule(least)
        done = sum(end <= UNTIL for env in bars for _, end in env)
        drawing.text(12, top - 12, f"{title}; {done} steps in the same time", bold=True)
        drawing.text(12, top + 15, "policy", size=12)
        for at in batches:
            if at + POLICY <= UNTIL:
                drawing.box(left + scale * at, top, scale * POLICY, row - 6, ORANGE)
        for env, own in enumerate(bars):
            y = top + row * (env + 1)
            drawing.text(12, y + 13, f"env {env}", size=12)
            drawing.box(left, y, scale * UNTIL, row - 6, PALE)
            for start, end in own:
                if start < UNTIL:
                    drawing.box(left + scale * start, y, scale * (min(end, UNTIL) - start) - 1.5, row - 6, BLUE)
    return drawing.svg()


# ---- speed: our figures beside those of others -------------------------------------------------------------------

SHOWN = {  # the names in bench.json, and what the picture calls them
    "EnvPool (C++)": "EnvPool, a CartPole of its own in C++",
    "2 plain loops": "limit of Python envs: 2 bare loops",
    "Shoal auto": "Shoal",
    "Gymnasium Sync": "Gymnasium SyncVectorEnv",
    "SB3 DummyVecEnv": "SB3 DummyVecEnv",
    "PufferLib Serial": "PufferLib Serial",
    "PufferLib mp x1": "PufferLib Multiprocessing",
    "tianshou Dummy": "tianshou DummyVectorEnv",
    "SB3 SubprocVecEnv": "SB3 SubprocVecEnv",
    "Gymnasium Async": "Gymnasium AsyncVectorEnv",
}


def speed() -> str:
    """64 CartPoles in several libraries. All but EnvPool step Gymnasium's env."""
    import plots

    document = json.loads(FIGURES.read_text())
    part = next(part for part in document["parts"] if part["name"] == "cartpole")
    found = {row["name"]: row for row in part["rows"]}
    rows = sorted((found[name] for name in SHOWN if name in found), key=lambda row: -row["median"])
    left, line, scale = 262.0, 27.0, 400.0 / max(row["median"] for row in rows)
    drawing = Drawing(770, 66 + line * len(rows) + 14, "Steps per second of 64 CartPoles in several libraries")
    drawing.text(14, 26, "64 CartPoles, steps per second (more is better)", bold=True, size=15)
    cores, cpu = part["machine"]["cores"], part["machine"]["cpu"]
    drawing.text(14, 46, f"{cores} cores ({cpu}), medians of interleaved runs: {part['command']}", fill=GREY, size=11)
    for index, row in enumerate(rows):
        y = 60 + line * index
        colour = {"limit": "#555555", "shoal": BLUE}.get(row["role"], ORANGE if "C++" not in row["name"] else "#d9d2c3")
        drawing.text(left - 8, y + 15, SHOWN[row["name"]], anchor="end", bold=row["role"] == "shoal")
        drawing.box(left, y, row["median"] * scale, line - 7, colour)
        drawing.text(left + row["median"] * scale + 8, y + 15, plots.amount(row["median"], part["unit"]))
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {"packages": packages, "step": step, "async": asynchronous, "speed": speed}


def main(arguments: list[str]) -> int:
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw()
        if "--check" in arguments:
            stale += [path.name] if not path.exists() or path.read_text() != text else []
        else:
            path.write_text(text)
    if stale:
        print(f"docs/pictures/{', '.join(stale)}: run python docs/pictures.py", file=sys.stderr)
        return 1
    if "--live" in arguments:
        live: Any = __import__("live_pictures")  # in tools; imports Shoal and starts pools
        live.draw(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
