"""How well `shoal.tune` chooses: its plan against the best of a full grid, and both against the limit.

First the tuner searches, in its own time. Then every cell of the grid is measured, a few rounds each, as a fraction of
the plain loops beside it. The best cells of these go into the final, with the tuned plan and the limit, interleaved in
the same rounds; the verdict is taken there, against the cell that is best there.

The limit of envs that compute is a plain loop on each core; of envs that wait, a plain loop for each env.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console

import common
import shoal
from runners import LoopsInStep, ShoalPlanned
from shoal.cli import bench, contenders
from shoal.cli.bench import RateSummary, Result, Settings
from shoal.cli.contenders import Contender, PlainLoop, Role
from shoal.cli.report import fraction
from shoal.cli.work import Work, env_fn, probe
from shoal.observe.progress import progress
from shoal.planning.plan import MOST_PROCESSES, MOST_THREADS, Plan
from shoal.tuning.result import TuneResult

TUNED, AUTO = "Shoal tuned", "Shoal auto"
SPINS = (None, (0, 0), (2_000_000, 2_000_000))
GROUP = 8  # cells that are open at the same time
FREE = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MOST_LOOPS = 64


class Case(NamedTuple):
    """An env, how many of it, and whether it waits rather than computes."""

    env: str
    num_envs: int
    waits: bool = False


CASES = {
    "CartPole": Case("CartPole-v1", 64),
    "Busy1ms": Case("envs:Busy1ms", 16),
    "Sleep1ms": Case("envs:Sleep1ms", 16, waits=True),
}


def grid(numbers: Sequence[int], cores: int) -> list[Plan]:
    """All plans: backends x workers (doubled up to one for each env) x full, half and quarter batches x spinning."""
    found: dict[Plan, None] = {}
    for count, part in itertools.product(numbers, (1, 2, 4)):
        if count // part < 1:
            continue
        batch = count // part if part > 1 else None
        for backend, spin in itertools.product(("serial", "threads", "processes", "hybrid"), SPINS):
            if spin is not None and backend in ("serial", "threads"):
                continue  # neither waits by spinning
            for workers in _workers(backend, count, cores):
                found[Plan(backend, workers, num_envs=count, batch_size=batch, spin=spin)] = None
    return list(found)


def _workers(backend: str, count: int, cores: int) -> list[int]:
    if backend == "serial":
        return [1]
    doubled = itertools.takewhile(lambda one: one <= count, (1 << k for k in itertools.count()))
    most = MOST_THREADS if backend == "threads" else MOST_PROCESSES
    least = 2 if backend == "hybrid" else 1
    return sorted({one for one in {*doubled, min(cores, count), count} if least <= one <= most})


def name_of(plan: Plan) -> str:
    """What a row is called."""
    words = plan.backend if plan.backend == "serial" else f"{plan.backend} x{plan.num_workers}"
    words += f", {plan.num_envs} envs"
    words += f", batch {plan.batch_size}" if plan.batch_size else ""
    return words + (f", spin {plan.spin[0] / 1e6:g} ms" if plan.spin else "")


def measure_grid(work: Work, cells: Sequence[Plan], how: Settings, cores: int) -> list[tuple[float, Plan]]:
    """Return (fraction of the plain loops beside it, plan) of all cells that ran, the best first."""
    limit = contenders.limits(cores)[-1]
    groups = [cells[start : start + GROUP] for start in range(0, len(cells), GROUP)]
    fields = [
        [limit, *(Contender(name_of(plan), ShoalPlanned, {"plan": plan}, Role.SHOAL) for plan in group)]
        for group in groups
    ]
    found = []
    with progress(sum(bench.ticks(field, how) for field in fields)) as notify:
        for field, group in zip(fields, groups, strict=True):
            result = bench.measure(work, field, how, notify)
            for plan, row in zip(group, result.rows[1:], strict=True):
                ratio = result.of_limit(row)
                if ratio is not None:
                    found.append((ratio.median, plan))
                else:
                    Console(stderr=True).print(f"{row.name}: {row.status}: {row.note}")
    return sorted(found, key=lambda pair: -pair[0])


def final(work: Work, case: Case, tuned: Plan, best: Sequence[Plan], how: Settings, cores: int) -> Result:
    """Measure the tuned plan, the best cells, auto and the limit in the same rounds."""
    loops = (tuned.num_envs or 1) if case.waits else cores
    field = [Contender(TUNED, ShoalPlanned, {"plan": tuned}, Role.SHOAL)]
    field += [Contender(name_of(plan), ShoalPlanned, {"plan": plan}, Role.SHOAL) for plan in best]
    field += contenders.shoals(["auto"], lend=True)
    if loops <= MOST_LOOPS:
        field.insert(0, Contender(f"{loops} plain loops", PlainLoop, role=Role.LIMIT, copies=loops))
    if cores > 1 and not case.waits:
        field.append(Contender(f"{cores} loops in step", LoopsInStep, {"cores": cores}, Role.LOOP))
    with progress(bench.ticks(field, how)) as notify:
        return bench.measure(replace(work, num_envs=tuned.num_envs or work.num_envs), field, how, notify)


def judge(found: TuneResult, result: Result, cells: int) -> dict[str, Any]:
    """Return what the tuned plan reached of the best cell and of the limit, round by round."""
    tuned = result.row(TUNED)
    best = result.best(lambda one: one.role is Role.SHOAL and one.name not in (TUNED, AUTO))
    step = next((row for row in result.rows if "in step" in row.name), None)
    ratios = {
        "of_best": tuned.over(best) if best else None,
        "of_limit": result.of_limit(tuned),
        "in_step_of_limit": result.of_limit(step) if step else None,
    }
    return {
        "env": result.work.env,
        "num_envs": found.limits.num_envs,
        "plan": name_of(found.plan),
        "search_s": found.seconds,
        "tried": sum(trial.state == "ran" for trial in found.table),
        "cells": cells,
        "best": best.name if best else None,
        **{name: ratio._asdict() if ratio else None for name, ratio in ratios.items()},
    }


def say(said: dict[str, Any]) -> str:
    """Put a verdict into words."""
    lines = [f"{said['env']}: {said['plan']}, found in {said['search_s']:.1f} s, of {said['tried']} that were tried"]
    if said["of_best"]:
        lines.append(f"{_fraction(said['of_best'])} of the best of {said['cells']} cells, {said['best']}")
    if said["of_limit"]:
        lines.append(f"{_fraction(said['of_limit'])} of the limit, so {1 - said['of_limit']['median']:.1%} overhead")
    if said["in_step_of_limit"]:
        lines.append(f"{_fraction(said['in_step_of_limit'])} of the limit for loops in step")
    return "\n  ".join(lines)


def _fraction(ratio: dict[str, float]) -> str:
    return fraction(RateSummary(**ratio))


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("How close the plan of shoal.tune comes to the best of a full grid.", 0.3, 15)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="ENV", help=", ".join(CASES))
    parser.add_argument("-n", "--num-envs", type=int, metavar="N", help="instead of each env's own number")
    parser.add_argument("--free", action="store_true", help="leave the number of envs open, to tuner and grid alike")
    parser.add_argument("--no-grid", action="store_true", help="measure the tuned plan against the limit only")
    parser.add_argument("--search", type=float, default=20.0, metavar="S", help="seconds of the search (%(default)s)")
    parser.add_argument("--grid-rounds", type=int, default=3, help="runs of each cell of the grid (%(default)s)")
    parser.add_argument("--top", type=int, default=5, help="cells of the grid in the final (%(default)s)")
    parser.add_argument("--name", default="tune", help="name of the result files (%(default)s)")
    options = parser.parse_args()
    cores, how = common.cores(), common.settings(options)
    results: list[Result] = []
    verdicts: list[dict[str, Any]] = []
    for name in options.only or CASES:
        case = CASES[name]
        number = None if options.free else options.num_envs or case.num_envs
        found = shoal.tune(env_fn(case.env), number, seconds=options.search)
        Console().print(f"{case.env}: {found.plan}")
        work = probe(case.env, number or case.num_envs)
        cells = grid(FREE if number is None else [number], cores)
        ranked = [] if options.no_grid else measure_grid(work, cells, replace(how, rounds=options.grid_rounds), cores)
        best = [plan for _, plan in ranked[: options.top]]
        results.append(final(work, case, found.plan, best, how, cores))
        verdicts.append(judge(found, results[-1], len(ranked)))
        common.show(results[-1:])
    for verdict in verdicts:
        Console().print(say(verdict), soft_wrap=True)
    common.save(options.out, options.name, results, tune=verdicts)


if __name__ == "__main__":
    main()
