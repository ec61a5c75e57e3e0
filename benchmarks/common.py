"""What the benchmark scripts share: their common options, and where their results go."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import envs
from shoal.cli import bench, doctor, report
from shoal.cli.contenders import Contender
from shoal.cli.work import probe
from shoal.observe.progress import progress
from shoal.support.cores import usable_cores
from shoal.support.usage import UsageError

RESULTS = Path(__file__).parent / "results"
Cell = tuple[str, int, list[Contender]]


def parser(about: str, seconds: float, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--seconds", type=float, default=seconds, help="length of each run (%(default)s)")
    made.add_argument("--rounds", type=int, default=rounds, help="runs of each contender (%(default)s)")
    made.add_argument("--limit", type=float, metavar="S", help="begin no round of a comparison after so many seconds")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (%(default)s)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here too")
    return made


def quick_option(made: argparse.ArgumentParser) -> None:
    """Add the option that cuts everything short."""
    made.add_argument("--quick", action="store_true", help="short runs, for a look")


def matrix_options(made: argparse.ArgumentParser) -> None:
    """Add the options of scripts that run envs x numbers."""
    quick_option(made)
    made.add_argument("--only", nargs="+", choices=list(envs.ALL), metavar="ENV", help=", ".join(envs.ALL))
    made.add_argument("-n", "--num-envs", type=int, nargs="+", default=[8, 64, 1024], metavar="N")


def settings(options: argparse.Namespace) -> bench.Settings:
    """Return how long and how often; `--quick` cuts both."""
    seconds, rounds = options.seconds, options.rounds
    if getattr(options, "quick", False):
        seconds, rounds = min(0.2, seconds), min(5, rounds)
    return bench.Settings(seconds=seconds, rounds=rounds, limit=options.limit)


def in_turns(names: Sequence[str], rounds: int, limit: float | None = None) -> Iterator[tuple[int, str]]:
    """Yield (round, name): each name once a round, in an order that changes. No round begins after `limit` seconds."""
    began = time.monotonic()
    for number in range(rounds):
        if number and limit is not None and time.monotonic() - began > limit:
            return
        for name in random.Random(number).sample(list(names), len(names)):
            yield number, name


def matrix(options: argparse.Namespace, field: Callable[[int], list[Contender]]) -> list[Cell]:
    """Return the cells asked for; `field` says who takes part with so many envs."""
    chosen = options.only or list(envs.ALL)
    return [(envs.ALL[name], n, field(n)) for name in chosen for n in options.num_envs]


def measure(
    cells: Sequence[Cell],
    how: bench.Settings,
    each: Callable[[bench.Result], None] = lambda result: None,
) -> list[bench.Result]:
    """Measure all cells under a progress bar; `each` sees every result as soon as it is there."""
    probed = {env: probe(env) for env in dict.fromkeys(env for env, _, _ in cells)}
    results = []
    with progress(sum(bench.ticks(field, how) for _, _, field in cells)) as notify:
        for env, number, field in cells:
            result = bench.measure(replace(probed[env], num_envs=number), field, how, notify)
            results.append(result)
            each(result)
    return results


def show(results: Iterable[bench.Result]) -> None:
    """Print the tables."""
    report.show(list(results), Console())


def write(options: argparse.Namespace, name: str, document: dict[str, Any]) -> None:
    """Write NAME.json, and once more where `--json` says."""
    options.out.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (options.out / f"{name}.json", options.json)):
        path.write_text(report.as_json({"machine": doctor.facts(), **document}))
        Console(stderr=True).print(f"saved {path}")


def save(folder: Path, name: str, results: Sequence[bench.Result], json: Path | None = None, **more: Any) -> None:
    """Write NAME.json, NAME.md and NAME.png, and the JSON once more where `json` says."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {**report.as_dict(results, doctor.facts()), **more}
    for path in filter(None, (folder / f"{name}.json", json)):
        path.write_text(report.as_json(document))
    (folder / f"{name}.md").write_text(f"# {name}\n\n{markdown(results)}")
    try:
        report.check_plot(folder / f"{name}.png")
    except UsageError as missing:
        Console(stderr=True).print(f"no plot: {missing}")
    else:
        report.plot(results, folder / f"{name}.png")
    Console(stderr=True).print(f"saved {folder / name}.json, .md, .png")


def markdown(results: Sequence[bench.Result]) -> str:
    """Return all results as Markdown tables."""
    blocks = []
    for result in results:
        lines = [f"### {report.title(result)}", "", "| " + " | ".join(report.HEAD) + " |"]
        lines.append("|---|" + "--:|" * (len(report.HEAD) - 1))
        shown = [row for row in report.ordered(result) if row.rate]
        lines += ["| " + " | ".join(report.cells(result, row)) + " |" for row in shown]
        lines += ["", *(f"- {note}" for note in report.notes(result))]
        blocks.append("\n".join(lines).rstrip())
    return "\n\n".join(blocks) + "\n"


def quartiles(values: Any) -> list[float]:
    """Return the first quartile, the median and the third."""
    return [float(q) for q in np.percentile(values, (25, 50, 75))]


def show_microseconds(told: dict[str, list[float]]) -> None:
    """Print a table of quartiles."""
    grid = Table("microseconds for a step of all envs", "median", "quartiles")
    for name, (low, middle, high) in told.items():
        grid.add_row(name, f"{middle:.1f}", f"{low:.1f} to {high:.1f}")
    Console().print(grid)


def cores() -> int:
    """Return the cores that this process may use."""
    return usable_cores()
