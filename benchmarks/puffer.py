"""Shoal against PufferLib's Multiprocessing, at the best of PufferLib's own settings, in turns, in one run.

- CartPole: 64 cheap envs
- Image84: 64 envs with observations of 84x84x4 that take some work to make
- Frames84: the same observations from memory, so that moving them is most of the work
- Team (with --agents): 32 PettingZoo envs of eight agents, against PufferLib's emulation

A first pass tries all settings of PufferLib; the two best are measured again beside Shoal. Both get the same env,
the same actions and the same time, reset in the step after an episode's end, and read a part of every observation that
they receive, before they send.

python benchmarks/puffer.py --only CartPole
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

import common
import envs
from puffer_runners import TEAM, PufferLib, ShoalPool, ShoalPuffer
from shoal.cli import bench, contenders
from shoal.cli.contenders import Contender, Role
from shoal.cli.report import thousands
from shoal.cli.work import Work, probe
from shoal.observe.progress import progress
from shoal.support.usage import UsageError

# name -> env, how many of it, how many times as fast as PufferLib Shoal wants to be
PARTS = {
    "CartPole": (envs.ALL["CartPole"], 64, 1.6),
    "Image84": (envs.ALL["Image84"], 64, 2.0),
    "Frames84": ("envs:Frames84", 64, 2.0),
    "Team": (TEAM, 32, 1.5),
}
WORKERS = (1, 2, 4, 8)
BACKENDS = ("auto", "processes", "hybrid")


def peers(number: int) -> list[Contender]:
    """Return PufferLib at all settings that are worth a try: workers, batches, copies, and in turn or not."""
    found = []
    for workers in WORKERS:
        for batch in [number, number // 2] if workers > 1 else [number]:
            options: dict[str, Any] = {"num_workers": workers, "batch_size": batch}
            found.append((f"PufferLib x{workers}, batch {batch}", options))
            if batch < number:
                found.append((f"PufferLib x{workers}, batch {batch}, any order", {**options, "sync_traj": False}))
            # With one worker to a batch it copies nothing, whatever it is told.
            if batch < number and workers > 2:
                found.append((f"PufferLib x{workers}, batch {batch}, copies", {**options, "zero_copy": False}))
    return [Contender(name, PufferLib, options) for name, options in found]


def shoals() -> list[Contender]:
    """Return Shoal as a user would run it."""
    found = [Contender(f"Shoal {one}", ShoalPool, {"backend": one}, Role.SHOAL) for one in BACKENDS]
    for backend in ("processes", "hybrid"):
        name = f"Shoal puffer.Multiprocessing, {backend}"
        found.append(Contender(name, ShoalPuffer, {"backend": backend}, Role.SHOAL))
    return found


def work_of(env: str, number: int) -> Work:
    """Look at an env and say what is to be done with it."""
    if env != TEAM:
        return replace(probe(env), num_envs=number)
    try:
        team = importlib.import_module("team")
    except ImportError as error:
        raise UsageError(f"--agents needs pettingzoo: pip install '.[peers]' ({error})") from error
    return Work(env, number, team.Team().action_space("player_0"))


def best_two(tried: bench.Result) -> list[Contender]:
    """Return the settings that go on: the two best, for the first pass is short.

    By their best rounds: others on the machine make whoever spins much slower, and never faster.
    """
    rated = [(row.rate.highest, row.contender) for row in tried.rows if row.rate]
    best = [contender for _, contender in sorted(rated, key=lambda one: one[0], reverse=True)[:2]]
    # Where none of them ran, one row says why.
    return best or [tried.rows[0].contender]


def field(work: Work, others: list[Contender]) -> list[Contender]:
    """Return the plain loops, Shoal, and these settings of PufferLib."""
    loops = contenders.limits(common.cores())[-1:] if work.env != TEAM else []
    return [*loops, *others, *shoals()]


def judge(name: str, result: bench.Result) -> list[dict[str, Any]]:
    """Return each of Shoal's rows as a multiple of the peer's: round by round, and the best round of each."""
    peer, wanted = result.best_python_peer(), PARTS[name][2]
    told = []
    for row in result.rows:
        over = row.over(peer) if peer and row.contender.role is Role.SHOAL else None
        if peer and peer.rate and row.rate and over:
            best = row.rate.highest / peer.rate.highest
            one = {"part": name, "shoal": row.name, "peer": peer.name, "wanted": wanted, "of_best_rounds": best}
            told.append({**one, **over._asdict()})
    return told


def table(judged: Sequence[dict[str, Any]]) -> Table:
    """Lay the ratios out. On a machine that is not quiet, those of the best rounds say more."""
    head = ("", "", "against", "times as fast", "best rounds", "wanted")
    grid = Table(*head, title="Shoal / PufferLib", title_justify="left")
    for one in judged:
        ratio = f"{one['median']:.2f} ({one['low']:.2f}..{one['high']:.2f})"
        grid.add_row(
            one["part"], one["shoal"], one["peer"], ratio, f"{one['of_best_rounds']:.2f}", f"{one['wanted']:g}"
        )
    return grid


def show_settings(tried: bench.Result) -> None:
    """Print what PufferLib reached at each of its settings."""
    grid = Table("", "steps/s", title=f"{tried.work.env}: PufferLib's settings", title_justify="left")
    for row in tried.rows:
        grid.add_row(row.name, thousands(row.rate) if row.rate else f"{row.status}: {row.note}")
    Console().print(grid)


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.5, 15)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--agents", action="store_true", help="the env with many agents too")
    parser.add_argument("--try-rounds", type=int, default=3, help="runs of each of PufferLib's settings (%(default)s)")
    options = parser.parse_args()
    names = options.only or [name for name in PARTS if name != "Team"]
    names += ["Team"] if options.agents and "Team" not in names else []
    how = common.settings(options)
    try_how = replace(how, rounds=options.try_rounds)
    try:
        works = {name: work_of(*PARTS[name][:2]) for name in names}
    except UsageError as error:
        parser.error(str(error))
    count = 0
    for work in works.values():
        every = peers(work.num_envs)
        count += bench.ticks(every, try_how) + bench.ticks(field(work, every[:2]), how)
    results: list[bench.Result] = []
    tries: list[bench.Result] = []
    judged: list[dict[str, Any]] = []
    with progress(count) as notify:
        for name, work in works.items():
            tries.append(bench.measure(work, peers(work.num_envs), try_how, notify))
            results.append(bench.measure(work, field(work, best_two(tries[-1])), how, notify))
            judged += judge(name, results[-1])
            # After each part: the whole of it takes long, and what is there should not be lost.
            more = {"settings": [one.as_dict() for one in tries], "ratios": judged}
            common.save(options.out, "puffer", results, json=options.json, **more)
    for tried, result in zip(tries, results, strict=True):
        show_settings(tried)
        common.show([result])
    Console().print(table(judged))


if __name__ == "__main__":
    main()
