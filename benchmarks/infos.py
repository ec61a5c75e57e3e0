"""What infos cost: HalfCheetah-v5 with its infos and without, and an env of no work with five numbers as an info.

- cheetah, bare: steps/s of 16 HalfCheetahs, with the infos that MuJoCo's envs return at each step and with none;
  Gymnasium's and Stable-Baselines3's vector envs against Shoal by `shoal.make`, in both APIs
- added: microseconds that five numbers add to a step of 64 envs of no work, which make them in any case and return
  them or not; and to what is no wait in it, the caller's own work and the busiest worker's: where workers are woken,
  waits differ by more than infos take

- batches (only if asked for): microseconds of single steps of 16 HalfCheetahs. Where other programs run, the fastest
  few are those that none of them has disturbed

python benchmarks/infos.py --parts cheetah bare added
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import common
import envs
import shoal
from runners import ShoalSB3
from shoal.cli import contenders, peers
from shoal.cli.bench import Result, Settings
from shoal.cli.contenders import Contender, Role
from shoal.observe.progress import progress

CHEETAHS, WORKLESS = 16, 64
SYNC = "Gymnasium Sync"
PARTS = {"cheetah": "HalfCheetah-v5", "bare": "envs:bare_cheetah"}
BACKENDS = ("serial", "processes", "hybrid", "auto")
KINDS = (envs.KeptInfos, envs.FiveInfos)
CHUNK = 200  # steps in a run of `added`
PERCENTILES = (1, 2, 5, 10, 25, 50)  # of single batches
VECTOR_ENVS: dict[str, Callable[[Any], Any]] = {
    SYNC: lambda kind: gymnasium.vector.SyncVectorEnv([kind] * WORKLESS),
    "Shoal serial": lambda kind: shoal.make(kind, WORKLESS, backend="serial"),
    "Shoal processes": lambda kind: shoal.make(kind, WORKLESS, backend="processes"),
}


def field(quick: bool) -> list[Contender]:
    """Return who takes part: the plain loops, Gymnasium, Stable-Baselines3, and Shoal in the APIs of both."""
    forked = {"start_method": "fork"} if quick else {}  # workers that are forked start in no time, and run the same
    return [
        *contenders.limits(common.cores())[-1:],
        *peers.gymnasiums(),
        Contender("SB3 DummyVecEnv", peers.SB3Dummy),
        Contender("SB3 SubprocVecEnv", peers.SB3Subproc, forked),
        *contenders.shoals(BACKENDS),
        *(Contender(f"Shoal VecEnv, {one}", ShoalSB3, {"backend": one}, Role.SHOAL) for one in ("processes", "auto")),
    ]


def over_sync(result: Result) -> dict[str, dict[str, float]]:
    """Return the rows as multiples of Gymnasium's SyncVectorEnv, round by round."""
    sync = result.row(SYNC)
    ratios = {row.name: row.over(sync) for row in result.rows if row is not sync}
    return {name: ratio._asdict() for name, ratio in ratios.items() if ratio}


def added(how: Settings, notify: Callable[[str], None]) -> dict[str, Any]:
    """Return the microseconds of a step with infos and without, and of what they add, round by round."""
    made = {(name, kind): make(kind) for name, make in VECTOR_ENVS.items() for kind in KINDS}
    actions = np.zeros(WORKLESS, np.int64)
    micros: dict[Any, list[tuple[float, float]]] = {key: [] for key in made}
    try:
        for one in made.values():
            one.reset(seed=0)
            _step(one, actions)  # so that caches are filled, and the keys of infos known
        for _, name in common.in_turns(list(VECTOR_ENVS), how.rounds, how.limit):
            for kind in KINDS:
                notify(f"{WORKLESS} envs of no work: {name}, {kind.__name__}")
                micros[name, kind].append(_step(made[name, kind], actions))
    finally:
        for one in made.values():
            one.close()
    found = {}
    for name in VECTOR_ENVS:
        without, with_infos = (micros[name, kind] for kind in KINDS)
        more, working = ([b[i] - a[i] for a, b in zip(without, with_infos, strict=True)] for i in range(2))
        took = ([step for step, _ in one] for one in (without, with_infos))
        columns = dict(zip(("without", "with", "added", "added_working"), (*took, more, working), strict=True))
        found[name] = {column: common.quartiles(values) for column, values in columns.items()}
    return found


def _step(one: Any, actions: Any) -> tuple[float, float]:
    """Return the microseconds of a step of all envs, and those that are no waits, of short runs, undisturbed ones."""
    steps, times, working = CHUNK // 5, [], []
    pool = getattr(one, "pool", None)
    for _ in range(5):
        earlier = pool and pool.stats()
        began = time.perf_counter()
        for _ in range(steps):
            one.step(actions)
        times.append(time.perf_counter() - began)
        working.append(times[-1])
        if earlier is not None and pool.plan.backend != "serial":
            spent = pool.stats() - earlier
            working[-1] += spent.seconds * max(spent.busy) - spent.waits
    return min(times) * 1e6 / steps, min(working) * 1e6 / steps


def batches(how: Settings, notify: Callable[[str], None]) -> dict[str, list[float]]:
    """Return percentiles of the microseconds of single steps of all HalfCheetahs, in turns."""
    kind = functools.partial(gymnasium.make, PARTS["cheetah"])
    made: dict[str, Any] = {SYNC: gymnasium.vector.SyncVectorEnv([kind] * CHEETAHS)}
    made |= {f"Shoal {one}": shoal.make(kind, CHEETAHS, backend=one) for one in BACKENDS[:3]}
    times: dict[str, list[float]] = {name: [] for name in made}
    try:
        actions = [made[SYNC].action_space.sample() for _ in range(16)]
        for one in made.values():
            one.reset(seed=0)
        for _, name in common.in_turns(list(made), how.rounds, how.limit):
            notify(f"batches of {name}")
            step, until, clock = made[name].step, time.perf_counter() + how.seconds, time.perf_counter
            for action in itertools.cycle(actions):
                began = clock()
                step(action)
                times[name].append(clock() - began)
                if began > until:
                    break
    finally:
        for one in made.values():
            one.close()
    return {name: (np.percentile(values, PERCENTILES) * 1e6).tolist() for name, values in times.items()}


def table_of_batches(found: dict[str, list[float]]) -> Table:
    """Lay the percentiles out, each with how many times as fast it is as Gymnasium's."""
    title = f"{CHEETAHS} HalfCheetahs: microseconds of a batch, and times as fast as {SYNC}"
    grid = Table("", *(f"{one} %" for one in PERCENTILES), title=title, title_justify="left")
    for name, values in found.items():
        grid.add_row(name, *(f"{us:.0f} ({sync / us:.2f})" for us, sync in zip(values, found[SYNC], strict=True)))
    return grid


def table_of_added(found: dict[str, Any]) -> Table:
    """Lay the microseconds out."""
    title = f"{WORKLESS} envs of no work: microseconds for a step of all"
    heads = ("without infos", "with five numbers", "they add", "to what is no wait")
    grid = Table("", *heads, title=title, title_justify="left")
    for name, columns in found.items():
        cells = (f"{middle:.1f} ({low:.1f}..{high:.1f})" for low, middle, high in columns.values())
        grid.add_row(name, *cells)
    return grid


def table_of_ratios(ratios: dict[str, dict[str, Any]]) -> Table:
    """Lay the multiples of Gymnasium's SyncVectorEnv out."""
    grid = Table("", *ratios, title=f"{CHEETAHS} HalfCheetahs, times as fast as {SYNC}", title_justify="left")
    for name in dict.fromkeys(name for part in ratios.values() for name in part):
        found = (part.get(name) for part in ratios.values())
        grid.add_row(
            name, *(f"{one['median']:.2f} ({one['low']:.2f}..{one['high']:.2f})" if one else "" for one in found)
        )
    return grid


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser("What infos cost.", 0.5, 11)
    common.quick_option(parser)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "added", "batches"], default=[*PARTS, "added"])
    options = parser.parse_args()
    if {"cheetah", "bare", "batches"} & set(options.parts) and not contenders.installed("mujoco"):
        parser.error("HalfCheetah needs mujoco: pip install '.[mujoco]', or leave it out by --parts added")
    how = common.settings(options)
    names = [name for name in PARTS if name in options.parts]
    results = common.measure([(PARTS[name], CHEETAHS, field(options.quick)) for name in names], how)
    ratios = {name: over_sync(result) for name, result in zip(names, results, strict=True)}
    document: dict[str, Any] = {"over_sync": ratios, "parts": names}
    if "added" in options.parts:
        with progress(2 * len(VECTOR_ENVS) * how.rounds) as notify:
            document["added"] = added(how, notify)
        Console().print(table_of_added(document["added"]))
    if "batches" in options.parts:
        with progress(4 * how.rounds) as notify:
            document["batches"] = batches(how, notify)
        Console().print(table_of_batches(document["batches"]))
    if results:
        common.show(results)
        Console().print(table_of_ratios(ratios))
        common.save(options.out, "infos", results, json=options.json, **document)
    else:
        common.write(options, "infos", document)


if __name__ == "__main__":
    main()
