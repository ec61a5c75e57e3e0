"""What the benchmark scripts share: their common options, and where their results go."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
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
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (%(default)s)")
    return made


def matrix_options(made: argparse.ArgumentParser) -> None:
    """Add the options of scripts that run envs x numbers."""
    made.add_argument("--quick", action="store_true", help="short runs, for a look")
    made.add_argument("--only", nargs="+", choices=list(envs.ALL), metavar="ENV", help=", ".join(envs.ALL))
    made.add_argument("-n", "--num-envs", type=int, nargs="+", default=[8, 64, 1024], metavar="N")


def settings(options: argparse.Namespace) -> bench.Settings:
    """Return how long and how often; `--quick` cuts both."""
    if getattr(options, "quick", False):
        return bench.Settings(seconds=min(0.3, options.seconds), rounds=min(3, options.rounds))
    return bench.Settings(seconds=options.seconds, rounds=options.rounds)


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


def save(folder: Path, name: str, results: Sequence[bench.Result], **more: Any) -> None:
    """Write NAME.json, NAME.md and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {**report.as_dict(results, doctor.facts()), **more}
    (folder / f"{name}.json").write_text(report.as_json(document))
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
