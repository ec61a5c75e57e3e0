"""How well `auto` chooses: against every backend at its default and at a few worker counts.

A fraction near 1 says that nobody who tries all of them by hand would gain anything.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

import common
from shoal.cli import contenders
from shoal.cli.bench import Result
from shoal.cli.contenders import Contender, Role
from shoal.cli.report import fraction, thousands
from shoal.cli.work import first_line

AUTO = "Shoal auto"


def field(number: int, cores: int) -> list[Contender]:
    """Return auto and those that it might have chosen."""
    found = [*contenders.limits(cores), *contenders.shoals(contenders.BACKENDS)]
    # Twice the cores and many more: worth it only for envs that wait for something.
    for workers in sorted({2 * cores, min(number, 16), min(number, 64)} - {cores}):
        if workers <= number:
            found += contenders.shoals(("threads", "processes"), workers=workers)
    return found


def judge(result: Result) -> dict[str, Any]:
    """Return what auto reached of the best that was there to choose, round by round."""
    auto = result.row(AUTO)
    best = result.best(lambda one: one.role is Role.SHOAL and one.name != AUTO)
    ratio = auto.over(best) if best else None
    return {
        "env": result.work.env,
        "num_envs": result.work.num_envs,
        "best": best.name if best else None,
        "of_best": ratio._asdict() if ratio else None,
        "plan": auto.note,
    }


def table(results: list[Result]) -> Table:
    """Lay the verdicts out."""
    grid = Table(title="auto against the best backend by hand", title_justify="left")
    for head in ("env", "envs", "auto", "of the best", "the best was", "what auto said"):
        grid.add_column(head)
    for result in results:
        auto, said = result.row(AUTO), judge(result)
        best = result.row(said["best"]) if said["best"] else None
        grid.add_row(
            result.work.env,
            str(result.work.num_envs),
            thousands(auto.rate),
            fraction(auto.over(best)) if best else "",
            said["best"] or "",
            first_line(auto.note),
        )
    return grid


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("How well backend='auto' chooses.", 0.3, 12)
    common.matrix_options(parser)
    options = parser.parse_args()
    cells = common.matrix(options, lambda number: field(number, common.cores()))
    results = common.measure(cells, common.settings(options))
    common.show(results)
    Console().print(table(results))
    common.save(options.out, "auto", results, auto=[judge(result) for result in results])


if __name__ == "__main__":
    main()
