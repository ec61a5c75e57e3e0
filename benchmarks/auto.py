"""How well `auto` chooses, and whether the pool then makes what `auto` has promised.

- choice: against every backend at its default and at a few worker counts. A fraction near 1 says that nobody who tries
  all of them by hand would gain anything.
- estimate: the steps/s that `auto` expects over those that its pool reaches, for envs of six kinds. Every round makes
  a new pool, so that each estimate is compared with the pool that was made right after it.

python benchmarks/auto.py --parts estimate
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal.cli import contenders
from shoal.cli.bench import Result, Settings
from shoal.cli.contenders import Contender, Role
from shoal.cli.report import fraction, thousands
from shoal.cli.work import env_fn, first_line
from shoal.observe.progress import progress

AUTO = "Shoal auto"
WARM_UP = 0.3  # seconds of steps before those that count: waits learn, and caches fill
# name -> env and how many of it: cheap steps, infos, sizes of observations, resets, computing
ESTIMATES = {
    "CartPole": ("CartPole-v1", 64),
    "HalfCheetah": ("HalfCheetah-v5", 16),
    "five numbers as info": ("envs:FiveInfos", 64),
    "84x84x4": ("envs:Image84", 64),
    "long resets": ("envs:LongReset", 16),
    "1 ms of computing": ("envs:Busy1ms", 16),
}


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


# ---- what it promises ------------------------------------------------------------------------------------------


def promise(env: str, number: int, seconds: float) -> tuple[float, float, str]:
    """Make a pool by `auto`; return the steps/s that it expects, those that it reaches, and its plan."""
    with shoal.make(env_fn(env), number) as envs:
        plan = envs.pool.plan
        actions = itertools.cycle([envs.action_space.sample() for _ in range(16)])
        envs.reset(seed=0)
        _steps(envs, actions, min(WARM_UP, seconds))
        calls, took = _steps(envs, actions, seconds)
        return plan.expected or 0.0, calls * number / took, str(plan)


def _steps(envs: Any, actions: Any, seconds: float) -> tuple[int, float]:
    calls, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        envs.step(next(actions))
        calls += 1
    return calls, took


def estimates(names: list[str], how: Settings, notify: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return for each env what was expected, what was reached, and their ratio, round by round."""
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
    for number, name in common.in_turns(names, how.rounds, how.limit):
        notify(f"estimate, round {number + 1}: {name}")
        found[name].append(promise(*ESTIMATES[name], how.seconds))
    told = []
    for name, runs in found.items():
        expected, reached, plans = zip(*runs, strict=True)
        ratios = [a / b for a, b in zip(expected, reached, strict=True)]
        told.append({
            "name": name, "env": ESTIMATES[name][0], "num_envs": ESTIMATES[name][1], "plan": plans[-1],
            "expected": common.quartiles(expected), "reached": common.quartiles(reached),
            "expected_over_reached": common.quartiles(ratios),
        })  # fmt: skip
    return told


def table_of_estimates(told: list[dict[str, Any]]) -> Table:
    """Lay expectation and result out."""
    grid = Table(title="what auto expects, and what its pool makes", title_justify="left")
    for head in ("env", "envs", "chosen", "expected", "reached", "expected / reached"):
        grid.add_column(head)
    for one in told:
        (_, expected, _), (_, reached, _) = one["expected"], one["reached"]
        ratio = "{1:.2f} ({0:.2f}..{2:.2f})".format(*one["expected_over_reached"])
        chosen = one["plan"].partition(":")[0]
        grid.add_row(one["name"], str(one["num_envs"]), chosen, f"{expected:,.0f}", f"{reached:,.0f}", ratio)
    return grid


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("How well backend='auto' chooses and estimates.", 0.3, 12)
    common.matrix_options(parser)
    parser.add_argument("--parts", nargs="+", choices=["choice", "estimate"], default=["choice", "estimate"])
    options = parser.parse_args()
    how, results, told = common.settings(options), [], []
    if "estimate" in options.parts:
        names = [name for name in ESTIMATES if name != "HalfCheetah" or contenders.installed("mujoco")]
        with progress(len(names) * how.rounds) as notify:
            told = estimates(names, how, notify)
        Console().print(table_of_estimates(told))
    if "choice" in options.parts:
        cells = common.matrix(options, lambda number: field(number, common.cores()))
        results = common.measure(cells, how)
        common.show(results)
        Console().print(table(results))
        judged = [judge(result) for result in results]
        common.save(options.out, "auto", results, json=options.json, auto=judged, estimates=told)
    else:
        common.write(options, "auto", {"estimates": told})


if __name__ == "__main__":
    main()
