"""What the counters of pool.stats() cost: 64 CartPoles with and without them, in turns, in one run.

The C core is built twice for it, once with -DSHOAL_NO_COUNTERS. Each build lives in interpreters of its own, several
times (two interpreters that do the same differ by a few percent all their lives), and steps when it is its turn. Under
serial the CPU time of a step counts, which a busy machine leaves alone; elsewhere the wall clock does.

- with, without: the counters
- again: with them, once more: what the comparison itself can tell apart
- before: an older checkout, built in place, whose folder `--before` names; so that the calls from Python count as well

python benchmarks/counters.py --lives 10 --rounds 20
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import supervision

NUM_ENVS, WORKERS = 64, 2
BACKENDS = ("serial", "hybrid", "processes")
ROOT = Path(__file__).parent.parent


def build(folder: Path, flags: str) -> Path:
    """Shoal as it is here, with a C core of its own."""
    shutil.copytree(ROOT / "src" / "shoal", folder / "shoal", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", folder, "--build-temp", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "SHOAL_CFLAGS": flags})
    return folder


def guest(backend: str) -> None:
    """Step whenever a line comes in, and say how many steps a second that was."""
    import numpy as np

    import shoal

    clock = time.process_time if backend == "serial" else time.perf_counter
    envs = shoal.make("CartPole-v1", num_envs=NUM_ENVS, backend=backend, num_workers=WORKERS)
    envs.reset(seed=0)
    actions = [np.random.default_rng(i).integers(0, 2, NUM_ENVS) for i in range(64)]
    print(json.dumps([shoal.__file__, shoal.native.KIND]), flush=True)
    for line in sys.stdin:
        for calls in range(20):  # wakes the workers
            envs.step(actions[calls])
        seconds, calls, start = float(line), 0, clock()
        while clock() - start < seconds:
            for _ in range(10):
                envs.step(actions[calls % 64])
                calls += 1
        print(json.dumps(calls * NUM_ENVS / (clock() - start)), flush=True)
    envs.close()


def main() -> None:
    """Run what the command line asks for."""
    import common
    from shoal.tools import doctor
    from shoal.tools.cli import progress

    parser = common.parser(str(__doc__).partition("\n")[0], 0.1, 20)
    parser.add_argument("--lives", type=int, default=10, help="how many interpreters each variant gets, one by one")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout, built in place")
    parser.add_argument("--guest", help="for the script's own use")
    options = parser.parse_args()
    if options.guest:
        guest(options.guest)
        return
    lives: dict[str, list[dict[str, list[float]]]] = {backend: [] for backend in options.backends}
    with tempfile.TemporaryDirectory() as work:
        sources = {
            "without": build(Path(work, "without"), "-DSHOAL_NO_COUNTERS"),
            "with": build(Path(work, "with"), ""),
        }
        sources["again"] = sources["with"]
        if options.before:
            sources["before"] = options.before.resolve() / "src"
        with progress(len(lives) * options.lives * options.rounds * len(sources)) as notify:
            for backend in options.backends:
                for number in range(options.lives):
                    order = random.Random(number).sample(list(sources), len(sources))
                    found = {name: supervision.Variant(backend, sources[name], __file__) for name in order}
                    assert all(v.version[0].startswith(str(sources[n])) for n, v in found.items()), "another Shoal"
                    assert all(v.version[1] == "native" for v in found.values()), "no C core was built"
                    life: dict[str, list[float]] = {name: [] for name in sources}
                    for turn in range(-2, options.rounds):  # the first two only warm up
                        for name in random.Random(turn).sample(order, len(order)):
                            rate = found[name].run(options.seconds)
                            if turn >= 0:
                                notify(f"{backend}, life {number + 1}: {name}")
                                life[name].append(rate)
                    lives[backend].append(life)
                    for variant in found.values():
                        variant.close()
    ratios = report(lives)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": doctor.facts(), "lives": lives, "ratios": ratios}
    (options.out / "counters.json").write_text(json.dumps(document, indent=2) + "\n")


def report(lives: dict[str, list[dict[str, list[float]]]]) -> dict[str, dict[str, list[float]]]:
    """Print how much slower each variant is than the one without counters, and return it."""
    grid = Table(title=f"{NUM_ENVS} CartPoles: steps/s against those without counters", title_justify="left")
    for head in ("backend", "variant", "steps/s", "/ without (95 % interval)"):
        grid.add_column(head, justify="left" if head in ("backend", "variant") else "right")
    ratios: dict[str, dict[str, list[float]]] = {}
    for backend, found in lives.items():
        for name in found[0]:
            each = [
                statistics.median(mine / theirs for mine, theirs in zip(life[name], life["without"], strict=True))
                for life in found
            ]
            middle, (low, high) = statistics.median(each), supervision.interval(each)
            ratios.setdefault(backend, {})[name] = [low, middle, high]
            rate = statistics.median(rate for life in found for rate in life[name])
            grid.add_row(backend, name, f"{rate:,.0f}", f"{middle:.4f} ({low:.4f}..{high:.4f})")
    Console().print(grid)
    return ratios


if __name__ == "__main__":
    main()
